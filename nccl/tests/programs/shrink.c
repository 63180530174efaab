/* Ranks that die one after the other, before and while the others shrink. The timeout of init is an hour:
   only the deaths themselves can end the attempts. */
#include "ranks.h"

enum { N = 6, COUNT = 5000 };

/* Rank that dies after rank 5: before its shrink, or so many microseconds after the shrink began. */
struct death {
  int rank;
  useconds_t delay;
};

static void *die_soon(void *death) {
  usleep(((struct death *)death)->delay);
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

static void rank_main(int rank, ncclUniqueId id, const void *task) {
  struct death death = *(const struct death *)task;
  int second = death.rank, gone[2] = {5, second}, own = -1;
  ncclComm_t comm, left = NULL;
  char words[32];
  OK(ncclCommInitRank(&comm, N, id, rank));
  OK(sum(comm, rank, gone, 0));
  if (rank == 5) kill(getpid(), SIGKILL);
  CHECK(failed(comm) == ncclRemoteError);
  if (rank == second) {
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, die_soon, &death) == 0);
    if (death.delay == 0) CHECK(pthread_join(thread, NULL) == 0);
    ncclCommShrink(comm, gone, 1, &left, NULL, NCCL_SHRINK_ABORT);
    pause();
  }
  double begun = seconds();
  ncclResult_t first = ncclCommShrink(comm, gone, 1, &left, NULL, NCCL_SHRINK_ABORT);
  CHECK(seconds() - begun < 2);
  if (death.delay == 0) CHECK(first == ncclRemoteError);
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
  struct death death = {second, delay};
  pid_t children[N];
  start_ranks(children, N, rank_main, &death);
  for (int r = 0; r < N; r++) expect_end(children[r], r == 5 || r == second);
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
