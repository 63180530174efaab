/* Arrays encoded and decoded without a communicator, in both layouts. */
#include "harness.h"

#include <math.h>
#include <stdint.h>

#define COUNT 1000

static float data[COUNT], back[COUNT];

/* A CompLL message and packed bytes in the layout that their authors published. */
static void published(void) {
    static const float x[] = {-5, 2, -3, 7, -1, 5, 3};
    static const unsigned char message[] = {4,    1,    0x00, 0x00, 0xa0, 0xc0, 0x00,
                                            0x00, 0xe0, 0x40, 0x90, 0xf2, 0xc5, 0x0a};
    static const unsigned char packed[] = {0x70, 0x9d, 0x3f};
    const float one = 1.23f;
    unsigned char wire[16];
    float y[7];
    size_t bytes = 0, count = 0;

    OK(cinch_wire_bytes("minmax4", CINCH_LAYOUT_PUBLISHED, 7, &bytes));
    CHECK(bytes == sizeof message);
    memset(wire, 0xee, sizeof wire);
    OK(cinch_encode("minmax4", CINCH_LAYOUT_PUBLISHED, x, 7, CINCH_F32, 0, wire, bytes, NULL));
    CHECK(memcmp(wire, message, sizeof message) == 0);
    CHECK(wire[14] == 0xee && wire[15] == 0xee);
    OK(cinch_wire_count("minmax4", CINCH_LAYOUT_PUBLISHED, wire, bytes, &count));
    CHECK(count == 7);
    OK(cinch_decode("minmax4", CINCH_LAYOUT_PUBLISHED, message, bytes, y, 7, CINCH_F32, NULL));
    CHECK(y[0] == -5 && y[3] == 7 && fabs(y[1] - 2.2) < 1e-5);
    FAILS(cinch_decode("minmax4", CINCH_LAYOUT_PUBLISHED, message, bytes, y, 6, CINCH_F32, NULL),
          CINCH_ERROR_INVALID_ARGUMENT, "6 elements");
    FAILS(cinch_decode("minmax2", CINCH_LAYOUT_PUBLISHED, message, bytes, y, 7, CINCH_F32, NULL),
          CINCH_ERROR_INVALID_ARGUMENT, "the array has 14");

    OK(cinch_encode("trunc24", CINCH_LAYOUT_PUBLISHED, &one, 1, CINCH_F32, 0, wire, 3, NULL));
    CHECK(memcmp(wire, packed, sizeof packed) == 0);
    OK(cinch_decode("trunc24", CINCH_LAYOUT_PUBLISHED, packed, 3, y, 1, CINCH_F32, NULL));
    CHECK(y[0] <= one && one - y[0] < 4e-5);
}

/* Every codec encodes and decodes an array at any address. */
static void chunks(void) {
    /* Limits: the largest error of an element of up to 1, and the RMS error relative to the RMS of
     * the data. Output of zeros would have a relative error of 1, wrong signs a larger one. */
    static const struct {
        const char *name;
        double largest, share;
    } codecs[] = {
        {"linear8", 0.004, 0.005},
        {"dynamic8:block=64", 0.05, 0.01},
        {"linear8:tensor=4", 0.004, 0.005},
        {"static8", 0.04, 0.03},
        {"mantissa8", 0.0625, 0.05},
        {"cast16", 0.000245, 0.0003},
        {"cast_bf16", 0.002, 0.0025},
        {"minmax1", 1, 0.75},
        {"minmax2", 0.334, 0.3},
        {"minmax4:seed=3", 0.134, 0.1},
        {"minmax8", 0.00393, 0.004},
        {"trunc8", 0.5, 0.5},
        {"trunc16", 0.00391, 0.004},
        {"trunc24", 1.6e-5, 1.6e-5},
        {"fp8_e4m3", 0.036, 0.03},
        {"fp8_e5m2", 0.072, 0.06},
        {"terngrad", 1, 0.6},
        {"onebit", 0.64, 0.5},
        {"threshold2:tau=0.25", 0.75, 0.75},
    };
    size_t at, i, bytes = 0;
    for (i = 0; i < COUNT; i++) data[i] = (float)sin((double)i);
    for (at = 0; at < sizeof codecs / sizeof *codecs; at++) {
        unsigned char *wire, *odd;
        const char *name = codecs[at].name;
        double most = 0, errors = 0, squares = 0;
        OK(cinch_wire_bytes(name, CINCH_LAYOUT_CHUNK, COUNT, &bytes));
        wire = harness_alloc(bytes);
        odd = harness_alloc(1 + sizeof data);
        memcpy(odd + 1, data, sizeof data);
        for (i = 0; i < COUNT; i++) back[i] = NAN;
        OK(cinch_encode(name, CINCH_LAYOUT_CHUNK, odd + 1, COUNT, CINCH_F32, 0, wire,
                        bytes, NULL));
        OK(cinch_decode(name, CINCH_LAYOUT_CHUNK, wire, bytes, back, COUNT, CINCH_F32, NULL));
        for (i = 0; i < COUNT; i++) {
            double error = fabs((double)back[i] - data[i]);
            /* Written so that a NaN fails. */
            if (!(error <= codecs[at].largest))
                FAIL("%s: %g came back as %g", name, data[i], back[i]);
            most = error > most ? error : most;
            errors += error * error;
            squares += (double)data[i] * data[i];
        }
        printf("%s: %u bytes, off by %g, %g of all\n", name, (unsigned)bytes, most,
               sqrt(errors / squares));
        CHECK(sqrt(errors / squares) <= codecs[at].share);
        FAILS(cinch_encode(name, CINCH_LAYOUT_CHUNK, data, COUNT, CINCH_F32, 0, wire,
                           bytes - 1, NULL),
              CINCH_ERROR_INVALID_ARGUMENT, "1000 elements");
        FAILS(cinch_decode(name, CINCH_LAYOUT_CHUNK, wire, bytes - 1, back, COUNT,
                           CINCH_F32, NULL),
              CINCH_ERROR_INVALID_ARGUMENT, "1000 elements");
        free(wire);
        free(odd);
    }
}

/* 16-bit elements are widened before encoding and rounded after decoding. */
static void narrow(void) {
    static const uint16_t x[] = {0x3f80, 0xc000, 0x4040}; /* 1, -2, 3 */
    uint16_t y[3];
    unsigned char wire[64];
    size_t bytes = 0;
    OK(cinch_wire_bytes("minmax8", CINCH_LAYOUT_CHUNK, 3, &bytes));
    OK(cinch_encode("minmax8", CINCH_LAYOUT_CHUNK, x, 3, CINCH_BF16, 0, wire, sizeof wire, NULL));
    OK(cinch_decode("minmax8", CINCH_LAYOUT_CHUNK, wire, bytes, y, 3, CINCH_BF16, NULL));
    CHECK(memcmp(x, y, sizeof x) == 0);
}

static void mistakes(void) {
    unsigned char wire[64];
    size_t number = 0;
    FAILS(cinch_wire_bytes(NULL, CINCH_LAYOUT_CHUNK, 1, &number), CINCH_ERROR_INVALID_ARGUMENT,
          "codec is NULL");
    FAILS(cinch_wire_bytes("int8", CINCH_LAYOUT_CHUNK, 1, &number),
          CINCH_ERROR_INVALID_ARGUMENT, "linear8");
    FAILS(cinch_wire_bytes("raw", CINCH_LAYOUT_CHUNK, 1, &number), CINCH_ERROR_INVALID_ARGUMENT,
          "copy them");
    FAILS(cinch_wire_bytes("linear8", (cinch_layout_t)7, 1, &number),
          CINCH_ERROR_INVALID_ARGUMENT, "layout 7");
    FAILS(cinch_wire_bytes("linear8", CINCH_LAYOUT_PUBLISHED, 1, &number),
          CINCH_ERROR_UNSUPPORTED, "published");
    FAILS(cinch_wire_bytes("linear8", CINCH_LAYOUT_CHUNK, 1, NULL), CINCH_ERROR_INVALID_ARGUMENT,
          "bytes");
    FAILS(cinch_wire_bytes("linear8", CINCH_LAYOUT_CHUNK, SIZE_MAX, &number),
          CINCH_ERROR_INVALID_ARGUMENT, "more than any memory");
    FAILS(cinch_wire_count("linear8", CINCH_LAYOUT_CHUNK, wire, 20, &number),
          CINCH_ERROR_UNSUPPORTED, "keep the count");
    FAILS(cinch_encode("linear8", CINCH_LAYOUT_CHUNK, NULL, 4, CINCH_F32, 0, wire, sizeof wire, NULL),
          CINCH_ERROR_INVALID_ARGUMENT, "src is NULL");
    FAILS(cinch_encode("linear8", CINCH_LAYOUT_CHUNK, wire, 4, CINCH_F32, 0, wire, sizeof wire, NULL),
          CINCH_ERROR_INVALID_ARGUMENT, "overlap");
    FAILS(cinch_encode("linear8", CINCH_LAYOUT_CHUNK, data, 4, CINCH_F64, 0, wire, sizeof wire, NULL),
          CINCH_ERROR_UNSUPPORTED, "not f64");
    FAILS(cinch_decode("linear8", CINCH_LAYOUT_CHUNK, wire, sizeof wire, NULL, 4, CINCH_F32, NULL),
          CINCH_ERROR_INVALID_ARGUMENT, "dst is NULL");
    OK(cinch_encode("linear8", CINCH_LAYOUT_CHUNK, NULL, 0, CINCH_F32, 0, NULL, 0, NULL));
    OK(cinch_decode("linear8", CINCH_LAYOUT_CHUNK, NULL, 0, NULL, 0, CINCH_F32, NULL));
}

/* Copies to GPUs refuse wrong arrays before anything moves. */
static void copies(void) {
    void *dsts[] = {back, NULL}, *streams[] = {NULL, NULL};
    const size_t bytes = sizeof back;
    unsigned char before[sizeof back];
    cinch_result_t code;
    memcpy(before, back, bytes);
    FAILS(cinch_copy_to_gpus("trunc16", data, NULL, streams, 2, COUNT, CINCH_F32, 0),
          CINCH_ERROR_INVALID_ARGUMENT, "dsts at");
    FAILS(cinch_copy_to_gpus("trunc16", data, dsts, NULL, 2, COUNT, CINCH_F32, 0),
          CINCH_ERROR_INVALID_ARGUMENT, "streams at");
    FAILS(cinch_copy_to_gpus("trunc16", data, dsts, streams, 0, COUNT, CINCH_F32, 0),
          CINCH_ERROR_INVALID_ARGUMENT, "no 0 addresses");
    FAILS(cinch_copy_to_gpus("trunc16", data, dsts, streams, 2, COUNT, CINCH_F32, 0),
          CINCH_ERROR_INVALID_ARGUMENT, "dsts[1] is NULL");
    FAILS(cinch_copy_to_gpus("trunc16", NULL, dsts, streams, 1, COUNT, CINCH_F32, 0),
          CINCH_ERROR_INVALID_ARGUMENT, "src is NULL");
    FAILS(cinch_copy_to_gpus("int8", data, dsts, streams, 1, COUNT, CINCH_F32, 0),
          CINCH_ERROR_INVALID_ARGUMENT, "linear8");
    FAILS(cinch_copy_to_gpus("trunc16", data, dsts, streams, 1, COUNT, CINCH_F64, 0),
          CINCH_ERROR_UNSUPPORTED, "not f64");
    /* Host memory is no place on a GPU; without a GPU there is none at all. */
    code = cinch_copy_to_gpus("trunc16", data, dsts, streams, 1, COUNT, CINCH_F32, 0);
    printf("to host memory -> %d: %s\n", (int)code, cinch_last_error());
    CHECK(code == CINCH_ERROR_UNSUPPORTED ||
          (code == CINCH_ERROR_INVALID_ARGUMENT && strstr(cinch_last_error(), "host memory")));
    CHECK(memcmp(before, back, bytes) == 0);
    OK(cinch_copy_to_gpus("trunc16", NULL, dsts, streams, 1, 0, CINCH_F32, 0));
}

int main(void) {
    published();
    chunks();
    narrow();
    mistakes();
    copies();
    return 0;
}
