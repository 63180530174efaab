// Exports a function that runs the kernels for whole arrays on the host, for kernels.rs; block.h
// emulates the GPU.
#include "block.h"

#include "entry/codec.cu"
#include "entry/published.cu"

namespace {

struct Named {
  const char *name;
  void (*kernel)(const cinch_codec_args);
};

#define BOTH(codec, type) \
  {"cinch_encode_" #codec "_" #type, cinch_encode_##codec##_##type}, \
      {"cinch_decode_" #codec "_" #type, cinch_decode_##codec##_##type}
#define TYPES(codec) BOTH(codec, f32), BOTH(codec, f16), BOTH(codec, bf16)
#define PUBLISHED(type) \
  {"cinch_pack_" #type, cinch_pack_##type}, {"cinch_unpack_" #type, cinch_unpack_##type}, \
      {"cinch_extent_" #type, cinch_extent_##type}, \
      {"cinch_message_" #type, cinch_message_##type}, \
      {"cinch_unmessage_" #type, cinch_unmessage_##type}

const Named KERNELS[] = {TYPES(linear8),   TYPES(dynamic8_tabled),
                         TYPES(static8_tabled), TYPES(mantissa8_tabled),
                         TYPES(cast_bf16), TYPES(cast16),
                         TYPES(minmax4),   TYPES(minmax),          TYPES(trunc),
                         TYPES(fp8_e4m3),  TYPES(fp8_e5m2),        TYPES(terngrad),
                         TYPES(onebit),    TYPES(threshold2),      PUBLISHED(f32),
                         PUBLISHED(f16),   PUBLISHED(bf16),        {"cinch_header", cinch_header}};

}  // namespace

// Runs the kernel of this name; returns false if no kernel has it.
extern "C" bool test_launch(const char *name, uint32_t blocks, uint32_t threads,
                            const cinch_codec_args *args) {
  for (const Named &one : KERNELS) {
    if (strcmp(one.name, name) == 0) {
      const cinch_codec_args own = *args;
      launch(blocks, threads, [&] { one.kernel(own); });
      return true;
    }
  }
  return false;
}
