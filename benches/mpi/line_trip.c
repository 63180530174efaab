/* Prints the nanoseconds that a cache line takes from one core to another and back, the median of 21 runs.
 *
 *     line_trip CORE CORE
 *
 * On a virtual machine this changes while the host moves its cores: some 50 ns between cores that share a cache,
 * and several times as much between others. Copies between ranks follow it. */
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

enum { RUNS = 21, TRIPS = 2000 };

static _Alignas(128) atomic_long line;

static void bind(int core)
{
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(core, &set);
    if (sched_setaffinity(0, sizeof set, &set) != 0) {
        perror("sched_setaffinity");
        exit(1);
    }
}

static double now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1e9 + time.tv_nsec;
}

static void *answer(void *core)
{
    bind(*(int *)core);
    for (long value = 1; value < 2L * RUNS * TRIPS; value += 2) {
        while (atomic_load_explicit(&line, memory_order_acquire) != value)
            ;
        atomic_store_explicit(&line, value + 1, memory_order_release);
    }
    return NULL;
}

static int compare(const void *one, const void *other)
{
    double difference = *(const double *)one - *(const double *)other;
    return (difference > 0) - (difference < 0);
}

int main(int argc, char **argv)
{
    if (argc != 3) {
        fprintf(stderr, "usage: line_trip CORE CORE\n");
        return 2;
    }
    int cores[2] = {atoi(argv[1]), atoi(argv[2])};
    pthread_t thread;
    if (pthread_create(&thread, NULL, answer, &cores[1]) != 0)
        return 1;
    bind(cores[0]);
    double times[RUNS];
    long value = 1;
    for (int run = 0; run < RUNS; run++) {
        double begun = now();
        for (int trip = 0; trip < TRIPS; trip++, value += 2) {
            atomic_store_explicit(&line, value, memory_order_release);
            while (atomic_load_explicit(&line, memory_order_acquire) != value + 1)
                ;
        }
        times[run] = (now() - begun) / TRIPS;
    }
    pthread_join(thread, NULL);
    qsort(times, RUNS, sizeof *times, compare);
    printf("%.0f\n", times[RUNS / 2]);
    return 0;
}
