/* Every collective, in and out of place, of several types, sizes and alignments. Values are small
 * integers, exact in every type, so that expected results come from integer arithmetic here. */
#include "harness.h"

#include <stdint.h>

#define GUARD 16

static const cinch_dtype_t dtypes[] = {CINCH_I8,  CINCH_U8,  CINCH_I32,  CINCH_U32, CINCH_I64,
                                       CINCH_U64, CINCH_F32, CINCH_F64, CINCH_BF16};
#define NDTYPES (sizeof dtypes / sizeof *dtypes)

static cinch_comm_t *comm;
static cinch_dtype_t dtype;
static size_t element;

/* Returns the value of one rank at one index: 1 to 5. */
static int value(int rank, size_t at) { return (int)((at * 7 + (size_t)rank * 3) % 5) + 1; }

static void put(unsigned char *buffer, size_t at, double number) {
    unsigned char *to = buffer + at * element;
#define PUT(type)                            \
    do {                                     \
        type exact = (type)number;           \
        memcpy(to, &exact, sizeof exact);    \
    } while (0)
    switch (dtype) {
    case CINCH_I8: PUT(int8_t); break;
    case CINCH_U8: PUT(uint8_t); break;
    case CINCH_I32: PUT(int32_t); break;
    case CINCH_U32: PUT(uint32_t); break;
    case CINCH_I64: PUT(int64_t); break;
    case CINCH_U64: PUT(uint64_t); break;
    case CINCH_F32: PUT(float); break;
    case CINCH_F64: PUT(double); break;
    case CINCH_BF16: {
        float wide = (float)number;
        memcpy(to, (unsigned char *)&wide + 2, 2); /* little endian */
        break;
    }
    default: FAIL("dtype %d is not tested", (int)dtype);
    }
}

static double take(const unsigned char *buffer, size_t at) {
    const unsigned char *from = buffer + at * element;
#define TAKE(type)                           \
    do {                                     \
        type exact;                          \
        memcpy(&exact, from, sizeof exact);  \
        return (double)exact;                \
    } while (0)
    switch (dtype) {
    case CINCH_I8: TAKE(int8_t);
    case CINCH_U8: TAKE(uint8_t);
    case CINCH_I32: TAKE(int32_t);
    case CINCH_U32: TAKE(uint32_t);
    case CINCH_I64: TAKE(int64_t);
    case CINCH_U64: TAKE(uint64_t);
    case CINCH_F32: TAKE(float);
    case CINCH_F64: TAKE(double);
    case CINCH_BF16: {
        float wide = 0;
        memcpy((unsigned char *)&wide + 2, from, 2);
        return (double)wide;
    }
    default: FAIL("dtype %d is not tested", (int)dtype);
    }
    return 0;
}

/* Buffer of `elements` at an alignment of `offset`, between guards, filled with 99s. */
typedef struct {
    unsigned char *whole, *data;
    size_t bytes;
} area;

static area make(size_t elements, size_t offset) {
    area made;
    size_t at;
    made.bytes = elements * element;
    made.whole = (unsigned char *)harness_alloc(made.bytes + 2 * GUARD);
    memset(made.whole, 0xA5, made.bytes + 2 * GUARD);
    made.data = made.whole + offset;
    for (at = 0; at < elements; at++) put(made.data, at, 99);
    return made;
}

static void unmake(area made) {
    const unsigned char *end = made.whole + made.bytes + 2 * GUARD, *at;
    for (at = made.whole; at < end; at++)
        if (at < made.data || at >= made.data + made.bytes) CHECK(*at == 0xA5);
    free(made.whole);
}

static double combined(cinch_op_t op, size_t at) {
    int rank, n = harness_nranks;
    double sum = 0, product = 1, most = 0, least = 9;
    for (rank = 0; rank < n; rank++) {
        double one = value(rank, at);
        sum += one;
        product *= one;
        most = one > most ? one : most;
        least = one < least ? one : least;
    }
    switch (op) {
    case CINCH_SUM: return sum;
    case CINCH_PROD: return product;
    case CINCH_MAX: return most;
    case CINCH_MIN: return least;
    case CINCH_AVG: return sum / n;
    default: FAIL("op %d is not tested", (int)op);
    }
    return 0;
}

static int is_float(void) {
    return dtype == CINCH_F32 || dtype == CINCH_F64 || dtype == CINCH_BF16;
}

/* Averages of integers are refused before anything moves: their sums may wrap. */
static void refused_average(void) {
    area in = make(8, 0), out = make(8, 0);
    FAILS(cinch_all_reduce(in.data, out.data, 8, dtype, CINCH_AVG, comm, NULL),
          CINCH_ERROR_INVALID_ARGUMENT, "would wrap");
    unmake(in);
    unmake(out);
}

#define EXPECT(buffer, at, expected)                                                       \
    do {                                                                                   \
        double seen_value = take(buffer, at), expected_value = (expected);                 \
        if (seen_value != expected_value)                                                  \
            FAIL("dtype %d, count %lu, in place %d: element %lu is %g, not %g", (int)dtype, \
                 (unsigned long)count, in_place, (unsigned long)(at), seen_value,          \
                 expected_value);                                                          \
    } while (0)

static void all_reduce(size_t count, cinch_op_t op, int in_place, size_t offset) {
    area in = make(count, offset), out = make(count, in_place ? 0 : offset ^ 1);
    size_t at;
    for (at = 0; at < count; at++) put(in.data, at, value(harness_rank, at));
    OK(cinch_all_reduce(in.data, in_place ? in.data : out.data, count, dtype, op, comm, NULL));
    for (at = 0; at < count; at++) {
        EXPECT(in_place ? in.data : out.data, at, combined(op, at));
        if (!in_place) EXPECT(in.data, at, value(harness_rank, at));
    }
    unmake(in);
    unmake(out);
}

static void reduce(size_t count, cinch_op_t op, int root, int in_place, size_t offset) {
    int is_root = harness_rank == root;
    area in = make(count, offset), out = make(is_root ? count : 0, offset);
    void *to = !is_root ? NULL : in_place ? in.data : out.data;
    size_t at;
    for (at = 0; at < count; at++) put(in.data, at, value(harness_rank, at));
    OK(cinch_reduce(in.data, to, count, dtype, op, root, comm, NULL));
    for (at = 0; at < count; at++) {
        if (is_root) EXPECT((unsigned char *)to, at, combined(op, at));
        if (!is_root || !in_place) EXPECT(in.data, at, value(harness_rank, at));
    }
    unmake(in);
    unmake(out);
}

static void broadcast(size_t count, int root, int in_place, size_t offset) {
    int is_root = harness_rank == root;
    area in = make(is_root ? count : 0, offset), out = make(count, offset);
    const void *from = !is_root ? NULL : in_place ? out.data : in.data;
    size_t at;
    for (at = 0; is_root && at < count; at++)
        put(in_place ? out.data : in.data, at, value(root, at));
    OK(cinch_broadcast(from, out.data, count, dtype, root, comm, NULL));
    for (at = 0; at < count; at++) EXPECT(out.data, at, value(root, at));
    unmake(in);
    unmake(out);
}

static void all_gather(size_t count, int in_place, size_t offset) {
    size_t total = count * (size_t)harness_nranks, mine = count * (size_t)harness_rank, at;
    area in = make(count, offset), out = make(total, offset);
    unsigned char *from = in_place ? out.data + mine * element : in.data;
    for (at = 0; at < count; at++) put(from, at, value(harness_rank, at));
    OK(cinch_all_gather(from, out.data, count, dtype, comm, NULL));
    for (at = 0; at < total; at++) EXPECT(out.data, at, value((int)(at / count), at % count));
    unmake(in);
    unmake(out);
}

static void gather(size_t count, int root, int in_place, size_t offset) {
    int is_root = harness_rank == root;
    size_t total = count * (size_t)harness_nranks, mine = count * (size_t)harness_rank, at;
    area in = make(count, offset), out = make(is_root ? total : 0, offset);
    unsigned char *from = is_root && in_place ? out.data + mine * element : in.data;
    for (at = 0; at < count; at++) put(from, at, value(harness_rank, at));
    OK(cinch_gather(from, is_root ? out.data : NULL, count, dtype, root, comm, NULL));
    for (at = 0; is_root && at < total; at++)
        EXPECT(out.data, at, value((int)(at / count), at % count));
    unmake(in);
    unmake(out);
}

static void reduce_scatter(size_t count, cinch_op_t op, int in_place, size_t offset) {
    size_t total = count * (size_t)harness_nranks, mine = count * (size_t)harness_rank, at;
    area in = make(total, offset), out = make(count, offset);
    unsigned char *to = in_place ? in.data + mine * element : out.data;
    for (at = 0; at < total; at++) put(in.data, at, value(harness_rank, at));
    OK(cinch_reduce_scatter(in.data, to, count, dtype, op, comm, NULL));
    for (at = 0; at < count; at++) EXPECT(to, at, combined(op, mine + at));
    unmake(in);
    unmake(out);
}

static void scatter(size_t count, int root, int in_place, size_t offset) {
    int is_root = harness_rank == root;
    size_t total = count * (size_t)harness_nranks, mine = count * (size_t)harness_rank, at;
    area in = make(is_root ? total : 0, offset), out = make(count, offset);
    unsigned char *to = is_root && in_place ? in.data + mine * element : out.data;
    for (at = 0; is_root && at < total; at++) put(in.data, at, value(root, at));
    OK(cinch_scatter(is_root ? in.data : NULL, to, count, dtype, root, comm, NULL));
    for (at = 0; at < count; at++) EXPECT(to, at, value(root, mine + at));
    unmake(in);
    unmake(out);
}

static void all_to_all(size_t count, int in_place, size_t offset) {
    size_t total = count * (size_t)harness_nranks, mine = count * (size_t)harness_rank, at;
    area in = make(total, offset), out = make(total, offset);
    unsigned char *to = in_place ? in.data : out.data;
    for (at = 0; at < total; at++) put(in.data, at, value(harness_rank, at));
    OK(cinch_all_to_all(in.data, to, count, dtype, comm, NULL));
    for (at = 0; at < total; at++)
        EXPECT(to, at, value((int)(at / count), mine + at % count));
    unmake(in);
    unmake(out);
}

/* Rank 0 sends to each other rank, which answers with its own. */
static void send_recv(size_t count, size_t offset) {
    const int in_place = 0;
    area in = make(count, offset), out = make(count, offset);
    int peer;
    size_t at;
    for (at = 0; at < count; at++) put(in.data, at, value(harness_rank, at));
    if (harness_rank == 0) {
        for (peer = 1; peer < harness_nranks; peer++) {
            OK(cinch_send(in.data, count, dtype, peer, comm, NULL));
            OK(cinch_recv(out.data, count, dtype, peer, comm, NULL));
            for (at = 0; at < count; at++) EXPECT(out.data, at, value(peer, at));
        }
    } else {
        OK(cinch_recv(out.data, count, dtype, 0, comm, NULL));
        OK(cinch_send(in.data, count, dtype, 0, comm, NULL));
        for (at = 0; at < count; at++) EXPECT(out.data, at, value(0, at));
    }
    unmake(in);
    unmake(out);
}

/* Each rank multiplies its contribution by its own factor before the sum. */
static void premultiplied(size_t count) {
    const int in_place = 0;
    int32_t factor32 = harness_rank + 1;
    float factor = (float)(harness_rank + 1);
    cinch_op_t op;
    int rank;
    size_t at;
    area data = make(count, 0);
    OK(cinch_op_create_premulsum(comm, dtype == CINCH_I32 ? (void *)&factor32 : (void *)&factor,
                                 dtype, &op));
    for (at = 0; at < count; at++) put(data.data, at, value(harness_rank, at));
    OK(cinch_all_reduce(data.data, data.data, count, dtype, op, comm, NULL));
    for (at = 0; at < count; at++) {
        double sum = 0;
        for (rank = 0; rank < harness_nranks; rank++) sum += value(rank, at) * (rank + 1);
        EXPECT(data.data, at, sum);
    }
    OK(cinch_op_destroy(comm, op));
    unmake(data);
}

static void everything(size_t count, int in_place, size_t offset) {
    int last = harness_nranks - 1;
    all_reduce(count, CINCH_SUM, in_place, offset);
    all_reduce(count, CINCH_MAX, in_place, offset);
    all_reduce(count, CINCH_MIN, in_place, offset);
    if (is_float()) all_reduce(count, CINCH_AVG, in_place, offset);
    else refused_average();
    reduce(count, CINCH_SUM, 0, in_place, offset);
    reduce(count, CINCH_MAX, last, in_place, offset);
    broadcast(count, 0, in_place, offset);
    broadcast(count, last, in_place, offset);
    all_gather(count, in_place, offset);
    gather(count, last, in_place, offset);
    reduce_scatter(count, CINCH_SUM, in_place, offset);
    if (is_float()) reduce_scatter(count, CINCH_AVG, in_place, offset);
    scatter(count, last, in_place, offset);
    all_to_all(count, in_place, offset);
    if (!in_place) send_recv(count, offset);
    if (!in_place && (dtype == CINCH_I32 || dtype == CINCH_F32)) {
        premultiplied(count);
        all_reduce(count, CINCH_PROD, 0, offset);
    }
}

int main(int argc, char **argv) {
    static const size_t counts[] = {0, 1, 7, 1000};
    size_t type, at;
    int in_place;
    comm = harness_join(argc, argv);
    for (type = 0; type < NDTYPES; type++) {
        dtype = dtypes[type];
        OK(cinch_dtype_size(dtype, &element));
        for (at = 0; at < sizeof counts / sizeof *counts; at++)
            for (in_place = 0; in_place < 2; in_place++)
                everything(counts[at], in_place, counts[at] == 7 ? 3 : 0);
    }
    /* More than all slots hold, and a prime number of elements. */
    dtype = CINCH_F32;
    OK(cinch_dtype_size(dtype, &element));
    for (in_place = 0; in_place < 2; in_place++) everything(400009, in_place, 1);
    OK(cinch_barrier(comm));
    return harness_leave(comm);
}
