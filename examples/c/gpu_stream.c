/* Sums an array in GPU memory over all ranks, on a CUDA stream, and checks the sum.
 *
 *   scripts/setup && CINCH_CUDA=require cargo build --release --workspace
 *   nvcc -I include -o gpu_stream examples/c/gpu_stream.c target/release/libcinch.a
 *   target/release/cinch run -n 2 -- ./gpu_stream
 *
 * Ranks take the GPUs of the host in turn; several ranks may share a GPU.
 */
#include <cinch.h>
#include <cuda_runtime_api.h>
#include <stdio.h>
#include <stdlib.h>

#define TRY(call) \
    if ((call) != CINCH_SUCCESS) return fprintf(stderr, "%s: %s\n", #call, cinch_last_error()), 1

#define TRY_CUDA(call)                                                                       \
    do {                                                                                     \
        cudaError_t error = (call);                                                          \
        if (error != cudaSuccess)                                                            \
            return fprintf(stderr, "%s: %s\n", #call, cudaGetErrorString(error)), 1;         \
    } while (0)

enum { COUNT = 1 << 20, PERIOD = 1000 };
#define BYTES (COUNT * sizeof(float))

int main(void) {
    const char *local_rank = getenv("LOCAL_RANK"); /* set by cinch run and torchrun */
    cinch_config_t config;
    cinch_comm_t *comm;
    cinch_result_t state;
    cudaStream_t stream;
    float *host, *input, *output;
    int rank, nranks, gpus, wrong = 0;

    TRY_CUDA(cudaGetDeviceCount(&gpus));
    TRY_CUDA(cudaSetDevice((local_rank ? atoi(local_rank) : 0) % gpus));
    TRY_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    TRY_CUDA(cudaMallocHost((void **)&host, BYTES));
    TRY_CUDA(cudaMalloc((void **)&input, BYTES));
    TRY_CUDA(cudaMalloc((void **)&output, BYTES));

    TRY(cinch_config_default(&config));
    config.device = "cuda"; /* the GPU of the current context */
    TRY(cinch_comm_init_from_env(&config, &comm));
    TRY(cinch_comm_rank(comm, &rank));
    TRY(cinch_comm_size(comm, &nranks));

    for (int i = 0; i < COUNT; i++) host[i] = (float)((rank + 1) * (i % PERIOD));
    /* All three are enqueued and run in stream order; the host does not wait in between. */
    TRY_CUDA(cudaMemcpyAsync(input, host, BYTES, cudaMemcpyHostToDevice, stream));
    TRY(cinch_all_reduce(input, output, COUNT, CINCH_F32, CINCH_SUM, comm, stream));
    TRY_CUDA(cudaMemcpyAsync(host, output, BYTES, cudaMemcpyDeviceToHost, stream));
    TRY_CUDA(cudaStreamSynchronize(stream));
    /* A failure after the launch, such as the exit of a peer, does not appear in the stream. */
    TRY(cinch_comm_async_error(comm, &state));
    TRY(state);

    for (int i = 0; i < COUNT; i++)
        wrong += host[i] != (float)(nranks * (nranks + 1) / 2 * (i % PERIOD));
    printf("rank %d of %d: %d values are wrong\n", rank, nranks, wrong);

    /* Ranks map each other's memory: finalize waits until they no longer do, so it comes first. */
    TRY(cinch_comm_finalize(comm));
    TRY(cinch_comm_destroy(comm));
    TRY_CUDA(cudaFree(output));
    TRY_CUDA(cudaFree(input));
    TRY_CUDA(cudaFreeHost(host));
    TRY_CUDA(cudaStreamDestroy(stream));
    return wrong != 0;
}
