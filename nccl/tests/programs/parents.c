/* Communicators that were split from one that fails. */
#include "ranks.h"

enum { N = 3, COUNT = 5000 };

/* Ranks 0 and 1 in one part, rank 2 in another. */
static void split_all(ncclComm_t *world, ncclComm_t *parts, ncclConfig_t *config) {
  OK(ncclGroupStart());
  for (int r = 0; r < N; r++) OK(ncclCommSplit(world[r], r == 2, 0, &parts[r], config));
  OK(ncclGroupEnd());
}

static ncclResult_t sum_of_pair(ncclComm_t *parts) {
  static float x[2][COUNT];
  for (int i = 0; i < COUNT; i++) x[0][i] = 1, x[1][i] = 2;
  OK(ncclGroupStart());
  for (int r = 0; r < 2; r++) {
    ncclResult_t result =
        ncclAllReduce(x[r], x[r], COUNT, ncclFloat32, ncclSum, parts[r], NULL);
    CHECK(result == ncclSuccess || result == ncclRemoteError);
  }
  ncclResult_t result = ncclGroupEnd();
  if (result == ncclSuccess) CHECK(x[0][0] == 3 && x[1][COUNT - 1] == 3);
  return result;
}

static void abort_one(ncclComm_t *world) {
  OK(ncclCommAbort(world[2]));
  /* It was in no call: the others have failed when they miss it. */
  CHECK(sum_of_pair(world) == ncclRemoteError);
  for (int r = 0; r < 2; r++) CHECK(failed(world[r]) == ncclRemoteError);
  for (int r = 0; r < 2; r++) OK(ncclCommAbort(world[r]));
}

static void abort_own(ncclComm_t *world) {
  for (int r = 0; r < N; r++) OK(ncclCommAbort(world[r]));
}

static void revoke_all(ncclComm_t *world) {
  for (int r = 0; r < N; r++) OK(ncclCommRevoke(world[r], NCCL_REVOKE_DEFAULT));
  destroy_all(world, N);
}

static void shrink_two(ncclComm_t *world) {
  ncclComm_t left[2];
  int gone = 2;
  OK(ncclGroupStart());
  for (int r = 0; r < 2; r++) {
    OK(ncclCommShrink(world[r], &gone, 1, &left[r], NULL, NCCL_SHRINK_ABORT));
  }
  OK(ncclGroupEnd());
  for (int r = 0; r < N; r++) OK(ncclCommAbort(world[r]));
  CHECK(sum_of_pair(left) == ncclSuccess);
  destroy_all(left, 2);
}

/* It goes on without its parent, unless it asked to share. */
static void threads(void (*end)(ncclComm_t *), ncclConfig_t *config, ncclResult_t expected) {
  ncclComm_t world[N], parts[N];
  join_all(world, N);
  split_all(world, parts, config);
  end(world);
  CHECK(sum_of_pair(parts) == expected);
  for (int r = 0; r < N; r++) {
    ncclResult_t state;
    OK(ncclCommGetAsyncError(parts[r], &state));
    CHECK(state == expected);
  }
  destroy_all(parts, N);
}

/* Pipe by which the other ranks report to rank 2 that they have split. */
static int split[2];

static void process_main(int rank, ncclUniqueId id, const void *unused) {
  (void)unused;
  static float x[COUNT];
  ncclComm_t world, part;
  OK(ncclCommInitRank(&world, N, id, rank));
  OK(ncclCommSplit(world, rank == 2, 0, &part, NULL));
  char said;
  if (rank == 2) {
    for (int other = 0; other < 2; other++) CHECK(read(split[0], &said, 1) == 1);
    kill(getpid(), SIGKILL);
  }
  CHECK(write(split[1], "x", 1) == 1);
  CHECK(failed(world) == ncclRemoteError);
  for (int i = 0; i < COUNT; i++) x[i] = 1;
  OK(ncclAllReduce(x, x, COUNT, ncclFloat32, ncclSum, part, NULL));
  CHECK(x[0] == 2 && x[COUNT - 1] == 2);
  OK(ncclCommAbort(world));
  OK(ncclAllReduce(x, x, COUNT, ncclFloat32, ncclSum, part, NULL));
  OK(ncclCommDestroy(part));
}

/* A rank of the parent that is in another part dies. */
static void processes(void) {
  pid_t children[N];
  CHECK(pipe(split) == 0);
  start_ranks(children, N, process_main, NULL);
  for (int r = 0; r < N; r++) expect_end(children[r], r == 2);
}

int main(void) {
  alarm(100);
  processes(); /* before there are threads */
  ncclConfig_t sharing = NCCL_CONFIG_INITIALIZER;
  sharing.splitShare = 1;
  threads(abort_one, NULL, ncclSuccess);
  threads(abort_own, NULL, ncclSuccess);
  threads(revoke_all, NULL, ncclSuccess);
  threads(shrink_two, NULL, ncclSuccess);
  threads(abort_one, &sharing, ncclRemoteError);
  puts("ok");
  return 0;
}
