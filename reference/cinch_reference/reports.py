"""Fields of a call's report: section "Reports"."""

from dataclasses import dataclass, field

import math

import numpy as np

from .arithmetic import F32, from_bits
from .element_codecs import table_of
from .spec import Codec


def largest(codec: Codec, scale: np.float32 | None) -> np.float32 | None:
    """Returns the largest number of a codec, None if it saturates nothing. Section "Reports"."""
    if codec.tensor:
        return scale
    match codec.name:
        case "cast16":
            return F32(65504)
        case "cast_bf16":
            return from_bits(np.array([0x7F7F0000]))[0]
        case "trunc8":
            return from_bits(np.array([0x7EFFFFFF]))[0]
        case "threshold2":
            return F32(codec.tau)
        case "static8" | "mantissa8":
            return table_of(codec).values[127]
    return None


def saturated(codec: Codec, v: np.ndarray, scale: np.float32 | None) -> int:
    """Returns how many finite numbers of an encode lie beyond the codec's largest."""
    limit = largest(codec, scale)
    if limit is None:
        return 0
    return int((np.isfinite(v) & (np.abs(v) > limit)).sum())


@dataclass
class RankReport:
    """Fields of one rank's report, and the ranges of its input that were counted."""

    saturated: int = 0
    non_finite: int = 0
    abs_max: float = 0.0
    squares: float = 0.0
    residual_l2_norm: float | None = None
    counted: set[tuple[int, int]] = field(default_factory=set)

    def count_input(self, x: np.ndarray, at: int) -> None:
        """Counts a part of the input once, where the rank first encodes, adds or copies it."""
        part = (at, x.size)
        if part in self.counted:
            return
        self.counted.add(part)
        finite = np.isfinite(x)
        self.non_finite += int((~finite).sum())
        if finite.any():
            self.abs_max = max(self.abs_max, float(np.abs(x[finite]).max()))
            self.squares += float(np.square(x[finite], dtype=np.float64).sum())

    @property
    def l2_norm(self) -> float:
        """Returns the root of the sum of the squares of the finite elements."""
        return math.sqrt(self.squares)
