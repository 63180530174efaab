"""`terngrad`: section of that name. Arrays have one row for each block."""

import numpy as np

from . import arithmetic
from .arithmetic import F32, F64, sign
from .spec import Codec


def encode_blocks(codec: Codec, x: np.ndarray, u: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns codes and A of blocks of finite elements."""
    with np.errstate(all="ignore"):
        wide = x.astype(F64)
        q = arithmetic.total(wide * wide)
        clip = (F64(2.5) * np.sqrt(q / F64(x.shape[1]))).astype(F32)
        a = np.minimum(np.abs(x).max(axis=1), clip)[:, None]
        scale = np.where(a < F32(2.0**-100), F32(2.0**64), F32(1))
        scale = np.where(a >= F32(2.0**100), F32(2.0**-64), scale)
        f = np.where(a == 0, F32(0), F32(1) / (a * scale))
        p = np.abs(x) * scale * f
        codes = np.where(p > u, 1 + sign(x), 0).astype(np.uint8)
    return codes, a


def decode_blocks(codec: Codec, codes: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """Returns the decoded numbers, for a finite number of the block."""
    zero = np.zeros_like(numbers)
    values = np.concatenate([zero, numbers, -numbers, zero], axis=1)
    return np.take_along_axis(values, codes.astype(np.intp), axis=1)
