// What all fused exchanges have in common, whatever announces their messages: who gets what of the
// input, where what the others send goes, and how a call ends.
//
// Two halves of the area are used in turn. A peer writes half h again two calls later; it has
// finished the call in between by then, for which it needed this rank's messages of that call, and
// those were sent after this rank had finished reading h: every call makes every rank wait for
// every other, for a message without contents if need be. The number of the call lives in device memory, so
// that a graph may replay it; calls that use another area have numbers of their own.
#pragma once

#include "abi.h"
#include "dtype/element.cuh"
#include "fifo/wait.cuh"
#include "prims/user.cuh"
#include "ptx/grid.cuh"

namespace cinch {

constexpr uint32_t ONESHOT_THREADS = CINCH_ONESHOT_THREADS;

// Pieces that a thread loads before it sends the first of them.
constexpr uint32_t SENT = 4;

// Who gets what of the input: everyone all of it, each a block, or each a part of the message; or of the
// root's everyone all, or the root all of everyone's.
enum class Sends { THE_SAME, A_BLOCK_EACH, A_PART_EACH, FROM_ROOT, TO_ROOT };

// A call, in words of 8 bytes. BLOCKS: the input or the output has one for each rank.
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
        // Of parts, the last ones may be shorter, or nothing.
        words(args.words),
        area((uint32_t)args.half / (PARTS ? 2 : 1)),
        // Blocks one behind the other are aligned as the first one is if they are whole words.
        aligned((args.flags & CINCH_ALIGNED) != 0 && (!BLOCKS || bytes % 8 == 0)),
        stop{stopped} {}

  // Where packets or lines of a trip lie in a box.
  __device__ __forceinline__ uint64_t place(uint32_t trip) const {
    return args.area + (epoch & 1) * args.half + trip * area;
  }

  // Bytes between what one rank and the next one get of the input, or give to the output, and how many
  // of them are those of `rank`.
  __device__ __forceinline__ uint32_t stride() const { return PARTS ? 8 * words : bytes; }
  __device__ __forceinline__ uint32_t bytes_of(uint32_t rank) const {
    if (!PARTS) return bytes;
    const uint32_t begin = rank * stride();
    return bytes > begin ? min(bytes - begin, stride()) : 0;
  }
  __device__ __forceinline__ bool has(uint32_t rank, uint32_t i) const {
    return PARTS ? 8 * i < bytes_of(rank) : i < words;
  }

  // Where in the input lies what goes to `peer`.
  __device__ __forceinline__ uint64_t begin_of(uint32_t peer) const {
    return PARTS || SENDS == Sends::A_BLOCK_EACH ? (uint64_t)peer * stride() : 0;
  }

  // Word i of that; zeros beyond its end.
  __device__ __forceinline__ uint64_t load(uint32_t peer, uint32_t i) const {
    return load_word(input + begin_of(peer), i, bytes_of(peer), size, aligned);
  }

  // Word i of the output's block or part of `rank`, where it has any; else of 0.
  __device__ __forceinline__ void store(uint32_t rank, uint32_t i, uint64_t value) const {
    store_word(output + (uint64_t)rank * stride(), i, bytes_of(rank), size, aligned, value);
  }

  // Each rank starts with another peer, so that no port gets all messages at once.
  __device__ __forceinline__ uint32_t peer_at(uint32_t k) const {
    const uint32_t peer = comm.rank + k;
    return peer >= comm.nranks ? peer - comm.nranks : peer;
  }

  const cinch_oneshot_args &args;
  const cinch_comm_view &comm;
  uint64_t epoch;  // as it was loaded: the first elements are asked for before it is needed
  const uint8_t *input;
  uint8_t *output;
  uint32_t bytes;  // of the message, or of a block
  uint32_t size;   // of an element
  uint32_t words;  // of what goes to a peer on one trip
  uint32_t area;  // bytes of a half for one trip
  bool aligned;
  Stop stop;
};

// What the ranks contribute to a sum, a Piece (PacketElements, LineElements) at a time. There are at
// least two of them, so that a NaN among them is combined with something, and may be any.
template <class E, class Piece>
struct Contributions {
  using Word = typename Piece::Word;
  using Acc = typename Piece::Acc;
  static constexpr int N = Piece::N;

  __device__ __forceinline__ explicit Contributions(const cinch_oneshot_args &args)
      : args(args),
        premultiplies((args.flags & CINCH_PREMULTIPLY) != 0),
        factor(args.flags & CINCH_FACTOR_AT ? E::factor_at(args.factor) : args.factor) {}

  // What the peers get of `word`.
  __device__ __forceinline__ Word premultiplied(Word word) const {
    if (!premultiplies) return word;
    Acc x[Piece::ROOM];
    unrounded(word, x);
    return Piece::pack(x);
  }

  // The same before it is rounded to the element type.
  __device__ __forceinline__ void unrounded(Word word, Acc (&x)[Piece::ROOM]) const {
    Piece::unpack_loosely(word, x);
    if (!premultiplies) return;
#pragma unroll
    for (int k = 0; k < N; ++k) x[k] = E::premultiply(x[k], factor);
  }

  // The sum, to which this rank gives `mine`, of what `receive` hands on in groups and in the order of
  // ranks. False if the wait ended early.
  template <class Receive>
  __device__ __forceinline__ bool add(Receive &&receive, const Acc (&mine)[Piece::ROOM],
                                      Word &result) const {
    Acc sum[Piece::ROOM];
    const bool complete = receive([&](uint32_t first, const auto &group) {
      // What is mostly asked for has code of its own, in one piece.
      const Combine op = static_cast<Combine>(args.combine);
      if (op == Combine::sum) {
        fold(first, group, Combine::sum, mine, sum);
      } else {
        fold(first, group, op, mine, sum);
      }
    });
    if (!complete) return false;
#pragma unroll
    for (int k = 0; k < N; ++k) sum[k] = E::settle(sum[k]);
    if (args.flags & CINCH_AVERAGE) {
#pragma unroll
      for (int k = 0; k < N; ++k) sum[k] = E::divide(sum[k], args.comm.nranks);
    }
    result = Piece::pack(sum);
    return true;
  }

 private:
  // Adds what the ranks from `first` on have sent.
  template <uint32_t K>
  __device__ __forceinline__ void fold(uint32_t first, const Word (&group)[K], Combine op,
                                       const Acc (&mine)[Piece::ROOM],
                                       Acc (&sum)[Piece::ROOM]) const {
#pragma unroll
    for (uint32_t j = 0; j < K; ++j) {
      if (first + j >= args.comm.nranks) break;
      Acc term[Piece::ROOM];
      Piece::unpack_loosely(group[j], term);
#pragma unroll
      for (int k = 0; k < N; ++k) {
        if (first + j == args.comm.rank) term[k] = mine[k];
        sum[k] = first + j == 0 ? term[k] : E::combine_loosely(sum[k], term[k], op);
      }
    }
  }

 public:
  const cinch_oneshot_args &args;
  bool premultiplies;
  uint64_t factor;
};

template <class Does>
__device__ __forceinline__ void oneshot(const cinch_oneshot_args &args) {
  __shared__ uint32_t stopped[2];
  if (threadIdx.x == 0) stopped[0] = stopped[1] = 0;
  await_what_is_before();
  const uint64_t epoch = args.epoch[0];
  __syncthreads();
  Does::exchange(args, epoch, stopped);
  __syncthreads();
  if (args.flags & CINCH_LETS_NEXT_BEGIN) let_next_begin();
  // The last block moves on to the next call: all blocks have read the number by then.
  if (threadIdx.x == 0) {
    unsigned long long *done = (unsigned long long *)&args.epoch[1];
    if (atomicAdd(done, 1ull) == gridDim.x - 1) {
      args.epoch[1] = 0;
      args.epoch[0] = epoch + 1;
    }
    if (stopped[1] != 0) {
      const Waiting waiting = {stopped[1] - 1, 0, 0, 0, 0};
      report(args.comm, CINCH_TROUBLE_TIMEOUT, waiting, epoch + 1, epoch, args.signature, nullptr);
    }
  }
}

}  // namespace cinch
