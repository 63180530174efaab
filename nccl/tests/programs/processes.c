/* Four processes: the id travels by value through a pipe; they end in any order. */
#include "check.h"

#include <dirent.h>
#include <signal.h>
#include <sys/wait.h>

enum { N = 4, COUNT = 5000 };

/* The others hold its second end until they end. */
static int others[2];

static int threads(void) {
  int count = 0;
  DIR *tasks = opendir("/proc/self/task");
  CHECK(tasks != NULL);
  while (readdir(tasks) != NULL) count++;
  closedir(tasks);
  return count;
}

static void rank_main(int rank, ncclUniqueId id) {
  static double x[COUNT], y[COUNT];
  ncclComm_t comm;
  OK(ncclCommInitRank(&comm, N, id, rank));
  for (int i = 0; i < COUNT; i++) x[i] = rank + i;
  for (int turn = 0; turn < 20; turn++) {
    OK(ncclAllReduce(x, y, COUNT, ncclFloat64, ncclSum, comm, NULL));
    for (int i = 0; i < COUNT; i++) CHECK(y[i] == 6 + 4 * i);
  }
  /* Around the ring. */
  OK(ncclGroupStart());
  OK(ncclSend(x, COUNT, ncclFloat64, (rank + 1) % N, comm, NULL));
  OK(ncclRecv(y, COUNT, ncclFloat64, (rank + N - 1) % N, comm, NULL));
  OK(ncclGroupEnd());
  CHECK(y[7] == (rank + N - 1) % N + 7);
  if (rank == 1) usleep(50000);
  OK(ncclCommDestroy(comm));
}

/* In a group, ranks end communicators in whatever order: none waits in the first for the second. */
static void leave_main(int rank, ncclUniqueId id) {
  ncclComm_t world, both[2], parts[2];
  OK(ncclCommInitRank(&world, N, id, rank));
  for (int i = 0; i < 2; i++) {
    OK(ncclCommSplit(world, 0, 0, &both[i], NULL));
    OK(ncclCommSplit(world, rank / 2, 0, &parts[i], NULL));
  }
  OK(ncclGroupStart());
  for (int i = 0; i < 2; i++) {
    OK(ncclCommFinalize(both[(rank + i) % 2]));
    OK(ncclCommDestroy(parts[(rank + i) % 2]));
  }
  OK(ncclCommDestroy(world));
  OK(ncclGroupEnd());
  OK(ncclGroupStart());
  for (int i = 0; i < 2; i++) OK(ncclCommDestroy(both[(rank + i) % 2]));
  OK(ncclGroupEnd());
}

/* Without a group, too, one communicator after the other: a rank waits for what it called alone. */
static void order_main(int rank, ncclUniqueId id) {
  static double x[COUNT], y[COUNT];
  ncclComm_t comms[3];
  OK(ncclCommInitRank(&comms[0], N, id, rank));
  for (int i = 0; i < 2; i++) {
    /* Both pairs of this rank in a ring. */
    OK(ncclCommSplit(comms[0], (rank + i) % N / 2, 0, &comms[1 + i], NULL));
    OK(ncclAllReduce(x, y, COUNT, ncclFloat64, ncclSum, comms[1 + i], NULL));
  }
  for (int i = 0; i < 3; i++) OK(ncclCommFinalize(comms[(rank + i) % 3]));
  for (int i = 0; i < 3; i++) OK(ncclCommDestroy(comms[(rank + i) % 3]));
}

/* Over and over; nothing piles up. */
static void again_main(int rank, ncclUniqueId id) {
  ncclComm_t world, comm;
  OK(ncclCommInitRank(&world, N, id, rank));
  for (int turn = 0; turn < 60; turn++) {
    OK(ncclCommSplit(world, 0, rank, &comm, NULL));
    OK(ncclCommDestroy(comm));
    CHECK(threads() < 40);
  }
  OK(ncclCommDestroy(world));
}

/* No rank waits for a rank that stays, which needs no other rank to leave later. */
static void stay_main(int rank, ncclUniqueId id) {
  static double x[COUNT], y[COUNT];
  char end;
  ncclComm_t comm;
  OK(ncclCommInitRank(&comm, N, id, rank));
  OK(ncclAllReduce(x, y, COUNT, ncclFloat64, ncclSum, comm, NULL));
  if (rank == 1) {
    CHECK(close(others[1]) == 0);
    CHECK(read(others[0], &end, 1) == 0);
    CHECK(settled(comm) == ncclSuccess);
  }
  if (rank != 2) OK(ncclCommFinalize(comm));
  OK(ncclCommDestroy(comm));
}

/* Ranks that have destroyed fail no other rank, however their processes exit. */
static void go_main(int rank, ncclUniqueId id) {
  static double x[COUNT], y[COUNT];
  ncclComm_t comm;
  OK(ncclCommInitRank(&comm, N, id, rank));
  OK(ncclAllReduce(x, y, COUNT, ncclFloat64, ncclSum, comm, NULL));
  if (rank == 0 || rank == 3) {
    OK(ncclCommDestroy(comm));
    _exit(0);
  }
  usleep(300000);
  for (int i = 0; i < COUNT; i++) x[i] = rank;
  OK(ncclGroupStart());
  OK(ncclSend(x, COUNT, ncclFloat64, 3 - rank, comm, NULL));
  OK(ncclRecv(y, COUNT, ncclFloat64, 3 - rank, comm, NULL));
  OK(ncclGroupEnd());
  CHECK(y[0] == 3 - rank && y[COUNT - 1] == 3 - rank);
  CHECK(settled(comm) == ncclSuccess);
  OK(ncclCommFinalize(comm));
  OK(ncclCommDestroy(comm));
}

/* A rank that exits without destroy fails the calls of other ranks, but not their finalize. */
static void end_main(int rank, ncclUniqueId id) {
  static double x[COUNT], y[COUNT];
  ncclComm_t comm, background;
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;
  OK(ncclCommInitRank(&comm, N, id, rank));
  CHECK(ncclCommSplit(comm, 0, 0, &background, &config) == ncclInProgress);
  CHECK(settled(background) == ncclSuccess);
  OK(ncclAllReduce(x, y, COUNT, ncclFloat64, ncclSum, comm, NULL));
  if (rank == 3) _exit(0);
  CHECK(failed(comm) == ncclRemoteError && failed(background) == ncclRemoteError);
  OK(ncclCommFinalize(comm));
  CHECK(ncclCommFinalize(background) == ncclInProgress);
  CHECK(settled(background) == ncclSuccess && settled(comm) == ncclSuccess);
  if (rank != 1) OK(ncclCommDestroy(comm));
  if (rank == 1) OK(ncclCommAbort(comm));
  OK(ncclCommDestroy(background));
}

/* Errors on all other ranks name a rank that dies, and the others continue without it. */
static void die_main(int rank, ncclUniqueId id) {
  static double x[COUNT];
  ncclComm_t comm;
  OK(ncclCommInitRank(&comm, N, id, rank));
  if (rank == 2) kill(getpid(), SIGKILL);
  EXPECT(ncclRemoteError, "rank 2", ncclAllReduce(x, x, COUNT, ncclFloat64, ncclSum, comm, NULL));
  CHECK(settled(comm) == ncclRemoteError);
  ncclComm_t left;
  int gone = 2, own = -1;
  EXPECT(ncclRemoteError, "NCCL_SHRINK_ABORT",
         ncclCommShrink(comm, &gone, 1, &left, NULL, NCCL_SHRINK_DEFAULT));
  OK(ncclCommShrink(comm, &gone, 1, &left, NULL, NCCL_SHRINK_ABORT));
  OK(ncclCommAbort(comm));
  OK(ncclCommUserRank(left, &own));
  CHECK(own == (rank == 3 ? 2 : rank));
  for (int i = 0; i < COUNT; i++) x[i] = rank;
  OK(ncclAllReduce(x, x, COUNT, ncclFloat64, ncclSum, left, NULL));
  CHECK(x[0] == 4 && x[COUNT - 1] == 4);

  /* Again, and without the first rank, where the others met. */
  ncclComm_t pair = NULL;
  gone = 0;
  if (own == 0) {
    /* Others may still be in the sum: they have all that they need of this rank. */
    OK(ncclCommAbort(left));
    return;
  }
  OK(ncclCommShrink(left, &gone, 1, &pair, NULL, NCCL_SHRINK_ABORT));
  OK(ncclAllReduce(x, x, COUNT, ncclFloat64, ncclSum, pair, NULL));
  CHECK(x[0] == 8);
  OK(ncclCommDestroy(left));
  OK(ncclCommDestroy(pair));
}

static void run(void (*body)(int, ncclUniqueId), int victim) {
  int pipes[N][2];
  pid_t children[N];
  for (int r = 0; r < N; r++) {
    CHECK(pipe(pipes[r]) == 0);
    children[r] = fork();
    CHECK(children[r] >= 0);
    if (children[r] == 0) {
      alarm(60); /* of its own: that of the parent is not inherited */
      ncclUniqueId id;
      /* Rank 0 makes the id and hands it around. */
      if (r == 0) {
        OK(ncclGetUniqueId(&id));
        for (int other = 1; other < N; other++) {
          /* The pipes of later ranks are inherited through the first one. */
          CHECK(write(pipes[0][1], &id, sizeof id) == (ssize_t)sizeof id);
        }
      } else {
        CHECK(read(pipes[0][0], &id, sizeof id) == (ssize_t)sizeof id);
      }
      body(r, id);
      exit(0);
    }
  }
  if (others[1] != 0) close(others[1]);
  for (int r = 0; r < N; r++) {
    int status = -1;
    CHECK(waitpid(children[r], &status, 0) == children[r]);
    if (r == victim) {
      CHECK(WIFSIGNALED(status));
    } else {
      CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    }
  }
}

int main(void) {
  alarm(60);
  run(rank_main, -1);
  run(leave_main, -1);
  run(order_main, -1);
  run(again_main, -1);
  run(go_main, -1);
  run(end_main, -1);
  CHECK(pipe(others) == 0);
  run(stay_main, -1);
  run(die_main, 2);
  puts("ok");
  return 0;
}
