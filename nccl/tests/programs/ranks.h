/* Ranks as processes, for programs in which some of them die or stop. */
#ifndef RANKS_H
#define RANKS_H

#include "check.h"

#include <signal.h>
#include <sys/wait.h>
#include <time.h>

/* The work of one rank; `task` belongs to the program. */
typedef void rank_main_t(int rank, ncclUniqueId id, const void *task);

static inline double seconds(void) {
  struct timespec now;
  CHECK(clock_gettime(CLOCK_MONOTONIC, &now) == 0);
  return now.tv_sec + now.tv_nsec * 1e-9;
}

/* Writes the id to a pipe, for so many ranks. */
static inline void send_id(int pipe, const ncclUniqueId *id, int ranks) {
  for (int r = 0; r < ranks; r++) CHECK(write(pipe, id, sizeof *id) == (ssize_t)sizeof *id);
}

static inline ncclUniqueId receive_id(int pipe) {
  ncclUniqueId id;
  CHECK(read(pipe, &id, sizeof id) == (ssize_t)sizeof id);
  return id;
}

/* Starts `n` ranks with one id. Each process ends with its rank, after a minute at most. */
static inline void start_ranks(pid_t *children, int n, rank_main_t *rank_main, const void *task) {
  int ids[2];
  CHECK(pipe(ids) == 0);
  for (int r = 0; r < n; r++) {
    children[r] = fork();
    CHECK(children[r] >= 0);
    if (children[r] == 0) {
      alarm(60);
      ncclUniqueId id;
      if (r == 0) {
        OK(ncclGetUniqueId(&id));
        send_id(ids[1], &id, n - 1);
      } else {
        id = receive_id(ids[0]);
      }
      rank_main(r, id, task);
      exit(0);
    }
  }
  close(ids[0]);
  close(ids[1]);
}

/* Waits for the end of a rank that was killed, or that must have succeeded. */
static inline void expect_end(pid_t child, int killed) {
  int status = -1;
  CHECK(waitpid(child, &status, 0) == child);
  CHECK(killed ? WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL
               : WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

#endif
