/* Communicators that new ranks join: a killed rank is replaced by a new process while the others live, ranks of
   one thread, new ranks that do not come, and wrong arguments. */
#include "ranks.h"

enum { N = 4, VICTIM = 1, MAKER = 2, COUNT = 5000 };

/* Pipe by which the rank that makes the id hands it to the new process. */
static int ids[2];

static ncclConfig_t background(void) {
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;
  return config;
}

/* Sums over the ranks of `comm`, and checks the bits. */
static ncclResult_t sum(ncclComm_t comm) {
  static double x[COUNT];
  int rank = -1, n = 0;
  OK(ncclCommUserRank(comm, &rank));
  OK(ncclCommCount(comm, &n));
  for (int i = 0; i < COUNT; i++) x[i] = rank + 1;
  ncclResult_t result = ncclAllReduce(x, x, COUNT, ncclFloat64, ncclSum, comm, NULL);
  if (result == ncclSuccess) CHECK(x[0] == n * (n + 1) / 2 && x[COUNT - 1] == x[0]);
  return result;
}

/* Grows `comm`, or joins if that is NULL. Returns the new communicator when all ranks have joined. */
static ncclComm_t grow(ncclComm_t comm, const ncclUniqueId *id, int rank, int blocking) {
  ncclComm_t grown = NULL;
  ncclConfig_t config = background();
  ncclResult_t result = ncclCommGrow(comm, N, id, rank, &grown, blocking ? NULL : &config);
  CHECK(blocking ? result == ncclSuccess : result == ncclInProgress);
  CHECK(grown != NULL && settled(grown) == ncclSuccess);
  OK(sum(grown));
  return grown;
}

static void rank_main(int rank, ncclUniqueId id, const void *task) {
  int blocking = *(const int *)task, gone = VICTIM, own = -1, before = -1;
  ncclComm_t comm, left, grown;
  OK(ncclCommInitRank(&comm, N, id, rank));
  OK(sum(comm));
  if (rank == VICTIM) kill(getpid(), SIGKILL);
  CHECK(failed(comm) == ncclRemoteError);
  OK(ncclCommShrink(comm, &gone, 1, &left, NULL, NCCL_SHRINK_ABORT));
  OK(ncclCommAbort(comm));
  OK(ncclCommUserRank(left, &before));
  if (rank == MAKER) {
    OK(ncclCommGetUniqueId(left, &id));
    send_id(ids[1], &id, 1);
  }
  grown = grow(left, rank == MAKER ? &id : NULL, -1, blocking);
  OK(ncclCommUserRank(grown, &own));
  CHECK(own == before);
  /* Both are usable, in either order of their ends. */
  OK(sum(left));
  OK(ncclCommDestroy(left));
  OK(sum(grown));
  OK(ncclCommDestroy(grown));
}

/* Rank 1 of 4 is killed, the others shrink, and grow by a new process. */
static void replace(int blocking) {
  pid_t children[N], new_rank;
  CHECK(pipe(ids) == 0);
  start_ranks(children, N, rank_main, &blocking);
  expect_end(children[VICTIM], 1);
  double begun = seconds();
  new_rank = fork();
  CHECK(new_rank >= 0);
  if (new_rank == 0) {
    alarm(60);
    ncclUniqueId id = receive_id(ids[0]);
    ncclComm_t grown = grow(NULL, &id, N - 1, blocking);
    OK(sum(grown));
    OK(ncclCommDestroy(grown));
    exit(0);
  }
  for (int r = 0; r < N; r++) {
    if (r != VICTIM) expect_end(children[r], 0);
  }
  expect_end(new_rank, 0);
  CHECK(seconds() - begun < 3);
  close(ids[0]);
  close(ids[1]);
}

/* A rank of the communicator dies, and no new rank comes: an error that names the dead rank, then one that names
   the missing rank. */
static void deadly_main(int rank, ncclUniqueId id, const void *unused) {
  (void)unused;
  ncclComm_t comm, left, grown = NULL;
  int gone = N - 1;
  char words[32];
  OK(ncclCommInitRank(&comm, N, id, rank));
  OK(sum(comm));
  if (rank == MAKER) OK(ncclCommGetUniqueId(comm, &id));
  if (rank == gone) {
    usleep(100000);
    kill(getpid(), SIGKILL);
  }
  double begun = seconds();
  snprintf(words, sizeof words, "rank %d (host", gone);
  EXPECT(ncclRemoteError, words, ncclCommGrow(comm, N + 1, NULL, -1, &grown, NULL));
  CHECK(grown == NULL && seconds() - begun < 2);
  OK(ncclCommShrink(comm, &gone, 1, &left, NULL, NCCL_SHRINK_ABORT));
  OK(ncclCommAbort(comm));
  if (rank == MAKER) OK(ncclCommGetUniqueId(left, &id));
  begun = seconds();
  EXPECT(ncclRemoteError, "rank 3 of 4 did not come", ncclCommGrow(left, N, NULL, -1, &grown, NULL));
  CHECK(grown == NULL && seconds() - begun < 3);
  ncclConfig_t config = background();
  if (rank == MAKER) OK(ncclCommGetUniqueId(left, &id));
  CHECK(ncclCommGrow(left, N, NULL, -1, &grown, &config) == ncclInProgress);
  CHECK(settled(grown) == ncclRemoteError);
  OK(ncclCommAbort(grown));
  OK(sum(left));
  OK(ncclCommDestroy(left));
}

static void deaths(void) {
  pid_t children[N];
  setenv("CINCH_INIT_TIMEOUT", "2", 1);
  start_ranks(children, N, deadly_main, NULL);
  for (int r = 0; r < N; r++) expect_end(children[r], r == N - 1);
  setenv("CINCH_INIT_TIMEOUT", "3600", 1);
}

/* From 2 ranks to 4 in one thread. */
static void threads(ncclConfig_t *config) {
  static float x[N][COUNT];
  ncclComm_t world[2], grown[N];
  ncclUniqueId id;
  join_all(world, 2);
  OK(ncclCommGetUniqueId(world[1], &id));
  OK(ncclGroupStart());
  for (int r = 0; r < 2; r++) OK(ncclCommGrow(world[r], N, NULL, -1, &grown[r], config));
  for (int r = 2; r < N; r++) OK(ncclCommGrow(NULL, N, &id, r, &grown[r], config));
  ncclResult_t result = ncclGroupEnd();
  CHECK(result == (config == NULL ? ncclSuccess : ncclInProgress));
  for (int r = 0; r < N; r++) CHECK(settled(grown[r]) == ncclSuccess);
  /* A failure of the old communicator is none of the new one. */
  for (int r = 0; r < 2; r++) OK(ncclCommAbort(world[r]));
  for (int r = 0; r < N; r++) {
    for (int i = 0; i < COUNT; i++) x[r][i] = r + 1;
  }
  OK(ncclGroupStart());
  for (int r = 0; r < N; r++) {
    OK(ncclAllReduce(x[r], x[r], COUNT, ncclFloat32, ncclSum, grown[r], NULL));
  }
  OK(ncclGroupEnd());
  for (int r = 0; r < N; r++) CHECK(x[r][0] == 10 && x[r][COUNT - 1] == 10);
  destroy_all(grown, N);
}

static void arguments(void) {
  const ncclResult_t wrong = ncclInvalidArgument;
  ncclComm_t world[2], other;
  ncclUniqueId id, plain;
  join_all(world, 2);
  EXPECT(wrong, "comm is NULL", ncclCommGetUniqueId(NULL, &id));
  EXPECT(wrong, "uniqueId", ncclCommGetUniqueId(world[0], NULL));
  OK(ncclCommGetUniqueId(world[0], &id));
  OK(ncclGetUniqueId(&plain));
  EXPECT(wrong, "newcomm", ncclCommGrow(world[0], 3, NULL, -1, NULL, NULL));
  EXPECT(wrong, "2 ranks cannot grow to 2", ncclCommGrow(world[0], 2, NULL, -1, &other, NULL));
  EXPECT(wrong, "nRanks -3", ncclCommGrow(world[0], -3, NULL, -1, &other, NULL));
  EXPECT(wrong, "rank is 1; a rank of comm passes -1 and keeps its number, here 0",
         ncclCommGrow(world[0], 3, NULL, 1, &other, NULL));
  EXPECT(wrong, "made this unique id", ncclCommGrow(world[0], 3, &plain, -1, &other, NULL));
  EXPECT(wrong, "comm and uniqueId are NULL", ncclCommGrow(NULL, 3, NULL, 2, &other, NULL));
  EXPECT(wrong, "of an init", ncclCommGrow(NULL, 3, &plain, 2, &other, NULL));
  EXPECT(wrong, "rank -1", ncclCommGrow(NULL, 3, &id, -1, &other, NULL));
  EXPECT(wrong, "its new ranks are 2 to 2", ncclCommGrow(NULL, 3, &id, 1, &other, NULL));
  CHECK(other == NULL);
  destroy_all(world, 2);
}

int main(void) {
  alarm(100);
  setenv("CINCH_INIT_TIMEOUT", "3600", 1);
  /* Processes come before there are threads. */
  replace(1);
  replace(0);
  deaths();
  ncclConfig_t config = background();
  threads(NULL);
  threads(&config);
  arguments();
  puts("ok");
  return 0;
}
