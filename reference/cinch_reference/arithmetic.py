"""Roundings: section "Notation"."""

from fractions import Fraction

import numpy as np

F32 = np.float32
F64 = np.float64

NAN = np.array(0x7FC00000, np.uint32).view(F32)[()]
"""NaN as a result: bits `7fc00000`."""


def bits(x: np.ndarray) -> np.ndarray:
    """Returns the 32 bits of each fp32 number. Section "Notation"."""
    return np.ascontiguousarray(x, F32).view(np.uint32)


def from_bits(b: np.ndarray) -> np.ndarray:
    """Returns the fp32 numbers with these bits. Section "Notation"."""
    return np.ascontiguousarray(b, np.uint32).view(F32)


def sign(x: np.ndarray) -> np.ndarray:
    """Returns bit 31 of each number, also of zeros and NaN. Section "Notation"."""
    return bits(x) >> np.uint32(31)


def up16(n: int) -> int:
    """Returns n rounded up to a multiple of 16. Section "Notation"."""
    return (n + 15) // 16 * 16


def fl(v: Fraction) -> np.float32:
    """Returns the fp32 number nearest to the exact value v, ties to even. Section "Notation"."""
    if v == 0:
        return F32(0)
    magnitude = abs(v)
    exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    if Fraction(2) ** exponent > magnitude:
        exponent -= 1
    step = Fraction(2) ** (max(exponent, -126) - 23)
    # `round` of a fraction takes ties to even. The product needs at most 24 bits, so fp64 holds it.
    rounded = round(magnitude / step) * step
    result = F32(np.inf) if rounded >= Fraction(2) ** 128 else F32(float(rounded))
    return -result if v < 0 else result


def fl_add(p: np.ndarray, c: np.ndarray) -> np.ndarray:
    """Returns fl(p + c) of fp64 numbers, rounded once.

    The fp64 sum is rounded to odd, so that the second rounding to fp32 equals one rounding (Boldo and
    Melquiond, "Emulation of FMA and correctly rounded sums", 2008).
    """
    total = p + c
    part = total - p
    error = (p - (total - part)) + (c - part)
    inexact = (error != 0) & np.isfinite(total)
    if inexact.any():
        pattern = total.view(np.int64)
        even = inexact & ((pattern & 1) == 0)
        away = (error > 0) == (total > 0)
        pattern += np.where(even, np.where(away, 1, -1), 0)
    return total.astype(F32)


def fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """Returns fl(a * b + c) of fp32 numbers, rounded once. Section "Notation".

    The product of two fp32 numbers is exact in fp64.
    """
    product = np.multiply(a, b, dtype=F64)
    return fl_add(product, np.broadcast_to(np.asarray(c, F64), product.shape))


def add(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Returns fl(a + b) of fp32 numbers."""
    return np.add(a, b, dtype=F32)


def canonical_nan(x: np.ndarray) -> np.ndarray:
    """Returns x with the bits `7fc00000` in the place of every NaN."""
    return np.where(np.isnan(x), NAN, x)


def total(v: np.ndarray) -> np.ndarray:
    """Returns the total of each row of fp64 numbers, in the order of section "terngrad"."""
    parts = np.zeros((v.shape[0], 32), F64)
    for begin in range(0, v.shape[1], 32):
        row = v[:, begin : begin + 32]
        parts[:, : row.shape[1]] += row
    half = 16
    while half:
        parts[:, :half] += parts[:, half : 2 * half]
        half //= 2
    return parts[:, 0].copy()
