/* Three ranks that a test observes by the text protocol of NCCL's RAS subsystem: all make calls, then rank 2 waits for
   the test while the others wait for rank 2. Lines of the standard input are steps: `go` lets rank 2 make its call,
   `kill` kills it, and `end` ends the others. */
#include "ranks.h"

enum { N = 3, LATE = 2, CALLS = 3 };

/* Pipes: from ranks to the parent, to the late rank, and to all ranks. */
static int ready[2], go[2], end[2];

static void rank_main(int rank, ncclUniqueId id, const void *task) {
  static float x[1000];
  char byte = (char)rank;
  ncclComm_t comm;
  (void)task;
  close(end[1]);
  close(go[1]);
  OK(ncclCommInitRank(&comm, N, id, rank));
  for (int i = 0; i < CALLS; i++) OK(ncclAllReduce(x, x, 1000, ncclFloat32, ncclSum, comm, NULL));
  OK(ncclBroadcast(x, x, 10, ncclFloat32, 0, comm, NULL));
  CHECK(write(ready[1], &byte, 1) == 1);
  if (rank == LATE) CHECK(read(go[0], &byte, 1) == 1);
  ncclResult_t result = ncclAllReduce(x, x, 1000, ncclFloat32, ncclSum, comm, NULL);
  CHECK(result == ncclSuccess || (rank != LATE && result == ncclRemoteError));
  CHECK(write(ready[1], &byte, 1) == 1);
  CHECK(read(end[0], &byte, 1) == 0);
  OK(result == ncclSuccess ? ncclCommDestroy(comm) : ncclCommAbort(comm));
}

static void await_ranks(int ranks) {
  char byte;
  for (int r = 0; r < ranks; r++) CHECK(read(ready[0], &byte, 1) == 1);
}

int main(void) {
  pid_t children[N];
  char line[32];
  int killed = 0;
  CHECK(pipe(ready) == 0 && pipe(go) == 0 && pipe(end) == 0);
  start_ranks(children, N, rank_main, NULL);
  close(end[0]);
  await_ranks(N);
  printf("ready %d %d %d\n", children[0], children[1], children[2]);
  fflush(stdout);
  while (fgets(line, sizeof line, stdin) != NULL && strcmp(line, "end\n") != 0) {
    if (strcmp(line, "go\n") == 0) {
      CHECK(write(go[1], "", 1) == 1);
      await_ranks(N);
    } else {
      CHECK(strcmp(line, "kill\n") == 0 && kill(children[LATE], SIGKILL) == 0);
      killed = 1;
      expect_end(children[LATE], killed);
      await_ranks(N - 1);
    }
    puts("done");
    fflush(stdout);
  }
  close(end[1]);
  for (int r = 0; r < N; r++) {
    if (r != LATE || !killed) expect_end(children[r], 0);
  }
  puts("ok");
  return 0;
}
