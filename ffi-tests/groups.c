/* Groups: sends and receives that depend on each other, nesting, several communicators, reports. */
#include "harness.h"

#include <stdint.h>

#define COUNT 50000

static cinch_comm_t *comm;

/* Every rank sends to the next and receives from the previous one: a deadlock without a group. */
static void ring_exchange(void) {
    static int32_t mine[COUNT], theirs[COUNT];
    int next = (harness_rank + 1) % harness_nranks;
    int previous = (harness_rank + harness_nranks - 1) % harness_nranks;
    int at, round;
    for (round = 0; round < 3; round++) {
        for (at = 0; at < COUNT; at++) mine[at] = harness_rank * 1000000 + at + round;
        OK(cinch_group_start());
        OK(cinch_send(mine, COUNT, CINCH_I32, next, comm, NULL));
        OK(cinch_recv(theirs, COUNT, CINCH_I32, previous, comm, NULL));
        OK(cinch_group_end());
        for (at = 0; at < COUNT; at++) CHECK(theirs[at] == previous * 1000000 + at + round);
    }
}

/* All pairs exchange blocks of different sizes, which no collective does. */
static void uneven_exchange(void) {
    enum { MOST = 64 };
    static uint64_t out[MOST][2000], in[MOST][2000];
    int peer, at;
    CHECK(harness_nranks <= MOST);
    memset(in, 0, sizeof in);
    OK(cinch_group_start());
    for (peer = 0; peer < harness_nranks; peer++) {
        size_t sends = (size_t)(100 + 10 * harness_rank + peer);
        size_t receives = (size_t)(100 + 10 * peer + harness_rank);
        if (peer == harness_rank) continue;
        for (at = 0; at < (int)sends; at++)
            out[peer][at] = (uint64_t)(harness_rank * 100 + peer) << 32 | (uint64_t)at;
        OK(cinch_recv(in[peer], receives, CINCH_U64, peer, comm, NULL));
        OK(cinch_send(out[peer], sends, CINCH_U64, peer, comm, NULL));
    }
    OK(cinch_group_end());
    for (peer = 0; peer < harness_nranks; peer++) {
        int receives = 100 + 10 * peer + harness_rank;
        if (peer == harness_rank) continue;
        for (at = 0; at < receives; at++)
            CHECK(in[peer][at] == ((uint64_t)(peer * 100 + harness_rank) << 32 | (uint64_t)at));
        CHECK(in[peer][receives] == 0);
    }
}

/* Small sums in one group are fused, each with its own report. Sums that depend on each other are
 * refused before anything moves. The cost model may choose the codec. */
static void fused_sums(void) {
    enum { SUMS = 20 };
    static float data[SUMS][64];
    cinch_report_t reports[SUMS];
    cinch_call_t call;
    int sum, at;
    for (sum = 0; sum < SUMS; sum++)
        for (at = 0; at < 64; at++) data[sum][at] = (float)(sum + harness_rank);
    OK(cinch_group_start());
    for (sum = 0; sum < SUMS; sum++) {
        OK(cinch_report_default(&reports[sum]));
        OK(cinch_call_default(&call));
        call.comm = comm;
        call.sendbuf = call.recvbuf = data[sum];
        call.count = (size_t)(sum % 3 == 0 ? 64 : 63);
        call.dtype = CINCH_F32;
        call.codec = "auto:raw";
        OK(cinch_call(&call, &reports[sum]));
    }
    OK(cinch_group_end());
    for (sum = 0; sum < SUMS; sum++) {
        int n = harness_nranks;
        CHECK(reports[sum].fused == SUMS);
        CHECK(strcmp(reports[sum].codec, "raw") == 0);
        CHECK(data[sum][0] == (float)(n * sum + n * (n - 1) / 2));
        CHECK(data[sum][63] ==
              (sum % 3 == 0 ? data[sum][0] : (float)(sum + harness_rank)));
    }
    OK(cinch_group_start());
    OK(cinch_all_reduce(data[0], data[1], 64, CINCH_F32, CINCH_SUM, comm, NULL));
    OK(cinch_all_reduce(data[1], data[2], 64, CINCH_F32, CINCH_SUM, comm, NULL));
    FAILS(cinch_group_end(), CINCH_ERROR_INVALID_ARGUMENT, "CINCH_FUSE_BYTES=0");
}

/* Collectives of two communicators in nested groups; the last end writes the reports. */
static void nested_collectives(void) {
    float sum[100], same[100];
    double most = harness_rank;
    cinch_comm_t *twin = NULL;
    cinch_call_t call;
    cinch_report_t report;
    int at, n = harness_nranks;
    OK(cinch_comm_split(comm, 7, harness_rank, &twin));
    for (at = 0; at < 100; at++) {
        sum[at] = (float)(at + harness_rank);
        same[at] = harness_rank == n - 1 ? (float)at : -1;
    }
    OK(cinch_report_default(&report));
    report.channels = 12345;
    OK(cinch_call_default(&call));
    call.comm = twin;
    call.collective = CINCH_BROADCAST;
    call.dtype = CINCH_F32;
    call.root = n - 1;
    call.count = 100;
    call.sendbuf = call.recvbuf = same;
    OK(cinch_group_start());
    OK(cinch_all_reduce(sum, sum, 100, CINCH_F32, CINCH_SUM, comm, NULL));
    OK(cinch_group_start());
    OK(cinch_call(&call, &report));
    OK(cinch_group_end());
    /* The inner end ran nothing. */
    CHECK(report.channels == 12345);
    OK(cinch_all_reduce(&most, &most, 1, CINCH_F64, CINCH_MAX, twin, NULL));
    OK(cinch_group_end());
    CHECK(report.channels != 12345);
    CHECK(strcmp(report.codec, "raw") == 0);
    for (at = 0; at < 100; at++) {
        CHECK(sum[at] == (float)(n * at + n * (n - 1) / 2));
        CHECK(same[at] == (float)at);
    }
    CHECK(most == n - 1);
    OK(cinch_comm_finalize(twin));
    OK(cinch_comm_destroy(twin));
}

/* An error inside a group: its end returns the error, nothing runs, and the next group works. */
static void poisoned(void) {
    float data[10] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1};
    OK(cinch_group_start());
    OK(cinch_all_reduce(data, data, 10, CINCH_F32, CINCH_SUM, comm, NULL));
    OK(cinch_group_start());
    FAILS(cinch_all_reduce(NULL, data, 10, CINCH_F32, CINCH_SUM, comm, NULL),
          CINCH_ERROR_INVALID_ARGUMENT, "sendbuf is NULL");
    OK(cinch_group_end());
    OK(cinch_all_reduce(data, data, 10, CINCH_F32, CINCH_SUM, comm, NULL));
    FAILS(cinch_group_end(), CINCH_ERROR_INVALID_ARGUMENT, "sendbuf is NULL");
    CHECK(data[0] == 1 && data[9] == 1);
    OK(cinch_group_start());
    OK(cinch_all_reduce(data, data, 10, CINCH_F32, CINCH_SUM, comm, NULL));
    OK(cinch_group_end());
    CHECK(data[9] == (float)harness_nranks);
}

int main(int argc, char **argv) {
    comm = harness_join(argc, argv);
    OK(cinch_group_start());
    OK(cinch_group_end());
    if (harness_nranks > 1) {
        ring_exchange();
        uneven_exchange();
    }
    fused_sums();
    nested_collectives();
    poisoned();
    FAILS(cinch_group_end(), CINCH_ERROR_INVALID_USAGE, "no group is open");
    return harness_leave(comm);
}
