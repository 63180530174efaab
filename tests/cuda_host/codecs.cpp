// Exports functions of the CUDA headers for codecs and element types, compiled for the host.
// codecs.rs compares them with the specification. The lanes of a warp run one after the other.
#include "codec/codec.cuh"
#include "dtype/average.cuh"
#include "dtype/element.cuh"

namespace {

using namespace cinch;

// Loads elements i to i + 15 of an array of n elements, with zeros for those from n on.
void load(const float *x, uint64_t n, uint64_t i, float (&out)[16]) {
  for (int k = 0; k < 16; ++k) out[k] = i + k < n ? x[i + k] : 0.0f;
}

// Returns a sum in the order of a warp: element i goes into partial sum i mod 32. Then the upper
// half of the partial sums is added to the lower, until one remains.
template <class Of>
double wide_sum(const float *x, uint64_t n, Of of) {
  double parts[32] = {};
  for (uint64_t i = 0; i < n; ++i) parts[i % 32] += of(x[i]);
  for (int half = 16; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) parts[i] += parts[i + half];
  }
  return parts[0];
}

// Returns the Format's Summary of a block: the values (such as its extremes) that encoding needs of
// all its elements.
template <class Format>
typename Format::Summary summary_of(const float *x, uint64_t n, Format *) {
  typename Format::Summary summary = Format::empty_summary();
  for (uint64_t i = 0; i < n; i += 16) {
    float lane[16];
    load(x, n, i, lane);
    Format::summarize(lane, n - i < 16 ? (uint32_t)(n - i) : 16, 8, summary);
  }
  return summary;
}

float most_of(const float *x, uint64_t n) {
  float most = 0;
  for (uint64_t i = 0; i < n; ++i) most = larger_magnitude(most, x[i]);
  return most;
}

TernGradFormat::Summary summary_of(const float *x, uint64_t n, TernGradFormat *) {
  return {most_of(x, n), {wide_sum(x, n, [](double one) { return one * one; })}};
}

OneBitFormat::Summary summary_of(const float *x, uint64_t n, OneBitFormat *) {
  OneBitFormat::Summary summary = OneBitFormat::empty_summary();
  uint32_t negative = 0;
  for (uint64_t i = 0; i < n; ++i) negative += x[i] < 0 ? 1 : 0;
  const double above = wide_sum(x, n, [](float one) { return one < 0 ? 0.0f : one; });
  const double below = wide_sum(x, n, [](float one) { return one < 0 ? one : 0.0f; });
  const bool finite = cinch::is_finite(most_of(x, n));
  summary.mean[0] = finite ? OneBitFormat::mean_of(above, (uint32_t)n - negative) : NAN;
  summary.mean[1] = finite ? OneBitFormat::mean_of(below, negative) : NAN;
  return summary;
}

template <class C>
void encode(const cinch_codec_params &params, const float *x, uint64_t n, uint32_t first,
            uint8_t *wire) {
  const C codec(params);
  codec.prepare_own(1);
  const Random random = codec.random(1, first);
  codec.clear_scale(wire, n);
  // Under a tensor scale, the Summary of a lane covers only its own 16 elements.
  const uint64_t block = codec.block() ? codec.block() : 16;
  for (uint64_t begin = 0; begin < n; begin += block) {
    const uint64_t count = n - begin < block ? n - begin : block;
    const auto summary = summary_of(x + begin, count, (typename C::Format *)nullptr);
    for (uint64_t i = begin; i < begin + block && i < n; i += 16) {
      float lane[16];
      load(x, n, i, lane);
      typename C::Codes codes;
      codec.encode(lane, summary, n, i, random, codes);
      codec.store(wire, n, i, codes);
    }
  }
  // Lanes behind the last element store the padding.
  for (uint64_t i = (n + 15) / 16 * 16; i % 512 != 0; i += 16) {
    typename C::Codes codes;
    memset(&codes, 0xff, sizeof(codes));
    codec.store(wire, n, i, codes);
  }
}

template <class C>
void decode(const cinch_codec_params &params, const uint8_t *wire, uint64_t n, float *out,
            bool reduce) {
  const C codec(params);
  codec.prepare_own(1);
  for (uint64_t i = 0; i < n; i += 16) {
    typename C::Codes codes;
    codec.load(wire, n, i, codes);
    float lane[16];
    load(out, n, i, lane);
    reduce ? codec.decode_reduce(codes, lane) : codec.decode(codes, lane);
    for (int k = 0; k < 16 && i + k < n; ++k) out[i + k] = lane[k];
  }
}

struct Entry {
  void (*encode)(const cinch_codec_params &, const float *, uint64_t, uint32_t, uint8_t *);
  void (*decode)(const cinch_codec_params &, const uint8_t *, uint64_t, float *, bool);
  uint64_t (*bytes)(const cinch_codec_params &, uint64_t);
};

template <class C>
constexpr Entry entry() {
  return {encode<C>, decode<C>,
          [](const cinch_codec_params &params, uint64_t n) { return C(params).wire_bytes(n); }};
}

// The index is the CodecKind; the second implementations of dynamic8, minmax4, static8 and
// mantissa8 follow behind.
const Entry CODECS[] = {{},
                        entry<Linear8>(),
                        entry<Dynamic8>(),
                        entry<Static8>(),
                        entry<Mantissa8>(),
                        entry<CastBf16>(),
                        entry<Cast16>(),
                        entry<MinMax>(),
                        entry<MinMax>(),
                        entry<MinMax4>(),
                        entry<MinMax>(),
                        entry<Trunc>(),
                        entry<Trunc>(),
                        entry<Trunc>(),
                        entry<Fp8E4M3>(),
                        entry<Fp8E5M2>(),
                        entry<TernGrad>(),
                        entry<OneBit>(),
                        entry<Threshold2>(),
                        entry<Dynamic8Tabled>(),
                        entry<MinMax>(),
                        entry<Static8Tabled>(),
                        entry<Mantissa8Tabled>()};

// Returns a over the ranks of an average. `word` has the number of ranks in the low half, and in the
// high half the bits of the factor of contributions; 0 for none.
template <class E>
typename E::Acc average(typename E::Acc a, uint64_t word) {
  const uint64_t factor = word >> 32;
  const uint32_t flags = CINCH_AVERAGE | (factor != 0 ? CINCH_PREMULTIPLY : 0);
  const Average<E> average(flags, factor, (uint32_t)word);
  return average.of(factor != 0 ? E::premultiply(a, factor) : a);
}

// Computes dst = a op b for 16-byte vectors. `op` is a cinch_combine, or 4 for a * word, 5 for the
// average of a as the sum of all ranks, 6 for a itself, or 7 for a + b as a partial sum of an average.
template <class E>
void element(uint32_t op, uint64_t word, const uint4 *a, const uint4 *b, uint4 *dst,
             uint64_t vectors) {
  for (uint64_t v = 0; v < vectors; ++v) {
    typename E::Acc x[E::N], y[E::N];
    E::unpack(a[v], x);
    E::unpack(b[v], y);
    for (int k = 0; k < E::N; ++k) {
      if (op < 4) x[k] = E::combine(x[k], y[k], op);
      if (op == 4) x[k] = E::premultiply(x[k], word);
      if (op == 5) x[k] = average<E>(x[k], word);
      if (op == 7) x[k] = Average<E>::partial(E::combine(x[k], y[k], (uint32_t)CINCH_SUM));
    }
    dst[v] = E::pack(x);
  }
}

// Converts fp32 numbers to elements of type E if `narrow`, else elements to fp32.
template <class E>
void convert(bool narrow, const void *from, void *to, uint64_t n) {
  using Bits = typename E::Bits;
  for (uint64_t i = 0; i < n; ++i) {
    if (narrow) {
      static_cast<Bits *>(to)[i] = E::narrow(static_cast<const float *>(from)[i]);
    } else {
      static_cast<float *>(to)[i] = E::widen(static_cast<const Bits *>(from)[i]);
    }
  }
}

}  // namespace

extern "C" {

uint64_t test_wire_bytes(uint32_t kind, const cinch_codec_params *params, uint64_t n) {
  return CODECS[kind].bytes(*params, n);
}

// Encodes a chunk whose first element has index `first` in its message. It uses the random numbers
// for sums.
void test_encode(uint32_t kind, const cinch_codec_params *params, const float *x, uint64_t n,
                 uint32_t first, uint8_t *wire) {
  CODECS[kind].encode(*params, x, n, first, wire);
}

// Returns x divided by n, computed by divided_by.
float test_divided(uint32_t n, float x) {
  switch (n) {
    case 3: return divided_by<3>(x);
    case 7: return divided_by<7>(x);
    case 15: return divided_by<15>(x);
    case 127: return divided_by<127>(x);
    default: return divided_by<255>(x);
  }
}

void test_decode(uint32_t kind, const cinch_codec_params *params, const uint8_t *wire, uint64_t n,
                 float *out, bool reduce) {
  CODECS[kind].decode(*params, wire, n, out, reduce);
}

// Computes `op` on vectors of the element type that `dtype`, the name of a DType, selects.
void test_element(const char *dtype, uint32_t op, uint64_t word, const void *a, const void *b,
                  void *dst, uint64_t vectors) {
#define FORWARD(name, Type)                                                                   \
  if (strcmp(dtype, #name) == 0) {                                                            \
    element<Type>(op, word, static_cast<const uint4 *>(a), static_cast<const uint4 *>(b),     \
                  static_cast<uint4 *>(dst), vectors);                                        \
  }
  CINCH_ELEMENTS(FORWARD)
#undef FORWARD
}

// Converts between fp32 and the type `dtype`. It exists only for types that accumulate in fp32.
void test_convert(const char *dtype, bool narrow, const void *from, void *to, uint64_t n) {
#define FORWARD(name, Type) \
  if (strcmp(dtype, #name) == 0) return convert<Type>(narrow, from, to, n);
  CINCH_FLOATS_8(FORWARD)
  CINCH_FLOATS_16(FORWARD)
  CINCH_FLOATS_32_64(FORWARD)
#undef FORWARD
}
}
