/* Three ranks as processes, whose tuners disagree: the call fails on all of them, and does not hang. */
#include "ranks.h"

enum { N = 3, COUNT = 1000 };

static void rank_main(int rank, ncclUniqueId id, const void *task) {
  static float x[COUNT];
  ncclComm_t comm;
  const char *odd = task;
  setenv("PLUGIN_TEST_PREFER", rank == 1 ? odd : "tree", 1);
  OK(ncclCommInitRank(&comm, N, id, rank));
  ncclResult_t result = ncclAllReduce(x, x, COUNT, ncclFloat32, ncclSum, comm, NULL);
  CHECK(result == ncclInvalidUsage || result == ncclRemoteError);
  printf("rank %d: %s\n", rank, ncclGetLastError(NULL));
  fflush(stdout);
  OK(ncclCommAbort(comm));
}

int main(void) {
  pid_t children[N];
  start_ranks(children, N, rank_main, "ring");
  for (int r = 0; r < N; r++) expect_end(children[r], 0);
  puts("ok");
  return 0;
}
