// dynamic8: a sign and a 7-bit dynamic tree, times the scale s, in closed form.
//
// A code c from 2 up has b = floor(log2 c) tree bits and decade n = 6 - b. With z = (c + 1/2) *
// 2^n, from 64 to 128, the middle of the leaf is q / (1280 * 10^n). The integer q is max(14 z -
// 768, 22 z - 1536); the two lines cross at z = 96, which is 0.45.
// Encoding estimates the position of an element among the magnitudes by the inverse lines; the
// estimate may be slightly off. It then compares the element's distances to the magnitudes below
// and above, each of which is an exact difference.
//
// Kernels with shared memory to spare use dynamic8_tabled.cuh, which takes fewer instructions
// (benches/FIGURES.md, "Choices in the kernels").
#pragma once

#include "codec/linear8.cuh"

namespace cinch {

struct DynamicMeaning : FactorStep {
  static CINCH_HD void prepare(uint32_t) {}

  static CINCH_HD float factor(float scale) {
    return scale <= 0x1p126f ? divide_ordinary(1.0f, scale) : small_reciprocal(scale);
  }

  // Returns the reciprocal of a scale above 2^126, which is subnormal: a rounded quotient, rounded
  // again to a multiple of 2^-149. If the first rounding made a tie, the remainder of the division
  // decides it.
  static CINCH_HD float small_reciprocal(float scale) {
    const float lowered = mul(scale, 0x1p-64f);
    const float quotient = divide_ordinary(1.0f, lowered);
    const float rest = fused(-lowered, quotient, 1.0f);
    const float steps = mul(quotient, 0x1p85f);
    float whole = add(add(steps, 0x1p23f), -0x1p23f);
    const float part = add(steps, -whole);
    if (part == 0.5f && rest > 0) whole = add(whole, 1.0f);
    if (part == -0.5f && rest < 0) whole = add(whole, -1.0f);
    return float_of((uint32_t)whole);
  }

  static CINCH_HD float step(float scale) { return scale; }

  static constexpr uint32_t LAST_RANK = 128;
  static CINCH_HD float unit(float scale) { return scale; }
  static CINCH_HD uint32_t nearest(float y, float factor) { return rank_of(mul(y, factor)); }

  static CINCH_HD uint32_t encode4(const float *x, float factor) {
    uint32_t ranks = 0;
    CINCH_UNROLL
    for (int i = 0; i < 4; ++i) ranks |= rank_of(magnitude_of(mul(x[i], factor))) << (8 * i);
    return codes_of(ranks, x);
  }

  static CINCH_HD void values4(uint32_t codes, float *values) {
    CINCH_UNROLL
    for (int i = 0; i < 4; ++i) values[i] = value(codes >> (8 * i) & 0xff);
  }

  static CINCH_HD float value(uint32_t code) {
    const uint32_t c = code & 0x7f;
    const float half = add(small_float(c == 0 ? 1 : c == 1 ? 128 : c), 0.5f);
    return float_of(bits_of(magnitude_at(half)) | (code & 0x80) << 24);
  }

  // Returns the codes of the elements x, whose magnitudes have the four given ranks. Rank 1 has
  // code 0 and rank 128 code 1; every other rank is its own code. A zero has no sign.
  static CINCH_HD uint32_t codes_of(uint32_t ranks, const float *x) {
    const uint32_t nonzero = ranks + 0x7e7e7e7eu;
    const uint32_t odd = (~nonzero | ranks) & 0x80808080u;
    const uint32_t codes = (ranks & 0x7f7f7f7fu) ^ (odd >> 7);
    return codes | (LinearMeaning::sign_bytes(x) & nonzero & 0x80808080u);
  }

  // Returns the rank of the magnitude nearest to y, in ascending order from 1. Rank 1 is 0, rank
  // 128 is 1, and ranks 2 to 127 equal their codes.
  static CINCH_HD uint32_t rank_of(float y) {
    // Elements up to LEAST become 0. LEAST is just above the lower end of the smallest decade.
    constexpr float LEAST = 1.05e-6f;
    y = y > LEAST ? y : LEAST;
    y = y < 1.0f ? y : 1.0f;
    // Finds n such that w = y * 10^n lies in [0.1, 1], and p = 2^-n.
    float w = y, p = 1.0f;
    bool deep = w < 0.001f;
    w = deep ? mul(w, 1000.0f) : w;
    p = deep ? 0.125f : p;
    deep = w < 0.01f;
    w = deep ? mul(w, 100.0f) : w;
    p = deep ? mul(p, 0.25f) : p;
    deep = w < 0.1f;
    w = deep ? mul(w, 10.0f) : w;
    p = deep ? mul(p, 0.5f) : p;
    const float lower = fused(w, 32 / 0.35f, (float)(64 - 3.2 / 0.35));
    const float upper = fused(w, 32 / 0.55f, (float)(96 - 14.4 / 0.55));
    const float place = fused(lower < upper ? lower : upper, p, -0.5f);
    // The low byte is the rank of the largest magnitude below y, by an estimate.
    const float below = add_down(place, 0x1.8p23f);
    const float half = add(add(below, -0x1.8p23f), 0.5f);
    const float low = magnitude_at(half), high = magnitude_at(add(half, 1.0f));
    return (bits_of(below) & 0xff) + (add(y, -low) > add(high, -y));
  }

  // Returns the magnitude with this rank.
  static CINCH_HD float magnitude(uint32_t rank) {
    return magnitude_at(add(small_float(rank), 0.5f));
  }

  // Returns the magnitude with the rank `half` - 1/2.
  static CINCH_HD float magnitude_at(float half) {
    const float z = float_of((bits_of(half) & 0x7fffffu) | (127 + 6) << 23);
    const float below = fused(z, 14.0f, -768.0f), above = fused(z, 22.0f, -1536.0f);
    // Here q is an integer and n the decade (see the head of this file). q * 10^(5 - n) has at most
    // 22 bits, so the product is exact.
    float power = half < 2.0f ? 0.0f : 1.0f;
    power = half > 4.0f ? 1e1f : power;
    power = half > 8.0f ? 1e2f : power;
    power = half > 16.0f ? 1e3f : power;
    power = half > 32.0f ? 1e4f : power;
    power = half > 64.0f ? 1e5f : power;
    const float q = mul(below > above ? below : above, power);
    constexpr double UNIT = 1 / 128000000.0;
    const float y = fused(q, (float)UNIT, mul(q, (float)(UNIT - (double)(float)UNIT)));
    return half > 128.0f ? 1.0f : y;
  }

  // Returns an integer below 2^8 as an fp32 number, without a conversion instruction.
  static CINCH_HD float small_float(uint32_t n) {
    return add(float_of(0x4b000000u | n), -0x1p23f);
  }
};

using Dynamic8Format = Scaled<DynamicMeaning, true>;

}  // namespace cinch
