"""Codecs without numbers: section "Element codecs"."""

from functools import cache

import numpy as np

from .arithmetic import F32, NAN, bits, from_bits, sign
from .elements import F16, Element, narrow, widen
from .spec import Codec
from .tables import Table, mantissa8, static8


def _split(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the bits without the sign, and the sign."""
    b = bits(x)
    return b & 0x7FFFFFFF, b >> 31


def encode_cast16(x: np.ndarray) -> np.ndarray:
    """Returns the codes of `cast16`."""
    limited = np.where(np.isfinite(x), np.clip(x, F32(-65504), F32(65504)), x)
    return narrow(F16, limited).astype(np.uint32)


def encode_cast_bf16(x: np.ndarray) -> np.ndarray:
    """Returns the codes of `cast_bf16`."""
    m, high = _split(x)
    finite = np.minimum(m + 0x7FFF + (m >> 16 & 1), 0x7F7F0000) >> 16
    code = np.where(m < 0x7F800000, finite, 0x7F80)
    code = np.where(m > 0x7F800000, (m | 0x400000) >> 16, code)
    return code | high << 15


def encode_trunc(x: np.ndarray, code_bits: int) -> np.ndarray:
    """Returns the codes of `trunc16` and `trunc24`."""
    b = np.where(np.isnan(x), bits(x) | 0x400000, bits(x))
    return b >> np.uint32(32 - code_bits)


def encode_trunc8(x: np.ndarray) -> np.ndarray:
    """Returns the codes of `trunc8`."""
    m, high = _split(x)
    code = np.where(m >= 0x7F800000, 0x7F, np.minimum(m, 0x7EFFFFFF) >> 24)
    return code | high << 7


def table_of(codec: Codec) -> Table:
    """Returns V of `static8` or `mantissa8`."""
    return static8(codec.offset) if codec.name == "static8" else mantissa8(codec.offset)


def encode_table(codec: Codec, x: np.ndarray) -> np.ndarray:
    """Returns the codes of `static8` and `mantissa8`."""
    finite = np.isfinite(x)
    c = table_of(codec).nearest(np.abs(np.where(finite, x, F32(0)))).astype(np.uint32)
    code = np.where(c == 0, 0, c + 128 * sign(x))
    return np.where(finite, code, 0x80)


def encode_threshold2(codec: Codec, x: np.ndarray) -> np.ndarray:
    """Returns the codes of `threshold2`."""
    tau = F32(codec.tau)
    code = np.where(x >= tau, 2, np.where(x <= -tau, 0, 1))
    return np.where(np.isfinite(x), code, 3)


BEYOND_F16 = F32(65520)
"""Magnitude from which on f16 rounds to infinity."""


@cache
def f16_limit(codec: Codec) -> np.float32 | None:
    """Returns the limit of a codec, None if it needs none. Section "Element codecs", Elements of f16."""
    if codec.name != "cast_bf16" and not (codec.name == "mantissa8" and 3 <= codec.offset <= 11):
        return None
    low, high = 0, int(bits(BEYOND_F16).item())
    # Decoded magnitudes ascend with the encoded ones, so the limit is found by halving.
    while high - low > 1:
        middle = (low + high) // 2
        if decode(codec, encode(codec, from_bits(np.array([middle]))))[0] < BEYOND_F16:
            low = middle
        else:
            high = middle
    return from_bits(np.array([low]))[0]


def limit_elements(codec: Codec, element: Element, x: np.ndarray) -> np.ndarray:
    """Returns the numbers to encode in a call of these elements. Section "Element codecs", Elements of f16."""
    limit = f16_limit(codec) if element is F16 else None
    if limit is None:
        return x
    return np.where((np.abs(x) > limit) & (np.abs(x) < BEYOND_F16), np.copysign(limit, x), x)


def encode(codec: Codec, x: np.ndarray) -> np.ndarray:
    """Returns the code of each element."""
    with np.errstate(all="ignore"):
        match codec.name:
            case "cast16":
                return encode_cast16(x)
            case "cast_bf16":
                return encode_cast_bf16(x)
            case "trunc8":
                return encode_trunc8(x)
            case "trunc16" | "trunc24":
                return encode_trunc(x, codec.code_bits)
            case "static8" | "mantissa8":
                return encode_table(codec, x)
            case "threshold2":
                return encode_threshold2(codec, x)
    raise ValueError(f"{codec.name} is no element codec")


def decode(codec: Codec, codes: np.ndarray) -> np.ndarray:
    """Returns the number of each code."""
    codes = codes.astype(np.uint32)
    match codec.name:
        case "cast16":
            return widen(F16, codes.astype(np.uint16))
        case "cast_bf16" | "trunc16":
            return from_bits(codes << 16)
        case "trunc24":
            return from_bits(codes << 8)
        case "trunc8":
            return np.where(codes & 0x7F == 0x7F, NAN, from_bits(codes << 24))
        case "static8" | "mantissa8":
            values = table_of(codec).values
            numbers = np.concatenate([values, -values])
            numbers[0x80] = NAN
            return numbers[codes]
        case "threshold2":
            tau = F32(codec.tau)
            return np.array([-tau, 0, tau, NAN], F32)[codes]
    raise ValueError(f"{codec.name} is no element codec")
