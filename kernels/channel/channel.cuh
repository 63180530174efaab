// The state of one channel, which the roles of a block share in shared memory.
//
// The waiters fill one half with the slots, jobs and masks of a batch; movers and publishers read
// it. channel/block.cuh has the barriers that hand a half from role to role.
#pragma once

#include "channel/block.cuh"
#include "ptx/base.cuh"

namespace cinch {

// The slots of the messages of one batch. Index p belongs to the message from peer p, index WARP +
// p to the message to peer p.
struct BatchSlots {
  uint8_t *at[2 * WARP];    // payload of the slot
  uint32_t flag[2 * WARP];  // flag of the message, in ll and ll128
  uint32_t refresh;         // not 0: some message of the batch rewrites its whole slot
};

// A step of the schedule, applied to one pass over the message, in the form that the movers
// execute.
struct ChunkScale;
struct Job {
  const uint8_t *input;  // the chunk in the input
  uint8_t *output;       // the chunk in the output
  uint32_t elements;     // of the chunk, which fits a slot
  uint32_t first;        // index in the input of its first element: seeds stochastic rounding
  uint16_t peers;        // index in Channel::peers of its receives, then its sends
  uint8_t op;
  uint8_t own;
  uint8_t own_after;
  uint8_t nrecv;
  uint8_t nsend;
  uint8_t half;        // half of the shared state
  bool aligned;        // input and output are aligned to 16 bytes, as far as the step uses them
  bool fast_path;      // Mover::has_fast_path of the job
  uint8_t intra;       // how messages inside groups are encoded: cinch_intra
  uint8_t intra_recv;  // leading receives that are so encoded; 0 if all messages have the codec
  bool intra_send;     // whether the sends are so encoded; false if all messages have the codec

  __device__ __forceinline__ uint8_t sender(uint32_t r) const;
  __device__ __forceinline__ const uint8_t *source(uint32_t r) const;
  __device__ __forceinline__ uint8_t *target(uint32_t t) const;
  __device__ __forceinline__ uint32_t source_flag(uint32_t r) const;
  __device__ __forceinline__ uint32_t target_flag(uint32_t t) const;
  __device__ __forceinline__ bool refresh() const;
  __device__ __forceinline__ ChunkScale &scale() const;

  __device__ __forceinline__ bool writes() const {
    return op != CINCH_SEND && op != CINCH_RECV_REDUCE_SEND &&
           op != CINCH_RECV_REDUCE_FINISH_SEND;
  }
  __device__ __forceinline__ bool sums() const {
    return op == CINCH_RECV_REDUCE_COPY || op == CINCH_RECV_REDUCE_SEND ||
           op == CINCH_RECV_REDUCE_COPY_SEND || op == CINCH_RECV_REDUCE_FINISH_SEND;
  }
  __device__ __forceinline__ bool is_final() const {
    return op == CINCH_RECV_REDUCE_COPY || op == CINCH_RECV_REDUCE_COPY_SEND ||
           op == CINCH_RECV_REDUCE_FINISH_SEND;
  }
  // Returns whether the step encodes or forwards messages by the call's codec.
  __device__ __forceinline__ bool sends_codes() const { return nsend > 0 && !intra_send; }
  // Returns whether it sends the codes that it receives.
  __device__ __forceinline__ bool forwards() const { return op == CINCH_RECV_COPY_SEND; }
  // Returns whether the step reads the rank's own contribution.
  __device__ __forceinline__ bool reads() const {
    return op == CINCH_SEND || op == CINCH_COPY || op == CINCH_REDUCE ||
           (sums() && own != CINCH_OWN_ABSENT);
  }
};

// The scale of a chunk that a job encodes, with a codec that has a scale for each chunk.
struct ChunkScale {
  float scale;       // the kept scale; 0 if there is none, and the movers must find the largest magnitude
  uint32_t largest;  // bits of the largest magnitude; not finite if an element is not
  uint32_t moved;    // tiles that are encoded or forwarded

  // Returns whether the chunk needs a new scale.
  __device__ __forceinline__ bool is_new() const { return scale == 0; }
  // Returns the scale by which the chunk is encoded.
  __device__ __forceinline__ float of_chunk() const {
    return is_new() ? float_of(largest) : scale;
  }
  // States that an element of the chunk is not finite.
  __device__ __forceinline__ void poison() { atomicMax(&largest, 0x7fc00000u); }
};

// Shared memory caches a list of up to this many steps and a list of up to KEPT_PEERS peers. A
// longer list of steps is read from the kernel's arguments. A longer list of peers is copied batch
// by batch; a batch has each peer at most once in each direction.
constexpr uint32_t KEPT_STEPS = CINCH_KEPT_STEPS;
constexpr uint32_t KEPT_PEERS = 512;
constexpr uint32_t BATCH_PEERS = 2 * CINCH_MAX_PEERS;

// A batch of steps, which the waiters describe here for the movers and publishers.
struct Batch {
  uint32_t jobs;  // 0 ends the walk
  uint32_t recv_mask;
  uint32_t send_mask;
  uint32_t step;  // index of its first step
  uint32_t pass;
};

// Shared memory of a block of the interpreter.
struct Channel {
  BatchSlots slots[2];
  Job jobs[2][CINCH_MAX_BATCH];
  ChunkScale scales[2][CINCH_MAX_BATCH];  // of the jobs
  Batch batches[2];
  cinch_work work;
  cinch_step steps[KEPT_STEPS];
  uint8_t peers[KEPT_PEERS + 2 * BATCH_PEERS];
  uint32_t stopped[2];
  uint32_t has_non_finite;  // not 0: the block has stored an element that is not finite (prims/verdict.cuh)
};

// Returns the block's channel. Callers use this function instead of passing a reference, so that
// the compiler emits shared-memory loads. Generic loads take ten times as long.
__device__ __forceinline__ Channel &this_channel() { return block_shared<Channel>(); }

__device__ __forceinline__ uint8_t Job::sender(uint32_t r) const {
  return this_channel().peers[peers + r];
}
__device__ __forceinline__ const uint8_t *Job::source(uint32_t r) const {
  return this_channel().slots[half].at[sender(r)];
}
__device__ __forceinline__ uint8_t *Job::target(uint32_t t) const {
  return this_channel().slots[half].at[WARP + this_channel().peers[peers + nrecv + t]];
}
__device__ __forceinline__ uint32_t Job::source_flag(uint32_t r) const {
  return this_channel().slots[half].flag[sender(r)];
}
__device__ __forceinline__ uint32_t Job::target_flag(uint32_t t) const {
  return this_channel().slots[half].flag[WARP + this_channel().peers[peers + nrecv + t]];
}
__device__ __forceinline__ bool Job::refresh() const {
  return this_channel().slots[half].refresh != 0;
}
__device__ __forceinline__ ChunkScale &Job::scale() const {
  Channel &own = this_channel();
  return own.scales[half][this - own.jobs[half]];
}

}  // namespace cinch
