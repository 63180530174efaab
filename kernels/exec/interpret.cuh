// The schedule interpreter: one block executes the steps of one channel.
//
// Launch: one block of BLOCK_THREADS threads for each channel of each work. Kernels of codecs also
//   need a stage of dynamic shared memory for each mover warp. All blocks must be resident at
//   once, because they wait for blocks of other ranks.
// Passes: channel c of a work with n channels executes the passes c, c + n, c + 2n, ... over
//   connections of its own, so no block waits for another block of its rank.
// Order: a block executes its steps in the order of schedule::walk, by time and the oldest pass
//   first. Thus a rank frees the slots that its peers wait for before it waits for slots itself.
//
// A batch of steps passes through the roles of the block like this; two batches are in flight, one
// in each half of the channel's shared state:
//
//   waiters     poll for messages and credit, write slots and jobs   | batch k + 1
//   movers      share the tiles of all jobs of the batch             | batch k
//   publishers  publish messages, return credit                      | batch k - 1
//
// A batch of 0 jobs ends the walk. After a failure all roles go on through the barriers, but none
// polls, moves or publishes.
//
// Synchronisation: fifo/fifo.cuh between ranks, channel/block.cuh inside the block. The kernel
//   begins with wait_for_previous_kernel and, where the work allows it, calls launch_dependents
//   once none of its threads polls a peer any more.
#pragma once

#include "abi.h"
#include "channel/channel.cuh"
#include "channel/feedback.cuh"
#include "channel/scales.cuh"
#include "channel/statistics.cuh"
#include "fifo/fifo.cuh"
#include "ptx/grid.cuh"

namespace cinch {

struct Range {
  uint64_t start;
  uint64_t elements;
};

// Returns the elements of one part of a pass; plan::Geometry::range has the same formula.
__device__ __forceinline__ Range range_of(const cinch_work &work, uint64_t pass, uint32_t part) {
  const uint64_t start = (pass * work.parts + part) * work.chunk;
  const uint64_t begin = min(start, work.count);
  return {begin, min(start + work.chunk, work.count) - begin};
}

// The steps of one channel of a work item, in the order in which the block executes them.
struct Walk {
  const cinch_step *steps;
  uint32_t nsteps;
  uint32_t stages;
  uint32_t channel;
  uint32_t channels;
  uint32_t passes;

  // Calls visit(first step, index of that step, pass) for each batch, in order.
  template <class Visit>
  __device__ __forceinline__ void each(Visit visit) const {
    const uint32_t times = passes == 0 ? 0 : passes + stages - 1;
#pragma unroll 1
    for (uint32_t time = 0; time < times; ++time) {
      uint32_t end = nsteps;
#pragma unroll 1
      while (end > 0) {
        const uint32_t stage = steps[end - 1].stage;
        uint32_t begin = end - 1;
        while (begin > 0 && steps[begin - 1].stage == stage) --begin;
        if (stage <= time && time - stage < passes) {
          const uint32_t pass = channel + (time - stage) * channels;
#pragma unroll 1
          for (uint32_t at = begin; at < end; at += steps[at].batch) visit(steps[at], at, pass);
        }
        end = begin;
      }
    }
  }
};

// A `Mover` executes steps in one protocol, for one element type or codec. It has
//   static constexpr int protocol
//   static constexpr bool draws              whether its codec may round stochastically
//   static constexpr bool keeps_scales       whether its codec may have a scale for each chunk
//   static constexpr bool takes_verdict      whether it inspects outputs (prims/verdict.cuh)
//   static void prepare(uint32_t threads)    fills tables in shared memory: called once by the
//                                            movers, before a barrier among them
//   static uint64_t factor_at(uint64_t)      loads the factor of a pre-multiplied sum
//   Mover(const cinch_work &, const cinch_comm_view &, Stop)
//   uint32_t element_bytes() const
//   uint32_t tile_elements() const           elements that a warp moves at once
//   bool has_fast_path(const Job &) const    whether whole tiles may take the faster loops
//   void tiles(const Job &, uint32_t first, uint32_t last)   moves tiles; called by a whole warp
//   void scan(const Job &, uint32_t first, uint32_t last)    with keeps_scales: finds the largest
//                                            magnitude that tiles() will encode

// Returns the number of tiles in a chunk of `elements`.
template <class Mover>
__device__ __forceinline__ uint32_t tiles_of(const Mover &mover, uint32_t elements) {
  return (elements + mover.tile_elements() - 1) / mover.tile_elements();
}

// Calls visit(job, first tile, end) for this warp's share of the tiles of all jobs of a batch. The share is contiguous, so
// that the warp reads a job once for many tiles.
template <class Visit>
__device__ __forceinline__ void each_share(const Channel &own, uint32_t half, uint32_t tiles,
                                           Visit &&visit) {
  const uint32_t all = tiles * own.batches[half].jobs;
  uint32_t first = all * mover_warp() >> LOG2_MOVER_WARPS;
  uint32_t left = (all * (mover_warp() + 1) >> LOG2_MOVER_WARPS) - first;
  const Job *job = own.jobs[half];
  for (; first >= tiles; first -= tiles) ++job;
#pragma unroll 1
  for (; left > 0; ++job, first = 0) {
    const uint32_t last = min(tiles, first + left);
    visit(*job, first, last);
    left -= last - first;
  }
}

// Moves the payload of a batch. Each chunk has at most `tiles` tiles: only the last parts of a pass
// are shorter. The function is out of line, so that the loops inside it need not keep the caller's
// registers. The caller passes `tiles` because a small call waits for the first load of each batch.
template <class Mover>
__device__ __noinline__ void move_batch(const cinch_comm_view &comm, uint32_t half,
                                        uint32_t tiles) {
  Channel &own = this_channel();
  const Stop stop = {own.stopped};
  const Mover mover(own.work, comm, stop);
  if (Mover::protocol != CINCH_SIMPLE && own.slots[half].refresh) {
    tiles = max(tiles, tiles_of(mover, comm.fifo.slot_bytes / mover.element_bytes()));
  }
  each_share(own, half, tiles, [&](const Job &job, uint32_t first, uint32_t last) {
    mover.tiles(job, first, last);
  });
}

// Finds the largest magnitudes of the chunks of a batch that need a new scale.
template <class Mover>
__device__ __noinline__ void scan_batch(const cinch_comm_view &comm, uint32_t half, uint32_t tiles) {
  Channel &own = this_channel();
  const Mover mover(own.work, comm, {own.stopped});
  each_share(own, half, tiles, [&](const Job &job, uint32_t first, uint32_t last) {
    mover.scan(job, first, last);
  });
}

// Fills the job of `step`. `peers` is the index in Channel::peers of the step's peers.
__device__ __forceinline__ void locate(const Channel &own, const cinch_step &step, uint32_t peers,
                                       uint32_t pass, uint32_t element_bytes, uint32_t half,
                                       Job &job) {
  const Range range = range_of(own.work, pass, step.part);
  const uint64_t in = step.in_block * own.work.count + range.start;
  const uint64_t out = step.out_block * own.work.count + range.start;
  job.input = (const uint8_t *)own.work.input + in * element_bytes;
  job.output = (uint8_t *)own.work.output + out * element_bytes;
  job.elements = (uint32_t)range.elements;
  job.first = (uint32_t)in;
  job.op = step.op;
  job.own = step.own;
  job.own_after = step.own_after;
  job.nrecv = step.nrecv;
  job.nsend = step.nsend;
  job.peers = (uint16_t)peers;
  job.half = (uint8_t)half;
  job.intra = own.work.intra;
  job.intra_recv = job.intra != CINCH_INTRA_CODED ? step.intra_recv : 0;
  job.intra_send = job.intra != CINCH_INTRA_CODED && step.intra_send != 0;
  // A rank's part of a buffer may have any number of elements, so alignment differs from chunk to
  // chunk.
  const bool reads = job.reads() || job.nrecv == 0, writes = job.writes();
  const uintptr_t used = (reads ? (uintptr_t)job.input : 0) | (writes ? (uintptr_t)job.output : 0);
  job.aligned = used % 16 == 0;
}

// Reports the peer whose ll or ll128 data did not arrive in time. Mover warps, which copy the
// payload, call this after their wait for the data failed.
__device__ __forceinline__ void report_missing(const cinch_comm_view &comm, const Channel &own,
                                               Stop stop, uint32_t channel, uint32_t half) {
  const uint32_t missing = stop.missing();
  // The communicator keeps only the first report, which comes from the batch whose wait failed.
  if (lane_id() != 0 || missing == 0) return;
  // A flag holds only the low bits of the message number. The cursor still has the number of
  // messages received before this launch.
  const uint64_t before = cursor_of(comm, channel, missing - 1)->received;
  const uint32_t flag = own.slots[half].flag[missing - 1];
  const uint64_t number = before + ((flag - (uint32_t)before) & NUMBER_MASK);
  const Batch &batch = own.batches[half];
  const WaitInfo info = {missing - 1, 0, channel, batch.step, batch.pass};
  report(comm, CINCH_TROUBLE_TIMEOUT, info, number, number - 1, own.work.signature, nullptr);
}

// Mixes the channel's message count into the keys of stochastic rounding, so that each replay of a
// CUDA graph draws other random numbers. A channel that encoded anything has sent messages since,
// so its count differs. One thread calls this before the first message is published.
static __device__ __noinline__ void redraw(const cinch_comm_view &comm, uint32_t channel,
                                           uint32_t (&key)[4]) {
  uint64_t count = 0;
  for (uint32_t rank = 0; rank < comm.nranks; ++rank) {
    count += cursor_with(comm, channel, rank)->sent;
  }
  // The finaliser of SplitMix64: consecutive counts give unrelated keys.
  uint64_t z = count * 0x9e3779b97f4a7c15u;
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
  z = (z ^ z >> 27) * 0x94d049bb133111ebu;
  z ^= z >> 31;
  for (uint32_t half = 0; half < 2; ++half) {
    key[2 * half] ^= (uint32_t)z;
    key[2 * half + 1] ^= (uint32_t)(z >> 32);
  }
}

// Adds the verdict of the block's output to the call's statistics. The last block of the call's last launch writes them.
static __device__ __noinline__ void add_verdict(const cinch_comm_view &comm, const Channel &own) {
  cinch_statistics_sums &sums = statistics_sums(comm);
  if (own.has_non_finite) atomicOr(&sums.verdict, (uint32_t)CINCH_VERDICT_NON_FINITE);
  const uint32_t has_input = own.work.flags & CINCH_HAS_INPUT ? 1 : 0;
  if (own.work.ends) end_statistics(sums, *own.work.statistics, has_input, own.work.channels);
}

template <class Mover>
__device__ __forceinline__ void interpret(const cinch_args &args) {
  Channel &own = this_channel();
  const cinch_comm_view &comm = args.comm;
  if (args.overflow) wait_for_previous_kernel();
  const uint8_t *work_buffer = args.overflow ? args.overflow : args.work_buffer;
  const cinch_work *works = (const cinch_work *)work_buffer;
  const cinch_step *steps = (const cinch_step *)(works + args.nworks);
  const uint8_t *peers = (const uint8_t *)(steps + args.nsteps);
  // Most launches have one work item, which owns all steps. The copies below then need not wait for
  // a load of the item: a small call pays for each dependent load.
  uint32_t channel = blockIdx.x, nsteps = args.nsteps;
  if (args.nworks > 1) {
    while (blockIdx.x >= works->first_block + works->channels) ++works;
    channel -= works->first_block;
    nsteps = works->nsteps;
    steps += works->steps;
  }
  const bool keeps_steps = nsteps <= KEPT_STEPS, keeps_peers = args.npeers <= KEPT_PEERS;
  // Disjoint threads copy the work item, the peers and the steps.
  constexpr uint32_t WORK_WORDS = sizeof(own.work) / 4, STEP_WORDS = sizeof(cinch_step) / 4;
  static_assert(WORK_WORDS <= BLOCK_THREADS - MOVERS, "one word for each thread");
  if (threadIdx.x >= MOVERS) {
    const uint32_t i = threadIdx.x - MOVERS;
    if (i < WORK_WORDS) ((uint32_t *)&own.work)[i] = ((const uint32_t *)works)[i];
  } else if (threadIdx.x >= MOVERS / 2) {
    for (uint32_t i = threadIdx.x - MOVERS / 2; keeps_peers && i < args.npeers; i += MOVERS / 2) {
      own.peers[i] = peers[i];
    }
  } else {
    for (uint32_t i = threadIdx.x; keeps_steps && i < nsteps * STEP_WORDS; i += MOVERS / 2) {
      ((uint32_t *)own.steps)[i] = ((const uint32_t *)steps)[i];
    }
  }
  if (keeps_steps) steps = own.steps;
  if (threadIdx.x == 0) own.has_non_finite = 0;
  if (threadIdx.x < 2) {
    own.stopped[threadIdx.x] = 0;
    own.slots[threadIdx.x].refresh = 0;
  }
  wait_for_previous_kernel();
  __syncthreads();
  if (own.work.flags & CINCH_FACTOR_AT) {
    // The factor is loaded here, and by one thread only: the previous kernel of the stream may have
    // written it.
    if (threadIdx.x == 0) own.work.factor = Mover::factor_at(own.work.factor);
    __syncthreads();
  }

  const Stop stop = {own.stopped};
  const uint32_t comm_channel = own.work.first_channel + channel;
  if (Mover::draws && (own.work.flags & CINCH_REDRAW)) {
    if (threadIdx.x == 0) {
      redraw(comm, comm_channel, *(uint32_t(*)[4])(own.work.codec.word + 2));
    }
    __syncthreads();
  }
  const uint32_t channels = own.work.channels;
  const uint32_t passes =
      own.work.passes > channel ? (own.work.passes - channel + channels - 1) / channels : 0;

  if (role() == Role::move) {
    Mover::prepare(MOVERS);
    sync_movers();
    const Mover mover(own.work, comm, stop);
    const uint32_t tiles = tiles_of(mover, (uint32_t)min(own.work.chunk, own.work.count));
#pragma unroll 1
    for (uint32_t half = 0;; half ^= 1) {
      wait_ready(half);
      if (own.batches[half].jobs == 0) {
        arrive_moved(half);
        break;
      }
      if constexpr (Mover::keeps_scales) {
        if (own.work.scales != nullptr) {
          if (!stop.is_set()) scan_batch<Mover>(comm, half, tiles);
          sync_movers();
        }
      }
      if (!stop.is_set()) move_batch<Mover>(comm, half, tiles);
      arrive_moved(half);
    }
  } else if (role() == Role::wait) {
    const Walk walk = {steps, nsteps, own.work.stages, channel, channels, passes};
    Waiter<Mover::protocol> waiter(comm, own.work, comm_channel, stop);
    const Mover mover(own.work, comm, stop);
    const uint32_t element_bytes = mover.element_bytes();
    const uint32_t mine = threadIdx.x - MOVERS;
    uint32_t half = 0, used = 0;
    const auto free_half = [&]() {
      if (used == 2) {
        wait_free(half);
      } else {
        ++used;
      }
    };
    walk.each([&](const cinch_step &batch, uint32_t at, uint32_t pass) {
      free_half();
      BatchSlots &slots = own.slots[half];
      if (mine < batch.batch) {
        const cinch_step &step = (&batch)[mine];
        uint32_t at_peers = step.peers;
        if (!keeps_peers) {
          at_peers = KEPT_PEERS + half * BATCH_PEERS + step.peers - batch.peers;
          const uint32_t count = step.nrecv + step.nsend;
          for (uint32_t i = 0; i < count; ++i) own.peers[at_peers + i] = peers[step.peers + i];
        }
        Job &job = own.jobs[half][mine];
        locate(own, step, at_peers, pass, element_bytes, half, job);
        job.fast_path = mover.has_fast_path(job);
        if (Mover::keeps_scales && own.work.scales != nullptr) begin_scale(own.work, job);
      }
      if (mine == 0) {
        own.batches[half] = {batch.batch, batch.recv_mask, batch.send_mask, at, pass};
      }
      if (Mover::protocol != CINCH_SIMPLE) {
        if (mine == 0) slots.refresh = 0;
        sync_waiters();
      }
      if (!stop.is_set()) waiter.wait(batch, at, pass, slots);
      arrive_ready(half);
      half ^= 1;
    });
    const bool launches = (own.work.flags & CINCH_LAUNCH_DEPENDENTS) != 0;
    if (Mover::protocol == CINCH_SIMPLE && launches) {
      // All messages and credits have arrived, so no waiter polls any more. In ll and ll128 the
      // movers poll the payload; there the publishers launch the dependents.
      sync_waiters();
      launch_dependents();
    }
    free_half();
    if (mine == 0) own.batches[half].jobs = 0;
    arrive_ready(half);
  } else {
    Publisher<Mover::protocol> publisher(comm, own.work, comm_channel);
#pragma unroll 1
    for (uint32_t half = 0;; half ^= 1) {
      wait_moved(half);
      const Batch batch = own.batches[half];
      if (batch.jobs == 0) break;
      const bool stopped = stop.is_set();
      if (stopped) report_missing(comm, own, stop, comm_channel, half);
      arrive_free(half);
      if (!stopped) publisher.publish(batch.recv_mask, batch.send_mask);
    }
    if (Mover::protocol != CINCH_SIMPLE && (own.work.flags & CINCH_LAUNCH_DEPENDENTS)) {
      launch_dependents();
    }
    if (!stop.is_set()) publisher.finish();
  }
  const bool ends_scales = Mover::keeps_scales && own.work.scales != nullptr && own.work.ends;
  const bool takes_verdict = Mover::takes_verdict && own.work.statistics != nullptr;
  if (own.work.residuals != nullptr || ends_scales || takes_verdict) {
    __syncthreads();
    if (threadIdx.x == 0 && !stop.is_set()) {
      if (own.work.residuals != nullptr) end_feedback(*own.work.residuals, channels);
      if (ends_scales) end_scales(*own.work.scales, own.work.codec.word[REFRESH_WORD], channels);
      if (takes_verdict) add_verdict(comm, own);
    } else if (threadIdx.x == 0 && takes_verdict) {
      // No block writes the statistics of a failed call. Those of an earlier one must not pass for them.
      own.work.statistics->known = 0;
    }
  }
}

}  // namespace cinch
