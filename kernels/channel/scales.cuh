// Scales that a tensor keeps from call to call, for codecs with a scale for each chunk.
//
//   waiters  look up the kept scale of each chunk that a batch encodes               begin_scale
//   movers   find the largest magnitude of chunks without one, then, behind a barrier, encode; the
//            warp that encodes the last tile of a chunk stores its number and keeps a new scale
//   the last block of a call counts the call                                        end_scales
#pragma once

#include "abi.h"
#include "channel/channel.cuh"
#include "codec/params.h"

namespace cinch {

// Index of `refresh` in the words of cinch_scaled_params.
constexpr uint32_t REFRESH_WORD = offsetof(cinch_scaled_params, refresh) / 4;

// Returns the address of the kept scale of the job's chunk.
__device__ __forceinline__ float *kept_scale(const cinch_work &work, const Job &job) {
  float *const all = (float *)((uint8_t *)work.scales + CINCH_SCALES_BYTES);
  return all + job.first / (uint32_t)work.chunk + job.first / (uint32_t)work.count;
}

// Looks up the scale of the chunk of a job, which is in shared memory and complete.
static __device__ __noinline__ void begin_scale(const cinch_work &work, const Job &job) {
  const bool encodes = job.sends_codes() && !job.forwards() && job.elements > 0;
  const bool has_scale = encodes && work.scales->calls > 0;
  job.scale() = {has_scale ? *kept_scale(work, job) : 0, 0, 0};
}

// Counts a call, or a graph's replay of it. The last of the launch's `blocks` to arrive does so, because other blocks
// read `calls` until they end. One thread of each block calls this after a barrier. A block of a call that failed must
// not call it.
static __device__ __noinline__ void end_scales(cinch_scales &scales, uint32_t refresh,
                                               uint32_t blocks) {
  __threadfence();  // SYNC POINT scales: this block has read `calls`
  if (atomicAdd(&scales.arrived, 1) + 1 == blocks) {
    __threadfence();  // SYNC POINT scales: all blocks have read it
    scales.arrived = 0;
    const uint32_t calls = scales.calls + 1;
    scales.calls = calls < refresh ? calls : 0;
  }
}

}  // namespace cinch
