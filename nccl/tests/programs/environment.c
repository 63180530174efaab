/* Settings of the environment apply to communicators by name. With an argument: creating one fails, and
 * the sentence contains the argument. */
#include "check.h"

enum { N = 2, LARGE = 262144 };

static float in[N][LARGE], exact[LARGE], out[N][LARGE];

static void join_named(ncclComm_t *comms, const char *name) {
  ncclUniqueId id;
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.commName = name;
  OK(ncclGetUniqueId(&id));
  OK(ncclGroupStart());
  for (int r = 0; r < N; r++) OK(ncclCommInitRankConfig(&comms[r], N, id, r, &config));
  OK(ncclGroupEnd());
}

/* Whether the sum of `count` elements is the exact one. */
static int is_exact(ncclComm_t *comms, size_t count) {
  OK(ncclGroupStart());
  for (int r = 0; r < N; r++) {
    OK(ncclAllReduce(in[r], out[r], count, ncclFloat32, ncclSum, comms[r], NULL));
  }
  OK(ncclGroupEnd());
  CHECK(memcmp(out[0], out[1], count * sizeof *exact) == 0);
  return memcmp(out[0], exact, count * sizeof *exact) == 0;
}

static void split_all(ncclComm_t *comms, ncclComm_t *made, ncclConfig_t *config) {
  OK(ncclGroupStart());
  for (int r = 0; r < N; r++) OK(ncclCommSplit(comms[r], 0, r, &made[r], config));
  OK(ncclGroupEnd());
}

int main(int argc, char **argv) {
  ncclComm_t gradients[N], tensors[N], others[N];
  if (argc > 1) {
    EXPECT(ncclInvalidArgument, argv[1], ncclCommInitAll(others, N, NULL));
    puts("ok");
    return 0;
  }
  for (int i = 0; i < LARGE; i++) {
    in[0][i] = (float)(i % 9973) / 7;
    in[1][i] = -(float)(i % 1013) / 3;
    exact[i] = in[0][i] + in[1][i];
  }
  join_named(gradients, "dp0");
  join_named(tensors, "tp");
  join_all(others, N);
  CHECK(!is_exact(gradients, LARGE));
  /* Below 1 MiB, turned off, and not named. */
  CHECK(is_exact(gradients, LARGE - 1));
  CHECK(is_exact(tensors, LARGE));
  CHECK(is_exact(others, LARGE));
  /* Without a config a split has its parent's, with one nothing of it. */
  ncclComm_t same[N], own[N];
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  split_all(gradients, same, NULL);
  split_all(gradients, own, &config);
  CHECK(!is_exact(same, LARGE));
  CHECK(is_exact(own, LARGE));
  destroy_all(same, N);
  destroy_all(own, N);
  destroy_all(gradients, N);
  destroy_all(tensors, N);
  destroy_all(others, N);
  puts("ok");
  return 0;
}
