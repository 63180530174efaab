"""`minmax1`, `minmax2`, `minmax4`, `minmax8`: section of that name.

Arrays have one row for each block.
"""

import numpy as np

from . import arithmetic
from .arithmetic import F32
from .spec import Codec


def levels(codec: Codec) -> np.float32:
    """Returns L, the largest code."""
    return F32(2**codec.code_bits - 1)


def round_code(t: np.ndarray, largest: np.float32, u: np.ndarray | None) -> np.ndarray:
    """Returns the codes of t: nearest, ties to even, or stochastic with the numbers u."""
    if u is None:
        return np.rint(t)
    below = np.floor(t)
    return np.minimum(below + (t - below > u), largest)


def raised(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Returns `raise` of each block."""
    g = np.abs(high - low)
    small = np.where((g > 0) & (g < F32(2.0**-100)), F32(2.0**64), F32(1))
    return np.where(g >= F32(2.0**126), F32(0.25), small)


def encode_blocks(
    codec: Codec, x: np.ndarray, u: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray]:
    """Returns codes and (min, max) of blocks of finite elements."""
    with np.errstate(all="ignore"):
        # Adding +0 turns -0 into +0.
        low = x.min(axis=1, keepdims=True) + F32(0)
        high = x.max(axis=1, keepdims=True) + F32(0)
        scale = raised(low, high)
        lo, hi = low * scale, high * scale
        r = hi - lo
        f = np.where(r == 0, F32(0), levels(codec) / r)
        t = (x * scale - lo) * f
        codes = round_code(t, levels(codec), u).astype(np.uint8)
    return codes, np.concatenate([low, high], axis=1)


def decode_blocks(codec: Codec, codes: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """Returns the decoded numbers, for finite numbers of the block."""
    with np.errstate(all="ignore"):
        low, high = numbers[:, :1], numbers[:, 1:]
        scale = raised(low, high)
        lo, hi = low * scale, high * scale
        gap = (hi - lo) / levels(codec)
        gap = np.where(scale == F32(0.25), gap * F32(1 - 2.0**-22), gap)
        y = arithmetic.fma(codes.astype(F32), gap, lo) * (F32(1) / scale)
        return y + F32(0)
