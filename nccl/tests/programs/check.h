/* Shared by the programs, which run on host memory (CINCH_DEVICE=host): streams are NULL. */
#ifndef CHECK_H
#define CHECK_H

#include <nccl.h>

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define CHECK(condition)                                                                     \
  do {                                                                                       \
    if (!(condition)) {                                                                      \
      fprintf(stderr, "%s:%d: %s (last error: %s)\n", __FILE__, __LINE__, #condition,        \
              ncclGetLastError(NULL));                                                       \
      exit(1);                                                                               \
    }                                                                                        \
  } while (0)

/* Checks that the call returns this code, and a sentence that contains `said`. */
#define EXPECT(code, said, call)                                                             \
  do {                                                                                       \
    ncclResult_t result_ = (call);                                                           \
    if (result_ != (code) || strstr(ncclGetLastError(NULL), said) == NULL) {                 \
      fprintf(stderr, "%s:%d: %s returned %d, not %d with \"%s\": %s\n", __FILE__, __LINE__, \
              #call, result_, code, said, ncclGetLastError(NULL));                           \
      exit(1);                                                                               \
    }                                                                                        \
  } while (0)

#define OK(call) EXPECT(ncclSuccess, "", call)

/* Creates a communicator of n ranks of this thread. */
static inline void join_all(ncclComm_t *comms, int n) { OK(ncclCommInitAll(comms, n, NULL)); }

static inline void destroy_all(ncclComm_t *comms, int n) {
  for (int i = 0; i < n; i++) OK(ncclCommDestroy(comms[i]));
}

/* Waits, at most 20 s, until the communicator is not busy; returns its state. */
static inline ncclResult_t settled(ncclComm_t comm) {
  ncclResult_t state = ncclInProgress;
  for (int i = 0; i < 20000 && state == ncclInProgress; i++) {
    CHECK(ncclCommGetAsyncError(comm, &state) == ncclSuccess);
    if (state == ncclInProgress) usleep(1000);
  }
  return state;
}

/* Waits, at most 20 s, until the communicator has failed; returns its state. */
static inline ncclResult_t failed(ncclComm_t comm) {
  ncclResult_t state = ncclSuccess;
  for (int i = 0; i < 20000 && state == ncclSuccess; i++) {
    CHECK(ncclCommGetAsyncError(comm, &state) == ncclSuccess);
    if (state == ncclSuccess) usleep(1000);
  }
  return state;
}

#endif
