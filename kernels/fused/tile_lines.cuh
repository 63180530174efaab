// How encoded tiles of fused kernels travel: in lines of 128 bytes, four of which a warp stores and
// loads by one instruction, 16 bytes a lane. A struct for each protocol.
//
//   WholeLines   ll128: 120 bytes of payload in a line, and a flag that stands for the whole line
//   Packets      ll: 8 bytes of payload and two flags in the 16 bytes of each lane, so 64 bytes of
//                payload in a line; right on every path, also over PCIe and in host memory
#pragma once

#include "abi.h"
#include "fifo/fifo.cuh"
#include "fused/exchange.cuh"
#include "prims/ll.cuh"
#include "prims/ll128.cuh"

namespace cinch {

struct WholeLines {
  static constexpr uint32_t LINE_PAYLOAD = CINCH_LINE_BYTES - 8;
  // Number of encoded tiles for which a warp polls together.
  static constexpr uint32_t SOURCES = 4;
  using Words = uint4;  // of a lane

  __device__ __forceinline__ WholeLines(const cinch_oneshot_args &args, uint64_t epoch)
      : flag_(call_flag(epoch, args.signature_hash)) {}

  // Return this lane's words of four lines, whose payload begins at `from`, and store them there.
  // The lane with the flag loads a word of the next lane, which it does not send.
  static __device__ __forceinline__ Words take(const uint8_t *from) {
    const uint2 *words = (const uint2 *)from + word_of_lane();
    return make_uint4(words[0].x, words[0].y, words[1].x, words[1].y);
  }
  static __device__ __forceinline__ void keep(uint8_t *to, uint4 v) {
    uint2 *words = (uint2 *)to + word_of_lane();
    words[0] = make_uint2(v.x, v.y);
    if (!carries_flag()) words[1] = make_uint2(v.z, v.w);
  }

  __device__ __forceinline__ void send(uint8_t *lines, Words words, bool has_line) const {
    store_lines(lines, words, flag_, has_line);
  }
  // Returns whether a lane's 16 bytes are complete, as far as it can tell.
  __device__ __forceinline__ bool is_there(uint4 v) const { return line_has(v, flag_); }

  // A flag differs from those of all lines that are still in an area.
  __device__ __forceinline__ void refresh(const cinch_oneshot_args &, uint64_t, uint32_t) const {}

 private:
  uint64_t flag_;
};

struct Packets {
  static constexpr uint32_t LINE_PAYLOAD = CINCH_LINE_BYTES / 2;
  static constexpr uint32_t SOURCES = 2;
  using Words = uint2;

  // The flags of a warp have all bits of the hash of the signature, 12 in each: no packet of its own
  // carries the hash.
  __device__ __forceinline__ Packets(const cinch_oneshot_args &args, uint64_t epoch)
      : epoch_(epoch),
        low_(flag(args.signature_hash, 2 * lane_id())),
        high_(flag(args.signature_hash, 2 * lane_id() + 1)) {}

  static __device__ __forceinline__ Words take(const uint8_t *from) {
    return ((const uint2 *)from)[lane_id()];
  }
  static __device__ __forceinline__ void keep(uint8_t *to, uint4 v) {
    ((uint2 *)to)[lane_id()] = make_uint2(v.x, v.z);
  }

  __device__ __forceinline__ void send(uint8_t *lines, Words words, bool has_line) const {
    store_line(has_line, lines + 16 * lane_id(), make_uint4(words.x, low_, words.y, high_));
  }
  __device__ __forceinline__ bool is_there(uint4 v) const { return v.y == low_ && v.w == high_; }

  // Sends packets for the rest of each round's area, behind its first `used` bytes, once in
  // REFRESH_PERIOD calls. Otherwise a packet that calls rarely use could keep its flag until the
  // sequence numbers wrap around. Raw calls alone use the last line, for the hash of a signature.
  __device__ __forceinline__ void refresh(const cinch_oneshot_args &args, uint64_t area,
                                          uint32_t used) const {
    if (!refreshes(low_, 2)) return;
    const cinch_comm_view &comm = args.comm;
    const uint32_t end = (uint32_t)args.half, half = end / 2;
    const uint32_t threads = gridDim.x * blockDim.x;
    const bool has_rounds = args.phases & CINCH_SENDS_SUMS;
#pragma unroll 1
    for (uint32_t at = 16 * (blockIdx.x * blockDim.x + threadIdx.x); at < end; at += 16 * threads) {
      const uint32_t in_round = has_rounds && at >= half ? at - half : at;
      if (in_round < used) continue;
      for (uint32_t peer = 0; peer < comm.nranks; ++peer) {
        if (peer != comm.rank) {
          store_ll(comm.outbox[peer] + area + at, 0, 0, message_flag(epoch_, 0));
        }
      }
    }
  }

 private:
  // Returns flag `number` of a warp's 64, with the bits of the hash from place 12 * number on.
  __device__ __forceinline__ uint32_t flag(uint64_t hash, uint32_t number) const {
    const uint32_t turn = 12 * number % 64;
    const uint64_t turned = turn == 0 ? hash : hash >> turn | hash << (64 - turn);
    return message_flag(epoch_, (uint32_t)turned << NUMBER_BITS);
  }

  uint64_t epoch_;
  uint32_t low_, high_;
};

}  // namespace cinch
