/* Runs several calls as one group: first an exchange with both neighbours, then the sums of the
 * gradients of four layers. Checks every value.
 *
 *   cargo build --release --workspace
 *   cc -I include -o groups examples/c/groups.c target/release/libcinch.a -pthread -lm
 *   target/release/cinch run -n 4 -- ./groups
 */
#include <cinch.h>
#include <stdio.h>

#define TRY(call) \
    if ((call) != CINCH_SUCCESS) return fprintf(stderr, "%s: %s\n", #call, cinch_last_error()), 1

enum { HALO = 1000, LAYERS = 4, LARGEST = 512 };

/* Sends `rank` to both neighbours on a ring, and receives their ranks. Returns 1 on failure. */
static int exchange(cinch_comm_t *comm, int rank, int nranks) {
    static int32_t mine[HALO], from_left[HALO], from_right[HALO];
    int left = (rank + nranks - 1) % nranks, right = (rank + 1) % nranks;
    for (int i = 0; i < HALO; i++) mine[i] = rank;

    /* Outside of a group every rank would wait in its first send for a receive. */
    TRY(cinch_group_start());
    TRY(cinch_send(mine, HALO, CINCH_I32, right, comm, NULL));
    TRY(cinch_recv(from_left, HALO, CINCH_I32, left, comm, NULL));
    TRY(cinch_send(mine, HALO, CINCH_I32, left, comm, NULL));
    TRY(cinch_recv(from_right, HALO, CINCH_I32, right, comm, NULL));
    TRY(cinch_group_end());

    for (int i = 0; i < HALO; i++)
        if (from_left[i] != left || from_right[i] != right)
            return fprintf(stderr, "rank %d: halo %d is wrong\n", rank, i), 1;
    return 0;
}

/* Sums the gradients of all layers. Returns 1 on failure. */
static int sum_gradients(cinch_comm_t *comm, int rank, int nranks) {
    static float gradients[LAYERS][LARGEST];
    cinch_report_t reports[LAYERS];
    int ranks = nranks * (nranks + 1) / 2;
    for (int layer = 0; layer < LAYERS; layer++)
        for (int i = 0; i < LARGEST; i++) gradients[layer][i] = (float)((rank + 1) * (layer + i));

    /* Small sums of one type and operation travel as one call, so they pay its latency once. */
    TRY(cinch_group_start());
    for (int layer = 0; layer < LAYERS; layer++) {
        cinch_call_t call;
        TRY(cinch_call_default(&call));
        TRY(cinch_report_default(&reports[layer]));
        call.comm = comm;
        call.collective = CINCH_ALL_REDUCE;
        call.sendbuf = call.recvbuf = gradients[layer];
        call.count = (size_t)(LARGEST >> layer);
        call.dtype = CINCH_F32;
        call.op = CINCH_SUM;
        TRY(cinch_call(&call, &reports[layer]));
    }
    /* The calls run here; buffers and reports hold results from here on. */
    TRY(cinch_group_end());

    for (int layer = 0; layer < LAYERS; layer++)
        for (int i = 0; i < LARGEST >> layer; i++)
            if (gradients[layer][i] != (float)(ranks * (layer + i)))
                return fprintf(stderr, "rank %d: gradient %d of layer %d is wrong\n", rank, i, layer), 1;
    printf("rank %d of %d: %d sums travelled as one\n", rank, nranks, (int)reports[0].fused);
    return 0;
}

int main(void) {
    cinch_comm_t *comm;
    int rank, nranks;
    TRY(cinch_comm_init_from_env(NULL, &comm));
    TRY(cinch_comm_rank(comm, &rank));
    TRY(cinch_comm_size(comm, &nranks));
    if (exchange(comm, rank, nranks) || sum_gradients(comm, rank, nranks)) return 1;
    TRY(cinch_comm_finalize(comm));
    TRY(cinch_comm_destroy(comm));
    return 0;
}
