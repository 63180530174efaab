/* Error feedback of calls, and the training helpers: AWP and the loss scaler. */
#include "harness.h"

#include <math.h>

#define COUNT 1000
#define CALLS 64
#define TENSOR 7

static cinch_comm_t *comm;
static float input[COUNT], output[COUNT];
static cinch_report_t report;

static void reduce(uint64_t feedback) {
    cinch_call_t call;
    OK(cinch_call_default(&call));
    call.comm = comm;
    call.collective = CINCH_ALL_REDUCE;
    call.sendbuf = input;
    call.recvbuf = output;
    call.count = COUNT;
    call.dtype = CINCH_F32;
    call.codec = "linear8";
    call.feedback = feedback;
    OK(cinch_report_default(&report));
    OK(cinch_call(&call, &report));
}

/* Returns the mean of many results minus the exact one, at an element that the codec cannot represent. */
static double mean_error(uint64_t feedback) {
    double sum = 0;
    int at;
    for (at = 0; at < CALLS; at++) {
        reduce(feedback);
        sum += (double)output[1];
    }
    return fabs(sum / CALLS - 0.3 * harness_nranks);
}

static void feedback(void) {
    size_t at, bytes = 0;
    char *stored;
    float first, second;
    for (at = 0; at < COUNT; at++) input[at] = at % 100 == 0 ? 1.0f : 0.3f;
    if (harness_nranks > 1) CHECK(mean_error(0) > 1e-3);
    CHECK((report.valid & CINCH_REPORT_RESIDUAL) == 0);
    CHECK(mean_error(TENSOR) < 5e-4 * harness_nranks);
    if (harness_nranks > 1) {
        CHECK((report.valid & CINCH_REPORT_RESIDUAL) != 0);
        CHECK(report.residual_l2_norm > 0 && report.residual_l2_norm < 1);
    }

    OK(cinch_feedback_export(comm, NULL, 0, &bytes));
    CHECK(bytes >= 24);
    stored = harness_alloc(bytes);
    FAILS(cinch_feedback_export(comm, stored, bytes - 1, &bytes), CINCH_ERROR_INVALID_ARGUMENT,
          "NULL buffer first");
    OK(cinch_feedback_export(comm, stored, bytes, &bytes));
    reduce(TENSOR);
    first = output[1];
    OK(cinch_feedback_forget(comm, 0));
    OK(cinch_feedback_import(comm, stored, bytes));
    reduce(TENSOR);
    second = output[1];
    CHECK(first == second);
    OK(cinch_feedback_rescale(comm, 0.5));
    FAILS(cinch_feedback_rescale(comm, NAN), CINCH_ERROR_INVALID_ARGUMENT, "NaN");
    stored[0] = '?';
    FAILS(cinch_feedback_import(comm, stored, bytes), CINCH_ERROR_INVALID_ARGUMENT, "no residuals");
    FAILS(cinch_feedback_import(comm, NULL, 1), CINCH_ERROR_INVALID_ARGUMENT, "1 bytes");
    OK(cinch_feedback_forget(comm, TENSOR));
    free(stored);
}

static void weight_precision(void) {
    cinch_awp_t awp, copy;
    const char *codec = NULL;
    OK(cinch_awp_default(&awp));
    FAILS(cinch_awp_update(&awp, 1.0, &codec), CINCH_ERROR_INVALID_ARGUMENT, "interval of 0");
    awp.threshold = 1e-3;
    awp.interval = 2;
    OK(cinch_awp_update(&awp, 1.0, &codec));
    CHECK(awp.bits == 8 && strcmp(codec, "trunc8") == 0);
    OK(cinch_awp_update(&awp, 2.0, NULL));
    CHECK(awp.bits == 8 && awp.count == 0);
    OK(cinch_awp_update(&awp, 2.0, NULL));
    copy = awp;
    OK(cinch_awp_update(&copy, 2.0, &codec));
    CHECK(copy.bits == 16 && strcmp(codec, "trunc16") == 0 && awp.bits == 8);
    FAILS(cinch_awp_update(&awp, -1.0, NULL), CINCH_ERROR_INVALID_ARGUMENT, "L2 norm of -1");
    copy.most_bits = 16;
    OK(cinch_awp_update(&copy, 2.0, NULL));
    OK(cinch_awp_update(&copy, 2.0, &codec));
    CHECK(copy.bits == 16 && strcmp(codec, "trunc16") == 0);
    copy.most_bits = 8;
    FAILS(cinch_awp_update(&copy, 2.0, NULL), CINCH_ERROR_INVALID_ARGUMENT, "16 bits to begin with; they are 1 to 8");
}

/* Statistics as a call on a GPU would write them; a call on host memory refuses to. */
static void verdicts(cinch_loss_scaler_t *scaler) {
    cinch_statistics_t all[2];
    cinch_call_t call;
    int apply = -1;
    memset(all, 0, sizeof all);
    FAILS(cinch_loss_scaler_step(scaler, all, 2, &apply), CINCH_ERROR_INVALID_ARGUMENT, "statistics 0 of 2");
    FAILS(cinch_loss_scaler_step(scaler, all, 0, &apply), CINCH_ERROR_INVALID_ARGUMENT, "without statistics");
    FAILS(cinch_loss_scaler_step(scaler, NULL, 1, &apply), CINCH_ERROR_INVALID_ARGUMENT, "NULL");
    all[0].known = all[1].known = CINCH_VERDICT_NON_FINITE;
    OK(cinch_loss_scaler_step(scaler, all, 2, &apply));
    CHECK(apply == 1);
    all[1].verdict = CINCH_VERDICT_NON_FINITE;
    OK(cinch_loss_scaler_step(scaler, all, 2, &apply));
    CHECK(apply == 0);

    OK(cinch_report_default(&report));
    FAILS(cinch_report_add_statistics(&report, all), CINCH_ERROR_INVALID_ARGUMENT, "verdict of its output alone");
    all[0].has_input = 1;
    all[0].non_finite = 3;
    all[0].sum_squares = 25;
    all[0].abs_max = 4;
    OK(cinch_report_add_statistics(&report, all));
    CHECK((report.valid & CINCH_REPORT_INPUT) != 0 && report.non_finite == 3);
    CHECK(report.l2_norm == 5 && report.abs_max == 4);
    FAILS(cinch_report_add_statistics(NULL, all), CINCH_ERROR_INVALID_ARGUMENT, "report");
    all[1].known = 0;
    FAILS(cinch_report_add_statistics(&report, all + 1), CINCH_ERROR_INVALID_ARGUMENT, "no call");
    FAILS(cinch_statistics_read(comm, all, 1, NULL, all + 1), CINCH_ERROR_UNSUPPORTED, "host memory");

    OK(cinch_call_default(&call));
    call.comm = comm;
    call.collective = CINCH_ALL_REDUCE;
    call.sendbuf = input;
    call.recvbuf = output;
    call.count = COUNT;
    call.dtype = CINCH_F32;
    call.statistics = all;
    FAILS(cinch_call(&call, NULL), CINCH_ERROR_UNSUPPORTED, "call.statistics");
    call.verdict_only = 2;
    FAILS(cinch_call(&call, NULL), CINCH_ERROR_INVALID_ARGUMENT, "verdict_only is 2");
    call.verdict_only = 1;
    call.statistics = NULL;
    FAILS(cinch_call(&call, NULL), CINCH_ERROR_INVALID_ARGUMENT, "statistics are NULL");
}

static void loss_scale(void) {
    cinch_loss_scaler_t scaler;
    uint64_t found;
    int apply = -1;
    OK(cinch_loss_scaler_default(&scaler));
    CHECK(scaler.scale == 65536.0 && scaler.interval == 2000);
    scaler.interval = 2;
    /* An infinity of one rank reaches every rank's output. */
    if (harness_rank == 0) input[3] = INFINITY;
    reduce(TENSOR);
    OK(cinch_count_non_finite(output, COUNT, CINCH_F32, &found));
    CHECK(found > 0);
    OK(cinch_loss_scaler_update(&scaler, found > 0, &apply));
    CHECK(apply == 0 && scaler.scale == 32768.0 && scaler.rescale == 0.5);
    OK(cinch_feedback_rescale(comm, scaler.rescale));
    input[3] = 0.3f;
    reduce(TENSOR);
    OK(cinch_count_non_finite(output, COUNT, CINCH_F32, &found));
    CHECK(found == 0);
    OK(cinch_loss_scaler_update(&scaler, found > 0, &apply));
    OK(cinch_loss_scaler_update(&scaler, 0, &apply));
    CHECK(apply == 1 && scaler.scale == 65536.0 && scaler.skipped == 1);
    FAILS(cinch_loss_scaler_update(&scaler, 0, NULL), CINCH_ERROR_INVALID_ARGUMENT, "apply");
    verdicts(&scaler);
    FAILS(cinch_count_non_finite(NULL, 1, CINCH_F32, &found), CINCH_ERROR_INVALID_ARGUMENT, "data");
}

int main(int argc, char **argv) {
    comm = harness_join(argc, argv);
    feedback();
    weight_precision();
    loss_scale();
    return harness_leave(comm);
}
