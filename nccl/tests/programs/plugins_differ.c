/* Three ranks as processes, whose tuners disagree about the variable that the argument names: the call fails on all of
   them, and does not hang. */
#include "ranks.h"

enum { N = 3, COUNT = 1000 };

static void rank_main(int rank, ncclUniqueId id, const void *task) {
  static float x[COUNT];
  ncclComm_t comm;
  const char *variable = task;
  setenv("PLUGIN_TEST_PREFER", "tree", 1);
  setenv("PLUGIN_TEST_CHANNELS", "2", 1);
  if (rank == 1) setenv(variable, strcmp(variable, "PLUGIN_TEST_CHANNELS") == 0 ? "1" : "ring", 1);
  OK(ncclCommInitRank(&comm, N, id, rank));
  ncclResult_t result = ncclAllReduce(x, x, COUNT, ncclFloat32, ncclSum, comm, NULL);
  CHECK(result == ncclInvalidUsage || result == ncclRemoteError);
  printf("rank %d: %s\n", rank, ncclGetLastError(NULL));
  fflush(stdout);
  OK(ncclCommAbort(comm));
}

int main(int argc, char **argv) {
  pid_t children[N];
  CHECK(argc == 2);
  start_ranks(children, N, rank_main, argv[1]);
  for (int r = 0; r < N; r++) expect_end(children[r], 0);
  puts("ok");
  return 0;
}
