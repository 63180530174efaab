// Element types, seeded data, and results computed on the host. Integers are compared bit for bit;
// floats are computed in extended precision, with a bound that holds for any order of rounding.
#pragma once

#include <nccl.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

namespace compare {

struct Type {
    ncclDataType_t number;
    const char *name;
    int bytes;
    bool is_float;
    bool is_signed;
    // Bits of the exponent and of the mantissa, for floats.
    int exponent;
    int mantissa;

    int bias() const { return (1 << (exponent - 1)) - 1; }
    // Returns the largest relative error of one rounding.
    long double unit() const { return std::ldexp(1.0L, -mantissa - 1); }
    // Returns the smallest positive number of the type, which is subnormal.
    long double smallest() const { return std::ldexp(1.0L, 1 - bias() - mantissa); }
};

constexpr Type kTypes[] = {
    {ncclInt8, "int8", 1, false, true, 0, 0},
    {ncclUint8, "uint8", 1, false, false, 0, 0},
    {ncclInt32, "int32", 4, false, true, 0, 0},
    {ncclUint32, "uint32", 4, false, false, 0, 0},
    {ncclInt64, "int64", 8, false, true, 0, 0},
    {ncclUint64, "uint64", 8, false, false, 0, 0},
    {ncclFloat16, "float16", 2, true, true, 5, 10},
    {ncclFloat32, "float32", 4, true, true, 8, 23},
    {ncclFloat64, "float64", 8, true, true, 11, 52},
    {ncclBfloat16, "bfloat16", 2, true, true, 8, 7},
    {ncclFloat8e4m3, "float8e4m3", 1, true, true, 4, 3},
    {ncclFloat8e5m2, "float8e5m2", 1, true, true, 5, 2},
};

enum class Op { Sum, Prod, Max, Min, Avg, PreMulHost, PreMulDevice };
constexpr Op kOps[] = {Op::Sum, Op::Prod, Op::Max, Op::Min, Op::Avg, Op::PreMulHost, Op::PreMulDevice};

inline const char *name(Op op) {
    switch (op) {
        case Op::Sum: return "sum";
        case Op::Prod: return "prod";
        case Op::Max: return "max";
        case Op::Min: return "min";
        case Op::Avg: return "avg";
        case Op::PreMulHost: return "premulsum (host scalar)";
        case Op::PreMulDevice: return "premulsum (device scalar)";
    }
    return "?";
}

inline uint64_t mix(uint64_t x) {
    x += 0x9e3779b97f4a7c15ull;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
    return x ^ (x >> 31);
}

// Returns element `at` of `rank`, as bits. Floats lie between 1/8 and 1; for products between 1 and
// 1.5, so that 8-bit products neither overflow nor vanish.
inline uint64_t element(const Type &type, Op op, int rank, size_t at, uint64_t seed) {
    const uint64_t word = mix(seed ^ mix(at * 64 + static_cast<uint64_t>(rank)));
    if (!type.is_float) return type.bytes == 8 ? word : word & ((1ull << (8 * type.bytes)) - 1);
    const uint64_t sign = (word >> 63) << (type.exponent + type.mantissa);
    uint64_t mantissa = word & ((1ull << type.mantissa) - 1);
    uint64_t exponent = static_cast<uint64_t>(type.bias()) - 1 - (word >> 60) % 3;
    if (op == Op::Prod) {
        exponent = static_cast<uint64_t>(type.bias());
        mantissa &= ~(1ull << (type.mantissa - 1));
    }
    return sign | exponent << type.mantissa | mantissa;
}

inline long double decode(const Type &type, uint64_t bits) {
    const int exponent = static_cast<int>(bits >> type.mantissa) & ((1 << type.exponent) - 1);
    const uint64_t mantissa = bits & ((1ull << type.mantissa) - 1);
    const bool negative = bits >> (type.exponent + type.mantissa) & 1;
    const int top = (1 << type.exponent) - 1;
    long double value;
    if (type.number == ncclFloat8e4m3 && exponent == top && mantissa == 7) {
        value = std::numeric_limits<long double>::quiet_NaN();
    } else if (type.number != ncclFloat8e4m3 && exponent == top) {
        value = mantissa ? std::numeric_limits<long double>::quiet_NaN()
                         : std::numeric_limits<long double>::infinity();
    } else if (exponent == 0) {
        value = static_cast<long double>(mantissa) * type.smallest();
    } else {
        const uint64_t whole = mantissa | 1ull << type.mantissa;
        value = std::ldexp(static_cast<long double>(whole), exponent - type.bias() - type.mantissa);
    }
    return negative ? -value : value;
}

// Returns the factor of a rank in a pre-multiplied sum. For floats it is a power of two, which
// every type represents.
inline uint64_t scalar(const Type &type, int rank) {
    if (!type.is_float) return static_cast<uint64_t>(rank) + 2;
    return (static_cast<uint64_t>(type.bias()) - static_cast<uint64_t>(rank % 3)) << type.mantissa;
}

inline int64_t as_signed(const Type &type, uint64_t bits) {
    const int shift = 64 - 8 * type.bytes;
    return static_cast<int64_t>(bits << shift) >> shift;
}

inline uint64_t load(const Type &type, const unsigned char *from) {
    uint64_t bits = 0;
    std::memcpy(&bits, from, static_cast<size_t>(type.bytes));
    return bits;
}

// The expected result of a reduction of `count` elements over `ranks` ranks.
class Expected {
  public:
    Expected(const Type &type, Op op, int ranks, size_t count, uint64_t seed)
        : type_(type), ranks_(ranks), exact_(!type.is_float || op == Op::Max || op == Op::Min) {
        if (exact_) bits_.resize(count);
        else {
            values_.resize(count);
            bounds_.resize(count);
        }
        for (size_t at = 0; at < count; at++) {
            if (!type.is_float) bits_[at] = integer(op, ranks, at, seed);
            else if (exact_) bits_[at] = extreme(op, ranks, at, seed);
            else real(op, ranks, at, seed);
        }
    }

    // Returns whether `found` differs from the exact element `at` by no more than the error bound.
    bool admits(size_t at, uint64_t found) const {
        if (exact_) return found == bits_[at];
        const long double off = std::fabs(decode(type_, found) - values_[at]);
        return off <= bounds_[at];  // False for NaN.
    }

    bool is_exact() const { return exact_; }

    // Returns the largest permitted root mean square of all errors, relative to that of the exact results.
    // For 8-bit floats the bounds of single errors exceed the results themselves, but rounding errors partly
    // cancel. In simulations of up to 8 ranks the error is at most 0.08 in float8e4m3 and 0.16 in float8e5m2.
    // They cover a ring, a tree, and 1/n applied before or after. Beyond 8 ranks the error grows with the
    // root of the ranks. A result of zeros would be off by 1, a sum that lacks one rank by 1/sqrt(ranks).
    long double most_off() const {
        if (exact_ || type_.bytes > 1) return std::numeric_limits<long double>::infinity();
        return 2 * type_.unit() * std::sqrt(std::max(1.0L, ranks_ / 8.0L));
    }

    long double value(size_t at) const { return values_[at]; }

  private:
    uint64_t integer(Op op, int ranks, size_t at, uint64_t seed) const {
        const uint64_t mask =
            type_.bytes == 8 ? ~0ull : (1ull << (8 * type_.bytes)) - 1;
        uint64_t result = 0;
        for (int rank = 0; rank < ranks; rank++) {
            uint64_t x = element(type_, op, rank, at, seed);
            if (op == Op::PreMulHost || op == Op::PreMulDevice) x *= scalar(type_, rank);
            if (rank == 0) result = x;
            else if (op == Op::Prod) result *= x;
            else if (op == Op::Max || op == Op::Min) {
                const bool less = type_.is_signed ? as_signed(type_, x) < as_signed(type_, result)
                                                  : x < result;
                if (less == (op == Op::Min)) result = x;
            } else result += x;
        }
        result &= mask;
        if (op == Op::Avg) {
            if (type_.is_signed)
                result = static_cast<uint64_t>(as_signed(type_, result) / ranks);
            else result /= static_cast<uint64_t>(ranks);
        }
        return result & mask;
    }

    uint64_t extreme(Op op, int ranks, size_t at, uint64_t seed) const {
        uint64_t result = element(type_, op, 0, at, seed);
        for (int rank = 1; rank < ranks; rank++) {
            const uint64_t x = element(type_, op, rank, at, seed);
            const bool less = decode(type_, x) < decode(type_, result);
            if (less == (op == Op::Min)) result = x;
        }
        return result;
    }

    // Computes element `at` and its error bound for floats. Each contribution is rounded at most
    // once by its scalar or by 1/n, and each partial result once. Every rounding error is relative
    // to the largest possible magnitude.
    void real(Op op, int ranks, size_t at, uint64_t seed) {
        long double sum = 0, magnitude = 0, product = 1;
        for (int rank = 0; rank < ranks; rank++) {
            long double x = decode(type_, element(type_, op, rank, at, seed));
            if (op == Op::PreMulHost || op == Op::PreMulDevice) x *= decode(type_, scalar(type_, rank));
            if (op == Op::Avg) x /= ranks;
            sum += x;
            magnitude += std::fabs(x);
            product *= x;
        }
        const bool multiplies = op == Op::Prod;
        values_[at] = multiplies ? product : sum;
        const long double size = multiplies ? std::fabs(product) : magnitude;
        // k roundings, each with a relative error of at most u, give at most (1+u)^k - 1. For
        // products of 8-bit types the linear bound k u is too small.
        const long double growth = std::pow(1 + type_.unit(), ranks + 2.0L) - 1;
        bounds_[at] = growth * size + (ranks + 2) * type_.smallest();
    }

    Type type_;
    int ranks_;
    bool exact_;
    std::vector<uint64_t> bits_;
    std::vector<long double> values_, bounds_;
};

}  // namespace compare
