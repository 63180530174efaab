// Exports a function that runs the kernels of kernels/entry/statistics.cu on the host, for
// statistics.rs; block.h emulates the GPU.
#include "block.h"
#include "device.h"

#include "entry/statistics.cu"

namespace {

struct Named {
  const char *name;
  void (*kernel)(const cinch_statistics_args);
};

const Named KERNELS[] = {{"f32", cinch_statistics_f32},       {"f64", cinch_statistics_f64},
                         {"f16", cinch_statistics_f16},       {"bf16", cinch_statistics_bf16},
                         {"f8e4m3", cinch_statistics_f8e4m3}, {"f8e5m2", cinch_statistics_f8e5m2}};

}  // namespace

// Runs the kernel for elements of this type; returns false if there is none.
extern "C" bool test_statistics(const char *type, uint32_t blocks,
                                const cinch_statistics_args *args) {
  for (const Named &one : KERNELS) {
    if (strcmp(one.name, type) == 0) {
      const cinch_statistics_args own = *args;
      gridDim.x = blocks;
      launch(blocks, cinch::THREADS, [&] { one.kernel(own); });
      return true;
    }
  }
  return false;
}
