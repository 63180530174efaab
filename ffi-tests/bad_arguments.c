/* Every bad argument is an error with a code and a sentence, and never a crash.
 *
 *   bad_arguments static                  calls that need no communicator
 *   bad_arguments RANK NRANKS IDFILE      calls on a communicator
 *   bad_arguments duplicate FIRST IDFILE  two processes that both join as rank 0 of 2
 */
#include "harness.h"

#include <pthread.h>
#include <stdint.h>
#include <sys/wait.h>
#include <unistd.h>

#define INVALID CINCH_ERROR_INVALID_ARGUMENT

/* Calls every function that takes a communicator with one that does not exist. */
static void no_communicator(cinch_comm_t *comm, const char *words) {
    float in[8] = {0}, out[8] = {0};
    int number = 0;
    cinch_comm_t *other = NULL;
    cinch_result_t code = CINCH_SUCCESS;
    cinch_op_t op = CINCH_SUM;
    cinch_call_t call;
    FAILS(cinch_comm_rank(comm, &number), INVALID, words);
    FAILS(cinch_comm_size(comm, &number), INVALID, words);
    FAILS(cinch_comm_split(comm, 0, 0, &other), INVALID, words);
    FAILS(cinch_comm_finalize(comm), INVALID, words);
    FAILS(cinch_comm_destroy(comm), INVALID, words);
    FAILS(cinch_comm_abort(comm), INVALID, words);
    FAILS(cinch_comm_async_error(comm, &code), INVALID, words);
    FAILS(cinch_barrier(comm), INVALID, words);
    FAILS(cinch_all_reduce(in, out, 1, CINCH_F32, CINCH_SUM, comm, NULL), INVALID, words);
    FAILS(cinch_all_gather(in, out, 1, CINCH_F32, comm, NULL), INVALID, words);
    FAILS(cinch_reduce_scatter(in, out, 1, CINCH_F32, CINCH_SUM, comm, NULL), INVALID, words);
    FAILS(cinch_broadcast(in, out, 1, CINCH_F32, 0, comm, NULL), INVALID, words);
    FAILS(cinch_reduce(in, out, 1, CINCH_F32, CINCH_SUM, 0, comm, NULL), INVALID, words);
    FAILS(cinch_gather(in, out, 1, CINCH_F32, 0, comm, NULL), INVALID, words);
    FAILS(cinch_scatter(in, out, 1, CINCH_F32, 0, comm, NULL), INVALID, words);
    FAILS(cinch_all_to_all(in, out, 1, CINCH_F32, comm, NULL), INVALID, words);
    FAILS(cinch_send(in, 1, CINCH_F32, 0, comm, NULL), INVALID, words);
    FAILS(cinch_recv(out, 1, CINCH_F32, 0, comm, NULL), INVALID, words);
    FAILS(cinch_op_create_premulsum(comm, in, CINCH_F32, &op), INVALID, words);
    FAILS(cinch_op_destroy(comm, 16), INVALID, words);
    OK(cinch_call_default(&call));
    call.comm = comm;
    FAILS(cinch_call(&call, NULL), INVALID, words);
    CHECK(other == NULL && op == CINCH_SUM && number == 0);
}

static void garbage_communicators(void) {
    unsigned char stack[64];
    void *freed = harness_alloc(64);
    volatile uintptr_t freed_address = (uintptr_t)freed; /* hidden from the compiler */
    memset(stack, 0xff, sizeof stack);
    free(freed);
    no_communicator(NULL, "comm is NULL");
    no_communicator((cinch_comm_t *)(void *)stack, "is not a communicator");
    no_communicator((cinch_comm_t *)(void *)(stack + 1), "is not a communicator");
    no_communicator((cinch_comm_t *)(uintptr_t)1, "is not a communicator");
    no_communicator((cinch_comm_t *)UINTPTR_MAX, "is not a communicator");
    no_communicator((cinch_comm_t *)freed_address, "is not a communicator");
}

static cinch_config_t fresh_config(void) {
    cinch_config_t config;
    OK(cinch_config_default(&config));
    return config;
}

static void configs(void) {
    /* A struct of a program with a newer header: more fields than the library knows. */
    struct {
        cinch_config_t config;
        uint64_t more[4];
    } newer;
    char endless[5000];
    cinch_config_t config;
    cinch_comm_t *comm = NULL;
#define JOIN cinch_comm_init_from_env(&config, &comm)
#define BAD_FIELD(field, value, words)           \
    do {                                         \
        config = fresh_config();                 \
        config.field = value;                    \
        printf("config.%s = %s: ", #field, #value); \
        FAILS(JOIN, INVALID, words);             \
    } while (0)
    FAILS(cinch_config_init(NULL, sizeof config, CINCH_API_VERSION), INVALID, "is NULL");
    FAILS(cinch_config_init(&config, 0, CINCH_API_VERSION), INVALID, "size 0");
    FAILS(cinch_config_init(&config, 8, CINCH_API_VERSION), INVALID, "size 8");
    FAILS(cinch_config_init(&config, SIZE_MAX, CINCH_API_VERSION), INVALID, "size 18");
    FAILS(cinch_config_init(&config, sizeof config, 99), INVALID, "version 99");
    BAD_FIELD(size, 0, "size 0");
    BAD_FIELD(size, 24, "size 24");
    BAD_FIELD(size, SIZE_MAX, "size 18");
    BAD_FIELD(magic, 0xdeadbeef, "magic 0xdeadbeef");
    BAD_FIELD(version, 0, "version 0");
    BAD_FIELD(version, 2, "version 2");
    BAD_FIELD(codec, "int8", "int8");
    BAD_FIELD(codec, "", "CINCH_CODEC");
    BAD_FIELD(codec, "linear8:block=48", "power of two");
    BAD_FIELD(codec, "\xff\xfe", "UTF-8");
    memset(endless, 'a', sizeof endless);
    BAD_FIELD(codec, endless, "4096");
    BAD_FIELD(network_interface, "", "CINCH_SOCKET_IFNAME");
    BAD_FIELD(device, "gpu0", "cuda:N");
    BAD_FIELD(device, "", "CINCH_DEVICE");
    BAD_FIELD(transport, (cinch_transport_t)99, "transport 99");
    BAD_FIELD(algorithm, (cinch_algorithm_t)99, "algorithm 99");
    BAD_FIELD(slots, 3, "power of two");
    BAD_FIELD(slots, 128, "CINCH_SLOTS");
    BAD_FIELD(channels, 17, "CINCH_CHANNELS");
    BAD_FIELD(tcp_sockets, UINT32_MAX, "CINCH_TCP_SOCKETS");
    BAD_FIELD(heartbeat_ms, 1, "CINCH_HEARTBEAT");
    BAD_FIELD(slot_bytes, 4097, "multiple of 64");
    BAD_FIELD(slot_bytes, UINT64_MAX, "CINCH_SLOT_BYTES");
    BAD_FIELD(buffer_bytes, 1, "CINCH_BUFFER_BYTES");
    BAD_FIELD(codec_min_bytes, UINT64_MAX, "CINCH_CODEC_MIN_BYTES");
    BAD_FIELD(timeout_ms, 1, "CINCH_TIMEOUT");
    BAD_FIELD(init_timeout_ms, UINT64_MAX, "CINCH_INIT_TIMEOUT");
    OK(cinch_config_init(&newer.config, sizeof newer, CINCH_API_VERSION));
    CHECK(newer.more[0] == 0 && newer.more[3] == 0);
    newer.more[2] = 1;
    FAILS(cinch_comm_init_from_env(&newer.config, &comm), INVALID, "sets a field at byte");
    /* The field is valid now, so that the next error is about another one. */
    newer.more[2] = 0;
    newer.config.slots = 3;
    FAILS(cinch_comm_init_from_env(&newer.config, &comm), INVALID, "power of two");
    memset(&config, 0, sizeof config);
    FAILS(JOIN, INVALID, "magic 0x0");
    CHECK(comm == NULL);
#undef BAD_FIELD
#undef JOIN
}

static void environment(void) {
    static const struct {
        const char *name, *value;
    } bad[] = {
        {"CINCH_SLOTS", ""},          {"CINCH_SLOTS", "-4"},
        {"CINCH_SLOTS", "4K"},        {"CINCH_SLOT_BYTES", "99999999999999999999999"},
        {"CINCH_SLOT_BYTES", "64Q"},  {"CINCH_CODEC", "zip"},
        {"CINCH_TIMEOUT", "NaN"},     {"CINCH_TIMEOUT", "-1"},
        {"CINCH_TRANSPORT", "pigeon"}, {"CINCH_ALGO", ""},
    };
    size_t at;
    cinch_comm_t *comm = NULL;
    for (at = 0; at < sizeof bad / sizeof *bad; at++) {
        CHECK(setenv(bad[at].name, bad[at].value, 1) == 0);
        printf("%s=%s: ", bad[at].name, bad[at].value);
        FAILS(cinch_comm_init_from_env(NULL, &comm), INVALID, bad[at].name);
        CHECK(unsetenv(bad[at].name) == 0);
    }
    /* No launcher started this process. */
    FAILS(cinch_comm_init_from_env(NULL, NULL), INVALID, "comm");
}

static void joining(void) {
    cinch_unique_id_t id;
    cinch_comm_t *comm = (cinch_comm_t *)(uintptr_t)1;
    FAILS(cinch_unique_id_create(NULL), INVALID, "id");
    OK(cinch_unique_id_create(&id));
    FAILS(cinch_comm_init(NULL, 0, 1, NULL, &comm), INVALID, "id is NULL");
    CHECK(comm == NULL);
    FAILS(cinch_comm_init(&id, 0, 1, NULL, NULL), INVALID, "comm");
    FAILS(cinch_comm_init(&id, -1, 1, NULL, &comm), INVALID, "rank -1");
    FAILS(cinch_comm_init(&id, 0, -1, NULL, &comm), INVALID, "nranks -1");
    memset(&id, 0, sizeof id);
    FAILS(cinch_comm_init(&id, 0, 1, NULL, &comm), INVALID, "id");
    CHECK(comm == NULL);
}

static void versioned_structs(void) {
    cinch_call_t call;
    cinch_report_t report;
    FAILS(cinch_call_init(NULL, sizeof call, CINCH_API_VERSION), INVALID, "is NULL");
    FAILS(cinch_call_init(&call, 3, CINCH_API_VERSION), INVALID, "size 3");
    FAILS(cinch_report_init(NULL, sizeof report, CINCH_API_VERSION), INVALID, "is NULL");
    FAILS(cinch_report_init(&report, sizeof report, 0), INVALID, "version 0");
    FAILS(cinch_call(NULL, NULL), INVALID, "cinch_call_t is NULL");
    memset(&call, 0, sizeof call);
    FAILS(cinch_call(&call, NULL), INVALID, "magic");
    OK(cinch_call_default(&call));
    memset(&report, 0xff, sizeof report);
    FAILS(cinch_call(&call, &report), INVALID, "cinch_report_t has magic");
    call.codec = "zip";
    FAILS(cinch_call(&call, NULL), INVALID, "zip");
    call.codec = NULL;
    call.algorithm = CINCH_ALGORITHM_AUTO;
    FAILS(cinch_call(&call, NULL), INVALID, "CINCH_ALGORITHM_AUTO");
    call.algorithm = (cinch_algorithm_t)77;
    FAILS(cinch_call(&call, NULL), INVALID, "algorithm 77");
}

static void groups(void) {
    cinch_unique_id_t id;
    cinch_comm_t *comm = NULL;
    float data = 0;
    FAILS(cinch_group_end(), CINCH_ERROR_INVALID_USAGE, "no group is open");
    OK(cinch_group_start());
    OK(cinch_group_end());
    FAILS(cinch_group_end(), CINCH_ERROR_INVALID_USAGE, "no group is open");
    /* The failing call and the outermost end both return an error inside a group. */
    OK(cinch_group_start());
    OK(cinch_group_start());
    FAILS(cinch_all_reduce(&data, &data, 1, CINCH_F32, CINCH_SUM, NULL, NULL), INVALID, "comm is NULL");
    OK(cinch_group_end());
    FAILS(cinch_group_end(), INVALID, "nothing ran: cinch_all_reduce");
    FAILS(cinch_group_end(), CINCH_ERROR_INVALID_USAGE, "no group is open");
    OK(cinch_unique_id_create(&id));
    OK(cinch_group_start());
    FAILS(cinch_comm_init(&id, 0, 1, NULL, &comm), CINCH_ERROR_INVALID_USAGE, "inside a group");
    FAILS(cinch_group_end(), CINCH_ERROR_INVALID_USAGE, "nothing ran");
    OK(cinch_group_start());
    FAILS(cinch_call(NULL, NULL), INVALID, "NULL");
    FAILS(cinch_group_end(), INVALID, "nothing ran");
}

static void words_and_sizes(void) {
    size_t size = 7;
    uint32_t code;
    FAILS(cinch_dtype_size(CINCH_F32, NULL), INVALID, "size");
    FAILS(cinch_dtype_size((cinch_dtype_t)12, &size), INVALID, "dtype 12");
    FAILS(cinch_dtype_size((cinch_dtype_t)UINT32_MAX, &size), INVALID, "dtype 4294967295");
    CHECK(size == 7);
    OK(cinch_dtype_size(CINCH_BF16, &size));
    CHECK(size == 2);
    OK(cinch_version(NULL, NULL, NULL));
    CHECK(strlen(cinch_version_string()) >= 5);
    for (code = 0; code < 100; code++) CHECK(strlen(cinch_error_string((cinch_result_t)code)) > 0);
    CHECK(strlen(cinch_error_string((cinch_result_t)UINT32_MAX)) > 0);
}

static int static_part(void) {
    CHECK(strcmp(cinch_last_error(), "") == 0);
    garbage_communicators();
    configs();
    environment();
    joining();
    versioned_structs();
    groups();
    words_and_sizes();
    printf("all well\n");
    return 0;
}

static void bad_ids(const cinch_unique_id_t *good) {
    cinch_unique_id_t id;
    cinch_config_t config = fresh_config();
    cinch_comm_t *comm = NULL;
    config.init_timeout_ms = 2000;
    FAILS(cinch_comm_init(good, harness_nranks, harness_nranks, &config, &comm), INVALID, "rank");
    FAILS(cinch_comm_init(good, 0, 0, &config, &comm), INVALID, "rank");
    FAILS(cinch_comm_init(good, 0, INT32_MAX, &config, &comm), INVALID, "rank");
    /* Id of another version, and one damaged bit. */
    id = *good;
    id.bytes[0] = (char)(id.bytes[0] + 1);
    FAILS(cinch_comm_init(&id, 0, 1, &config, &comm), INVALID, "id");
    id = *good;
    id.bytes[77] = (char)(id.bytes[77] ^ 4);
    FAILS(cinch_comm_init(&id, 0, 1, &config, &comm), INVALID, "id");
    /* Truncated id. */
    id = *good;
    memset(id.bytes + 64, 0, 64);
    FAILS(cinch_comm_init(&id, 0, 1, &config, &comm), INVALID, "id");
    CHECK(comm == NULL);
}

static void numbers(cinch_comm_t *comm) {
    float in[64] = {0}, out[64] = {0};
    int n = harness_nranks;
    cinch_call_t call;
    FAILS(cinch_all_reduce(in, out, 1, (cinch_dtype_t)12, CINCH_SUM, comm, NULL), INVALID, "dtype 12");
    FAILS(cinch_all_reduce(in, out, 1, (cinch_dtype_t)~0u, CINCH_SUM, comm, NULL), INVALID, "dtype");
    FAILS(cinch_all_reduce(in, out, 1, CINCH_F32, (cinch_op_t)5, comm, NULL), INVALID, "op 5");
    FAILS(cinch_all_reduce(in, out, 1, CINCH_F32, (cinch_op_t)~0u, comm, NULL), INVALID, "op 4294967295");
    FAILS(cinch_broadcast(in, out, 1, CINCH_F32, -1, comm, NULL), INVALID, "root -1");
    FAILS(cinch_broadcast(in, out, 1, CINCH_F32, n, comm, NULL), INVALID, "root");
    FAILS(cinch_reduce(in, out, 1, CINCH_F32, CINCH_SUM, INT32_MAX, comm, NULL), INVALID, "root");
    FAILS(cinch_gather(in, out, 1, CINCH_F32, INT32_MIN, comm, NULL), INVALID, "root");
    FAILS(cinch_scatter(in, out, 1, CINCH_F32, n, comm, NULL), INVALID, "root");
    FAILS(cinch_send(in, 1, CINCH_F32, -1, comm, NULL), INVALID, "peer -1");
    FAILS(cinch_send(in, 1, CINCH_F32, n, comm, NULL), INVALID, "");
    FAILS(cinch_recv(out, 1, CINCH_F32, n, comm, NULL), INVALID, "");
    OK(cinch_call_default(&call));
    call.comm = comm;
    call.collective = (cinch_collective_t)10;
    FAILS(cinch_call(&call, NULL), INVALID, "collective 10");
}

static void buffers(cinch_comm_t *comm) {
    unsigned char memory[4096] = {0};
    float *in = (float *)(void *)memory, *out = (float *)(void *)(memory + 2048);
    FAILS(cinch_all_reduce(NULL, out, 1, CINCH_F32, CINCH_SUM, comm, NULL), INVALID, "sendbuf is NULL");
    FAILS(cinch_all_reduce(in, NULL, 1, CINCH_F32, CINCH_SUM, comm, NULL), INVALID, "recvbuf is NULL");
    FAILS(cinch_all_gather(NULL, out, 1, CINCH_F32, comm, NULL), INVALID, "sendbuf is NULL");
    FAILS(cinch_all_to_all(in, NULL, 1, CINCH_F32, comm, NULL), INVALID, "recvbuf is NULL");
    FAILS(cinch_broadcast(NULL, NULL, 1, CINCH_F32, harness_rank, comm, NULL), INVALID, "is NULL");
    FAILS(cinch_all_reduce(in, out, SIZE_MAX, CINCH_U8, CINCH_SUM, comm, NULL), INVALID, "end of memory");
    FAILS(cinch_all_reduce(in, out, SIZE_MAX / 2, CINCH_U8, CINCH_SUM, comm, NULL), INVALID, "memory");
    FAILS(cinch_all_reduce(in, out, SIZE_MAX / 4, CINCH_F32, CINCH_SUM, comm, NULL), INVALID, "memory");
    FAILS(cinch_all_reduce(in, out, SIZE_MAX / 4 + 2, CINCH_F32, CINCH_SUM, comm, NULL), INVALID, "memory");
    FAILS(cinch_all_gather(in, out, SIZE_MAX / 8, CINCH_F64, comm, NULL), INVALID, "memory");
    /* Overlaps that are neither in place nor disjoint. */
    FAILS(cinch_all_reduce(in, in + 1, 8, CINCH_F32, CINCH_SUM, comm, NULL), INVALID, "overlap");
    FAILS(cinch_all_reduce(memory + 1, memory, 8, CINCH_F32, CINCH_SUM, comm, NULL), INVALID, "overlap");
    FAILS(cinch_all_gather(in + 1, in, 8, CINCH_F32, comm, NULL), INVALID, "overlap");
    FAILS(cinch_reduce_scatter(in, in + 1, 8, CINCH_F32, CINCH_SUM, comm, NULL), INVALID, "overlap");
    FAILS(cinch_all_to_all(in, in + 1, 8, CINCH_F32, comm, NULL), INVALID, "overlap");
    /* Host memory has no streams. */
    FAILS(cinch_all_reduce(in, out, 1, CINCH_F32, CINCH_SUM, comm, memory),
          CINCH_ERROR_INVALID_USAGE, "communicator of host memory");
    OK(cinch_all_reduce(NULL, NULL, 0, CINCH_F32, CINCH_SUM, comm, NULL));
    OK(cinch_all_gather(NULL, NULL, 0, CINCH_F64, comm, NULL));
    OK(cinch_all_reduce(memory + 1, memory + 1, 0, CINCH_F32, CINCH_SUM, comm, NULL));
    OK(cinch_all_reduce(memory + 1, memory + 2051, 9, CINCH_F32, CINCH_SUM, comm, NULL));
}

static void codecs(cinch_comm_t *comm) {
    int32_t integers[64] = {0};
    float floats[64] = {0};
    cinch_call_t call;
    OK(cinch_call_default(&call));
    call.comm = comm;
    call.count = 64;
    call.codec = "linear8";
    call.dtype = CINCH_I32;
    call.sendbuf = call.recvbuf = integers;
    FAILS(cinch_call(&call, NULL), INVALID, "linear8");
    call.dtype = CINCH_F32;
    call.op = CINCH_MAX;
    call.sendbuf = call.recvbuf = floats;
    FAILS(cinch_call(&call, NULL), INVALID, "linear8");
    call.op = CINCH_SUM;
    call.codec = "linear8:block=7";
    FAILS(cinch_call(&call, NULL), INVALID, "block=7");
}

static void operators(cinch_comm_t *comm) {
    float factor = 2, data[4] = {1, 2, 3, 4};
    double wide[4] = {0};
    cinch_op_t op = CINCH_SUM, later;
    cinch_comm_t *twin = NULL;
    FAILS(cinch_op_create_premulsum(comm, NULL, CINCH_F32, &op), INVALID, "scalar is NULL");
    FAILS(cinch_op_create_premulsum(comm, &factor, CINCH_F32, NULL), INVALID, "op");
    FAILS(cinch_op_create_premulsum(comm, &factor, (cinch_dtype_t)50, &op), INVALID, "dtype 50");
    CHECK(op == CINCH_SUM);
    FAILS(cinch_op_destroy(comm, CINCH_SUM), INVALID, "built in");
    FAILS(cinch_op_destroy(comm, (cinch_op_t)12345), INVALID, "op 12345");
    OK(cinch_op_create_premulsum(comm, &factor, CINCH_F32, &op));
    CHECK(op >= CINCH_OP_FIRST_CREATED);
    FAILS(cinch_all_reduce(wide, wide, 4, CINCH_F64, op, comm, NULL), INVALID, "created for f32");
    OK(cinch_comm_split(comm, 0, 0, &twin));
    FAILS(cinch_all_reduce(data, data, 4, CINCH_F32, op, twin, NULL), INVALID, "created operator");
    OK(cinch_comm_finalize(twin));
    OK(cinch_comm_destroy(twin));
    OK(cinch_all_reduce(data, data, 4, CINCH_F32, op, comm, NULL));
    CHECK(data[3] == 8 * (float)harness_nranks);
    OK(cinch_op_destroy(comm, op));
    FAILS(cinch_op_destroy(comm, op), INVALID, "created operator");
    FAILS(cinch_all_reduce(data, data, 4, CINCH_F32, op, comm, NULL), INVALID, "created operator");
    OK(cinch_op_create_premulsum(comm, &factor, CINCH_F32, &later));
    CHECK(later != op);
}

static void out_parameters(cinch_comm_t *comm) {
    cinch_comm_t *other = (cinch_comm_t *)(uintptr_t)1;
    FAILS(cinch_comm_rank(comm, NULL), INVALID, "rank");
    FAILS(cinch_comm_size(comm, NULL), INVALID, "nranks");
    FAILS(cinch_comm_async_error(comm, NULL), INVALID, "code");
    FAILS(cinch_comm_split(comm, 0, 0, NULL), INVALID, "newcomm");
    FAILS(cinch_comm_split(comm, -2, 0, &other), INVALID, "color -2");
    CHECK(other == NULL);
}

static void group_with_communicator(cinch_comm_t *comm) {
    float data[4] = {1, 1, 1, 1};
    cinch_comm_t *other = NULL;
    OK(cinch_group_start());
    OK(cinch_all_reduce(data, data, 4, CINCH_F32, CINCH_SUM, comm, NULL));
    FAILS(cinch_all_reduce(data, data, 4, CINCH_F32, (cinch_op_t)9, comm, NULL), INVALID, "op 9");
    FAILS(cinch_group_end(), INVALID, "nothing ran");
    CHECK(data[0] == 1);
    OK(cinch_group_start());
    FAILS(cinch_barrier(comm), CINCH_ERROR_INVALID_USAGE, "inside a group");
    FAILS(cinch_comm_split(comm, 0, 0, &other), CINCH_ERROR_INVALID_USAGE, "inside a group");
    FAILS(cinch_comm_finalize(comm), CINCH_ERROR_INVALID_USAGE, "inside a group");
    FAILS(cinch_comm_destroy(comm), CINCH_ERROR_INVALID_USAGE, "inside a group");
    FAILS(cinch_group_end(), CINCH_ERROR_INVALID_USAGE, "barrier");
    /* The communicator still works. */
    OK(cinch_all_reduce(data, data, 4, CINCH_F32, CINCH_SUM, comm, NULL));
    CHECK(data[0] == (float)harness_nranks);
}

static void *many_calls(void *comm) {
    int at;
    for (at = 0; at < 50; at++) {
        int64_t data[100] = {41, 42};
        OK(cinch_all_reduce(data, data, 100, CINCH_I64, CINCH_SUM, (cinch_comm_t *)comm, NULL));
        CHECK(data[0] == 41 && data[1] == 42 && data[99] == 0);
    }
    return NULL;
}

/* Two threads call on one communicator: with one rank, any order is the same on all ranks. */
static void two_threads(cinch_comm_t *comm) {
    pthread_t threads[2];
    int at;
    for (at = 0; at < 2; at++) CHECK(pthread_create(&threads[at], NULL, many_calls, comm) == 0);
    for (at = 0; at < 2; at++) CHECK(pthread_join(threads[at], NULL) == 0);
}

static void after_abort(cinch_comm_t *comm) {
    float data[4] = {0};
    cinch_comm_t *twin = NULL;
    cinch_result_t code = CINCH_ERROR_INTERNAL;
    OK(cinch_comm_split(comm, 0, 0, &twin));
    OK(cinch_comm_async_error(twin, &code));
    CHECK(code == CINCH_SUCCESS);
    OK(cinch_barrier(comm));
    OK(cinch_comm_abort(twin));
    OK(cinch_comm_abort(twin));
    OK(cinch_comm_async_error(twin, &code));
    CHECK(code == CINCH_ERROR_ABORTED);
    CHECK(strstr(cinch_last_error(), "abort") != NULL);
    FAILS(cinch_all_reduce(data, data, 4, CINCH_F32, CINCH_SUM, twin, NULL), CINCH_ERROR_ABORTED, "abort");
    FAILS(cinch_barrier(twin), CINCH_ERROR_ABORTED, "abort");
    OK(cinch_comm_destroy(twin));
    no_communicator(twin, "was destroyed");
    /* The parent did not abort. */
    OK(cinch_barrier(comm));
}

/* A forked child cannot use its parent's communicator, not even for a query. */
static void forked_child(cinch_comm_t *comm) {
    int status = 0;
    pid_t child;
    fflush(stdout);
    child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        int number = -1;
        FAILS(cinch_comm_rank(comm, &number), CINCH_ERROR_INVALID_USAGE, "forked");
        FAILS(cinch_comm_destroy(comm), CINCH_ERROR_INVALID_USAGE, "forked");
        OK(cinch_group_start());
        FAILS(cinch_op_destroy(comm, 16), CINCH_ERROR_INVALID_USAGE, "forked");
        FAILS(cinch_group_end(), CINCH_ERROR_INVALID_USAGE, "nothing ran");
        fflush(stdout);
        _exit(number == -1 ? 0 : 1);
    }
    CHECK(waitpid(child, &status, 0) == child);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    OK(cinch_barrier(comm));
}

static int live_part(int argc, char **argv) {
    cinch_unique_id_t id;
    cinch_config_t config = fresh_config();
    cinch_comm_t *comm, *again = NULL;
    comm = harness_join(argc, argv);
    harness_await(argv[3], &id);
    bad_ids(&id);
    numbers(comm);
    buffers(comm);
    codecs(comm);
    operators(comm);
    out_parameters(comm);
    group_with_communicator(comm);
    if (harness_nranks == 1) two_threads(comm);
    forked_child(comm);
    after_abort(comm);
    OK(cinch_comm_finalize(comm));
    OK(cinch_comm_destroy(comm));
    no_communicator(comm, "was destroyed");
    /* The id was used already. */
    config.init_timeout_ms = 2000;
    if (harness_nranks == 1) {
        cinch_result_t code = cinch_comm_init(&id, 0, 1, &config, &again);
        printf("an id that has served -> %d: %s\n", (int)code, cinch_last_error());
        CHECK(code != CINCH_SUCCESS && code != CINCH_ERROR_INTERNAL && again == NULL);
    }
    printf("rank %d of %d: all well\n", harness_rank, harness_nranks);
    return 0;
}

/* Two processes join as rank 0: neither hangs, and both get an error. */
static int duplicate_part(char **argv) {
    cinch_unique_id_t id;
    cinch_config_t config = fresh_config();
    cinch_comm_t *comm = NULL;
    cinch_result_t code;
    harness_rank = atoi(argv[2]);
    harness_id(argv[3], &id);
    config.init_timeout_ms = 3000;
    code = cinch_comm_init(&id, 0, 2, &config, &comm);
    printf("a second rank 0 -> %d: %s\n", (int)code, cinch_last_error());
    CHECK(code != CINCH_SUCCESS && code != CINCH_ERROR_INTERNAL && comm == NULL && strlen(cinch_last_error()) > 0);
    printf("all well\n");
    return 0;
}

int main(int argc, char **argv) {
    if (argc == 2 && strcmp(argv[1], "static") == 0) return static_part();
    if (argc == 4 && strcmp(argv[1], "duplicate") == 0) return duplicate_part(argv);
    return live_part(argc, argv);
}
