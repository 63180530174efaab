// The schedule interpreter: one block walks the steps of one lane.
//
// Launch: one block a channel, THREADS threads, all blocks of all works resident at once. Each
// block takes the passes channel, channel + channels, ... of its work over its own lane, so that
// blocks never wait for one another.
//
// For each batch of steps: the owners of the connections wait, while another warp works out where
// the chunks lie; barrier; the warps move tiles of all the batch's chunks, one chunk after the
// other in turn, so that small chunks of many peers go at once; barrier; the owners publish.
//
// The walk is schedule::walk: by time, the oldest pass first, so that a rank frees the slots that
// its peers need before it waits for slots itself.
#pragma once

#include "abi.h"
#include "fifo/fifo.cuh"

namespace cinch {

constexpr uint32_t THREADS = 512;
constexpr uint32_t WARPS = THREADS / WARP;

// One step of one pass, as the movers see it.
struct Job {
  const uint8_t *input;  // this chunk of the input
  uint8_t *output;       // this chunk of the output
  uint32_t elements;     // a chunk fits a slot
  uint8_t op;
  uint8_t own;
  uint8_t own_after;
  uint8_t nrecv;
  uint8_t nsend;
  const uint8_t *peers;  // receives, then sends
  const LaneState *lane;

  __device__ __forceinline__ const uint8_t *source(uint32_t r) const { return lane->at[peers[r]]; }
  __device__ __forceinline__ uint8_t *target(uint32_t t) const {
    return lane->at[WARP + peers[nrecv + t]];
  }
  __device__ __forceinline__ uint32_t source_flag(uint32_t r) const { return lane->flag[peers[r]]; }
  __device__ __forceinline__ uint32_t target_flag(uint32_t t) const {
    return lane->flag[WARP + peers[nrecv + t]];
  }

  __device__ __forceinline__ bool writes() const {
    return op != CINCH_SEND && op != CINCH_RECV_REDUCE_SEND;
  }
  __device__ __forceinline__ bool sums() const {
    return op == CINCH_RECV_REDUCE_COPY || op == CINCH_RECV_REDUCE_SEND ||
           op == CINCH_RECV_REDUCE_COPY_SEND;
  }
  __device__ __forceinline__ bool is_final() const {
    return op == CINCH_RECV_REDUCE_COPY || op == CINCH_RECV_REDUCE_COPY_SEND;
  }
  // Whether the rank's own contribution takes part.
  __device__ __forceinline__ bool reads() const {
    return op == CINCH_SEND || op == CINCH_COPY || op == CINCH_REDUCE ||
           (sums() && own != CINCH_OWN_ABSENT);
  }
};

struct Range {
  uint64_t start;
  uint64_t elements;
};

// plan::Geometry::range.
__device__ __forceinline__ Range range_of(const cinch_work &work, uint64_t pass, uint32_t part) {
  const uint64_t start = (pass * work.parts + part) * work.chunk;
  const uint64_t begin = min(start, work.count);
  return {begin, min(start + work.chunk, work.count) - begin};
}

// Steps and peers that fit are kept in shared memory; longer lists are read where they are.
constexpr uint32_t KEPT_STEPS = 96;
constexpr uint32_t KEPT_PEERS = 512;

// `Mover` is a class with
//   static constexpr int protocol;
//   Mover(const cinch_work &, const cinch_comm_view &, Stop);
//   uint32_t element_bytes() const;
//   uint32_t tile_elements() const;            elements that a warp moves at once
//   void tile(const Job &, uint32_t tile);     called by a whole warp
template <class Mover>
__device__ __forceinline__ void interpret(const cinch_args &args) {
  __shared__ LaneState state;
  __shared__ Job jobs[CINCH_MAX_BATCH];
  __shared__ cinch_work work;
  __shared__ cinch_step kept_steps[KEPT_STEPS];
  __shared__ uint8_t kept_peers[KEPT_PEERS];

  const cinch_comm_view &comm = args.comm;
  const uint8_t *blob = args.far ? args.far : args.blob;
  const cinch_work *works = (const cinch_work *)blob;
  const cinch_step *steps = (const cinch_step *)(works + args.nworks);
  const uint8_t *peers = (const uint8_t *)(steps + args.nsteps);
  while (blockIdx.x >= works->first_block + works->channels) ++works;
  const uint32_t channel = blockIdx.x - works->first_block;
  const uint32_t nsteps = works->nsteps;
  steps += works->steps;

  Lane<Mover::protocol> lane(comm, work, works->first_lane + channel, state);
  for (uint32_t i = threadIdx.x; i < sizeof(work) / 4; i += THREADS) {
    ((uint32_t *)&work)[i] = ((const uint32_t *)works)[i];
  }
  if (nsteps <= KEPT_STEPS) {
    for (uint32_t i = threadIdx.x; i < nsteps * sizeof(cinch_step) / 4; i += THREADS) {
      ((uint32_t *)kept_steps)[i] = ((const uint32_t *)steps)[i];
    }
    steps = kept_steps;
  }
  if (args.npeers <= KEPT_PEERS) {
    for (uint32_t i = threadIdx.x; i < args.npeers; i += THREADS) kept_peers[i] = peers[i];
    peers = kept_peers;
  }
  __syncthreads();

  const Stop stop = lane.stop();
  Mover mover(work, comm, stop);
  const uint32_t channels = work.channels;
  const uint32_t passes =
      work.passes > channel ? (work.passes - channel + channels - 1) / channels : 0;
  const uint32_t times = passes == 0 ? 0 : passes + work.stages - 1;
  const uint32_t tile_elements = mover.tile_elements();
  for (uint32_t time = 0; time < times; ++time) {
    uint32_t end = nsteps;
    while (end > 0) {
      const uint32_t stage = steps[end - 1].stage;
      uint32_t begin = end - 1;
      while (begin > 0 && steps[begin - 1].stage == stage) --begin;
      const bool active = stage <= time && time - stage < passes;
      const uint32_t pass = channel + (time - stage) * channels;
      uint32_t at = active ? begin : end;
      while (at < end) {
        const cinch_step &batch = steps[at];
        const uint32_t count = batch.batch;
        lane.wait(batch, at, pass);
        if (threadIdx.x >= 2 * WARP && threadIdx.x < 2 * WARP + count) {
          const cinch_step &step = steps[at + threadIdx.x - 2 * WARP];
          const Range range = range_of(work, pass, step.part);
          const uint64_t in = step.in_block * work.count + range.start;
          const uint64_t out = step.out_block * work.count + range.start;
          Job job;
          job.input = (const uint8_t *)work.input + in * mover.element_bytes();
          job.output = (uint8_t *)work.output + out * mover.element_bytes();
          job.elements = (uint32_t)range.elements;
          job.op = step.op;
          job.own = step.own;
          job.own_after = step.own_after;
          job.nrecv = step.nrecv;
          job.nsend = step.nsend;
          job.peers = peers + step.peers;
          job.lane = &state;
          jobs[threadIdx.x - 2 * WARP] = job;
        }
        __syncthreads();
        if (stop.is_set()) return;
        // Parts of a pass are equal but for the last ones, which are shorter.
        uint32_t most = (uint32_t)min(work.chunk, work.count);
        if (Mover::protocol != CINCH_SIMPLE && state.refresh) {
          most = max(most, comm.fifo.slot_bytes / mover.element_bytes());
        }
        const uint32_t tiles = (most + tile_elements - 1) / tile_elements * count;
        for (uint32_t flat = threadIdx.x / WARP; flat < tiles; flat += WARPS) {
          mover.tile(jobs[flat % count], flat / count);
        }
        __syncthreads();
        if (Mover::protocol != CINCH_SIMPLE && stop.is_set()) {
          return lane.report_missing(at, pass);
        }
        lane.post(batch);
        at += count;
      }
      end = begin;
    }
  }
  lane.finish();
}

}  // namespace cinch
