/* Splits, ranks without a color, new communicators that outlive their parent, and two threads with
 * one communicator each. */
#include "harness.h"

#include <pthread.h>
#include <stdint.h>

/* Splits even from odd ranks, in reverse order. */
static void by_parity(cinch_comm_t *comm) {
    int n = harness_nranks, color = harness_rank % 2, size = 0, rank = -1, at, members;
    int32_t sum = harness_rank, expected = 0, ranks[64];
    cinch_comm_t *half = NULL;
    members = color == 0 ? (n + 1) / 2 : n / 2;
    for (at = color; at < n; at += 2) expected += at;
    OK(cinch_comm_split(comm, color, -(int64_t)harness_rank, &half));
    OK(cinch_comm_size(half, &size));
    OK(cinch_comm_rank(half, &rank));
    CHECK(size == members && size <= 64);
    CHECK(rank == members - 1 - harness_rank / 2);
    OK(cinch_all_gather(&harness_rank, ranks, 1, CINCH_I32, half, NULL));
    for (at = 0; at < size; at++) CHECK(ranks[at] == color + 2 * (size - 1 - at));
    OK(cinch_all_reduce(&sum, &sum, 1, CINCH_I32, CINCH_SUM, half, NULL));
    CHECK(sum == expected);
    OK(cinch_comm_finalize(half));
    OK(cinch_comm_destroy(half));
}

/* Splits all ranks but rank 0. */
static void without_rank_zero(cinch_comm_t *comm) {
    cinch_comm_t *rest = (cinch_comm_t *)(uintptr_t)1;
    int size = 0;
    int color = harness_rank == 0 ? CINCH_SPLIT_NO_COLOR : 3;
    OK(cinch_comm_split(comm, color, 0, &rest));
    if (harness_rank == 0) {
        CHECK(rest == NULL);
        return;
    }
    OK(cinch_comm_size(rest, &size));
    CHECK(size == harness_nranks - 1);
    OK(cinch_barrier(rest));
    OK(cinch_comm_finalize(rest));
    OK(cinch_comm_destroy(rest));
}

static void *sums(void *comm) {
    int at;
    for (at = 0; at < 100; at++) {
        double data[1000] = {0};
        data[999] = at;
        OK(cinch_all_reduce(data, data, 1000, CINCH_F64, CINCH_SUM, (cinch_comm_t *)comm, NULL));
        CHECK(data[0] == 0 && data[999] == at * (double)harness_nranks);
    }
    return NULL;
}

static void a_thread_each(cinch_comm_t *comm) {
    cinch_comm_t *twins[2] = {NULL, NULL};
    pthread_t threads[2];
    int at;
    for (at = 0; at < 2; at++) OK(cinch_comm_split(comm, 0, harness_rank, &twins[at]));
    CHECK(twins[0] != twins[1]);
    for (at = 0; at < 2; at++) CHECK(pthread_create(&threads[at], NULL, sums, twins[at]) == 0);
    for (at = 0; at < 2; at++) CHECK(pthread_join(threads[at], NULL) == 0);
    for (at = 0; at < 2; at++) {
        OK(cinch_comm_finalize(twins[at]));
        OK(cinch_comm_destroy(twins[at]));
    }
}

int main(int argc, char **argv) {
    cinch_comm_t *comm = harness_join(argc, argv), *child = NULL;
    float one = 1;
    by_parity(comm);
    without_rank_zero(comm);
    a_thread_each(comm);
    /* The new communicator outlives its parent. */
    OK(cinch_comm_split(comm, 0, harness_rank, &child));
    OK(cinch_comm_finalize(comm));
    OK(cinch_comm_destroy(comm));
    OK(cinch_all_reduce(&one, &one, 1, CINCH_F32, CINCH_SUM, child, NULL));
    CHECK(one == (float)harness_nranks);
    return harness_leave(child);
}
