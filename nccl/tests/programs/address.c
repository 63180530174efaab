/* Ids of one address (NCCL_COMM_ID) are equal: communicators are told apart by more than that. */
#include "check.h"

enum { COUNT = 100 };

static void join_at(ncclUniqueId id, ncclComm_t *comms) {
  OK(ncclGroupStart());
  for (int r = 0; r < 2; r++) OK(ncclCommInitRank(&comms[r], 2, id, r));
  OK(ncclGroupEnd());
}

static void check_sum(ncclComm_t *comms) {
  float x[2][COUNT] = {{1}, {2}};
  OK(ncclGroupStart());
  for (int r = 0; r < 2; r++) {
    OK(ncclAllReduce(x[r], x[r], COUNT, ncclFloat32, ncclSum, comms[r], NULL));
  }
  OK(ncclGroupEnd());
  CHECK(x[0][0] == 3 && x[1][0] == 3);
}

int main(void) {
  alarm(60);
  ncclUniqueId ids[2];
  ncclComm_t first[2], second[2];
  for (int i = 0; i < 2; i++) OK(ncclGetUniqueId(&ids[i]));
  CHECK(memcmp(&ids[0], &ids[1], sizeof ids[0]) == 0);
  join_at(ids[0], first);
  join_at(ids[1], second);
  check_sum(first);
  check_sum(second);
  /* One thread has all ranks, so that no destroy may wait for a later one. */
  for (int r = 0; r < 2; r++) {
    OK(ncclCommDestroy(first[r]));
    OK(ncclCommDestroy(second[r]));
  }

  /* Equal ids in one call: dropping the spare ones does not cancel the running rendezvous. */
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;
  for (int r = 0; r < 2; r++) {
    CHECK(ncclCommInitRankScalable(&first[r], 2, r, 2, ids, &config) == ncclInProgress);
    usleep(100000);
  }
  for (int r = 0; r < 2; r++) CHECK(settled(first[r]) == ncclSuccess);
  check_sum(first);
  destroy_all(first, 2);
  puts("ok");
  return 0;
}
