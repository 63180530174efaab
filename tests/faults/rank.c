/* A rank of scripts/test-faults: makes a communicator, calls collectives, and reports each error.
 *
 *   rank RANK NRANKS IDFILE TRANSPORT SEED
 *
 * With an IDFILE of `env` the communicator comes from the launcher's variables. RANK_DEFECT plants a defect
 * that the test must find: `leak` leaves a descriptor, `wrong` reports a wrong bit. With RANK_GOES_ON the rank
 * goes on after a wrong result, RANK_CALLS is the number of steady calls, RANK_CODEC their codec, and
 * RANK_ELEMENTS the number of elements of the first call.
 *
 * Lines on standard output, each in one write:
 *   phase NAME            the phase begins
 *   error PHASE CODE TEXT the call failed; the rank goes on to its end
 *   wrong PHASE TEXT      a result differs from the oracle
 *   left A | B            what the process held at its start and holds at its end
 *   end NANOSECONDS       all is done, by CLOCK_MONOTONIC
 */
#define _GNU_SOURCE
#include "shim.h"

#include <cinch.h>
#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

/* Default number of calls of the steady phase; with pauses, so that heartbeats fall between them. */
#define STEADY_CALLS 30
/* Number of the first call after new ranks have joined; above that of all calls before. */
#define GROWN_CALLS 1000000
#define MAX_RANKS 16
/* Longest time that a rank waits for the id in milliseconds. */
#define ID_TIMEOUT 5000
/* Lifetime of a rank in seconds, should its driver be gone. */
#define LIFETIME 60

/* Libraries before the C function for it have none of these. */
extern cinch_result_t cinch_comm_prepare_to_shrink(cinch_comm_t *comm) __attribute__((weak));
extern cinch_result_t cinch_comm_shrink(cinch_comm_t *comm, const int *exclude, int count,
                                        const cinch_config_t *config, cinch_comm_t **newcomm) __attribute__((weak));
extern cinch_result_t cinch_comm_grow_id(cinch_comm_t *comm, cinch_unique_id_t *id) __attribute__((weak));
extern cinch_result_t cinch_comm_grow(cinch_comm_t *comm, int nranks, const cinch_config_t *config,
                                      cinch_comm_t **newcomm) __attribute__((weak));

static const char *const PHASE_NAMES[PHASES] = {
    "none", "id", "rendezvous", "connect", "first", "steady", "group", "split", "grow", "destroy", "after"};

static int rank, nranks, phase, calls;
static uint32_t seed;

static void report_line(const char *format, ...) {
    char line[2048];
    va_list list;
    va_start(list, format);
    int size = vsnprintf(line, sizeof line - 1, format, list);
    va_end(list);
    if (size > (int)sizeof line - 2) size = sizeof line - 2;
    for (int at = 0; at < size; at++) {
        if (line[at] == '\n') line[at] = ' ';
    }
    line[size] = '\n';
    if (write(1, line, size + 1) != size + 1) _exit(3);
}

static void sleep_ms(long ms) {
    struct timespec rest = {ms / 1000, ms % 1000 * 1000000};
    nanosleep(&rest, NULL);
}

static int64_t now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1000000000LL + time.tv_nsec;
}

static void enter(int next) {
    phase = next;
    report_line("phase %s", PHASE_NAMES[phase]);
    if (faults_phase) faults_phase(phase);
}

/* Reports to the shim that the program runs between two calls. */
static void point(void) {
    if (faults_point) faults_point();
}

/* Reports a failed call. Returns whether the call succeeded. */
static int ok(cinch_result_t code) {
    if (code == CINCH_SUCCESS) return 1;
    /* The shim may have moved on from the rendezvous. */
    report_line("error %s %d %s", PHASE_NAMES[phase], (int)code, cinch_last_error());
    return 0;
}

/* ---- what the process holds ---- */

static int entries(const char *path) {
    int count = 0;
    DIR *directory = opendir(path);
    if (directory == NULL) return -1;
    while (readdir(directory) != NULL) count++;
    closedir(directory);
    return count - 2; /* without . and .. */
}

static int shared_mappings(void) {
    char line[4096];
    int count = 0;
    FILE *maps = fopen("/proc/self/maps", "r");
    if (maps == NULL) return -1;
    while (fgets(line, sizeof line, maps) != NULL) count += strstr(line, "memfd:") || strstr(line, "/dev/shm");
    fclose(maps);
    return count;
}

static void count_holdings(char *text, size_t size, int fds) {
    snprintf(text, size, "fds %d, threads %d, shared mappings %d", entries("/proc/self/fd") + fds,
             entries("/proc/self/task"), shared_mappings());
}

/* ---- inputs and the oracle ---- */

static uint32_t mix(uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    uint32_t x = a * 0x9e3779b1u ^ b * 0x85ebca6bu ^ c * 0xc2b2ae35u ^ d * 0x27d4eb2fu;
    x ^= x >> 15, x *= 0x2c1b3c6du, x ^= x >> 12, x *= 0x297a2d39u;
    return x ^ x >> 15;
}

/* Element `at` of the input of a rank of the world. Sums of the first kind wrap in 32 bits; of the second kind they
 * are at most 240, which bf16 holds exactly. */
static uint32_t integer(int call, int owner, size_t at) {
    return mix(seed, call, owner, at);
}
static float small(int call, int owner, size_t at) {
    return (float)(mix(seed, call, owner, at) % 16);
}

/* The communicator under test: its handle, and the ranks of the world that it has. */
struct group {
    cinch_comm_t *comm;
    int size, own;
    int world[MAX_RANKS];
};

static uint32_t sum(const struct group *in, int call, size_t at) {
    uint32_t total = 0;
    for (int member = 0; member < in->size; member++) total += integer(call, in->world[member], at);
    return total;
}

static int is_right(const char *what, size_t count, size_t at, uint32_t found, uint32_t right) {
    static int reported;
    if (found == right) return 1;
    /* Each call reports one line. */
    if (reported != calls) {
        report_line("wrong %s %s, call %d: element %zu of %zu is %u, not %u", PHASE_NAMES[phase], what, calls, at,
                    count, found, right);
    }
    reported = calls;
    return getenv("RANK_GOES_ON") != NULL;
}

#define COLLECTIVES 6
static const char *const NAMES[COLLECTIVES] = {"all_reduce", "all_reduce of f32 by cast_bf16", "all_gather",
                                               "reduce_scatter", "broadcast", "all_to_all"};

static cinch_result_t call_collective(const struct group *in, int kind, size_t count, const uint32_t *input,
                                      uint32_t *output) {
    cinch_call_t call;
    cinch_result_t code = cinch_call_default(&call);
    if (code != CINCH_SUCCESS) return code;
    static const cinch_collective_t KINDS[COLLECTIVES] = {CINCH_ALL_REDUCE, CINCH_ALL_REDUCE, CINCH_ALL_GATHER,
                                                          CINCH_REDUCE_SCATTER, CINCH_BROADCAST, CINCH_ALL_TO_ALL};
    call.comm = in->comm;
    call.collective = KINDS[kind];
    call.sendbuf = input;
    call.recvbuf = output;
    call.count = count;
    call.dtype = kind == 1 ? CINCH_F32 : CINCH_U32;
    call.op = CINCH_SUM;
    call.root = calls % in->size;
    const char *codec = getenv("RANK_CODEC");
    call.codec = kind != 1 ? "raw" : codec != NULL ? codec : "cast_bf16";
    return cinch_call(&call, NULL);
}

/* Compares a result with the oracle. */
static int is_exact(const struct group *in, int kind, size_t count, const uint32_t *output) {
    size_t total = kind == 2 || kind == 5 ? count * in->size : count;
    for (size_t at = 0; at < total; at++) {
        uint32_t right = 0, found = output[at];
        int source = in->world[at / count % in->size];
        float exact = 0, value;
        switch (kind) {
        case 0: right = sum(in, calls, at); break;
        case 1:
            for (int member = 0; member < in->size; member++) exact += small(calls, in->world[member], at);
            memcpy(&value, &found, sizeof value);
            if (value == exact) continue;
            memcpy(&right, &exact, sizeof right);
            break;
        case 2: right = integer(calls, source, at % count); break;
        case 3: right = sum(in, calls, in->own * count + at); break;
        case 4: right = integer(calls, in->world[calls % in->size], at); break;
        default: right = integer(calls, source, in->own * count + at % count); break;
        }
        if (!is_right(NAMES[kind], total, at, found, right)) return 0;
    }
    return 1;
}

/* Runs a collective and compares its result with the oracle. Returns whether it succeeded. */
static int collective(const struct group *in, int kind, size_t count) {
    size_t room = (kind < 2 ? count : count * in->size) + 1;
    uint32_t *input = malloc(room * sizeof *input), *output = calloc(room, sizeof *output);
    if (input == NULL || output == NULL) abort();
    calls++;
    for (size_t at = 0; at < room; at++) {
        float value = small(calls, rank, at);
        input[at] = integer(calls, rank, at);
        if (kind == 1) memcpy(&input[at], &value, sizeof value);
    }
    const char *defect = getenv("RANK_DEFECT");
    int right = ok(call_collective(in, kind, count, input, output));
    if (right && phase == STEADY && defect != NULL && strcmp(defect, "wrong") == 0) output[count / 2] ^= 1;
    right = right && is_exact(in, kind, count, output);
    free(input);
    free(output);
    return right;
}

/* ---- phases ---- */

/* Writes an id to a file for the other ranks; an empty file if it was not made. */
static void hand_out(const char *path, const cinch_unique_id_t *id, int made) {
    char staging[4200];
    snprintf(staging, sizeof staging, "%s.new", path);
    FILE *file = fopen(staging, "wb");
    if (file == NULL) abort();
    if (made) fwrite(id->bytes, 1, sizeof id->bytes, file);
    fclose(file);
    if (rename(staging, path) != 0) abort();
}

static int await_id(const char *path, cinch_unique_id_t *id) {
    for (int tries = 0; tries < ID_TIMEOUT / 5; tries++) {
        FILE *file = fopen(path, "rb");
        if (file != NULL) {
            size_t size = fread(id->bytes, 1, sizeof id->bytes, file);
            fclose(file);
            if (size == sizeof id->bytes) return 1;
            break;
        }
        sleep_ms(5);
    }
    report_line("error %s -1 rank 0 gave no id", PHASE_NAMES[phase]);
    return 0;
}

static int get_id(const char *path, cinch_unique_id_t *id) {
    enter(ID);
    point();
    if (rank != 0) return await_id(path, id);
    int made = ok(cinch_unique_id_create(id));
    hand_out(path, id, made);
    return made;
}

static int default_config(const char *transport, cinch_config_t *config) {
    if (!ok(cinch_config_default(config))) return 0;
    config->transport = strcmp(transport, "tcp") == 0 ? CINCH_TRANSPORT_TCP : CINCH_TRANSPORT_SHM;
    return 1;
}

static int join(const char *path, const char *transport, struct group *world) {
    cinch_config_t config;
    cinch_unique_id_t id;
    int by_environment = strcmp(path, "env") == 0;
    if (!default_config(transport, &config)) return 0;
    if (!by_environment && !get_id(path, &id)) return 0;
    enter(RENDEZVOUS);
    point();
    return ok(by_environment ? cinch_comm_init_from_env(&config, &world->comm)
                             : cinch_comm_init(&id, rank, nranks, &config, &world->comm));
}

static int steady(const struct group *in) {
    const char *count = getenv("RANK_CALLS");
    int last = count != NULL ? atoi(count) : STEADY_CALLS;
    for (int at = 0; at < last; at++) {
        uint32_t drawn = mix(seed, 77, at, 0);
        size_t elements = 1 + drawn / 16 % (1u << drawn / 4096 % 15);
        point();
        if (!collective(in, drawn % COLLECTIVES, elements)) return 0;
        if (at % 3 == 0 && count == NULL) sleep_ms(10);
    }
    return 1;
}

/* Eight small all_reduces, which are fused, and messages around a ring. */
static int grouped(const struct group *in) {
    enum { CALLS_IN_GROUP = 8, COUNT = 50, MESSAGE = 3000 };
    static uint32_t inputs[CALLS_IN_GROUP][COUNT], outputs[CALLS_IN_GROUP][COUNT], sent[MESSAGE], received[MESSAGE];
    int next = (in->own + 1) % in->size, before = (in->own + in->size - 1) % in->size;
    calls++;
    point();
    if (!ok(cinch_group_start())) return 0;
    int queued = 1;
    for (int at = 0; at < CALLS_IN_GROUP && queued; at++) {
        for (int i = 0; i < COUNT; i++) inputs[at][i] = integer(calls, rank, at * COUNT + i);
        queued = ok(cinch_all_reduce(inputs[at], outputs[at], COUNT, CINCH_U32, CINCH_SUM, in->comm, NULL));
    }
    for (int i = 0; i < MESSAGE; i++) sent[i] = integer(calls, rank, 1000 + i);
    queued = queued && ok(cinch_send(sent, MESSAGE, CINCH_U32, next, in->comm, NULL));
    queued = queued && ok(cinch_recv(received, MESSAGE, CINCH_U32, before, in->comm, NULL));
    point();
    if (!ok(cinch_group_end()) || !queued) return 0;
    for (int at = 0; at < CALLS_IN_GROUP * COUNT; at++) {
        uint32_t found = outputs[at / COUNT][at % COUNT];
        if (!is_right("fused all_reduce", COUNT, at, found, sum(in, calls, at))) return 0;
    }
    for (int i = 0; i < MESSAGE; i++) {
        uint32_t right = integer(calls, in->world[before], 1000 + i);
        if (!is_right("recv", MESSAGE, i, received[i], right)) return 0;
    }
    return 1;
}

/* Ends a communicator after an error, if it exists. */
static void give_up(struct group *of) {
    if (of->comm == NULL) return;
    cinch_comm_abort(of->comm);
    ok(cinch_comm_destroy(of->comm));
    of->comm = NULL;
}

static int end(struct group *of) {
    point();
    if (!ok(cinch_comm_finalize(of->comm))) return 0;
    point();
    cinch_comm_t *comm = of->comm;
    of->comm = NULL;
    return ok(cinch_comm_destroy(comm));
}

/* Splits the world in even and odd ranks, and calls collectives in the new communicator. */
static int split(const struct group *in, struct group *child) {
    point();
    child->size = 0;
    for (int member = in->own % 2; member < in->size; member += 2) {
        if (member == in->own) child->own = child->size;
        child->world[child->size++] = in->world[member];
    }
    if (!ok(cinch_comm_split(in->comm, in->own % 2, in->own, &child->comm))) return 0;
    for (int kind = 0; kind < COLLECTIVES; kind++) {
        point();
        if (!collective(child, kind, 700)) return 0;
    }
    return end(child);
}

/* Makes a communicator without the last rank, and calls collectives in it. The phase `grow` ends it. */
static int shrink(const struct group *in, struct group *child) {
    if (!cinch_comm_prepare_to_shrink || !cinch_comm_shrink) return 1;
    int last = in->size - 1;
    point();
    if (!ok(cinch_comm_prepare_to_shrink(in->comm))) return 0;
    if (in->own == last) return 1;
    *child = *in;
    child->comm = NULL, child->size = last;
    point();
    if (!ok(cinch_comm_shrink(in->comm, &last, 1, NULL, &child->comm))) return 0;
    for (int kind = 0; kind < COLLECTIVES; kind++) {
        if (!collective(child, kind, 700)) return 0;
    }
    return 1;
}

/* The process of the last rank joins the communicator without it again, as a new rank. */
static int grow(const char *path, const char *transport, const struct group *in, struct group *child,
                struct group *grown) {
    char name[4150];
    cinch_config_t config;
    cinch_unique_id_t id;
    int last = in->size - 1, is_new = in->own == last;
    if (!cinch_comm_grow || !cinch_comm_grow_id || last == 0 || strcmp(path, "env") == 0 || (!is_new && !child->comm)) {
        return child->comm == NULL || end(child);
    }
    *grown = *in;
    grown->comm = NULL;
    snprintf(name, sizeof name, "%s.grow", path);
    point();
    if (in->own == 0) {
        int made = ok(cinch_comm_grow_id(child->comm, &id));
        hand_out(name, &id, made);
        if (!made) return 0;
    }
    if (is_new && (!default_config(transport, &config) || !await_id(name, &id))) return 0;
    point();
    if (!ok(is_new ? cinch_comm_init(&id, last, in->size, &config, &grown->comm)
                   : cinch_comm_grow(child->comm, in->size, NULL, &grown->comm))) {
        return 0;
    }
    /* The new rank has made fewer calls than the others. */
    calls = GROWN_CALLS;
    for (int kind = 0; kind < COLLECTIVES; kind++) {
        point();
        if (!collective(grown, kind, 700)) return 0;
    }
    return end(grown) && (child->comm == NULL || end(child));
}

static int run(const char *path, const char *transport, struct group *world, struct group *child,
               struct group *grown) {
    if (!join(path, transport, world)) return 0;
    enter(FIRST);
    point();
    const char *elements = getenv("RANK_ELEMENTS");
    if (!collective(world, 0, elements != NULL ? strtoul(elements, NULL, 10) : 1000)) return 0;
    enter(STEADY);
    if (!steady(world)) return 0;
    enter(GROUP);
    if (!grouped(world) || !grouped(world)) return 0;
    enter(SPLIT);
    if (!split(world, child) || !shrink(world, child)) return 0;
    enter(GROW);
    if (!grow(path, transport, world, child, grown)) return 0;
    enter(DESTROY);
    return end(world);
}

int main(int count, char **words) {
    char before[200], after[200];
    struct group world = {0}, child = {0}, grown = {0};
    if (count != 6) return 2;
    rank = atoi(words[1]), nranks = atoi(words[2]), seed = (uint32_t)strtoul(words[5], NULL, 10);
    if (nranks < 1 || nranks > MAX_RANKS || rank < 0 || rank >= nranks) return 2;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    alarm(LIFETIME);
    world.size = nranks, world.own = rank;
    for (int member = 0; member < nranks; member++) world.world[member] = member;
    /* The log file stays open for the life of the process. */
    count_holdings(before, sizeof before, getenv("CINCH_LOG_FILE") != NULL);
    if (getenv("RANK_DEFECT") && strcmp(getenv("RANK_DEFECT"), "leak") == 0 && dup(1) < 0) return 2;

    run(words[3], words[4], &world, &child, &grown);
    give_up(&grown);
    give_up(&child);
    give_up(&world);
    enter(AFTER);
    report_line("end %lld", (long long)now());
    /* Threads of the library may end later: that of an unused id after CINCH_INIT_TIMEOUT, that of rank 0 when all
     * other ranks have left. RANK_END_TIMEOUT is in milliseconds. */
    const char *patience = getenv("RANK_END_TIMEOUT");
    for (int tries = patience != NULL ? atoi(patience) / 20 : 0; tries >= 0; tries--) {
        count_holdings(after, sizeof after, 0);
        if (strcmp(before, after) == 0) break;
        sleep_ms(20);
    }
    report_line("left %s | %s", before, after);
    return 0;
}
