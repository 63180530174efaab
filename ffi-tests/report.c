/* Calls with an 8-bit codec: their reports and errors. */
#include "harness.h"

#include <math.h>
#include <stdint.h>

#define COUNT 100000

static cinch_comm_t *comm;
static float input[COUNT], output[COUNT], exact[COUNT];

/* Each rank's data is a function of its rank, so that every rank knows the exact sum. */
static float datum(int rank, size_t at) {
    uint32_t mixed = (uint32_t)at * 2654435761u + (uint32_t)rank * 40503u;
    mixed ^= mixed >> 15;
    mixed *= 2246822519u;
    mixed ^= mixed >> 13;
    return (float)((double)mixed / 4294967296.0 - 0.5);
}

static void fill(void) {
    size_t at;
    int rank;
    for (at = 0; at < COUNT; at++) {
        input[at] = datum(harness_rank, at);
        exact[at] = 0;
        for (rank = 0; rank < harness_nranks; rank++) exact[at] += datum(rank, at);
    }
}

static cinch_report_t run(cinch_collective_t collective, const char *codec, uint64_t tensor) {
    cinch_call_t call;
    cinch_report_t report;
    size_t at;
    for (at = 0; at < COUNT; at++) output[at] = NAN;
    OK(cinch_report_default(&report));
    OK(cinch_call_default(&call));
    call.comm = comm;
    call.collective = collective;
    call.sendbuf = input;
    call.recvbuf = output;
    call.count = COUNT;
    call.dtype = CINCH_F32;
    call.codec = codec;
    call.tensor = tensor;
    OK(cinch_call(&call, &report));
    CHECK(report.size == sizeof report && report.version == CINCH_API_VERSION);
    printf("codec %s algorithm %d transport %d channels %u wire %llu valid %u saturated %llu "
           "non-finite %llu abs max %g l2 %g\n",
           report.codec, (int)report.algorithm, (int)report.transport, (unsigned)report.channels,
           (unsigned long long)report.wire_bytes, (unsigned)report.valid,
           (unsigned long long)report.saturated, (unsigned long long)report.non_finite,
           report.abs_max, report.l2_norm);
    return report;
}

/* Returns the largest difference between output and exact sum; infinity if the output has a NaN. */
static double largest_error(void) {
    double largest = 0;
    size_t at;
    for (at = 0; at < COUNT; at++) {
        double error = fabs((double)output[at] - (double)exact[at]);
        if (isnan(error)) return INFINITY;
        largest = error > largest ? error : largest;
    }
    return largest;
}

/* Checks that all ranks hold the same bits. */
static void identical(void) {
    uint64_t hash = 14695981039346656037u, most, least;
    size_t at;
    for (at = 0; at < sizeof output; at++)
        hash = (hash ^ ((unsigned char *)output)[at]) * 1099511628211u;
    OK(cinch_all_reduce(&hash, &most, 1, CINCH_U64, CINCH_MAX, comm, NULL));
    OK(cinch_all_reduce(&hash, &least, 1, CINCH_U64, CINCH_MIN, comm, NULL));
    CHECK(most == least);
}

static void check_input(const cinch_report_t *report) {
    double most = 0, squares = 0;
    size_t at;
    for (at = 0; at < COUNT; at++) {
        double one = fabs((double)input[at]);
        if (!isfinite(one)) continue;
        most = one > most ? one : most;
        squares += one * one;
    }
    CHECK(report->valid & CINCH_REPORT_INPUT);
    CHECK(report->abs_max == most);
    CHECK(fabs(report->l2_norm - sqrt(squares)) < 1e-5 * sqrt(squares));
}

/* Texts of the communicator and of a call that does not run. */
static void check_texts(void) {
    cinch_call_t call;
    cinch_result_t result;
    char text[8192];
    size_t size = 0, again = 0;
    OK(cinch_comm_name(comm, text, sizeof text, &size));
    CHECK(size == strlen(text) + 1);
    OK(cinch_comm_codec_policy(comm, text, sizeof text, &size));
    CHECK(size == strlen(text) + 1 && strncmp(text, "compression off: ", 17) == 0);

    OK(cinch_call_default(&call));
    call.comm = comm;
    call.collective = CINCH_ALL_REDUCE;
    call.count = COUNT;
    call.dtype = CINCH_F32;
    call.codec = "linear8";
    OK(cinch_call_explain(&call, NULL, 0, &size));
    OK(cinch_call_explain(&call, text, sizeof text, &again));
    CHECK(size == again && size == strlen(text) + 1);
    if (harness_nranks > 1) CHECK(strstr(text, "linear8") != NULL);
    text[0] = 'x';
    result = cinch_call_explain(&call, text, size - 1, &again);
    CHECK(result == CINCH_ERROR_INVALID_ARGUMENT && text[0] == 'x' && again == size);
    CHECK(strstr(cinch_last_error(), "ask with a NULL buffer first") != NULL);
    call.dtype = CINCH_I32;
    CHECK(cinch_call_explain(&call, text, sizeof text, &size) == CINCH_ERROR_INVALID_ARGUMENT);
    CHECK(cinch_call_explain(NULL, text, sizeof text, &size) == CINCH_ERROR_INVALID_ARGUMENT);
    CHECK(cinch_comm_name(comm, text, sizeof text, NULL) == CINCH_ERROR_INVALID_ARGUMENT);
}

int main(int argc, char **argv) {
    static const char *const codecs[] = {"linear8", "dynamic8:block=64", "linear8:tensor=4"};
    cinch_report_t raw, report;
    double n;
    size_t at;
    comm = harness_join(argc, argv);
    n = harness_nranks;
    fill();
    check_texts();

    raw = run(CINCH_ALL_REDUCE, "raw", 0);
    CHECK(strcmp(raw.codec, "raw") == 0);
    CHECK(!(raw.valid & CINCH_REPORT_INPUT));
    CHECK(largest_error() < 1e-5 * n);
    identical();
    if (harness_nranks > 1) {
        CHECK(raw.wire_bytes > 0 && raw.channels > 0);
        CHECK(raw.transport != CINCH_TRANSPORT_UNSET && raw.algorithm != CINCH_ALGORITHM_UNSET);
    }

    for (at = 0; at < sizeof codecs / sizeof *codecs; at++) {
        /* Each of the n-1 partial sums, at most n/2 large, and the result are rounded: dynamic8 by
         * 5 % of a block's largest value at most, linear8 by 1/254 of it. */
        double bound = (codecs[at][0] == 'l' ? 1.0 / 254 : 0.05) * n * n / 2;
        report = run(CINCH_ALL_REDUCE, codecs[at], at + 1);
        CHECK(strncmp(report.codec, codecs[at], strlen(codecs[at])) == 0);
        CHECK(largest_error() <= bound);
        identical();
        if (harness_nranks > 1) {
            CHECK(largest_error() > 0);
            CHECK(report.algorithm != raw.algorithm || report.wire_bytes * 3 < raw.wire_bytes);
            check_input(&report);
            CHECK(report.saturated == 0 && report.non_finite == 0);
        }
    }

    if (harness_nranks > 1) {
        report = run(CINCH_BROADCAST, "linear8", 0);
        identical();
        if (harness_rank == 0) check_input(&report);
        else CHECK(!(report.valid & CINCH_REPORT_INPUT));

        /* A NaN and an infinity of one rank reach all ranks; the report of that rank counts them. */
        input[5] = harness_rank == 1 ? NAN : input[5];
        input[99000] = harness_rank == 1 ? INFINITY : input[99000];
        report = run(CINCH_ALL_REDUCE, "linear8", 0);
        CHECK(!isfinite(output[5]) && !isfinite(output[99000]) && isfinite(output[50000]));
        CHECK(report.non_finite == (harness_rank == 1 ? 2u : 0u));
        check_input(&report);

        /* Values beyond the fixed range of static8 saturate. */
        fill();
        input[17] = 1e9f;
        report = run(CINCH_ALL_REDUCE, "static8", 0);
        CHECK(report.saturated >= 1);
        identical();
    }

    /* A call without a report. */
    OK(cinch_all_reduce(input, output, COUNT, CINCH_F32, CINCH_SUM, comm, NULL));
    return harness_leave(comm);
}
