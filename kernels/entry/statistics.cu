// Statistics of whole arrays: of the input of a call, and the verdict of its output.
//
// The kernels are cinch_statistics_TYPE, for every type of floats.
// Launch: any grid, blocks of 256 threads. Each warp takes tiles of 512 elements. Arrays need the
// alignment of their element type; arrays aligned to 16 bytes move in vectors.
#include "channel/statistics.cuh"
#include "entry/elements.cuh"
#include "ptx/grid.cuh"

namespace cinch {

static_assert(THREADS == CINCH_STATISTICS_THREADS, "the host launches CINCH_STATISTICS_THREADS");

// Adds the elements of a tile from `begin` on. A tile of the output adds to the verdict only.
template <class E>
__device__ __forceinline__ void sum_tile(const cinch_statistics_args &args, uint64_t factor,
                                           uint64_t begin, BlockSums &block, LaneSums &lane) {
  const uint64_t i = begin + 16 * lane_id();
  const uint32_t valid = elements_from(args.count, i);
  float x[16];
  load_elements<E>(args.elements, is_aligned(args.elements), args.count, i, x);
  if (args.result != nullptr) {
    if (!is_finite(largest_of(x))) block.record_non_finite();
    return;
  }
  if (args.flags & CINCH_PREMULTIPLY) {
    CINCH_UNROLL
    for (int k = 0; k < 16; ++k) x[k] = E::premultiply(x[k], factor);
  }
  lane.add(x, valid, block);
  count_saturated(x, valid, args.largest, block);
}

// Elements of f64 are added one by one, in f64.
__device__ __forceinline__ void sum_doubles(const cinch_statistics_args &args, uint64_t factor,
                                              uint64_t begin, BlockSums &block, double &sum,
                                              double &most) {
  const double *elements = static_cast<const double *>(args.elements);
  CINCH_ROLL
  for (uint64_t i = begin + lane_id(); i < begin + TILE && i < args.count; i += WARP) {
    double x = elements[i];
    if (args.result == nullptr && args.flags & CINCH_PREMULTIPLY) x = F64::premultiply(x, factor);
    const double magnitude = fabs(x);
    if (magnitude <= 0x1.fffffffffffffp1023) {
      sum = __fma_rn(x, x, sum);
      most = magnitude > most ? magnitude : most;
      if (args.result == nullptr && magnitude > args.largest) atomicAdd(&block.saturated, 1ull);
    } else if (args.result != nullptr) {
      block.record_non_finite();
    } else {
      atomicAdd(&block.non_finite, 1ull);
    }
  }
}

template <class E>
__device__ __forceinline__ void sum_array(const cinch_statistics_args &args) {
  BlockSums &block = block_shared<BlockSums>();
  if (threadIdx.x == 0) block.clear();
  wait_for_previous_kernel();
  __syncthreads();
  const uint64_t factor =
      args.flags & CINCH_FACTOR_AT ? E::factor_at(args.factor) : args.factor;
  if constexpr (std::is_same<E, F64>::value) {
    double sum = 0, most = 0;
    each_tile(args.count, [&](uint64_t begin) {
      sum_doubles(args, factor, begin, block, sum, most);
    });
    // The output adds to the verdict only.
    if (args.result == nullptr) block.add(sum, most);
  } else {
    LaneSums lane;
    each_tile(args.count, [&](uint64_t begin) {
      sum_tile<E>(args, factor, begin, block, lane);
    });
    lane.end(block);
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  block.add_to(*args.sums);
  if (args.result != nullptr) end_statistics(*args.sums, *args.result, args.has_input, gridDim.x);
}

}  // namespace cinch

#define CINCH_STATISTICS(type, Type)                                           \
  extern "C" __global__ void __launch_bounds__(256)                            \
      cinch_statistics_##type(const __grid_constant__ cinch_statistics_args args) { \
    cinch::sum_array<cinch::Type>(args);                                     \
  }

CINCH_FLOATS_8(CINCH_STATISTICS)
CINCH_FLOATS_16(CINCH_STATISTICS)
CINCH_FLOATS_32_64(CINCH_STATISTICS)
