/* A codec for one call, through the options that NVIDIA's library ignores. */
#include "check.h"

enum { N = 2, COUNT = 4096 };

static float in[N][COUNT], exact[COUNT], out[N][COUNT];

static void sum(ncclComm_t *comms, const ncclCollConfig_t *config) {
  memset(out, 0xff, sizeof out); /* NaN */
  OK(ncclGroupStart());
  for (int r = 0; r < N; r++) {
    OK(ncclAllReduceConfig(in[r], out[r], COUNT, ncclFloat32, ncclSum, comms[r], NULL, config));
  }
  OK(ncclGroupEnd());
  CHECK(memcmp(out[0], out[1], sizeof out[0]) == 0);
}

int main(void) {
  ncclComm_t comms[N];
  join_all(comms, N);
  for (int i = 0; i < COUNT; i++) {
    in[0][i] = (float)i / 7;
    in[1][i] = -(float)(i * i % 1013) / 3;
    exact[i] = in[0][i] + in[1][i];
  }
  sum(comms, NULL);
  CHECK(memcmp(out[0], exact, sizeof exact) == 0);

  ncclCollConfig_t config = NCCL_COLLCONFIG_INITIALIZER;
  sum(comms, &config);
  CHECK(memcmp(out[0], exact, sizeof exact) == 0);

  ncclConfigExt_t off = {NULL, {CINCH_NCCL_VENDOR_ID, CINCH_NCCL_OPTION_OFF}, {.i = 0}};
  ncclConfigExt_t block = {&off, {CINCH_NCCL_VENDOR_ID, CINCH_NCCL_OPTION_BLOCK}, {.i = 64}};
  ncclConfigExt_t codec = {&block, {CINCH_NCCL_VENDOR_ID, CINCH_NCCL_OPTION_CODEC}, {.s = "linear8"}};
  ncclConfigExt_t foreign = {&codec, {4711, 1}, {.raw = NULL}};
  config.ext = &foreign;
  sum(comms, &config);
  double worst = 0;
  for (int i = 0; i < COUNT; i++) {
    double error = out[0][i] - exact[i];
    if (error < 0) error = -error;
    /* Each of at most three encodes is off by at most the block's largest magnitude / 254. Said so
     * that a NaN fails. */
    CHECK(error < 3 * 1000.0 / 254);
    if (error > worst) worst = error;
  }
  CHECK(worst > 0);

  off.val.i = 1;
  sum(comms, &config);
  CHECK(memcmp(out[0], exact, sizeof exact) == 0);

  off.val.i = 0;
  codec.val.s = "linear9";
  EXPECT(ncclInvalidArgument, "linear9",
         ncclAllReduceConfig(in[0], out[0], COUNT, ncclFloat32, ncclSum, comms[0], NULL, &config));
  codec.val.s = "linear8";
  EXPECT(ncclInvalidArgument, "f32, f16 and bf16 only",
         ncclAllReduceConfig(in[0], out[0], COUNT, ncclInt32, ncclSum, comms[0], NULL, &config));
  config.ext = NULL;
  config.algSelection = "nvls";
  EXPECT(ncclInvalidArgument, "algSelection",
         ncclAllReduceConfig(in[0], out[0], COUNT, ncclFloat32, ncclSum, comms[0], NULL, &config));
  config.algSelection = "tree";
  sum(comms, &config);
  CHECK(memcmp(out[0], exact, sizeof exact) == 0);
  config.launchCompletionEvent = (cudaEvent_t)(uintptr_t)64;
  EXPECT(ncclInvalidUsage, "launchCompletionEvent",
         ncclAllReduceConfig(in[0], out[0], COUNT, ncclFloat32, ncclSum, comms[0], NULL, &config));
  destroy_all(comms, N);
  puts("ok");
  return 0;
}
