/* Times MPI_Allreduce of fp32 sums by the method of `cinch bench all_reduce`, so that the two compare:
 * a barrier before each iteration outside the timing, out of place, the largest time over ranks, the
 * median over iterations. From 1 MiB on it rotates over as many pairs of buffers as cinch (`set_count`),
 * so that neither library finds its data in the cache.
 *
 * allreduce_mpi [-b BYTES] [-e BYTES] [-f FACTOR] [-n ITERATIONS] [-w WARM_UPS]
 * Rank 0 prints a JSON line for each size: {"size": bytes, "time_us": median, "min_us": least}.
 */
#include <mpi.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MOST_PAIRS 64
#define COLD_FROM ((size_t)1 << 20)
#define COLD_BYTES ((size_t)128 << 20)

/* Returns the number of buffer pairs in rotation. */
static int pairs_of(size_t size, int ranks)
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

int main(int argc, char **argv)
{
    size_t first = 1 << 10, last = 64 << 20, factor = 4;
    int iterations = 20, warm_ups = 5, rank, ranks;

    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    for (int i = 1; i + 1 < argc; i += 2) {
        if (!strcmp(argv[i], "-b")) first = bytes(argv[i + 1]);
        else if (!strcmp(argv[i], "-e")) last = bytes(argv[i + 1]);
        else if (!strcmp(argv[i], "-f")) factor = bytes(argv[i + 1]);
        else if (!strcmp(argv[i], "-n")) iterations = atoi(argv[i + 1]);
        else if (!strcmp(argv[i], "-w")) warm_ups = atoi(argv[i + 1]);
        else MPI_Abort(MPI_COMM_WORLD, 2);
    }
    if (first < sizeof(float) || last < first || factor < 2 || iterations < 1 || warm_ups < 0)
        MPI_Abort(MPI_COMM_WORLD, 2);

    float *input[MOST_PAIRS], *output[MOST_PAIRS];
    double *times = malloc((size_t)iterations * sizeof *times);
    if (!times)
        MPI_Abort(MPI_COMM_WORLD, 3);

    for (size_t size = first; size <= last; size *= factor) {
        int count = (int)(size / sizeof(float)), pairs = pairs_of(size, ranks);
        for (int i = 0; i < pairs; i++) {
            input[i] = malloc(size);
            output[i] = malloc(size);
            if (!input[i] || !output[i])
                MPI_Abort(MPI_COMM_WORLD, 3);
            fill(input[i], size / sizeof(float), (uint64_t)(rank * MOST_PAIRS + i + 1));
            memset(output[i], 1, size);
        }
        for (int i = -warm_ups; i < iterations; i++) {
            int at = (i + warm_ups) % pairs;
            MPI_Barrier(MPI_COMM_WORLD);
            double start = MPI_Wtime();
            MPI_Allreduce(input[at], output[at], count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
            double mine = MPI_Wtime() - start, longest;
            MPI_Allreduce(&mine, &longest, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
            if (i >= 0)
                times[i] = longest * 1e6;
        }
        qsort(times, (size_t)iterations, sizeof *times, by_value);
        if (rank == 0) {
            printf("{\"size\": %zu, \"time_us\": %.3f, \"min_us\": %.3f}\n", size,
                   times[iterations / 2], times[0]);
            fflush(stdout);
        }
        for (int i = 0; i < pairs; i++) {
            free(input[i]);
            free(output[i]);
        }
    }
    free(times);
    MPI_Finalize();
    return 0;
}
