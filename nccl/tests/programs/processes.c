/* Four processes: the id travels by value through a pipe; they end in any order. */
#include "check.h"

#include <signal.h>
#include <sys/wait.h>

enum { N = 4, COUNT = 5000 };

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

/* A rank that dies is named on all others, who go on without it. */
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
  run(die_main, 2);
  puts("ok");
  return 0;
}
