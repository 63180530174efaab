/* Four ranks of one thread: everything goes through groups. */
#include "check.h"

enum { N = 4, COUNT = 1003 };

static float in[N][N * COUNT], out[N][N * COUNT];

static void fill(void) {
  for (int r = 0; r < N; r++) {
    for (int i = 0; i < N * COUNT; i++) {
      in[r][i] = (float)(r * 10000 + i);
      out[r][i] = -1;
    }
  }
}

/* All ranks make the same call, in one group. */
#define TOGETHER(call)                    \
  do {                                    \
    fill();                               \
    OK(ncclGroupStart());                 \
    for (int r = 0; r < N; r++) OK(call); \
    OK(ncclGroupEnd());                   \
  } while (0)

static void collectives(ncclComm_t *comms) {
  TOGETHER(ncclAllReduce(in[r], out[r], COUNT, ncclFloat32, ncclSum, comms[r], NULL));
  for (int r = 0; r < N; r++) {
    for (int i = 0; i < COUNT; i++) CHECK(out[r][i] == (float)(60000 + 4 * i));
    CHECK(out[r][COUNT] == -1);
  }
  TOGETHER(ncclAllGather(in[r], out[r], COUNT, ncclFloat32, comms[r], NULL));
  for (int r = 0; r < N; r++) {
    for (int i = 0; i < N * COUNT; i++) CHECK(out[r][i] == in[i / COUNT][i % COUNT]);
  }
  TOGETHER(ncclReduceScatter(in[r], out[r], COUNT, ncclFloat32, ncclMax, comms[r], NULL));
  for (int r = 0; r < N; r++) {
    for (int i = 0; i < COUNT; i++) CHECK(out[r][i] == in[N - 1][r * COUNT + i]);
  }
  TOGETHER(ncclBroadcast(in[r], out[r], COUNT, ncclFloat32, 2, comms[r], NULL));
  for (int r = 0; r < N; r++) CHECK(memcmp(out[r], in[2], COUNT * sizeof(float)) == 0);
  TOGETHER(ncclBcast(in[r], COUNT, ncclFloat32, 1, comms[r], NULL));
  for (int r = 0; r < N; r++) CHECK(in[r][5] == 10005);
  TOGETHER(ncclReduce(in[r], r == 3 ? out[r] : NULL, COUNT, ncclFloat32, ncclMin, 3, comms[r],
                      NULL));
  CHECK(memcmp(out[3], in[0], COUNT * sizeof(float)) == 0);
  TOGETHER(ncclAlltoAll(in[r], out[r], COUNT, ncclFloat32, comms[r], NULL));
  for (int r = 0; r < N; r++) {
    for (int i = 0; i < N * COUNT; i++) CHECK(out[r][i] == in[i / COUNT][r * COUNT + i % COUNT]);
  }
  TOGETHER(ncclGather(in[r], r == 1 ? out[r] : NULL, COUNT, ncclFloat32, 1, comms[r], NULL));
  for (int i = 0; i < N * COUNT; i++) CHECK(out[1][i] == in[i / COUNT][i % COUNT]);
  TOGETHER(ncclScatter(r == 0 ? in[r] : NULL, out[r], COUNT, ncclFloat32, 0, comms[r], NULL));
  for (int r = 0; r < N; r++) {
    CHECK(memcmp(out[r], in[0] + r * COUNT, COUNT * sizeof(float)) == 0);
  }
  /* In place. */
  TOGETHER(ncclAllGather(in[r] + r * COUNT, in[r], COUNT, ncclFloat32, comms[r], NULL));
  for (int r = 0; r < N; r++) {
    for (int i = 0; i < N * COUNT; i++) CHECK(in[r][i] == (float)(i / COUNT * 10000 + i));
  }
  /* Types of 8 bits are moved, and summed: 1.0 is 0x38 in e4m3, 4.0 is 0x48. */
  memset(in, 0x38, sizeof in);
  OK(ncclGroupStart());
  for (int r = 0; r < N; r++) {
    OK(ncclAllReduce(in[r], out[r], COUNT, ncclFloat8e4m3, ncclSum, comms[r], NULL));
  }
  OK(ncclGroupEnd());
  for (int r = 0; r < N; r++) CHECK(*(unsigned char *)out[r] == 0x48);
}

/* Averages of numbers whose sum overflows the type, by a ring, which sends partial sums. */
static void averages(void) {
  ncclComm_t comms[N];
  unsigned short *const large = (unsigned short *)in, *const mean = (unsigned short *)out;
  CHECK(setenv("NCCL_ALGO", "Ring", 1) == 0);
  join_all(comms, N);
  CHECK(unsetenv("NCCL_ALGO") == 0);
  for (int i = 0; i < COUNT; i++) large[i] = 0x7b53; /* 60000 */
  memset(out, 0, sizeof out);
  OK(ncclGroupStart());
  for (int r = 0; r < N; r++) {
    OK(ncclAllReduce(large, mean + r * COUNT, COUNT, ncclFloat16, ncclAvg, comms[r], NULL));
  }
  OK(ncclGroupEnd());
  for (int i = 0; i < N * COUNT; i++) CHECK(mean[i] == 0x7b53);
  destroy_all(comms, N);
}

static void messages(ncclComm_t *comms) {
  /* Everybody to everybody, itself included, with different counts; a count of 0 is none. */
  fill();
  OK(ncclGroupStart());
  for (int r = 0; r < N; r++) {
    OK(ncclGroupStart());
    for (int p = 0; p < N; p++) {
      size_t there = (size_t)(r * N + p) * 7, back = (size_t)(p * N + r) * 7;
      OK(ncclSend(in[r] + p * COUNT, there, ncclFloat32, p, comms[r], NULL));
      OK(ncclRecv(out[r] + p * COUNT, back, ncclFloat32, p, comms[r], NULL));
    }
    OK(ncclGroupEnd());
  }
  OK(ncclGroupEnd());
  for (int r = 0; r < N; r++) {
    for (int p = 0; p < N; p++) {
      size_t count = (size_t)(p * N + r) * 7;
      CHECK(memcmp(out[r] + p * COUNT, in[p] + r * COUNT, count * sizeof(float)) == 0);
      CHECK(out[r][p * COUNT + count] == -1);
    }
  }
  /* Collectives come first, whatever the order of each rank. */
  fill();
  OK(ncclGroupStart());
  OK(ncclAllReduce(in[0], out[0], COUNT, ncclFloat32, ncclSum, comms[0], NULL));
  OK(ncclSend(in[0] + COUNT, COUNT, ncclFloat32, 1, comms[0], NULL));
  OK(ncclRecv(out[1] + COUNT, COUNT, ncclFloat32, 0, comms[1], NULL));
  for (int r = 1; r < N; r++) {
    OK(ncclAllReduce(in[r], out[r], COUNT, ncclFloat32, ncclSum, comms[r], NULL));
  }
  OK(ncclGroupEnd());
  CHECK(memcmp(out[1] + COUNT, in[0] + COUNT, COUNT * sizeof(float)) == 0);
  for (int r = 0; r < N; r++) CHECK(out[r][3] == 60012);
  /* A send to itself without its receive. */
  OK(ncclGroupStart());
  OK(ncclSend(in[0], 4, ncclFloat32, 0, comms[0], NULL));
  EXPECT(ncclInvalidUsage, "no receive", ncclGroupEnd());
}

static void errors(ncclComm_t *comms) {
  EXPECT(ncclInvalidUsage, "no group is open", ncclGroupEnd());
  fill();
  OK(ncclGroupStart());
  OK(ncclGroupStart());
  OK(ncclAllReduce(in[0], out[0], 4, ncclFloat32, ncclSum, comms[0], NULL));
  EXPECT(ncclInvalidArgument, "datatype 99",
         ncclAllReduce(in[1], out[1], 4, (ncclDataType_t)99, ncclSum, comms[1], NULL));
  OK(ncclGroupEnd());
  EXPECT(ncclInvalidArgument, "nothing ran: ncclAllReduce", ncclGroupEnd());
  CHECK(out[0][0] == -1);
  /* Nor is a communicator finalized then. */
  OK(ncclGroupStart());
  OK(ncclCommFinalize(comms[0]));
  EXPECT(ncclInvalidUsage, "finalized",
         ncclAllReduce(in[0], out[0], 4, ncclFloat32, ncclSum, comms[0], NULL));
  EXPECT(ncclInvalidUsage, "nothing ran", ncclGroupEnd());
  /* Questions are no part of it. */
  int count;
  OK(ncclGroupStart());
  EXPECT(ncclInvalidArgument, "NULL", ncclCommCount(NULL, &count));
  OK(ncclGroupEnd());
  /* A simulated group moves nothing. */
  ncclSimInfo_t info = NCCL_SIM_INFO_INITIALIZER;
  OK(ncclGroupStart());
  for (int r = 0; r < N; r++) {
    OK(ncclAllReduce(in[r], out[r], COUNT, ncclFloat32, ncclSum, comms[r], NULL));
  }
  OK(ncclGroupSimulateEnd(&info));
  /* A refused one, too, and what comes next is in no group. */
  info.magic = 1;
  OK(ncclGroupStart());
  OK(ncclAllReduce(in[0], out[0], COUNT, ncclFloat32, ncclSum, comms[0], NULL));
  EXPECT(ncclInvalidArgument, "NCCL_SIM_INFO_INITIALIZER", ncclGroupSimulateEnd(&info));
  EXPECT(ncclInvalidUsage, "no group is open", ncclGroupEnd());
  CHECK(info.estimatedTime > 0 && info.estimatedTime < 1e6);
  CHECK(out[0][0] == -1);
}

/* Init in a group, with a bad one among good ones: none is made. */
static void joins(void) {
  ncclComm_t comms[N];
  ncclUniqueId id;
  OK(ncclGetUniqueId(&id));
  OK(ncclGroupStart());
  for (int r = 0; r < N; r++) OK(ncclCommInitRank(&comms[r], N, id, r));
  OK(ncclGroupEnd());
  for (int r = 0; r < N; r++) {
    int rank = -1;
    OK(ncclCommUserRank(comms[r], &rank));
    CHECK(rank == r);
  }
  collectives(comms);
  destroy_all(comms, N);

  OK(ncclGetUniqueId(&id));
  OK(ncclGroupStart());
  OK(ncclCommInitRank(&comms[0], 2, id, 0));
  EXPECT(ncclInvalidArgument, "rank 5", ncclCommInitRank(&comms[1], 2, id, 5));
  EXPECT(ncclInvalidArgument, "nothing ran", ncclGroupEnd());
  CHECK(comms[0] == NULL && comms[1] == NULL);

  /* The rendezvous finds a rank that joins twice; the group creates no communicator. */
  OK(ncclGetUniqueId(&id));
  OK(ncclGroupStart());
  for (int r = 0; r < 3; r++) OK(ncclCommInitRank(&comms[r], 3, id, r > 0));
  EXPECT(ncclInvalidArgument, "more than once", ncclGroupEnd());
  CHECK(comms[0] == NULL && comms[1] == NULL && comms[2] == NULL);

  /* Several ids: all ranks use the rendezvous of the first. */
  ncclUniqueId ids[2];
  OK(ncclGetUniqueId(&ids[0]));
  OK(ncclGetUniqueId(&ids[1]));
  OK(ncclGroupStart());
  for (int r = 0; r < 2; r++) OK(ncclCommInitRankScalable(&comms[r], 2, r, 2, ids, NULL));
  OK(ncclGroupEnd());
  for (int r = 0; r < 2; r++) OK(ncclCommFinalize(comms[r]));
  destroy_all(comms, 2);
}

static void splits(ncclComm_t *comms) {
  ncclComm_t made[N];
  int count, rank;
  OK(ncclGroupStart());
  for (int r = 0; r < N; r++) {
    OK(ncclCommSplit(comms[r], r == 1 ? NCCL_SPLIT_NOCOLOR : r % 2, -r, &made[r], NULL));
  }
  OK(ncclGroupEnd());
  CHECK(made[1] == NULL);
  /* 0 and 2 are together, in the order of their keys; 3 is alone. */
  OK(ncclCommCount(made[0], &count));
  OK(ncclCommUserRank(made[0], &rank));
  CHECK(count == 2 && rank == 1);
  OK(ncclCommUserRank(made[2], &rank));
  CHECK(rank == 0);
  OK(ncclCommCount(made[3], &count));
  CHECK(count == 1);
  fill();
  OK(ncclGroupStart());
  OK(ncclAllReduce(in[0], out[0], COUNT, ncclFloat32, ncclSum, made[0], NULL));
  OK(ncclAllReduce(in[2], out[2], COUNT, ncclFloat32, ncclSum, made[2], NULL));
  OK(ncclAllReduce(in[3], out[3], COUNT, ncclFloat32, ncclSum, made[3], NULL));
  OK(ncclGroupEnd());
  CHECK(out[0][1] == 20002 && out[2][1] == 20002 && out[3][1] == 30001);
  OK(ncclCommDestroy(made[0]));
  OK(ncclCommDestroy(made[2]));
  OK(ncclCommDestroy(made[3]));
  /* Two splits of one parent in a group, one after the other; a config of its own. */
  ncclComm_t again[N];
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.commName = "again";
  OK(ncclGroupStart());
  for (int r = 0; r < N; r++) {
    OK(ncclCommSplit(comms[r], 0, r, &made[r], NULL));
    OK(ncclCommSplit(comms[r], r / 2, r, &again[r], &config));
  }
  OK(ncclGroupEnd());
  OK(ncclCommCount(made[0], &count));
  CHECK(count == N);
  OK(ncclCommCount(again[3], &count));
  CHECK(count == 2);
  destroy_all(made, N);
  destroy_all(again, N);
  EXPECT(ncclInvalidArgument, "color -2", ncclCommSplit(comms[0], -2, 0, &made[0], NULL));
}

/* Without ranks 0 and 2, twice from the same parent, which lives on. */
static void shrinks(ncclComm_t *comms) {
  int gone[2] = {0, 2};
  for (int turn = 0; turn < 2; turn++) {
    ncclComm_t made[N] = {NULL};
    OK(ncclGroupStart());
    for (int r = 1; r < N; r += 2) {
      OK(ncclCommShrink(comms[r], gone, 2, &made[r], NULL, NCCL_SHRINK_DEFAULT));
    }
    OK(ncclGroupEnd());
    int count, rank;
    OK(ncclCommCount(made[1], &count));
    OK(ncclCommUserRank(made[3], &rank));
    CHECK(count == 2 && rank == 1);
    fill();
    OK(ncclGroupStart());
    for (int r = 1; r < N; r += 2) {
      OK(ncclAllReduce(in[r], out[r], COUNT, ncclFloat32, ncclSum, made[r], NULL));
    }
    OK(ncclGroupEnd());
    CHECK(out[1][5] == 40010 && out[3][5] == 40010);
    for (int r = 1; r < N; r += 2) OK(ncclCommDestroy(made[r]));
  }
  ncclComm_t none;
  EXPECT(ncclInvalidArgument, "0 is the caller",
         ncclCommShrink(comms[0], gone, 2, &none, NULL, NCCL_SHRINK_DEFAULT));
  CHECK(none == NULL);
  EXPECT(ncclInvalidArgument, "0 ranks",
         ncclCommShrink(comms[1], gone, 0, &none, NULL, NCCL_SHRINK_DEFAULT));
  EXPECT(ncclInvalidArgument, "shrinkFlags is 5",
         ncclCommShrink(comms[1], gone, 2, &none, NULL, 5));
  gone[1] = 4;
  EXPECT(ncclInvalidArgument, "4 is not one of its ranks",
         ncclCommShrink(comms[1], gone, 2, &none, NULL, NCCL_SHRINK_DEFAULT));
  gone[1] = 0;
  EXPECT(ncclInvalidArgument, "0 is listed twice",
         ncclCommShrink(comms[1], gone, 2, &none, NULL, NCCL_SHRINK_DEFAULT));
}

int main(void) {
  ncclComm_t comms[N];
  join_all(comms, N);
  collectives(comms);
  messages(comms);
  errors(comms);
  splits(comms);
  shrinks(comms);
  for (int r = 0; r < N; r++) OK(ncclCommFinalize(comms[r]));
  destroy_all(comms, N);
  joins();
  averages();
  puts("ok");
  return 0;
}
