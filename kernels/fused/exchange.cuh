// The common part of the fused kernels, for every protocol and codec: the pattern of the exchange,
// the addresses of its messages, and the end of a call.
//
// A fused kernel has no slots and no counters. Each peer buffer has an area for it, in two halves
// that calls use alternately:
//
//   area   half of even calls            half of odd calls
//          | round 0    | round 1    |  | round 0    | round 1    |
//            (round 1: second round of a two-shot all_reduce; else round 0 has the whole half)
//
// Synchronisation contract: in every call every rank waits for a message of every other rank; a
// rank without data sends an empty message. A peer writes half h again two calls later. By then it
// has finished the call in between, for which it needed this rank's messages. This rank sent these
// messages after it finished reading half h.
//
// Flags carry the sequence number of the call (`epoch`), which lives in device memory, so that a
// CUDA graph may replay the launch. Calls that use another area have a sequence number of their
// own.
#pragma once

#include "abi.h"
#include "dtype/average.cuh"
#include "dtype/element.cuh"
#include "fifo/wait.cuh"
#include "prims/user.cuh"
#include "ptx/grid.cuh"

namespace cinch {

constexpr uint32_t FUSED_THREADS = CINCH_FUSED_THREADS;

// Number of bits of the sequence number in the flag of an ll128 line; the others are bits of the
// hash of the call's signature. A million calls a second wrap it around after 12 days, and a line
// that was not rewritten meanwhile still has to carry another hash.
constexpr uint64_t CALL_BITS = 40;

// Returns the flag of the lines of call number `epoch`.
__device__ __forceinline__ uint64_t call_flag(uint64_t epoch, uint64_t hash) {
  constexpr uint64_t mask = (1ull << CALL_BITS) - 1;
  return (hash & ~mask) | ((epoch + 1) & mask);
}

// Number of words that a thread loads before it sends the first of them.
constexpr uint32_t SENT = 4;

// Which part of its input a rank sends, and to whom.
enum class Sends {
  TO_ALL,        // every rank sends its whole input to all others
  A_BLOCK_EACH,  // every rank sends each other rank its block
  A_PART_EACH,   // every rank sends each other rank its part of the message
  FROM_ROOT,     // the root sends its whole input to all others
  TO_ROOT,       // every rank sends its whole input to the root
};

// A call as one rank executes it. It addresses data in words of 8 bytes. With BLOCKS the input or
// the output has a block for each rank.
template <Sends SENDS, bool BLOCKS>
struct Exchange {
  static constexpr bool PARTS = SENDS == Sends::A_PART_EACH;

  __device__ __forceinline__ Exchange(const cinch_oneshot_args &args, uint32_t element_bytes,
                                      uint64_t epoch, uint32_t *stopped)
      : args(args),
        comm(args.comm),
        epoch(epoch),
        input((const uint8_t *)args.input),
        output((uint8_t *)args.output),
        bytes((uint32_t)args.count * element_bytes),
        size(element_bytes),
        // Number of words in a full part. Parts at the end of the message may be shorter or empty.
        words(args.words),
        area((uint32_t)args.half / (PARTS ? 2 : 1)),
        // Consecutive blocks have the alignment of the first block if they consist of whole words.
        aligned((args.flags & CINCH_ALIGNED) != 0 && (!BLOCKS || bytes % 8 == 0)),
        stop{stopped} {}

  // Returns the offset in a peer buffer of the packets or lines of a round.
  __device__ __forceinline__ uint64_t offset_of(uint32_t round) const {
    return args.area + (epoch & 1) * args.half + round * area;
  }

  // Return the distance in bytes between the blocks or parts of consecutive ranks, and the number
  // of bytes in the block or part of `rank`.
  __device__ __forceinline__ uint32_t stride() const { return PARTS ? 8 * words : bytes; }
  __device__ __forceinline__ uint32_t bytes_of(uint32_t rank) const {
    if (!PARTS) return bytes;
    const uint32_t begin = rank * stride();
    return bytes > begin ? min(bytes - begin, stride()) : 0;
  }
  __device__ __forceinline__ bool has(uint32_t rank, uint32_t i) const {
    return PARTS ? 8 * i < bytes_of(rank) : i < words;
  }

  // Returns the offset in the input of the bytes that `peer` receives.
  __device__ __forceinline__ uint64_t begin_of(uint32_t peer) const {
    return PARTS || SENDS == Sends::A_BLOCK_EACH ? (uint64_t)peer * stride() : 0;
  }

  // Loads word i of the data that `peer` receives; zeros beyond the end of that data.
  __device__ __forceinline__ uint64_t load(uint32_t peer, uint32_t i) const {
    return load_word(input + begin_of(peer), i, bytes_of(peer), size, aligned);
  }

  // Stores word i of the block or part of `rank` in the output. For an output without blocks,
  // `rank` is 0.
  __device__ __forceinline__ void store(uint32_t rank, uint32_t i, uint64_t value) const {
    store_word(output + (uint64_t)rank * stride(), i, bytes_of(rank), size, aligned, value);
  }

  // Returns the k-th peer after this rank. Each rank starts with another peer, so that no port
  // receives all messages at once.
  __device__ __forceinline__ uint32_t peer_at(uint32_t k) const {
    const uint32_t peer = comm.rank + k;
    return peer >= comm.nranks ? peer - comm.nranks : peer;
  }

  const cinch_oneshot_args &args;
  const cinch_comm_view &comm;
  uint64_t epoch;  // loaded late: the first loads of the input do not wait for it
  const uint8_t *input;
  uint8_t *output;
  uint32_t bytes;  // of the message, or of a block
  uint32_t size;   // of an element
  uint32_t words;  // that a peer receives in one round
  uint32_t area;   // bytes of a half for one round
  bool aligned;
  Stop stop;
};

// Adds the ranks' contributions, a Piece (PacketElements, LineElements) at a time. A sum has at
// least two terms and makes a NaN canonical at its end. Thus the terms may be unpacked to any NaN.
template <class E, class Piece>
struct Contributions {
  using Word = typename Piece::Word;
  using Acc = typename Piece::Acc;
  static constexpr int N = Piece::N;

  __device__ __forceinline__ explicit Contributions(const cinch_oneshot_args &args)
      : args(args),
        premultiplies((args.flags & CINCH_PREMULTIPLY) != 0),
        factor(args.flags & CINCH_FACTOR_AT ? E::factor_at(args.factor) : args.factor) {}

  // Returns `word` in the form in which the peers receive it: multiplied by the factor of a
  // pre-multiplied sum.
  __device__ __forceinline__ Word premultiplied(Word word) const {
    if (!premultiplies) return word;
    Acc x[Piece::ROOM];
    unrounded(word, x);
    return Piece::pack(x);
  }

  // Unpacks `word`. In a pre-multiplied sum it multiplies by the factor, but does not round to the
  // element type.
  __device__ __forceinline__ void unrounded(Word word, Acc (&x)[Piece::ROOM]) const {
    Piece::unpack_any_nan(word, x);
    if (!premultiplies) return;
#pragma unroll
    for (int k = 0; k < N; ++k) x[k] = E::premultiply(x[k], factor);
  }

  // Adds all ranks' terms in the order of ranks. `mine` is this rank's term, and `receive` delivers
  // the terms of other ranks in groups. Returns false if a wait failed.
  template <class Receive>
  __device__ __forceinline__ bool add(Receive &&receive, const Acc (&mine)[Piece::ROOM],
                                      Word &result) const {
    Acc sum[Piece::ROOM];
    const bool complete = receive([&](uint32_t first, const auto &group) {
      // The most frequent operation has a loop of its own, without a branch for each term.
      const Combine op = static_cast<Combine>(args.combine);
      if (op == Combine::sum) {
        fold(first, group, Combine::sum, mine, sum);
      } else {
        fold(first, group, op, mine, sum);
      }
    });
    if (!complete) return false;
#pragma unroll
    for (int k = 0; k < N; ++k) sum[k] = E::canonicalize(sum[k]);
    if (args.flags & CINCH_AVERAGE) {
      const Average<E> average(args.flags, args.factor, args.comm.nranks);
#pragma unroll
      for (int k = 0; k < N; ++k) sum[k] = average.of(sum[k]);
    }
    result = Piece::pack(sum);
    return true;
  }

 private:
  // Adds a group of terms, which begins with the term of rank `first`.
  template <uint32_t K>
  __device__ __forceinline__ void fold(uint32_t first, const Word (&group)[K], Combine op,
                                       const Acc (&mine)[Piece::ROOM],
                                       Acc (&sum)[Piece::ROOM]) const {
#pragma unroll
    for (uint32_t j = 0; j < K; ++j) {
      if (first + j >= args.comm.nranks) break;
      Acc term[Piece::ROOM];
      Piece::unpack_any_nan(group[j], term);
#pragma unroll
      for (int k = 0; k < N; ++k) {
        if (first + j == args.comm.rank) term[k] = mine[k];
        sum[k] = first + j == 0 ? term[k] : E::combine_any_nan(sum[k], term[k], op);
      }
    }
  }

 public:
  const cinch_oneshot_args &args;
  bool premultiplies;
  uint64_t factor;
};

template <class Does>
__device__ __forceinline__ void run_fused(const cinch_oneshot_args &args) {
  __shared__ uint32_t stopped[2];
  if (threadIdx.x == 0) stopped[0] = stopped[1] = 0;
  wait_for_previous_kernel();
  const uint64_t epoch = args.epoch[0];
  __syncthreads();
  Does::exchange(args, epoch, stopped);
  __syncthreads();
  if (args.flags & CINCH_LAUNCH_DEPENDENTS) launch_dependents();
  // The last block to finish advances the sequence number: all blocks have loaded it by then.
  if (threadIdx.x == 0) {
    unsigned long long *done = (unsigned long long *)&args.epoch[1];
    if (atomicAdd(done, 1ull) == gridDim.x - 1) {
      args.epoch[1] = 0;
      args.epoch[0] = epoch + 1;
    }
    if (stopped[1] != 0) {
      const WaitInfo info = {stopped[1] - 1, 0, 0, 0, 0};
      report(args.comm, CINCH_TROUBLE_TIMEOUT, info, epoch + 1, epoch, args.signature, nullptr);
    }
  }
}

}  // namespace cinch
