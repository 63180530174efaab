/* A wrong argument is refused by name on this rank, and the communicator stays usable. */
#include "check.h"

static ncclComm_t invalid(void) { return (ncclComm_t)(uintptr_t)4096; }

int main(void) {
  int number = 0;
  OK(ncclGetVersion(&number));
  CHECK(number == 22809);
  EXPECT(ncclInvalidArgument, "version", ncclGetVersion(NULL));
  CHECK(strcmp(ncclGetErrorString(ncclSuccess), "no error") == 0);
  CHECK(ncclGetErrorString((ncclResult_t)77) != NULL);

  /* Joining. */
  ncclComm_t comm = invalid();
  ncclUniqueId id;
  memset(&id, 0, sizeof id);
  EXPECT(ncclInvalidArgument, "all zeros", ncclCommInitRank(&comm, 1, id, 0));
  CHECK(comm == NULL);
  OK(ncclGetUniqueId(&id));
  EXPECT(ncclInvalidArgument, "NULL", ncclCommInitRank(NULL, 1, id, 0));
  EXPECT(ncclInvalidArgument, "rank 2 of 2", ncclCommInitRank(&comm, 2, id, 2));
  EXPECT(ncclInvalidArgument, "negative", ncclCommInitRank(&comm, 2, id, -1));
  EXPECT(ncclInvalidArgument, "rank 0 of 0", ncclCommInitRank(&comm, 0, id, 0));
  EXPECT(ncclInvalidArgument, "ndev is 0", ncclCommInitAll(&comm, 0, NULL));
  EXPECT(ncclInvalidArgument, "nId 0", ncclCommInitRankScalable(&comm, 1, 0, 0, &id, NULL));
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.magic = 1;
  EXPECT(ncclInvalidArgument, "NCCL_CONFIG_INITIALIZER",
         ncclCommInitRankConfig(&comm, 1, id, 0, &config));

  /* An id that bytes were changed of is no id; one that was copied is. */
  ncclUniqueId damaged = id;
  damaged.internal[50] ^= 1;
  EXPECT(ncclInvalidArgument, "damaged", ncclCommInitRank(&comm, 1, damaged, 0));

  /* A communicator of one rank. */
  OK(ncclCommInitRank(&comm, 1, id, 0));
  OK(ncclCommCount(comm, &number));
  CHECK(number == 1);
  OK(ncclCommUserRank(comm, &number));
  CHECK(number == 0);
  EXPECT(ncclInvalidUsage, "host memory", ncclCommCuDevice(comm, &number));
  EXPECT(ncclInvalidArgument, "NULL", ncclCommCount(NULL, &number));
  EXPECT(ncclInvalidArgument, "not a communicator", ncclCommCount(invalid(), &number));
  EXPECT(ncclInvalidArgument, "NULL", ncclCommCount(comm, NULL));
  uint64_t bytes = 1;
  OK(ncclCommMemStats(comm, ncclStatGpuMemSuspended, &bytes));
  CHECK(bytes == 0);
  EXPECT(ncclInvalidArgument, "stat 9", ncclCommMemStats(comm, (ncclCommMemStat_t)9, &bytes));

  float x[4] = {1, 2, 3, 4}, y[4] = {0};
  OK(ncclAllReduce(x, y, 4, ncclFloat32, ncclAvg, comm, NULL));
  CHECK(memcmp(x, y, sizeof x) == 0);
  EXPECT(ncclInvalidArgument, "NULL", ncclAllReduce(x, y, 4, ncclFloat32, ncclSum, NULL, NULL));
  EXPECT(ncclInvalidArgument, "datatype 12",
         ncclAllReduce(x, y, 4, ncclNumTypes, ncclSum, comm, NULL));
  EXPECT(ncclInvalidArgument, "datatype -1",
         ncclAllReduce(x, y, 4, (ncclDataType_t)-1, ncclSum, comm, NULL));
  EXPECT(ncclInvalidArgument, "op 5", ncclAllReduce(x, y, 4, ncclFloat32, ncclNumOps, comm, NULL));
  EXPECT(ncclInvalidArgument, "sendbuff is NULL",
         ncclAllReduce(NULL, y, 4, ncclFloat32, ncclSum, comm, NULL));
  EXPECT(ncclInvalidArgument, "beyond the end",
         ncclAllReduce(x, y, (size_t)-1, ncclFloat32, ncclSum, comm, NULL));
  EXPECT(ncclInvalidArgument, "root 1", ncclBroadcast(x, y, 4, ncclFloat32, 1, comm, NULL));
  EXPECT(ncclInvalidArgument, "root -1", ncclBroadcast(x, y, 4, ncclFloat32, -1, comm, NULL));
  EXPECT(ncclInvalidArgument, "overlap", ncclAllReduce(x, x + 1, 3, ncclFloat32, ncclSum, comm, NULL));
  EXPECT(ncclInvalidArgument, "peer -2", ncclSend(x, 4, ncclFloat32, -2, comm, NULL));
  EXPECT(ncclInvalidUsage, "group", ncclSend(x, 4, ncclFloat32, 0, comm, NULL));
  EXPECT(ncclInvalidUsage, "pass NULL",
         ncclAllReduce(x, y, 4, ncclFloat32, ncclSum, comm, (cudaStream_t)(uintptr_t)64));
  OK(ncclAllReduce(NULL, NULL, 0, ncclFloat32, ncclSum, comm, NULL));

  /* A sentence is where the last one was: its pointer may be kept. */
  const char *said = ncclGetLastError(NULL);
  EXPECT(ncclInvalidArgument, "root 1", ncclBroadcast(x, y, 4, ncclFloat32, 1, comm, NULL));
  CHECK(ncclGetLastError(NULL) == said && strstr(said, "root 1") != NULL);

  /* Operators. */
  ncclRedOp_t op;
  float factor = 3;
  OK(ncclRedOpCreatePreMulSum(&op, &factor, ncclFloat32, ncclScalarHostImmediate, comm));
  factor = 4; /* read already */
  OK(ncclAllReduce(x, y, 4, ncclFloat32, op, comm, NULL));
  CHECK(y[0] == 3 && y[3] == 12);
  EXPECT(ncclInvalidArgument, "created for f32",
         ncclAllReduce(x, y, 2, ncclFloat64, op, comm, NULL));
  OK(ncclRedOpDestroy(op, comm));
  EXPECT(ncclInvalidArgument, "created operator", ncclRedOpDestroy(op, comm));
  EXPECT(ncclInvalidArgument, "created operator", ncclRedOpDestroy(ncclSum, comm));
  EXPECT(ncclInvalidArgument, "created operator",
         ncclAllReduce(x, y, 4, ncclFloat32, op, comm, NULL));
  OK(ncclRedOpCreatePreMulSum(&op, &factor, ncclFloat32, ncclScalarDevice, comm));
  factor = 5; /* read when the call runs */
  OK(ncclAllReduce(x, y, 4, ncclFloat32, op, comm, NULL));
  CHECK(y[0] == 5 && y[3] == 20);
  EXPECT(ncclInvalidArgument, "residence 2",
         ncclRedOpCreatePreMulSum(&op, &factor, ncclFloat32, (ncclScalarResidence_t)2, comm));
  EXPECT(ncclInvalidArgument, "scalar is NULL",
         ncclRedOpCreatePreMulSum(&op, NULL, ncclFloat32, ncclScalarDevice, comm));

  /* Memory and registration. */
  void *memory = &number, *handle = NULL;
  OK(ncclMemAlloc(&memory, 0));
  CHECK(memory == NULL);
  OK(ncclMemFree(NULL));
  OK(ncclMemAlloc(&memory, 1000));
  CHECK((uintptr_t)memory % 256 == 0);
  memset(memory, 7, 1000);
  EXPECT(ncclInvalidArgument, "not the beginning", ncclMemFree((char *)memory + 256));
  OK(ncclCommRegister(comm, memory, 1000, &handle));
  CHECK(handle != NULL);
  EXPECT(ncclInvalidArgument, "no buffer", ncclCommRegister(comm, NULL, 1000, &handle));
  CHECK(handle == NULL);
  OK(ncclCommRegister(comm, memory, 1000, &handle));
  OK(ncclCommDeregister(comm, handle));
  EXPECT(ncclInvalidArgument, "was destroyed", ncclCommDeregister(comm, handle));
  OK(ncclCommDeregister(comm, NULL));
  ncclWindow_t window = (ncclWindow_t)memory;
  OK(ncclCommWindowRegister(comm, memory, 1000, &window, NCCL_WIN_COLL_SYMMETRIC));
  CHECK(window == NULL);
  OK(ncclCommWindowDeregister(comm, window));
  EXPECT(ncclInvalidArgument, "winFlags",
         ncclCommWindowRegister(comm, memory, 1000, &window, 1 << 20));
  OK(ncclMemFree(memory));
  EXPECT(ncclInvalidArgument, "not the beginning", ncclMemFree(memory));

  /* Unsupported functions return an error. */
  EXPECT(ncclInvalidUsage, "ncclCommResume is not supported", ncclCommResume(comm));
  EXPECT(ncclInvalidUsage, "ncclCommSuspend is not supported", pncclCommSuspend(comm, 1));

  /* Both names are one function. */
  OK(pncclAllReduce(x, y, 4, ncclFloat32, ncclMax, comm, NULL));
  CHECK(memcmp(x, y, sizeof x) == 0);

  /* The end. */
  OK(ncclCommFinalize(comm));
  EXPECT(ncclInvalidUsage, "finalized", ncclAllReduce(x, y, 4, ncclFloat32, ncclSum, comm, NULL));
  EXPECT(ncclInvalidUsage, "finalized", ncclCommFinalize(comm));
  OK(ncclCommDestroy(comm));
  EXPECT(ncclInvalidArgument, "was destroyed", ncclCommCount(comm, &number));
  EXPECT(ncclInvalidArgument, "was destroyed", ncclCommDestroy(comm));
  OK(ncclCommDestroy(NULL));
  OK(ncclCommAbort(NULL));
  OK(ncclCommFinalize(NULL));
  OK(ncclCommRevoke(NULL, NCCL_REVOKE_DEFAULT));
  puts("ok");
  return 0;
}
