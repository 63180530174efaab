"""Averages of floats: section "Averages"."""

from fractions import Fraction

import numpy as np

from .arithmetic import F32
from .elements import BF16, F8E4M3, F8E5M2, F16, Element
from .raw import nan_of
from .spec import Codec

LARGEST = {
    F16: Fraction(65504),
    BF16: Fraction(0xFF) * 2**120,
    F8E4M3: Fraction(448),
    F8E5M2: Fraction(57344),
}
"""L, the largest number of the element types that have a limit."""

WITHOUT_SHIFT = ("static8", "mantissa8", "threshold2")
"""Codecs in which contributions of bf16 are not scaled."""


def shift_in_codec(element: Element, codec: Codec, algorithm: str, nranks: int) -> int:
    """Returns s for messages in one codec, from the table."""
    steps = (nranks - 1).bit_length()
    if nranks == 1:
        return 0
    if codec.name == "cast16" or (codec.is_raw and element in (F16, F8E4M3, F8E5M2)):
        return 0 if algorithm in ("direct", "oneshot", "flat_tree") else steps
    if element is BF16 and codec.name not in WITHOUT_SHIFT:
        return steps + 1
    return 0


def shift(element: Element, codecs: tuple[Codec, Codec], algorithm: str, nranks: int) -> int:
    """Returns s, the larger one of both codecs."""
    return max(shift_in_codec(element, codec, algorithm, nranks) for codec in codecs)


def limit(v: np.ndarray, m: Fraction | None) -> np.ndarray:
    """Returns limit(v, m); None is infinity."""
    # A limit beyond fp32 removes nothing, since all numbers above it are infinite.
    if m is None or m >= 2**128:
        return v
    m = F32(float(m))
    return np.where(np.isfinite(v) & (np.abs(v) > m), np.copysign(m, v), v)


def limit_to_element(element: Element, v: np.ndarray) -> np.ndarray:
    """Returns limit(v, L), which is narrowed for a message."""
    return limit(v, LARGEST.get(element))


def contribution(x: np.ndarray, s: int) -> np.ndarray:
    """Returns fl(x * 2^-s)."""
    with np.errstate(all="ignore"):
        return nan_of(x * x.dtype.type(2.0**-s))


def final_sum(element: Element, acc: np.ndarray, nranks: int, s: int) -> np.ndarray:
    """Returns fin(acc)."""
    divisor = Fraction(nranks, 2**s)
    largest = LARGEST.get(element)
    with np.errstate(all="ignore"):
        limited = limit(acc, None if largest is None else largest * divisor)
        return nan_of(limited / acc.dtype.type(float(divisor)))
