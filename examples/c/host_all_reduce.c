/* Sums an array in host memory over all ranks with 8 bits per value, and checks the sum.
 *
 *   cargo build --release --workspace
 *   cc -I include -o host_all_reduce examples/c/host_all_reduce.c target/release/libcinch.a -pthread -lm
 *   target/release/cinch run -n 4 -- ./host_all_reduce
 */
#include <cinch.h>
#include <math.h>
#include <stdio.h>

#define TRY(call) \
    if ((call) != CINCH_SUCCESS) return fprintf(stderr, "%s: %s\n", #call, cinch_last_error()), 1

enum { COUNT = 1 << 20, PERIOD = 1000 };

int main(void) {
    static float data[COUNT];
    cinch_config_t config;
    cinch_comm_t *comm;
    int rank, nranks;

    TRY(cinch_config_default(&config));
    config.codec = "linear8";
    TRY(cinch_comm_init_from_env(&config, &comm));
    TRY(cinch_comm_rank(comm, &rank));
    TRY(cinch_comm_size(comm, &nranks));

    for (int i = 0; i < COUNT; i++) data[i] = (float)((rank + 1) * (i % PERIOD));
    TRY(cinch_all_reduce(data, data, COUNT, CINCH_F32, CINCH_SUM, comm, NULL));

    double worst = 0, ranks = nranks * (nranks + 1) / 2;
    for (int i = 0; i < COUNT; i++) worst = fmax(worst, fabs(data[i] - ranks * (i % PERIOD)));
    /* One encode is off by at most 1/254 of the largest value; a sum passes at most nranks of them. */
    double bound = nranks * ranks * PERIOD / 254;
    printf("rank %d of %d: largest error %g, bound %g\n", rank, nranks, worst, bound);

    TRY(cinch_comm_finalize(comm));
    TRY(cinch_comm_destroy(comm));
    return worst > bound;
}
