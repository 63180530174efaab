// The schedule interpreter: one block walks the steps of one lane.
//
// Launch: one block a channel, BLOCK_THREADS threads, all blocks of all works resident at once.
// Each block takes the passes channel, channel + channels, ... of its work over its own lane, so
// that blocks never wait for one another.
//
// The waiters walk the steps. For each batch they wait for its messages and slots, work out where
// its chunks lie, and leave in shared memory all that the others need: the movers share the tiles of
// all its chunks, one chunk after the other in turn, so that small chunks of many peers go at once;
// the publisher publishes. The three work on different batches at a time: see exec/group.cuh. A
// batch of no jobs ends the walk.
//
// The walk is schedule::walk: by time, the oldest pass first, so that a rank frees the slots that
// its peers need before it waits for slots itself.
#pragma once

#include "abi.h"
#include "fifo/fifo.cuh"
#include "ptx/grid.cuh"

namespace cinch {

// One step of one pass, as the movers see it.
struct Job {
  const uint8_t *input;  // this chunk of the input
  uint8_t *output;       // this chunk of the output
  uint32_t elements;     // a chunk fits a slot
  uint32_t first;        // place of its first element in the input: what it draws hangs on that
  uint16_t peers;        // where in the channel's list its receives stand, then its sends
  uint8_t op;
  uint8_t own;
  uint8_t own_after;
  uint8_t nrecv;
  uint8_t nsend;
  uint8_t half;          // of the shared state
  bool aligned;          // to 16 bytes, as far as they are used
  bool usual;            // what Mover::usual says

  __device__ __forceinline__ uint8_t sender(uint32_t r) const;
  __device__ __forceinline__ const uint8_t *source(uint32_t r) const;
  __device__ __forceinline__ uint8_t *target(uint32_t t) const;
  __device__ __forceinline__ uint32_t source_flag(uint32_t r) const;
  __device__ __forceinline__ uint32_t target_flag(uint32_t t) const;
  __device__ __forceinline__ bool refresh() const;

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

// What a raw step does besides moving, in a call that reduces.
struct Arithmetic {
  bool computes;  // terms are added, or the input multiplied
  bool divides;
  uint32_t own;   // cinch_own of the own contribution, where it is read

  __device__ __forceinline__ Arithmetic(const cinch_work &work, const Job &job, bool reduces) {
    const bool premultiplies = (work.flags & CINCH_PREMULTIPLY) != 0;
    computes = reduces &&
               (job.sums() || job.op == CINCH_REDUCE || (premultiplies && job.nrecv == 0));
    divides = reduces && (work.flags & CINCH_AVERAGE) && job.is_final();
    own = job.sums() ? (uint32_t)job.own : (uint32_t)CINCH_OWN_EXACT;
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

// Steps and peers that fit are kept in shared memory. Of longer lists steps are read where they are,
// and each batch's peers copied: a batch has a peer once in each direction.
constexpr uint32_t KEPT_STEPS = CINCH_KEPT_STEPS;
constexpr uint32_t KEPT_PEERS = 512;
constexpr uint32_t BATCH_PEERS = 2 * CINCH_MAX_RANKS;

// What movers and the publisher learn of a batch.
struct Batch {
  uint32_t jobs;  // 0: there are no more batches
  uint32_t recv_mask;
  uint32_t send_mask;
  uint32_t step;  // number of its first step
  uint32_t pass;
};

// What a block keeps in shared memory.
struct Channel {
  Places places[2];
  Job jobs[2][CINCH_MAX_BATCH];
  Batch batches[2];
  cinch_work work;
  cinch_step steps[KEPT_STEPS];
  uint8_t peers[KEPT_PEERS + 2 * BATCH_PEERS];
  uint32_t stopped[2];
};

// The block's own. By name and not by reference, so that the compiler sees shared memory everywhere:
// a load through a pointer to it is one to anywhere, and ten times as slow.
__device__ __forceinline__ Channel &this_channel() {
  __shared__ Channel channel;
  return channel;
}

__device__ __forceinline__ uint8_t Job::sender(uint32_t r) const {
  return this_channel().peers[peers + r];
}
__device__ __forceinline__ const uint8_t *Job::source(uint32_t r) const {
  return this_channel().places[half].at[sender(r)];
}
__device__ __forceinline__ uint8_t *Job::target(uint32_t t) const {
  return this_channel().places[half].at[WARP + this_channel().peers[peers + nrecv + t]];
}
__device__ __forceinline__ uint32_t Job::source_flag(uint32_t r) const {
  return this_channel().places[half].flag[sender(r)];
}
__device__ __forceinline__ uint32_t Job::target_flag(uint32_t t) const {
  return this_channel().places[half].flag[WARP + this_channel().peers[peers + nrecv + t]];
}
__device__ __forceinline__ bool Job::refresh() const {
  return this_channel().places[half].refresh != 0;
}

// A channel's share of a work.
struct Walk {
  const cinch_step *steps;
  uint32_t nsteps;
  uint32_t stages;
  uint32_t channel;
  uint32_t channels;
  uint32_t passes;

  // Calls visit(batch, index of its first step, pass) for all batches, in order.
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

// `Mover` is a class with
//   static constexpr int protocol;
//   static constexpr bool draws;               whether it may round at random
//   static void prepare(uint32_t threads);     once, by the movers, before a barrier of theirs
//   static uint64_t factor_at(uint64_t);       the word of a factor that lies there
//   Mover(const cinch_work &, const cinch_comm_view &, Stop);
//   uint32_t element_bytes() const;
//   uint32_t tile_elements() const;            elements that a warp moves at once
//   bool usual(const Job &) const;             whether whole tiles may go by quicker loops
//   void tiles(const Job &, uint32_t first, uint32_t last);   called by a whole warp; of the channel

// Tiles of a chunk of `elements`.
template <class Mover>
__device__ __forceinline__ uint32_t tiles_of(const Mover &mover, uint32_t elements) {
  return (elements + mover.tile_elements() - 1) / mover.tile_elements();
}

// The movers share the tiles of a batch, of whose chunks none has more than `tiles`: parts of a pass
// are equal but for the last ones, which are shorter. Out of line, so that the registers of the walk
// do not burden the loops that move data. What movers can be told they do not find out: a small call
// waits for the start of each of its batches.
template <class Mover>
__device__ __noinline__ void move_batch(const cinch_comm_view &comm, uint32_t half,
                                        uint32_t tiles) {
  Channel &own = this_channel();
  const Stop stop = {own.stopped};
  const Mover mover(own.work, comm, stop);
  if (Mover::protocol != CINCH_SIMPLE && own.places[half].refresh) {
    tiles = max(tiles, tiles_of(mover, comm.fifo.slot_bytes / mover.element_bytes()));
  }
  // Each warp takes an equal share of the tiles of all jobs, in order, so that it looks at a job
  // once for many tiles.
  const uint32_t all = tiles * own.batches[half].jobs;
  uint32_t first = all * mover_warp() >> LOG2_MOVER_WARPS;
  uint32_t left = (all * (mover_warp() + 1) >> LOG2_MOVER_WARPS) - first;
  const Job *job = own.jobs[half];
  for (; first >= tiles; first -= tiles) ++job;
#pragma unroll 1
  for (; left > 0; ++job, first = 0) {
    const uint32_t last = min(tiles, first + left);
    mover.tiles(*job, first, last);
    left -= last - first;
  }
}

// Where the chunk of a step lies. `peers` is where its peers stand.
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
  // Blocks of any number of elements follow one another, so this differs from chunk to chunk.
  const bool reads = job.reads() || job.nrecv == 0, writes = job.writes();
  const uintptr_t used = (reads ? (uintptr_t)job.input : 0) | (writes ? (uintptr_t)job.output : 0);
  job.aligned = used % 16 == 0;
}

// Says whose data did not come, after movers have polled for it in vain.
__device__ __forceinline__ void report_missing(const cinch_comm_view &comm, const Channel &own,
                                               Stop stop, uint32_t lane, uint32_t half) {
  const uint32_t missing = stop.missing();
  // The first report counts, which is that of the batch in which it went wrong.
  if (lane_id() != 0 || missing == 0) return;
  // The flag has the lower bits of the number, and cursors stand where they did before this launch.
  const uint64_t before = cursor_of(comm, lane, missing - 1)->received;
  const uint64_t number = before + ((own.places[half].flag[missing - 1] - (uint32_t)before) & NUMBER_MASK);
  const Batch &batch = own.batches[half];
  const Waiting waiting = {missing - 1, 0, lane, batch.step, batch.pass};
  report(comm, CINCH_TROUBLE_TIMEOUT, waiting, number, number - 1, own.work.signature, nullptr);
}

// Has a replay draw other numbers than the last one: a lane over which anything was encoded has sent
// messages since. By one thread, before anything is published.
static __device__ __noinline__ void redraw(const cinch_comm_view &comm, uint32_t lane, uint32_t (&key)[4]) {
  uint64_t count = 0;
  for (uint32_t peer = 0; peer < comm.nranks; ++peer) count += cursor_of(comm, lane, peer)->sent;
  // The finaliser of SplitMix64, so that counts in a row have nothing in common.
  uint64_t z = count * 0x9e3779b97f4a7c15u;
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
  z = (z ^ z >> 27) * 0x94d049bb133111ebu;
  z ^= z >> 31;
  for (uint32_t half = 0; half < 2; ++half) {
    key[2 * half] ^= (uint32_t)z;
    key[2 * half + 1] ^= (uint32_t)(z >> 32);
  }
}

// What a call leaves becomes what the next one, or the next replay, finds: once the last of its
// `blocks` is through, since blocks read `turn` for as long as they work. A call that fails leaves
// all as it was. By one thread of each block, behind a barrier.
static __device__ __noinline__ void end_feedback(cinch_residuals &residuals, uint32_t blocks) {
  __threadfence();  // SYNC POINT residuals: this block has read `turn`
  if (atomicAdd(&residuals.arrived, 1) + 1 == blocks) {
    __threadfence();  // SYNC POINT residuals: so have all
    residuals.arrived = 0;
    residuals.turn ^= 1;
  }
}

template <class Mover>
__device__ __forceinline__ void interpret(const cinch_args &args) {
  Channel &own = this_channel();
  const cinch_comm_view &comm = args.comm;
  if (args.far) await_what_is_before();
  const uint8_t *blob = args.far ? args.far : args.blob;
  const cinch_work *works = (const cinch_work *)blob;
  const cinch_step *steps = (const cinch_step *)(works + args.nworks);
  const uint8_t *peers = (const uint8_t *)(steps + args.nsteps);
  // What a launch of one work, which most are, copies is known without a look at it: small calls wait
  // for every load that waits for another.
  uint32_t channel = blockIdx.x, nsteps = args.nsteps;
  if (args.nworks > 1) {
    while (blockIdx.x >= works->first_block + works->channels) ++works;
    channel -= works->first_block;
    nsteps = works->nsteps;
    steps += works->steps;
  }
  const bool keeps_steps = nsteps <= KEPT_STEPS, keeps_peers = args.npeers <= KEPT_PEERS;
  // Each of the three by threads of its own.
  constexpr uint32_t WORK_WORDS = sizeof(own.work) / 4, STEP_WORDS = sizeof(cinch_step) / 4;
  static_assert(WORK_WORDS <= BLOCK_THREADS - MOVERS, "a word a thread");
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
  if (threadIdx.x < 2) {
    own.stopped[threadIdx.x] = 0;
    own.places[threadIdx.x].refresh = 0;
  }
  await_what_is_before();
  __syncthreads();
  if (own.work.flags & CINCH_FACTOR_AT) {
    // Read here, in the order of the stream, and once.
    if (threadIdx.x == 0) own.work.factor = Mover::factor_at(own.work.factor);
    __syncthreads();
  }

  const Stop stop = {own.stopped};
  const uint32_t lane = own.work.first_lane + channel;
  if (Mover::draws && (own.work.flags & CINCH_REDRAW)) {
    if (threadIdx.x == 0) {
      redraw(comm, lane, *(uint32_t(*)[4])(own.work.codec.word + 2));
    }
    __syncthreads();
  }
  const uint32_t channels = own.work.channels;
  const uint32_t passes =
      own.work.passes > channel ? (own.work.passes - channel + channels - 1) / channels : 0;

  // Once something has gone wrong, all go on through the barriers, and nobody waits or moves.
  if (role() == Role::move) {
    Mover::prepare(MOVERS);
    meet_movers();
    const Mover mover(own.work, comm, stop);
    const uint32_t tiles = tiles_of(mover, (uint32_t)min(own.work.chunk, own.work.count));
#pragma unroll 1
    for (uint32_t half = 0;; half ^= 1) {
      await_ready(half);
      if (own.batches[half].jobs == 0) {
        say_moved(half);
        break;
      }
      if (!stop.is_set()) move_batch<Mover>(comm, half, tiles);
      say_moved(half);
    }
  } else if (role() == Role::wait) {
    const Walk walk = {steps, nsteps, own.work.stages, channel, channels, passes};
    Waiter<Mover::protocol> waiter(comm, own.work, lane, stop);
    const Mover mover(own.work, comm, stop);
    const uint32_t element_bytes = mover.element_bytes();
    const uint32_t mine = threadIdx.x - MOVERS;
    uint32_t half = 0, used = 0;
    const auto free_half = [&]() {
      if (used == 2) {
        await_free(half);
      } else {
        ++used;
      }
    };
    walk.each([&](const cinch_step &batch, uint32_t at, uint32_t pass) {
      free_half();
      Places &places = own.places[half];
      if (mine < batch.batch) {
        const cinch_step &step = (&batch)[mine];
        uint32_t place = step.peers;
        if (!keeps_peers) {
          place = KEPT_PEERS + half * BATCH_PEERS + step.peers - batch.peers;
          const uint32_t count = step.nrecv + step.nsend;
          for (uint32_t i = 0; i < count; ++i) own.peers[place + i] = peers[step.peers + i];
        }
        Job &job = own.jobs[half][mine];
        locate(own, step, place, pass, element_bytes, half, job);
        job.usual = mover.usual(job);
      }
      if (mine == 0) {
        own.batches[half] = {batch.batch, batch.recv_mask, batch.send_mask, at, pass};
      }
      if (Mover::protocol != CINCH_SIMPLE) {
        if (mine == 0) places.refresh = 0;
        meet_waiters();
      }
      if (!stop.is_set()) waiter.wait(batch, at, pass, places);
      say_ready(half);
      half ^= 1;
    });
    const bool lets_next_begin = (own.work.flags & CINCH_LETS_NEXT_BEGIN) != 0;
    if (Mover::protocol == CINCH_SIMPLE && lets_next_begin) {
      // All that peers send is there, and all slots are: none of the waiters waits any more. In the other
      // protocols it is the movers that wait for what is sent.
      meet_waiters();
      let_next_begin();
    }
    free_half();
    if (mine == 0) own.batches[half].jobs = 0;
    say_ready(half);
  } else {
    Publisher<Mover::protocol> publisher(comm, own.work, lane);
#pragma unroll 1
    for (uint32_t half = 0;; half ^= 1) {
      await_moved(half);
      const Batch batch = own.batches[half];
      if (batch.jobs == 0) break;
      const bool stopped = stop.is_set();
      if (stopped) report_missing(comm, own, stop, lane, half);
      say_free(half);
      if (!stopped) publisher.publish(batch.recv_mask, batch.send_mask);
    }
    if (Mover::protocol != CINCH_SIMPLE && (own.work.flags & CINCH_LETS_NEXT_BEGIN)) let_next_begin();
    if (!stop.is_set()) publisher.finish();
  }
  if (own.work.residuals != nullptr) {
    __syncthreads();
    if (threadIdx.x == 0 && !stop.is_set()) end_feedback(*own.work.residuals, channels);
  }
}

}  // namespace cinch
