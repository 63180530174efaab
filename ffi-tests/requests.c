/* Started calls: results beside those of blocking calls, tests, waits for any, descriptors, refusals. */
#include "harness.h"

#include <poll.h>
#include <pthread.h>

#define COUNT 50000
#define CALLS 16

static cinch_comm_t *comm;
static long sent[CALLS][COUNT], got[CALLS][COUNT];

static cinch_call_t all_reduce(int at) {
    cinch_call_t call;
    OK(cinch_call_default(&call));
    call.comm = comm;
    call.sendbuf = sent[at];
    call.recvbuf = got[at];
    call.count = COUNT;
    call.dtype = CINCH_I64;
    return call;
}

static cinch_request_t *start(int at, cinch_report_t *report) {
    cinch_call_t call = all_reduce(at);
    cinch_request_t *request = NULL;
    OK(cinch_call_start(&call, report, &request));
    CHECK(request != NULL);
    return request;
}

static void check_sum(int at) {
    long ranks = (long)harness_nranks * (harness_nranks - 1) / 2, i;
    for (i = 0; i < COUNT; i++) CHECK(got[at][i] == ranks + (long)harness_nranks * (at + i));
}

/* Started and blocking calls alternate; requests are waited for in the opposite order. */
static void order(void) {
    cinch_request_t *requests[CALLS];
    cinch_report_t report;
    long highest = harness_rank;
    int at;
    OK(cinch_report_default(&report));
    for (at = 0; at < CALLS; at++) requests[at] = start(at, at == 0 ? &report : NULL);
    OK(cinch_all_reduce(&highest, &highest, 1, CINCH_I64, CINCH_MAX, comm, NULL));
    CHECK(highest == harness_nranks - 1);
    for (at = CALLS; at-- > 0;) {
        int done = 0;
        /* The blocking call came after all of them. */
        OK(cinch_request_test(requests[at], &done));
        CHECK(done == 1);
        OK(cinch_request_wait(requests[at]));
        check_sum(at);
    }
    CHECK(report.algorithm != CINCH_ALGORITHM_UNSET);
    FAILS(cinch_request_wait(requests[0]), CINCH_ERROR_INVALID_ARGUMENT, "request");
}

static void any_and_descriptor(void) {
    cinch_request_t *requests[3] = {NULL, NULL, NULL};
    struct pollfd polled;
    int index = -1, descriptor = -1;
    memset(got, 0, sizeof got);
    requests[1] = start(1, NULL);
    requests[2] = start(2, NULL);
    OK(cinch_request_wait_any(requests, 3, &index));
    /* Calls run in order, so the first that was started ends first. */
    CHECK(index == 1);
    OK(cinch_request_wait(requests[1]));
    check_sum(1);
    OK(cinch_request_descriptor(requests[2], &descriptor));
    polled.fd = descriptor;
    polled.events = POLLIN;
    CHECK(poll(&polled, 1, 60000) == 1 && (polled.revents & POLLIN));
    OK(cinch_request_wait(requests[2]));
    check_sum(2);
    requests[1] = requests[2] = NULL;
    FAILS(cinch_request_wait_any(requests, 3, &index), CINCH_ERROR_INVALID_ARGUMENT, "no request");
    FAILS(cinch_request_wait_any(NULL, 1, &index), CINCH_ERROR_INVALID_ARGUMENT, "requests");
    FAILS(cinch_request_wait_any(requests, -1, &index), CINCH_ERROR_INVALID_ARGUMENT, "-1");
}

static void refusals(void) {
    cinch_call_t call = all_reduce(0);
    cinch_request_t *request = (cinch_request_t *)&call;
    call.dtype = 99;
    FAILS(cinch_call_start(&call, NULL, &request), CINCH_ERROR_INVALID_ARGUMENT, "99");
    CHECK(request == NULL);
    FAILS(cinch_call_start(NULL, NULL, &request), CINCH_ERROR_INVALID_ARGUMENT, "call");
    call = all_reduce(0);
    FAILS(cinch_call_start(&call, NULL, NULL), CINCH_ERROR_INVALID_ARGUMENT, "request");
    call.codec = "linear8";
    FAILS(cinch_call_start(&call, NULL, &request), CINCH_ERROR_INVALID_ARGUMENT, "linear8");
    OK(cinch_group_start());
    call = all_reduce(0);
    FAILS(cinch_call_start(&call, NULL, &request), CINCH_ERROR_INVALID_USAGE, "inside a group");
    FAILS(cinch_group_end(), CINCH_ERROR_INVALID_USAGE, "nothing ran");
    FAILS(cinch_request_wait(NULL), CINCH_ERROR_INVALID_ARGUMENT, "request");
    FAILS(cinch_request_test(NULL, NULL), CINCH_ERROR_INVALID_ARGUMENT, "done");
    FAILS(cinch_request_descriptor((cinch_request_t *)comm, &(int){0}), CINCH_ERROR_INVALID_ARGUMENT, "request");
}

/* A communicator that is created in the background, while another one works. */
static void background_init(const char *path) {
    char other[4096];
    cinch_unique_id_t id;
    cinch_comm_t *made = NULL;
    cinch_request_t *request = NULL;
    int rank = -1;
    CHECK(snprintf(other, sizeof other, "%s.second", path) < (int)sizeof other);
    harness_id(other, &id);
    OK(cinch_comm_init_start(&id, harness_rank, harness_nranks, NULL, &made, &request));
    OK(cinch_barrier(comm));
    OK(cinch_request_wait(request));
    OK(cinch_comm_rank(made, &rank));
    CHECK(rank == harness_rank);
    OK(cinch_barrier(made));
    OK(cinch_comm_finalize(made));
    OK(cinch_comm_destroy(made));
    if (harness_rank == 0) remove(other);
}

/* A destroyed communicator runs its started calls to their end. */
static void destroyed(void) {
    cinch_comm_t *whole = comm, *part = NULL;
    cinch_request_t *request;
    OK(cinch_comm_split(whole, 0, harness_rank, &part));
    comm = part;
    memset(got[3], 0, sizeof got[3]);
    request = start(3, NULL);
    OK(cinch_comm_destroy(part));
    OK(cinch_request_wait(request));
    check_sum(3);
    comm = whole;
    OK(cinch_barrier(comm));
}

int main(int argc, char **argv) {
    int at;
    long i;
    comm = harness_join(argc, argv);
    for (at = 0; at < CALLS; at++)
        for (i = 0; i < COUNT; i++) sent[at][i] = harness_rank + at + i;
    order();
    any_and_descriptor();
    refusals();
    background_init(argv[3]);
    destroyed();
    return harness_leave(comm);
}
