/* Grows: a new rank joins a communicator, which stays usable. */
#include "harness.h"

#include <unistd.h>

static void sums(cinch_comm_t *comm, int32_t expected) {
    int32_t sum;
    int rank = -1;
    OK(cinch_comm_rank(comm, &rank));
    sum = rank + 1;
    OK(cinch_all_reduce(&sum, &sum, 1, CINCH_I32, CINCH_SUM, comm, NULL));
    CHECK(sum == expected);
}

/* Reads the id that rank 0 of the old communicator publishes for the new rank. */
static void join_as_new(const char *path, int rank, int nranks) {
    cinch_comm_t *grown = NULL;
    cinch_unique_id_t id;
    harness_await(path, &id);
    FAILS(cinch_comm_init(&id, 0, nranks, NULL, &grown), CINCH_ERROR_INVALID_ARGUMENT, "rank 0 cannot join");
    FAILS(cinch_comm_init(&id, rank, rank, NULL, &grown), CINCH_ERROR_INVALID_ARGUMENT, "cannot grow to");
    CHECK(grown == NULL);
    OK(cinch_comm_init(&id, rank, nranks, NULL, &grown));
    sums(grown, nranks * (nranks + 1) / 2);
    OK(cinch_comm_finalize(grown));
    OK(cinch_comm_destroy(grown));
}

static void bad_arguments(cinch_comm_t *comm, int size) {
    cinch_comm_t *other = comm;
    cinch_unique_id_t id;
    FAILS(cinch_comm_grow_id(NULL, &id), CINCH_ERROR_INVALID_ARGUMENT, "comm");
    FAILS(cinch_comm_grow_id(comm, NULL), CINCH_ERROR_INVALID_ARGUMENT, "id");
    FAILS(cinch_comm_grow(comm, size + 1, NULL, NULL), CINCH_ERROR_INVALID_ARGUMENT, "newcomm");
    FAILS(cinch_comm_grow(NULL, size + 1, NULL, &other), CINCH_ERROR_INVALID_ARGUMENT, "comm");
    CHECK(other == NULL);
    FAILS(cinch_comm_grow(comm, size, NULL, &other), CINCH_ERROR_INVALID_ARGUMENT, "cannot grow to");
    FAILS(cinch_comm_grow(comm, -1, NULL, &other), CINCH_ERROR_INVALID_ARGUMENT, "nranks -1");
    FAILS(cinch_comm_grow(comm, size + 1, NULL, &other), CINCH_ERROR_INVALID_USAGE, "has made an id");
    OK(cinch_group_start());
    FAILS(cinch_comm_grow(comm, size + 1, NULL, &other), CINCH_ERROR_INVALID_USAGE, "inside a group");
    FAILS(cinch_group_end(), CINCH_ERROR_INVALID_USAGE, "inside a group");
    CHECK(other == NULL);
}

/* The last process is the new rank, if there are several. */
int main(int argc, char **argv) {
    char path[4096];
    cinch_comm_t *comm = NULL, *grown = NULL;
    cinch_unique_id_t id;
    int old;
    harness_arguments(argc, argv);
    old = harness_nranks > 1 ? harness_nranks - 1 : 1;
    CHECK(snprintf(path, sizeof path, "%s.%ld", argv[3], (long)getppid()) < (int)sizeof path);
    if (harness_rank == old) {
        join_as_new(path, old, harness_nranks);
        CHECK(remove(path) == 0);
        return 0;
    }
    harness_id(argv[3], &id);
    OK(cinch_comm_init(&id, harness_rank, old, NULL, &comm));
    bad_arguments(comm, old);
    if (harness_nranks > 1) {
        if (harness_rank == 0) {
            OK(cinch_comm_grow_id(comm, &id));
            harness_publish(path, &id);
        }
        OK(cinch_comm_grow(comm, harness_nranks, NULL, &grown));
        sums(comm, old * (old + 1) / 2);
        OK(cinch_comm_finalize(comm));
        OK(cinch_comm_destroy(comm));
        sums(grown, harness_nranks * (harness_nranks + 1) / 2);
        comm = grown;
    }
    return harness_leave(comm);
}
