/* Non-blocking communicators, aborts and revokes; ranks are threads. */
#include "check.h"

enum { COUNT = 100 };

static ncclConfig_t nonblocking(void) {
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;
  return config;
}

/* Two ranks in one thread, without a group: nothing waits. */
static void background(void) {
  ncclComm_t comms[2], halves[2];
  ncclConfig_t config = nonblocking();
  ncclUniqueId id;
  float x[2][COUNT] = {{1}, {2}}, y[2][COUNT];
  OK(ncclGetUniqueId(&id));
  CHECK(ncclCommInitRankConfig(&comms[0], 2, id, 0, &config) == ncclInProgress);
  ncclResult_t state;
  OK(ncclCommGetAsyncError(comms[0], &state));
  CHECK(state == ncclInProgress);
  EXPECT(ncclInvalidArgument, "not ready",
         ncclAllReduce(x[0], y[0], COUNT, ncclFloat32, ncclSum, comms[0], NULL));
  EXPECT(ncclInvalidArgument, "not ready", ncclCommDestroy(comms[0]));
  CHECK(ncclCommInitRankConfig(&comms[1], 2, id, 1, &config) == ncclInProgress);
  for (int r = 0; r < 2; r++) CHECK(settled(comms[r]) == ncclSuccess);
  OK(ncclGroupStart());
  for (int r = 0; r < 2; r++) {
    OK(ncclAllReduce(x[r], y[r], COUNT, ncclFloat32, ncclSum, comms[r], NULL));
  }
  OK(ncclGroupEnd());
  CHECK(y[0][0] == 3 && y[1][0] == 3);
  for (int r = 0; r < 2; r++) {
    CHECK(ncclCommSplit(comms[r], 0, 0, &halves[r], NULL) == ncclInProgress);
    CHECK(halves[r] != NULL);
  }
  for (int r = 0; r < 2; r++) {
    CHECK(settled(comms[r]) == ncclSuccess);
    CHECK(settled(halves[r]) == ncclSuccess);
  }
  for (int r = 0; r < 2; r++) CHECK(ncclCommFinalize(halves[r]) == ncclInProgress);
  for (int r = 0; r < 2; r++) CHECK(settled(halves[r]) == ncclSuccess);
  destroy_all(halves, 2);
  OK(ncclGroupStart());
  CHECK(ncclCommSplit(comms[0], 0, 0, &halves[0], NULL) == ncclSuccess);
  EXPECT(ncclInvalidUsage, "when that is ready", ncclCommDestroy(comms[0]));
  EXPECT(ncclInvalidUsage, "nothing ran", ncclGroupEnd());
  CHECK(halves[0] == NULL);
  OK(ncclGroupStart());
  for (int r = 0; r < 2; r++) OK(ncclCommFinalize(comms[r]));
  CHECK(ncclGroupEnd() == ncclInProgress);
  for (int r = 0; r < 2; r++) CHECK(settled(comms[r]) == ncclSuccess);
  destroy_all(comms, 2);

  /* A group of non-blocking communicators returns ncclInProgress and takes no blocking ones. */
  OK(ncclGetUniqueId(&id));
  OK(ncclGroupStart());
  for (int r = 0; r < 2; r++) OK(ncclCommInitRankConfig(&comms[r], 2, id, r, &config));
  CHECK(ncclGroupEnd() == ncclInProgress);
  for (int r = 0; r < 2; r++) CHECK(settled(comms[r]) == ncclSuccess);
  destroy_all(comms, 2);
  OK(ncclGetUniqueId(&id));
  OK(ncclGroupStart());
  OK(ncclCommInitRankConfig(&comms[0], 2, id, 0, &config));
  OK(ncclCommInitRank(&comms[1], 2, id, 1));
  EXPECT(ncclInvalidArgument, "one kind", ncclGroupEnd());
  CHECK(comms[0] == NULL && comms[1] == NULL);

  /* A join that nobody answers ends when it is aborted. */
  OK(ncclGetUniqueId(&id));
  CHECK(ncclCommInitRankConfig(&comms[0], 2, id, 0, &config) == ncclInProgress);
  OK(ncclCommAbort(comms[0]));
  EXPECT(ncclInvalidArgument, "was destroyed", ncclCommAbort(comms[0]));
}

struct Rank {
  ncclComm_t comm, made;
  ncclResult_t result;
  const char *said;
};

static void *wait_for_peer(void *argument) {
  struct Rank *rank = argument;
  static float x[COUNT], y[COUNT];
  rank->result = ncclAllReduce(x, y, COUNT, ncclFloat32, ncclSum, rank->comm, NULL);
  rank->said = ncclGetLastError(rank->comm);
  return NULL;
}

static void *split_one(void *argument) {
  struct Rank *rank = argument;
  rank->result = ncclCommSplit(rank->comm, 0, 0, &rank->made, NULL);
  return NULL;
}

/* A call that blocks a thread is nothing in progress to the others. */
static void blocks(void) {
  ncclComm_t comms[2], made;
  join_all(comms, 2);
  struct Rank rank = {.comm = comms[0]};
  pthread_t thread;
  CHECK(pthread_create(&thread, NULL, split_one, &rank) == 0);
  for (int i = 0; i < 100; i++) {
    ncclResult_t state;
    OK(ncclCommGetAsyncError(comms[0], &state));
    CHECK(state == ncclSuccess);
    usleep(1000);
  }
  OK(ncclCommSplit(comms[1], 0, 0, &made, NULL));
  CHECK(pthread_join(thread, NULL) == 0 && rank.result == ncclSuccess);
  OK(ncclCommDestroy(rank.made));
  OK(ncclCommDestroy(made));
  destroy_all(comms, 2);
}

/* A rank waits in a call, and its peer aborts. */
static void aborts(void) {
  ncclComm_t comms[2];
  join_all(comms, 2);
  struct Rank rank = {.comm = comms[0]};
  pthread_t thread;
  CHECK(pthread_create(&thread, NULL, wait_for_peer, &rank) == 0);
  usleep(20000);
  OK(ncclCommAbort(comms[1]));
  CHECK(pthread_join(thread, NULL) == 0);
  CHECK(rank.result == ncclRemoteError && strstr(rank.said, "left the communicator") != NULL);
  CHECK(settled(comms[0]) == ncclRemoteError);
  CHECK(strstr(ncclGetLastError(comms[0]), "rank 1") != NULL);
  OK(ncclCommAbort(comms[0]));
}

/* An abort that cuts nothing short takes back nothing that was sent; one that does is told. */
static void aborts_after_sending(void) {
  enum { BYTES = 64 };
  ncclComm_t comms[2];
  char x[BYTES] = "sent", y[BYTES] = "";
  join_all(comms, 2);
  OK(ncclSend(x, BYTES, ncclInt8, 1, comms[0], NULL));
  OK(ncclCommAbort(comms[0]));
  usleep(200000);
  OK(ncclRecv(y, BYTES, ncclInt8, 0, comms[1], NULL));
  CHECK(memcmp(x, y, BYTES) == 0);
  OK(ncclCommAbort(comms[1]));

  join_all(comms, 2);
  struct Rank rank = {.comm = comms[0]};
  pthread_t thread;
  CHECK(pthread_create(&thread, NULL, wait_for_peer, &rank) == 0);
  usleep(20000);
  OK(ncclCommAbort(comms[0]));
  CHECK(pthread_join(thread, NULL) == 0);
  CHECK(rank.result == ncclRemoteError);
  /* A call that is made before the news has another call of rank 0 to complain of. */
  CHECK(failed(comms[1]) == ncclRemoteError);
  EXPECT(ncclRemoteError, "rank 0", ncclRecv(y, BYTES, ncclInt8, 0, comms[1], NULL));
  CHECK(strstr(ncclGetLastError(comms[1]), "aborted") != NULL);
  OK(ncclCommAbort(comms[1]));
}

static void *finalize_one(void *argument) {
  struct Rank *rank = argument;
  rank->result = ncclCommFinalize(rank->comm);
  return NULL;
}

/* An abort ends a finalize that waits for a call, and with it the call. */
static void aborts_a_finalize(void) {
  ncclComm_t comms[2];
  join_all(comms, 2);
  struct Rank calls = {.comm = comms[0]}, ends = calls;
  pthread_t threads[2];
  CHECK(pthread_create(&threads[0], NULL, wait_for_peer, &calls) == 0);
  usleep(100000);
  CHECK(pthread_create(&threads[1], NULL, finalize_one, &ends) == 0);
  usleep(100000);
  OK(ncclCommAbort(comms[0]));
  for (int i = 0; i < 2; i++) CHECK(pthread_join(threads[i], NULL) == 0);
  CHECK(calls.result == ncclRemoteError && ends.result == ncclRemoteError);
  CHECK(strstr(calls.said, "aborted") != NULL);
  OK(ncclCommAbort(comms[1]));
}

/* A revoked communicator has no error; it can be split and shrunk, and ends. Calls and splits that wait
 * for other ranks end. */
static void revokes(void) {
  enum { N = 3 };
  ncclComm_t comms[N], parts[N];
  float x[N][COUNT] = {{1}, {2}, {4}};
  join_all(comms, N);
  EXPECT(ncclInvalidArgument, "revokeFlags is 1", ncclCommRevoke(comms[0], 1));
  struct Rank rank = {.comm = comms[0]};
  pthread_t thread;
  CHECK(pthread_create(&thread, NULL, wait_for_peer, &rank) == 0);
  struct Rank split = {.comm = comms[1]};
  pthread_t splits;
  CHECK(pthread_create(&splits, NULL, split_one, &split) == 0);
  usleep(100000);
  for (int r = 0; r < N; r++) OK(ncclCommRevoke(comms[r], NCCL_REVOKE_DEFAULT));
  CHECK(pthread_join(thread, NULL) == 0 && rank.result == ncclRemoteError);
  CHECK(pthread_join(splits, NULL) == 0 && split.result == ncclRemoteError && split.made == NULL);
  for (int r = 0; r < N; r++) {
    CHECK(settled(comms[r]) == ncclSuccess);
    EXPECT(ncclInvalidUsage, "revoked",
           ncclAllReduce(x[r], x[r], COUNT, ncclFloat32, ncclSum, comms[r], NULL));
    EXPECT(ncclInvalidUsage, "revoked", ncclCommFinalize(comms[r]));
  }
  /* More than once; by their keys the last rank is the first. */
  for (int turn = 0; turn < 2; turn++) {
    int own = -1;
    OK(ncclGroupStart());
    for (int r = 0; r < N; r++) {
      int color = r == turn ? NCCL_SPLIT_NOCOLOR : 7;
      OK(ncclCommSplit(comms[r], color, -r, &parts[r], NULL));
    }
    OK(ncclGroupEnd());
    CHECK(parts[turn] == NULL);
    OK(ncclCommUserRank(parts[2], &own));
    CHECK(own == 0);
    OK(ncclGroupStart());
    for (int r = 0; r < N; r++) {
      if (r == turn) continue;
      OK(ncclAllReduce(x[r], x[r], COUNT, ncclFloat32, ncclSum, parts[r], NULL));
    }
    OK(ncclGroupEnd());
    for (int r = 0; r < N; r++) OK(ncclCommDestroy(parts[r]));
  }
  /* 2 + 4, and 1 with that. */
  CHECK(x[0][0] == 7 && x[1][0] == 6 && x[2][0] == 7);
  int gone[2] = {0, 2}, count = 0;
  ncclComm_t left;
  OK(ncclCommShrink(comms[1], gone, 2, &left, NULL, NCCL_SHRINK_DEFAULT));
  OK(ncclCommCount(left, &count));
  CHECK(count == 1);
  OK(ncclCommDestroy(left));
  destroy_all(comms, N);
}

int main(void) {
  background();
  blocks();
  aborts();
  aborts_after_sending();
  aborts_a_finalize();
  revokes();
  puts("ok");
  return 0;
}
