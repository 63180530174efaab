/* Shared by the test programs: checks that report where they failed, and creation of a communicator.
 *
 * A test starts PROGRAM RANK NRANKS IDFILE. Rank 0 creates the id and writes it to IDFILE.
 */
#ifndef HARNESS_H
#define HARNESS_H

#ifndef _POSIX_C_SOURCE
#define _POSIX_C_SOURCE 200809L /* nanosleep, setenv, pthread under -std=c11 */
#endif

#include <cinch.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static int harness_rank = 0;
static int harness_nranks = 1;

#define FAIL(...)                                                        \
    do {                                                                 \
        printf("%s:%d: rank %d: ", __FILE__, __LINE__, harness_rank);    \
        printf(__VA_ARGS__);                                             \
        printf("\n");                                                    \
        fflush(stdout);                                                  \
        exit(1);                                                         \
    } while (0)

#define CHECK(condition)                                                 \
    do {                                                                 \
        if (!(condition)) FAIL("not true: %s", #condition);              \
    } while (0)

/* Checks that the call succeeds. */
#define OK(call)                                                         \
    do {                                                                 \
        cinch_result_t harness_code = (call);                            \
        if (harness_code != CINCH_SUCCESS)                               \
            FAIL("%s returned %d: %s", #call, (int)harness_code,         \
                 cinch_last_error());                                    \
    } while (0)

/* Checks that the call fails with this code, and with a sentence that contains these words. */
#define FAILS(call, expected, words)                                     \
    do {                                                                 \
        cinch_result_t harness_code = (call);                            \
        printf("%s -> %d: %s\n", #call, (int)harness_code,               \
               harness_code == CINCH_SUCCESS ? "success" : cinch_last_error()); \
        if (harness_code != (expected))                                  \
            FAIL("%s should have returned %s", #call, #expected);        \
        if (strstr(cinch_last_error(), words) == NULL)                   \
            FAIL("the sentence of %s lacks \"%s\"", #call, words);       \
    } while (0)

static inline void harness_sleep_ms(long ms) {
    struct timespec wait;
    wait.tv_sec = ms / 1000;
    wait.tv_nsec = ms % 1000 * 1000000L;
    nanosleep(&wait, NULL);
}

static inline void *harness_alloc(size_t bytes) {
    /* At least one byte, so that an empty buffer has an address, too. */
    void *memory = malloc(bytes + 1);
    CHECK(memory != NULL);
    return memory;
}

/* Writes the id to `path` atomically. */
static inline void harness_publish(const char *path, const cinch_unique_id_t *id) {
    char staging[4096];
    FILE *file;
    CHECK(snprintf(staging, sizeof staging, "%s.new", path) < (int)sizeof staging);
    file = fopen(staging, "wb");
    CHECK(file != NULL);
    CHECK(fwrite(id->bytes, 1, sizeof id->bytes, file) == sizeof id->bytes);
    CHECK(fclose(file) == 0);
    CHECK(rename(staging, path) == 0);
}

static inline void harness_await(const char *path, cinch_unique_id_t *id) {
    int tries;
    for (tries = 0; tries < 3000; tries++) {
        FILE *file = fopen(path, "rb");
        if (file != NULL) {
            CHECK(fread(id->bytes, 1, sizeof id->bytes, file) == sizeof id->bytes);
            fclose(file);
            return;
        }
        harness_sleep_ms(10);
    }
    FAIL("no id in %s after 30 s", path);
}

static inline void harness_arguments(int argc, char **argv) {
    if (argc != 4) FAIL("usage: %s RANK NRANKS IDFILE", argv[0]);
    harness_rank = atoi(argv[1]);
    harness_nranks = atoi(argv[2]);
}

/* Returns the id of this run: rank 0 creates it, the others wait for its file. */
static inline void harness_id(const char *path, cinch_unique_id_t *id) {
    if (harness_rank == 0) {
        OK(cinch_unique_id_create(id));
        harness_publish(path, id);
    } else {
        harness_await(path, id);
    }
}

/* Creates the communicator that the arguments describe. */
static inline cinch_comm_t *harness_join(int argc, char **argv) {
    cinch_unique_id_t id;
    cinch_comm_t *comm = NULL;
    int rank = -1, nranks = -1;
    harness_arguments(argc, argv);
    harness_id(argv[3], &id);
    OK(cinch_comm_init(&id, harness_rank, harness_nranks, NULL, &comm));
    CHECK(comm != NULL);
    OK(cinch_comm_rank(comm, &rank));
    OK(cinch_comm_size(comm, &nranks));
    CHECK(rank == harness_rank && nranks == harness_nranks);
    return comm;
}

/* Finalizes and destroys the communicator. */
static inline int harness_leave(cinch_comm_t *comm) {
    OK(cinch_comm_finalize(comm));
    OK(cinch_comm_destroy(comm));
    printf("rank %d of %d: all well\n", harness_rank, harness_nranks);
    return 0;
}

#endif
