/* A rank that stops after the rendezvous: the others fail within CINCH_INIT_TIMEOUT, not after the hours that a
   call may take. */
#include "ranks.h"

#include <dirent.h>

enum { N = 3, TIMEOUT = 2 };

/* Returns whether this process has a control thread, which starts when the rendezvous is over. */
static int has_joined(void) {
  int found = 0;
  struct dirent *task;
  DIR *tasks = opendir("/proc/self/task");
  CHECK(tasks != NULL);
  while ((task = readdir(tasks)) != NULL) {
    char path[300], name[32] = "";
    snprintf(path, sizeof path, "/proc/self/task/%s/comm", task->d_name);
    FILE *file = fopen(path, "r");
    if (file == NULL) continue;
    if (fgets(name, sizeof name, file) != NULL) found |= strcmp(name, "cinch-control\n") == 0;
    fclose(file);
  }
  closedir(tasks);
  return found;
}

static void *stop_after_rendezvous(void *unused) {
  while (!has_joined()) {
  }
  raise(SIGSTOP);
  return unused;
}

static void rank_main(int rank, ncclUniqueId id, const void *task) {
  int victim = *(const int *)task;
  ncclComm_t comm;
  pthread_t thread;
  char words[32];
  if (rank == victim) CHECK(pthread_create(&thread, NULL, stop_after_rendezvous, NULL) == 0);
  double begun = seconds();
  ncclResult_t result = ncclCommInitRank(&comm, N, id, rank);
  if (rank == victim) pause();
  snprintf(words, sizeof words, "rank %d (host", victim);
  CHECK(result != ncclSuccess && strstr(ncclGetLastError(NULL), words) != NULL);
  CHECK(seconds() - begun < 2 * TIMEOUT + 1);
}

static void run(int victim) {
  pid_t children[N];
  start_ranks(children, N, rank_main, &victim);
  for (int r = 0; r < N; r++) {
    if (r != victim) expect_end(children[r], 0);
  }
  CHECK(kill(children[victim], SIGKILL) == 0);
  expect_end(children[victim], 1);
}

int main(void) {
  setenv("CINCH_INIT_TIMEOUT", "2", 1);
  run(1);
  run(0);
  puts("ok");
  return 0;
}
