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

// What a group keeps in shared memory.
struct Channel {
  LaneState lane;
  Job jobs[CINCH_MAX_BATCH];
  cinch_work work;
  cinch_step steps[KEPT_STEPS];
  uint8_t peers[KEPT_PEERS];
};

// `Mover` is a class with
//   static constexpr int protocol;
//   Mover(const cinch_work &, const cinch_comm_view &, Stop);
//   uint32_t element_bytes() const;
//   uint32_t tile_elements() const;            elements that a warp moves at once
//   void tile(const Job &, uint32_t tile);     called by a whole warp

// The warps of the group share the tiles of a batch. Out of line, so that the registers of the
// walk do not burden the loops that move data.
template <class Mover>
__device__ __noinline__ void move_batch(const Channel &own, const cinch_comm_view &comm,
                                        uint32_t count) {
  const Stop stop = {const_cast<uint32_t *>(own.lane.stopped)};
  Mover mover(own.work, comm, stop);
  // Parts of a pass are equal but for the last ones, which are shorter.
  uint32_t most = (uint32_t)min(own.work.chunk, own.work.count);
  if (Mover::protocol != CINCH_SIMPLE && own.lane.refresh) {
    most = max(most, comm.fifo.slot_bytes / mover.element_bytes());
  }
  const uint32_t tile_elements = mover.tile_elements();
  const uint32_t tiles = (most + tile_elements - 1) / tile_elements * count;
#pragma unroll 1
  for (uint32_t flat = thread() / WARP; flat < tiles; flat += WARPS) {
    mover.tile(own.jobs[flat % count], flat / count);
  }
}

template <class Mover>
__device__ __forceinline__ void interpret(const cinch_args &args) {
  __shared__ Channel shared[GROUPS];
  Channel &own = shared[group()];
  LaneState &state = own.lane;
  Job *const jobs = own.jobs;
  cinch_work &work = own.work;

  const cinch_comm_view &comm = args.comm;
  const uint8_t *blob = args.far ? args.far : args.blob;
  const cinch_work *works = (const cinch_work *)blob;
  const cinch_step *steps = (const cinch_step *)(works + args.nworks);
  const uint8_t *peers = (const uint8_t *)(steps + args.nsteps);
  const uint32_t place = blockIdx.x * GROUPS + group();
  const cinch_work *const last = works + args.nworks - 1;
  while (works < last && place >= works->first_block + works->channels) ++works;
  const uint32_t channel = place - works->first_block;
  if (channel >= works->channels) return;
  const uint32_t nsteps = works->nsteps;
  steps += works->steps;

  Lane<Mover::protocol> lane(comm, work, works->first_lane + channel, state);
  for (uint32_t i = thread(); i < sizeof(work) / 4; i += THREADS) {
    ((uint32_t *)&work)[i] = ((const uint32_t *)works)[i];
  }
  if (nsteps <= KEPT_STEPS) {
    for (uint32_t i = thread(); i < nsteps * sizeof(cinch_step) / 4; i += THREADS) {
      ((uint32_t *)own.steps)[i] = ((const uint32_t *)steps)[i];
    }
    steps = own.steps;
  }
  if (args.npeers <= KEPT_PEERS) {
    for (uint32_t i = thread(); i < args.npeers; i += THREADS) own.peers[i] = peers[i];
    peers = own.peers;
  }
  sync();

  const Stop stop = lane.stop();
  const uint32_t element_bytes = Mover(work, comm, stop).element_bytes();
  const uint32_t channels = work.channels;
  const uint32_t passes =
      work.passes > channel ? (work.passes - channel + channels - 1) / channels : 0;
  const uint32_t times = passes == 0 ? 0 : passes + work.stages - 1;
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
        if (thread() >= 2 * WARP && thread() < 2 * WARP + count) {
          const cinch_step &step = steps[at + thread() - 2 * WARP];
          const Range range = range_of(work, pass, step.part);
          const uint64_t in = step.in_block * work.count + range.start;
          const uint64_t out = step.out_block * work.count + range.start;
          Job job;
          job.input = (const uint8_t *)work.input + in * element_bytes;
          job.output = (uint8_t *)work.output + out * element_bytes;
          job.elements = (uint32_t)range.elements;
          job.op = step.op;
          job.own = step.own;
          job.own_after = step.own_after;
          job.nrecv = step.nrecv;
          job.nsend = step.nsend;
          job.peers = peers + step.peers;
          job.lane = &state;
          jobs[thread() - 2 * WARP] = job;
        }
        sync();
        if (stop.is_set()) return;
        move_batch<Mover>(own, comm, count);
        sync();
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
