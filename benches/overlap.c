/* Times an all_reduce of 16 MiB in host memory, computing, and both at once: one after the other, and with the
 * all_reduce started before. Run by benches/overlap as ranks of `cinch run`.
 *
 * Prints the medians over rounds of the time of the slowest rank, in milliseconds, as one JSON line.
 */
#include <cinch.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define TRY(call) \
    if ((call) != CINCH_SUCCESS) return fprintf(stderr, "%s: %s\n", #call, cinch_last_error()), 1

enum { COUNT = 4 << 20, ROUNDS = 15, TABLE = 4096, KINDS = 4 };

static float data[COUNT];

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return 1e3 * (double)time.tv_sec + 1e-6 * (double)time.tv_nsec;
}

/* Computes on memory that fits a cache, as much as takes about a millisecond for each unit. */
static double compute(long units) {
    static double table[TABLE];
    for (long unit = 0; unit < units; unit++)
        for (int at = 0; at < TABLE; at++) table[at] = table[at] * 0.999 + at;
    return table[units % TABLE];
}

static int less(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

int main(void) {
    static double times[KINDS][ROUNDS];
    static volatile double sink;
    cinch_comm_t *comm;
    cinch_call_t call;
    int rank;
    TRY(cinch_comm_init_from_env(NULL, &comm));
    TRY(cinch_comm_rank(comm, &rank));
    TRY(cinch_call_default(&call));
    call.comm = comm;
    call.sendbuf = call.recvbuf = data;
    call.count = COUNT;
    call.dtype = CINCH_F32;
    for (int at = 0; at < COUNT; at++) data[at] = (float)(at % 1000) / 1000;
    for (int warm = 0; warm < 3; warm++) TRY(cinch_call(&call, NULL));
    /* As much computing as one all_reduce takes, the same on all ranks. */
    double begin = now();
    TRY(cinch_call(&call, NULL));
    double wanted = now() - begin;
    begin = now();
    sink = compute(2000);
    double units = 2000 * wanted / (now() - begin);
    TRY(cinch_all_reduce(&units, &units, 1, CINCH_F64, CINCH_MAX, comm, NULL));
    for (int round = 0; round < ROUNDS; round++) {
        for (int kind = 0; kind < KINDS; kind++) {
            cinch_request_t *request = NULL;
            TRY(cinch_barrier(comm));
            begin = now();
            if (kind == 3) TRY(cinch_call_start(&call, NULL, &request));
            if (kind != 0) sink = compute((long)units);
            if (kind == 0 || kind == 2) TRY(cinch_call(&call, NULL));
            if (kind == 3) TRY(cinch_request_wait(request));
            double took = now() - begin;
            TRY(cinch_all_reduce(&took, &took, 1, CINCH_F64, CINCH_MAX, comm, NULL));
            times[kind][round] = took;
            /* Sums would grow out of range. */
            for (int at = 0; at < COUNT; at++) data[at] = (float)(at % 1000) / 1000;
        }
    }
    for (int kind = 0; kind < KINDS; kind++) qsort(times[kind], ROUNDS, sizeof times[kind][0], less);
    double comm_ms = times[0][ROUNDS / 2], compute_ms = times[1][ROUNDS / 2];
    double shorter = comm_ms < compute_ms ? comm_ms : compute_ms;
    if (rank == 0)
        printf("{\"all_reduce_ms\": %.3f, \"compute_ms\": %.3f, \"in_turn_ms\": %.3f, \"started_ms\": %.3f, "
               "\"hidden\": %.3f}\n",
               comm_ms, compute_ms, times[2][ROUNDS / 2], times[3][ROUNDS / 2],
               (times[2][ROUNDS / 2] - times[3][ROUNDS / 2]) / shorter);
    (void)sink;
    TRY(cinch_comm_finalize(comm));
    TRY(cinch_comm_destroy(comm));
    return 0;
}
