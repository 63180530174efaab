"""Random numbers of stochastic rounding: section "Random numbers"."""

import numpy as np

from .arithmetic import F32

MASK64 = 2**64 - 1


def mix(x: int) -> int:
    """Returns the mixed 64 bits of x. Section "Random numbers"."""
    z = x + 0x9E3779B97F4A7C15 & MASK64
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & MASK64
    z = (z ^ z >> 27) * 0x94D049BB133111EB & MASK64
    return z ^ z >> 31


def key(seed: int, operation: int, hop: int) -> tuple[int, int]:
    """Returns k0 and k1. Section "Random numbers"."""
    k = 0
    for word in (seed, operation, hop):
        k = mix(k ^ word)
    return k & 0xFFFFFFFF, k >> 32


def u(k: tuple[int, int], first: int, n: int) -> np.ndarray:
    """Returns the numbers of the indices `first` to `first + n - 1`. Section "Random numbers"."""
    k0, k1 = np.uint32(k[0]), np.uint32(k[1])
    x = (np.arange(n, dtype=np.uint64) + np.uint64(first)).astype(np.uint32) ^ k0
    x ^= x >> np.uint32(16)
    x *= np.uint32(0x7FEB352D)
    x ^= x >> np.uint32(15)
    x ^= k1
    x *= np.uint32(0x846CA68B)
    x ^= x >> np.uint32(16)
    return (x >> np.uint32(8)).astype(F32) * F32(2.0**-24)
