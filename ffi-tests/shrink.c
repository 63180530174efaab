/* Shrinks after ranks have ended: by the ranks that the program names, and by those that are known to have
 * ended. */
#include "harness.h"

#include <unistd.h>

static void sums(cinch_comm_t *comm, int32_t expected) {
    int32_t sum = harness_rank;
    OK(cinch_all_reduce(&sum, &sum, 1, CINCH_I32, CINCH_SUM, comm, NULL));
    CHECK(sum == expected);
}

/* Waits until the communicator has failed because a rank has ended. */
static void await_failure(cinch_comm_t *comm) {
    cinch_result_t code = CINCH_SUCCESS;
    int tries;
    for (tries = 0; tries < 1000 && code == CINCH_SUCCESS; tries++) {
        OK(cinch_comm_async_error(comm, &code));
        harness_sleep_ms(10);
    }
    CHECK(code == CINCH_ERROR_REMOTE);
}

static void bad_arguments(cinch_comm_t *comm) {
    cinch_comm_t *other = (cinch_comm_t *)comm;
    int own = harness_rank, many = harness_nranks;
    FAILS(cinch_comm_shrink(comm, &own, 1, NULL, NULL), CINCH_ERROR_INVALID_ARGUMENT, "newcomm");
    FAILS(cinch_comm_shrink(comm, NULL, 1, NULL, &other), CINCH_ERROR_INVALID_ARGUMENT, "exclude");
    CHECK(other == NULL);
    FAILS(cinch_comm_shrink(comm, &own, -1, NULL, &other), CINCH_ERROR_INVALID_ARGUMENT, "-1");
    FAILS(cinch_comm_shrink(comm, &own, 1, NULL, &other), CINCH_ERROR_INVALID_USAGE, "prepare");
    OK(cinch_comm_prepare_to_shrink(comm));
    FAILS(cinch_comm_shrink(comm, &own, 1, NULL, &other), CINCH_ERROR_INVALID_ARGUMENT, "the caller");
    FAILS(cinch_comm_shrink(comm, &many, 1, NULL, &other), CINCH_ERROR_INVALID_ARGUMENT, "not one");
    FAILS(cinch_comm_shrink(comm, NULL, 0, NULL, &other), CINCH_ERROR_INVALID_USAGE, "name the ranks");
    CHECK(other == NULL);
}

int main(int argc, char **argv) {
    cinch_comm_t *comm = harness_join(argc, argv), *three = NULL, *two = NULL;
    int gone = 0, size = 0;
    bad_arguments(comm);
    if (harness_nranks == 4) {
        OK(cinch_barrier(comm));
        if (harness_rank == 0) _exit(0);
        await_failure(comm);
        OK(cinch_comm_shrink(comm, &gone, 1, NULL, &three));
        OK(cinch_comm_destroy(comm));
        sums(three, 6);
        if (harness_rank == 2) _exit(0);
        await_failure(three);
        OK(cinch_comm_shrink(three, NULL, 0, NULL, &two));
        OK(cinch_comm_size(two, &size));
        CHECK(size == 2);
        sums(two, 4);
        OK(cinch_comm_destroy(three));
        comm = two;
    }
    OK(cinch_comm_finalize(comm));
    OK(cinch_comm_destroy(comm));
    return 0;
}
