"""`onebit`: section of that name. Arrays have one row for each block."""

import numpy as np

from . import arithmetic
from .arithmetic import F32, F64
from .spec import Codec


def mean(x: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """Returns the mean of the chosen elements of each block, +0 if there is none."""
    count = chosen.sum(axis=1)
    total = arithmetic.total(np.where(chosen, x.astype(F64), F64(0)))
    with np.errstate(all="ignore"):
        result = (total / count).astype(F32) + F32(0)
    return np.where(count == 0, F32(0), result)


def encode_blocks(codec: Codec, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns codes and the two means of blocks of finite elements."""
    codes = (x >= 0).astype(np.uint8)
    return codes, np.stack([mean(x, x >= 0), mean(x, x < 0)], axis=1)


def decode_blocks(codec: Codec, codes: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """Returns the decoded numbers, for finite numbers of the block."""
    return np.where(codes == 1, numbers[:, :1], numbers[:, 1:])
