// Exports a function that runs single steps of schedule kernels with a codec on the host, for
// steps.rs. A warp moves all tiles of the step. block.h emulates the GPU.
#include "block.h"
#include "device.h"

#include "prims/coded.cuh"

using namespace cinch;

// A step. Mirrors `Step` of steps.rs.
struct Step {
  const uint8_t *input;
  uint8_t *output;
  const uint8_t *sources[4];
  uint8_t *targets[4];
  uint32_t elements;
  uint32_t nranks;
  uint32_t codec[8];
  uint8_t op;
  uint8_t own;
  uint8_t own_after;
  uint8_t nrecv;
  uint8_t nsend;
  uint8_t intra;
  uint8_t intra_recv;
  uint8_t intra_send;
  uint8_t aligned;
};

namespace {

// Fills the shared memory of the block.
void fill_channel(const Step &step) {
  Channel &own = this_channel();
  own.work = {};
  memcpy(own.work.codec.word, step.codec, sizeof(step.codec));
  for (uint32_t r = 0; r < step.nrecv; ++r) {
    own.peers[r] = (uint8_t)r;
    own.slots[0].at[r] = (uint8_t *)step.sources[r];
  }
  for (uint32_t t = 0; t < step.nsend; ++t) {
    own.peers[step.nrecv + t] = (uint8_t)t;
    own.slots[0].at[WARP + t] = step.targets[t];
  }
}

template <class E, class C>
void run(const Step &step) {
  using Mover = CodedSimple<E, C>;
  Job job = {};
  job.input = step.input;
  job.output = step.output;
  job.elements = step.elements;
  job.op = step.op;
  job.own = step.own;
  job.own_after = step.own_after;
  job.nrecv = step.nrecv;
  job.nsend = step.nsend;
  job.intra = step.intra;
  job.intra_recv = step.intra_recv;
  job.intra_send = step.intra_send != 0;
  job.aligned = step.aligned != 0;
  cinch_comm_view comm = {};
  comm.nranks = step.nranks;
  launch(1, WARP, [&] {
    if (threadIdx.x == 0) fill_channel(step);
    __syncthreads();
    Mover::prepare(WARP);
    __syncthreads();
    const Mover mover(this_channel().work, comm, Stop{this_channel().stopped});
    Job own_job = job;
    own_job.fast_path = mover.has_fast_path(job);
    const uint32_t tile = mover.tile_elements();
    mover.tiles(own_job, 0, (job.elements + tile - 1) / tile);
  });
}

struct Named {
  const char *name;
  void (*run)(const Step &);
};

#define CODED(codec, Codec)                                                            \
  {codec "_f32", run<F32, Codec>}, {codec "_f16", run<F16, Codec>}, {                  \
    codec "_bf16", run<BF16, Codec>                                                    \
  }

const Named STEPS[] = {CODED("linear8", Linear8Nearest), CODED("dynamic8", Dynamic8Nearest),
                       CODED("cast_bf16", CastBf16),      CODED("terngrad", TernGrad),
                       CODED("onebit", OneBit)};

}  // namespace

// Runs a step by the kernel code of a codec and an element type. Returns false if the name is
// unknown.
extern "C" bool test_step(const char *name, const Step *step) {
  for (const Named &one : STEPS) {
    if (strcmp(one.name, name) == 0) {
      one.run(*step);
      return true;
    }
  }
  return false;
}
