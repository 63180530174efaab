/* Times MPI's collectives on fp32 by the method of `cinch bench`, so that the two compare: a barrier before
 * each iteration outside the timing, out of place, the largest time over ranks, the median over iterations.
 * From 1 MiB on it rotates over as many pairs of buffers as cinch (`set_count`), so that neither library finds
 * its data in the cache.
 *
 * collectives_mpi COLLECTIVE [-b BYTES] [-e BYTES] [-f FACTOR] [-n ITERATIONS] [-w WARM_UPS] [-t SECONDS]
 * Rank 0 prints a JSON line for each size: {"size": bytes, "time_us": median, "min_us": least, "iterations": n}.
 * With -t a size whose iterations would take longer than this gets fewer of them, but at least three.
 *
 * A size is that of cinch and of nccl-tests: bytes of the call's larger buffer on one rank, with the blocks of
 * all ranks.
 *
 *   all_reduce, broadcast, reduce, send_recv      every rank's whole vector
 *   all_gather, gather                            the output; each rank's input is size / ranks
 *   reduce_scatter, scatter                       the input; each rank's output is size / ranks
 *   all_to_all                                    input and output; each message is size / ranks
 *
 * Blocks are rounded down to multiples of 16 bytes. Rank 0 is the root. MPI_Bcast has one buffer, so that it
 * compares with cinch's broadcast in place. In send_recv each rank sends to the next rank and receives from the
 * previous one, by MPI_Sendrecv.
 */
#include <mpi.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MOST_PAIRS 64
#define COLD_FROM ((size_t)1 << 20)
#define COLD_BYTES ((size_t)128 << 20)

#define LEAST_ITERATIONS 3

static int rank, ranks;

/* A call on `count` elements: those of a block if the collective has blocks, and otherwise of a vector. */
typedef void timed_call(float *input, float *output, int count);

static void all_reduce(float *input, float *output, int count)
{
    MPI_Allreduce(input, output, count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
}

static void all_gather(float *input, float *output, int count)
{
    MPI_Allgather(input, count, MPI_FLOAT, output, count, MPI_FLOAT, MPI_COMM_WORLD);
}

static void reduce_scatter(float *input, float *output, int count)
{
    MPI_Reduce_scatter_block(input, output, count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
}

static void broadcast(float *input, float *output, int count)
{
    MPI_Bcast(rank == 0 ? input : output, count, MPI_FLOAT, 0, MPI_COMM_WORLD);
}

static void reduce(float *input, float *output, int count)
{
    MPI_Reduce(input, output, count, MPI_FLOAT, MPI_SUM, 0, MPI_COMM_WORLD);
}

static void gather(float *input, float *output, int count)
{
    MPI_Gather(input, count, MPI_FLOAT, output, count, MPI_FLOAT, 0, MPI_COMM_WORLD);
}

static void scatter(float *input, float *output, int count)
{
    MPI_Scatter(input, count, MPI_FLOAT, output, count, MPI_FLOAT, 0, MPI_COMM_WORLD);
}

static void all_to_all(float *input, float *output, int count)
{
    MPI_Alltoall(input, count, MPI_FLOAT, output, count, MPI_FLOAT, MPI_COMM_WORLD);
}

static void send_recv(float *input, float *output, int count)
{
    MPI_Sendrecv(input, count, MPI_FLOAT, (rank + 1) % ranks, 0, output, count, MPI_FLOAT,
                 (rank + ranks - 1) % ranks, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
}

/* Collectives by name, with the blocks of one rank's input and output: 0 is a vector that is not divided,
 * 1 a block, 2 a block of each rank. */
static const struct collective {
    const char *name;
    timed_call *call;
    int input, output;
} COLLECTIVES[] = {
    { "all_reduce", all_reduce, 0, 0 },
    { "all_gather", all_gather, 1, 2 },
    { "reduce_scatter", reduce_scatter, 2, 1 },
    { "broadcast", broadcast, 0, 0 },
    { "reduce", reduce, 0, 0 },
    { "gather", gather, 1, 2 },
    { "scatter", scatter, 2, 1 },
    { "all_to_all", all_to_all, 2, 2 },
    { "send_recv", send_recv, 0, 0 },
};

static const struct collective *find(const char *name)
{
    for (size_t i = 0; i < sizeof COLLECTIVES / sizeof *COLLECTIVES; i++)
        if (!strcmp(COLLECTIVES[i].name, name))
            return &COLLECTIVES[i];
    return NULL;
}

/* Returns the number of buffer pairs in rotation. */
static int pairs_of(size_t size)
{
    size_t each = 2 * (size_t)ranks * size, pairs = (COLD_BYTES + each - 1) / each;
    if (size < COLD_FROM) return 1;
    return pairs < MOST_PAIRS ? (int)pairs : MOST_PAIRS;
}

/* Fills an array with sums of four uniform values: kurtosis 2.7, for one generator call per value. */
static void fill(float *data, size_t count, uint64_t seed)
{
    uint64_t state = seed * 0x9e3779b97f4a7c15u + 1;
    for (size_t i = 0; i < count; i++) {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        uint32_t sum = (uint32_t)(state & 0xffff) + (uint32_t)((state >> 16) & 0xffff)
            + (uint32_t)((state >> 32) & 0xffff) + (uint32_t)(state >> 48);
        data[i] = ((float)sum - 131070.0f) * (1.0f / 37837.0f);
    }
}

/* Allocates elements from the start of a cache line on, as cinch's benchmark does. */
static float *allocate(size_t count)
{
    float *data = aligned_alloc(64, (count * sizeof(float) + 63) / 64 * 64);
    if (!data)
        MPI_Abort(MPI_COMM_WORLD, 3);
    return data;
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static size_t bytes(const char *text)
{
    char *unit;
    size_t value = strtoull(text, &unit, 10);
    switch (*unit) {
    case 'k': case 'K': return value << 10;
    case 'm': case 'M': return value << 20;
    case 'g': case 'G': return value << 30;
    default: return value;
    }
}

/* Makes a call after a barrier, and returns its microseconds on this rank. */
static double time_call(const struct collective *of, float *input, float *output, size_t count)
{
    MPI_Barrier(MPI_COMM_WORLD);
    double start = MPI_Wtime();
    of->call(input, output, (int)count);
    return (MPI_Wtime() - start) * 1e6;
}

/* Returns whether `seconds` have passed since `start` by rank 0's clock, on all ranks alike; 0: never. */
static int is_late(double start, double seconds)
{
    int late = MPI_Wtime() - start >= seconds;
    if (seconds <= 0)
        return 0;
    MPI_Bcast(&late, 1, MPI_INT, 0, MPI_COMM_WORLD);
    return late;
}

/* Measures calls of about `size` bytes. Rank 0 prints the result; a size whose blocks are empty has none. */
static void measure(const struct collective *of, size_t size, int iterations, int warm_ups, double limit,
                    double *times)
{
    float *input[MOST_PAIRS], *output[MOST_PAIRS];
    int has_blocks = of->input || of->output;
    size_t count = size / sizeof(float);
    if (has_blocks)
        count = count / (size_t)ranks / 4 * 4;
    size_t parts = has_blocks ? (size_t)ranks : 1, in = of->input == 2 ? parts : 1,
        out = of->output == 2 ? parts : 1;
    int pairs = pairs_of(size = parts * count * sizeof(float));
    if (count == 0)
        return;
    for (int i = 0; i < pairs; i++) {
        input[i] = allocate(in * count);
        output[i] = allocate(out * count);
        fill(input[i], in * count, (uint64_t)(rank * MOST_PAIRS + i + 1));
        memset(output[i], 1, out * count * sizeof(float));
    }
    double start = MPI_Wtime();
    int calls = 0, done = 0;
    for (; calls < warm_ups && (calls == 0 || !is_late(start, limit / 4)); calls++)
        time_call(of, input[calls % pairs], output[calls % pairs], count);
    for (; done < iterations && (done < LEAST_ITERATIONS || !is_late(start, limit)); done++, calls++)
        times[done] = time_call(of, input[calls % pairs], output[calls % pairs], count);
    iterations = done;
    MPI_Reduce(rank == 0 ? MPI_IN_PLACE : times, times, iterations, MPI_DOUBLE, MPI_MAX, 0, MPI_COMM_WORLD);
    if (rank == 0) {
        qsort(times, (size_t)iterations, sizeof *times, by_value);
        printf("{\"size\": %zu, \"time_us\": %.3f, \"min_us\": %.3f, \"iterations\": %d}\n", size,
               (times[(iterations - 1) / 2] + times[iterations / 2]) / 2, times[0], iterations);
        fflush(stdout);
    }
    for (int i = 0; i < pairs; i++) {
        free(input[i]);
        free(output[i]);
    }
}

int main(int argc, char **argv)
{
    size_t first = 1 << 10, last = 64 << 20, factor = 4;
    int iterations = 20, warm_ups = 5;
    double limit = 0;

    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    const struct collective *of = argc > 1 ? find(argv[1]) : NULL;
    for (int i = 2; i + 1 < argc; i += 2) {
        if (!strcmp(argv[i], "-b")) first = bytes(argv[i + 1]);
        else if (!strcmp(argv[i], "-e")) last = bytes(argv[i + 1]);
        else if (!strcmp(argv[i], "-f")) factor = bytes(argv[i + 1]);
        else if (!strcmp(argv[i], "-n")) iterations = atoi(argv[i + 1]);
        else if (!strcmp(argv[i], "-t")) limit = atof(argv[i + 1]);
        else if (!strcmp(argv[i], "-w")) warm_ups = atoi(argv[i + 1]);
        else MPI_Abort(MPI_COMM_WORLD, 2);
    }
    double *times = malloc((size_t)(iterations > 0 ? iterations : 1) * sizeof *times);
    if (!times || !of || first < sizeof(float) || last < first || factor < 2 || iterations < 1 || warm_ups < 0)
        MPI_Abort(MPI_COMM_WORLD, 2);
    for (size_t size = first; size <= last; size *= factor)
        measure(of, size, iterations, warm_ups, limit, times);
    free(times);
    MPI_Finalize();
    return 0;
}
