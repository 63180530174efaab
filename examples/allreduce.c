/* Sums an array over all ranks, with 8 bits a value on the way.
 *
 *   cargo build --release --workspace
 *   cc -I include -o allreduce examples/allreduce.c target/release/libcinch.a -pthread -lm
 *   target/release/cinch run -n 4 -- ./allreduce
 */
#include <cinch.h>
#include <stdio.h>

#define TRY(call) \
    if ((call) != CINCH_SUCCESS) return fprintf(stderr, "%s\n", cinch_last_error()), 1

int main(void) {
    static float data[1 << 20];
    cinch_comm_t *comm;
    cinch_config_t config;
    int rank, nranks;

    TRY(cinch_config_default(&config));
    config.codec = "linear8";
    TRY(cinch_comm_init_from_env(&config, &comm));
    TRY(cinch_comm_rank(comm, &rank));
    TRY(cinch_comm_size(comm, &nranks));

    for (int i = 0; i < 1 << 20; i++) data[i] = (float)(rank + 1);
    TRY(cinch_all_reduce(data, data, 1 << 20, CINCH_F32, CINCH_SUM, comm, NULL));
    printf("rank %d of %d: %g\n", rank, nranks, data[0]);

    TRY(cinch_comm_finalize(comm));
    TRY(cinch_comm_destroy(comm));
    return 0;
}
