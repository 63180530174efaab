/* Calls that a test observes by plug-ins: sums in groups of four ranks, messages, and single calls of one rank. The
   argument names the algorithm by which the tuner lets sums run, or `any`. */
#include "check.h"

enum { N = 4, COUNT = 4096 };

static float in[N][COUNT], ring[N][COUNT], tree[N][COUNT], plain[N][COUNT];

/* Sums by an algorithm; NULL leaves the choice to the library. */
static void sum(ncclComm_t *comms, float out[N][COUNT], const char *algorithm) {
  ncclCollConfig_t config = NCCL_COLLCONFIG_INITIALIZER;
  config.algSelection = algorithm;
  OK(ncclGroupStart());
  for (int r = 0; r < N; r++) {
    if (algorithm == NULL) {
      OK(ncclAllReduce(in[r], out[r], COUNT, ncclFloat32, ncclSum, comms[r], NULL));
    } else {
      OK(ncclAllReduceConfig(in[r], out[r], COUNT, ncclFloat32, ncclSum, comms[r], NULL, &config));
    }
  }
  OK(ncclGroupEnd());
}

int main(int argc, char **argv) {
  ncclComm_t comms[N], alone;
  CHECK(argc == 2);
  for (int r = 0; r < N; r++) {
    /* Sums of these depend on their order. */
    for (int i = 0; i < COUNT; i++) in[r][i] = (float)((i * 7919 + r * 104729) % 1000003) / (float)(1 + 31 * r + i % 97);
  }
  join_all(comms, N);
  sum(comms, plain, NULL);
  sum(comms, tree, "tree");
  sum(comms, ring, "ring");
  CHECK(memcmp(tree, ring, sizeof tree) != 0);
  if (strcmp(argv[1], "tree") == 0) CHECK(memcmp(plain, tree, sizeof tree) == 0);
  if (strcmp(argv[1], "ring") == 0) CHECK(memcmp(plain, ring, sizeof ring) == 0);
  OK(ncclGroupStart());
  OK(ncclSend(in[2], 10, ncclInt32, 3, comms[2], NULL));
  OK(ncclRecv(plain[3], 10, ncclInt32, 2, comms[3], NULL));
  OK(ncclGroupEnd());
  CHECK(memcmp(plain[3], in[2], 40) == 0);
  join_all(&alone, 1);
  for (int i = 0; i < 2; i++) OK(ncclBroadcast(in[0], plain[0], COUNT, ncclFloat16, 0, alone, NULL));
  destroy_all(&alone, 1);
  /* A refused call, and a group that does not run. */
  OK(ncclGroupStart());
  OK(ncclAllGather(in[0], plain[0], 10, ncclFloat32, comms[0], NULL));
  EXPECT(ncclInvalidArgument, "datatype 99", ncclAllGather(in[0], plain[0], 10, 99, comms[1], NULL));
  EXPECT(ncclInvalidArgument, "so nothing ran", ncclGroupEnd());
  destroy_all(comms, N);
  puts("ok");
  return 0;
}
