/* A rank that stops after the rendezvous: the others fail within CINCH_INIT_TIMEOUT, not after the hours that a
   call may take. */
#include "check.h"

#include <dirent.h>
#include <signal.h>
#include <sys/wait.h>
#include <time.h>

enum { N = 3, TIMEOUT = 2 };

static double seconds(void) {
  struct timespec now;
  CHECK(clock_gettime(CLOCK_MONOTONIC, &now) == 0);
  return now.tv_sec + now.tv_nsec * 1e-9;
}

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

static void rank_main(int rank, ncclUniqueId id, int victim) {
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
  int ids[2];
  pid_t children[N];
  CHECK(pipe(ids) == 0);
  for (int r = 0; r < N; r++) {
    children[r] = fork();
    CHECK(children[r] >= 0);
    if (children[r] == 0) {
      alarm(60);
      ncclUniqueId id;
      if (r == 0) {
        OK(ncclGetUniqueId(&id));
        for (int other = 1; other < N; other++)
          CHECK(write(ids[1], &id, sizeof id) == (ssize_t)sizeof id);
      } else {
        CHECK(read(ids[0], &id, sizeof id) == (ssize_t)sizeof id);
      }
      rank_main(r, id, victim);
      exit(0);
    }
  }
  for (int r = 0; r < N; r++) {
    int status = -1;
    if (r == victim) continue;
    CHECK(waitpid(children[r], &status, 0) == children[r]);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  }
  CHECK(kill(children[victim], SIGKILL) == 0);
  CHECK(waitpid(children[victim], NULL, 0) == children[victim]);
  close(ids[0]);
  close(ids[1]);
}

int main(void) {
  setenv("CINCH_INIT_TIMEOUT", "2", 1);
  run(1);
  run(0);
  puts("ok");
  return 0;
}
