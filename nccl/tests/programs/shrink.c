/* Ranks that die one after the other, before and while the others shrink. The timeout of init is an hour:
   only the deaths themselves can end the attempts. */
#include "check.h"

#include <signal.h>
#include <sys/wait.h>
#include <time.h>

enum { N = 6, COUNT = 5000 };

static double seconds(void) {
  struct timespec now;
  CHECK(clock_gettime(CLOCK_MONOTONIC, &now) == 0);
  return now.tv_sec + now.tv_nsec * 1e-9;
}

static void *die_soon(void *microseconds) {
  usleep(*(useconds_t *)microseconds);
  kill(getpid(), SIGKILL);
  return NULL;
}

/* Sums over the ranks of `comm`, which are all but the excluded ones. Returns the call's result. */
static ncclResult_t sum(ncclComm_t comm, int rank, const int *gone, int count) {
  static double x[COUNT];
  double right = N * (N - 1) / 2;
  for (int i = 0; i < count; i++) right -= gone[i];
  for (int i = 0; i < COUNT; i++) x[i] = rank;
  ncclResult_t result = ncclAllReduce(x, x, COUNT, ncclFloat64, ncclSum, comm, NULL);
  if (result == ncclSuccess) CHECK(x[0] == right && x[COUNT - 1] == right);
  return result;
}

/* Rank 5 dies, then `second`: before its shrink, or so many microseconds after the shrink began. */
static void rank_main(int rank, ncclUniqueId id, int second, useconds_t delay) {
  int gone[2] = {5, second}, own = -1;
  ncclComm_t comm, left = NULL;
  char words[32];
  OK(ncclCommInitRank(&comm, N, id, rank));
  OK(sum(comm, rank, gone, 0));
  if (rank == 5) kill(getpid(), SIGKILL);
  CHECK(failed(comm) == ncclRemoteError);
  if (rank == second) {
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, die_soon, &delay) == 0);
    if (delay == 0) CHECK(pthread_join(thread, NULL) == 0);
    ncclCommShrink(comm, gone, 1, &left, NULL, NCCL_SHRINK_ABORT);
    pause();
  }
  double begun = seconds();
  ncclResult_t first = ncclCommShrink(comm, gone, 1, &left, NULL, NCCL_SHRINK_ABORT);
  CHECK(seconds() - begun < 2);
  if (delay == 0) CHECK(first == ncclRemoteError);
  if (first == ncclSuccess) {
    /* Rank `second` died later, as rank `second` of the new communicator. */
    while (sum(left, rank, gone, 1) == ncclSuccess) {
    }
    ncclComm_t pair = NULL;
    begun = seconds();
    OK(ncclCommShrink(left, &second, 1, &pair, NULL, NCCL_SHRINK_ABORT));
    CHECK(seconds() - begun < 2);
    OK(ncclCommAbort(left));
    left = pair;
  } else {
    snprintf(words, sizeof words, "rank %d (host", second);
    CHECK(strstr(ncclGetLastError(NULL), words) != NULL && left == NULL);
    begun = seconds();
    OK(ncclCommShrink(comm, gone, 2, &left, NULL, NCCL_SHRINK_ABORT));
    CHECK(seconds() - begun < 2);
  }
  OK(ncclCommAbort(comm));
  OK(ncclCommUserRank(left, &own));
  CHECK(own == rank - (rank > second));
  OK(sum(left, rank, gone, 2));
  OK(ncclCommDestroy(left));
}

static void run(int second, useconds_t delay) {
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
      rank_main(r, id, second, delay);
      exit(0);
    }
  }
  for (int r = 0; r < N; r++) {
    int status = -1;
    CHECK(waitpid(children[r], &status, 0) == children[r]);
    int killed = r == 5 || r == second;
    CHECK(killed ? WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL
                 : WIFEXITED(status) && WEXITSTATUS(status) == 0);
  }
  close(ids[0]);
  close(ids[1]);
}

int main(void) {
  setenv("CINCH_INIT_TIMEOUT", "3600", 1);
  run(0, 0);
  run(2, 0);
  for (useconds_t delay = 500; delay <= 8000; delay *= 2) {
    run(0, delay);
    run(4, delay);
  }
  puts("ok");
  return 0;
}
