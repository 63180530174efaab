"""Tables of magnitudes and the nearest search: sections "Scaled codecs" and "Element codecs"."""

from dataclasses import dataclass
from fractions import Fraction
from functools import cache

import numpy as np

from .arithmetic import F32, F64, fl


@dataclass(frozen=True, eq=False)
class Table:
    """Magnitudes by code, with the exact midpoints between adjacent different ones."""

    values: np.ndarray
    codes: np.ndarray
    midpoints: np.ndarray

    def nearest(self, y: np.ndarray) -> np.ndarray:
        """Returns the code of the magnitude nearest to each y; a tie gets the smaller magnitude."""
        # Side "left" counts the midpoints below y, so a midpoint itself stays below.
        return self.codes[np.searchsorted(self.midpoints, y.astype(F64), side="left")]


def table(values: list[np.float32]) -> Table:
    """Returns the table of these magnitudes. Section "Scaled codecs", nearest(y)."""
    by_code = np.array(values, F32)
    # np.unique returns the first, so the smallest, code of equal magnitudes.
    magnitudes, codes = np.unique(by_code, return_index=True)
    wide = magnitudes.astype(F64)
    # Adjacent fp32 numbers of these tables differ by less than 2^29, so fp64 holds their sum exactly.
    return Table(by_code, codes.astype(np.uint8), (wide[:-1] + wide[1:]) / 2)


@cache
def dynamic8() -> Table:
    """Returns the table of section "Scaled codecs", `dynamic8`."""
    values = [F32(0), F32(1)]
    for c in range(2, 128):
        k = c.bit_length() - 1
        leaf, half = c - 2**k, 2 ** (k - 1)
        if leaf < half:
            d = 10_000_000 + (35_000_000 >> k) * (2 * leaf + 1)
        else:
            d = 45_000_000 + (55_000_000 >> k) * (2 * (leaf - half) + 1)
        values.append(fl(Fraction(d, 10 ** (14 - k))))
    return table(values)


NODES = [
    10000, 14375, 18750, 23125, 27500, 31875, 36250, 40625,
    45000, 51750, 58500, 65250, 72000, 78750, 85500, 92250,
]  # fmt: skip


@cache
def static8(offset: int) -> Table:
    """Returns V of `static8`. Section "Element codecs"."""
    scale = [Fraction(10) ** ((c >> 4) - 10 + offset) for c in range(128)]
    return table([F32(0)] + [fl(NODES[c % 16] * scale[c]) for c in range(1, 128)])


@cache
def mantissa8(offset: int) -> Table:
    """Returns V of `mantissa8`. Section "Element codecs"."""
    return table([fl((c % 16) * Fraction(10) ** ((c >> 4) - 6 + offset)) for c in range(128)])
