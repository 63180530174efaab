"""Codecs with one scale for each block: section "Scaled codecs" and "Tensor scales".

Arrays have one row for each block.
"""

import numpy as np

from . import arithmetic
from .arithmetic import F32, NAN, from_bits, sign
from .elements import minifloat_code, minifloat_number
from .spec import Codec
from .tables import dynamic8

UNIT_LIMIT = from_bits(np.array([0x7C010203]))[0]
"""U, the largest unit of `linear8`."""

FP8 = {"fp8_e4m3": (3, 7, F32(448)), "fp8_e5m2": (2, 15, F32(57344))}
"""Mantissa bits, bias and largest number."""


def factor(codec: Codec, a: np.ndarray) -> np.ndarray:
    """Returns factor(a)."""
    if codec.name == "linear8":
        return F32(127) / a
    if codec.name == "dynamic8":
        return F32(1) / a
    return FP8[codec.name][2] / a


def magnitude(codec: Codec, y: np.ndarray, f: np.ndarray) -> np.ndarray:
    """Returns magnitude(y, f), the code without its sign."""
    if codec.name == "linear8":
        # `ceil(product - 0.5)` of the rounded number; a tie goes to the smaller integer.
        rounded = np.ceil(arithmetic.fma(y, f, F32(-0.5)))
        return np.minimum(np.maximum(rounded, F32(0)), F32(127)).astype(np.uint8)
    if codec.name == "dynamic8":
        return dynamic8().nearest(y * f)
    mantissa, bias, largest = FP8[codec.name]
    return minifloat_code(np.minimum(y * f, largest), mantissa, bias).astype(np.uint8)


def unit(codec: Codec, a: np.ndarray) -> np.ndarray:
    """Returns unit(a)."""
    if codec.name == "linear8":
        return np.minimum(a / F32(127), UNIT_LIMIT)
    if codec.name == "dynamic8":
        return a
    return a / FP8[codec.name][2]


def value(codec: Codec, code: np.ndarray) -> np.ndarray:
    """Returns value(code)."""
    c = np.arange(128)
    if codec.name == "linear8":
        magnitudes = c.astype(F32)
    elif codec.name == "dynamic8":
        magnitudes = dynamic8().values
    else:
        mantissa, bias, largest = FP8[codec.name]
        magnitudes = minifloat_number(c, mantissa, bias)
        magnitudes = np.where(magnitudes > largest, NAN, magnitudes)
    return np.concatenate([magnitudes, -magnitudes])[code]


def decodable(codec: Codec, w: np.ndarray, raised: np.ndarray) -> np.ndarray:
    """Returns d(c) of each block, in ascending order. Section "Scaled codecs", encode with a seed."""
    d = np.sort(value(codec, np.arange(128)))[None, :] * w
    return np.where(raised == F32(1), d, d * F32(2.0**-64) * F32(2.0**64))


def takes_high(distance: np.ndarray, gap: np.ndarray, u: np.ndarray) -> np.ndarray:
    """Returns whether an element at this distance above `low` becomes `high`."""
    return distance > u * gap


def draw(codec: Codec, y: np.ndarray, n: np.ndarray, d: np.ndarray, u: np.ndarray) -> np.ndarray:
    """Returns the code without its sign, from the nearest code n. Section "Scaled codecs", encode with a seed."""
    # A code's place among all codes, and the code at each place.
    code_at = np.argsort(value(codec, np.arange(128)), kind="stable")
    place_of = np.argsort(code_at, kind="stable")
    place = place_of[n]

    def at(places: np.ndarray) -> np.ndarray:
        return np.take_along_axis(d, places, axis=1)

    low = np.where(at(place) > y, place - 1, place)
    high = np.minimum(low + 1, 127)
    is_high = takes_high(y - at(low), at(high) - at(low), u) & (low < 127)
    return code_at[np.where(is_high, high, low)].astype(np.uint8)


def encode(codec: Codec, x: np.ndarray, scale: np.ndarray, u: np.ndarray | None) -> np.ndarray:
    """Returns the codes of finite x, with a seed for the numbers u. Section "Scaled codecs", encode."""
    scale = scale[:, None]
    with np.errstate(all="ignore"):
        raised = np.where((scale > 0) & (scale < F32(2.0**-100)), F32(2.0**64), F32(1))
        f = factor(codec, scale * raised)
        y = np.abs(x) * raised
        # A scale of 0 gives codes 0, whatever its factor.
        f = np.where(scale == 0, F32(0), f)
        y = np.where(scale == 0, F32(0), y)
        c = magnitude(codec, y, f)
        if u is not None:
            d = decodable(codec, unit(codec, scale * raised), raised)
            c = np.where(scale == 0, c, draw(codec, y, c, d, u))
    negative = (c != 0) & (sign(x) == 1)
    return c + np.where(negative, np.uint8(128), np.uint8(0))


def encode_blocks(
    codec: Codec, x: np.ndarray, u: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray]:
    """Returns codes and scales of blocks of finite elements. Section "Scaled codecs"."""
    scale = np.abs(x).max(axis=1)
    return encode(codec, x, scale, u), scale[:, None]


def encode_tensor(
    codec: Codec, x: np.ndarray, scale: np.float32, u: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray]:
    """Returns codes and number of one chunk with a scale from outside. Section "Tensor scales"."""
    finite = np.isfinite(x)
    usable = bool(np.isfinite(scale)) and scale >= 0
    codes = np.zeros(x.shape, np.uint8)
    if usable and scale > 0:
        row = np.where(finite, x, F32(0))[None, :]
        codes = encode(codec, row, np.array([scale], F32), None if u is None else u[None, :])[0]
    number = scale if usable and finite.all() else NAN
    return codes, np.array([number], F32)


def largest_finite(x: np.ndarray) -> np.float32:
    """Returns the largest finite magnitude, 0 if there is none."""
    magnitudes = np.abs(x[np.isfinite(x)])
    return magnitudes.max() if magnitudes.size else F32(0)


def _decode(codec: Codec, codes: np.ndarray, numbers: np.ndarray, acc: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):
        size = np.abs(numbers)
        small = (size > 0) & (size < F32(2.0**-100))
        w = unit(codec, numbers * np.where(small, F32(2.0**64), F32(1)))
        v = value(codec, codes)
        # Where the scale was not raised, the product itself is the first factor of one fma.
        result = arithmetic.fma(v, w, acc)
        rows = small[:, 0]
        if rows.any():
            t = v[rows] * w[rows]
            result[rows] = arithmetic.fma(t, F32(2.0**-64), acc[rows])
        return arithmetic.canonical_nan(result)


def decode_blocks(codec: Codec, codes: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """Returns the decoded numbers. Section "Scaled codecs", decode."""
    return _decode(codec, codes, numbers, np.zeros(codes.shape, F32))


def decode_add_blocks(
    codec: Codec, codes: np.ndarray, numbers: np.ndarray, acc: np.ndarray
) -> np.ndarray:
    """Returns the accumulators after decode-add. Section "Scaled codecs", acc'."""
    return _decode(codec, codes, numbers, acc)


