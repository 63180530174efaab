"""Element types, widening and narrowing: section "Element types"."""

from dataclasses import dataclass

import numpy as np

from .arithmetic import F32, bits, from_bits


@dataclass(frozen=True)
class Element:
    """Element type: its number, the numpy type that stores its bits, and the type of its accumulator."""

    name: str
    number: int
    storage: type
    accumulator: type
    codecs: bool = False

    @property
    def bytes(self) -> int:
        """Returns the bytes of one element."""
        return np.dtype(self.storage).itemsize

    @property
    def is_float(self) -> bool:
        """Returns whether sums accumulate in floating point."""
        return np.dtype(self.accumulator).kind == "f"


I8 = Element("i8", 0, np.int8, np.int8)
U8 = Element("u8", 1, np.uint8, np.uint8)
I32 = Element("i32", 2, np.int32, np.int32)
U32 = Element("u32", 3, np.uint32, np.uint32)
I64 = Element("i64", 4, np.int64, np.int64)
U64 = Element("u64", 5, np.uint64, np.uint64)
F16 = Element("f16", 6, np.uint16, np.float32, True)
F32E = Element("f32", 7, np.float32, np.float32, True)
F64E = Element("f64", 8, np.float64, np.float64)
BF16 = Element("bf16", 9, np.uint16, np.float32, True)
F8E4M3 = Element("f8e4m3", 10, np.uint8, np.float32)
F8E5M2 = Element("f8e5m2", 11, np.uint8, np.float32)

ELEMENTS = [I8, U8, I32, U32, I64, U64, F16, F32E, F64E, BF16, F8E4M3, F8E5M2]
BY_NAME = {element.name: element for element in ELEMENTS}


def minifloat_number(code: np.ndarray, mantissa: int, bias: int) -> np.ndarray:
    """Returns the fp32 numbers of finite codes without sign. Section "Scaled codecs", `fp8_*`."""
    code = np.asarray(code, np.int32)
    field, exponent = code & ((1 << mantissa) - 1), code >> mantissa
    normal = np.ldexp(F32(1) + field * F32(2.0**-mantissa), exponent - bias)
    small = np.ldexp(field.astype(F32), 1 - bias - mantissa)
    return np.where(code < (1 << mantissa), small, normal).astype(F32)


def minifloat_code(y: np.ndarray, mantissa: int, bias: int) -> np.ndarray:
    """Returns the code nearest to each finite magnitude, ties to even, subnormals kept.

    A magnitude beyond the format's range has a code beyond its finite ones.
    """
    exponent = np.maximum(np.where(y == 0, -999, np.frexp(y)[1] - 1), 1 - bias)
    # A power of two scales exactly in fp64. np.rint takes ties to even.
    steps = np.rint(np.ldexp(y.astype(np.float64), mantissa - exponent)).astype(np.int64)
    return ((exponent.astype(np.int64) + bias - 1) << mantissa) + steps


def widen(element: Element, raw: np.ndarray) -> np.ndarray:
    """Returns elements as accumulators. Section "Element types", Widening."""
    if element is F16:
        half = np.ascontiguousarray(raw, np.uint16)
        wide = half.view(np.float16).astype(F32)
        low = half.astype(np.uint32)
        nan = ((low >> 15) << 31) | 0x7FC00000 | ((low & 0x3FF) << 13)
        return np.where((low & 0x7FFF) > 0x7C00, from_bits(nan), wide)
    if element is BF16:
        return from_bits(np.asarray(raw, np.uint16).astype(np.uint32) << 16)
    if element in (F8E4M3, F8E5M2):
        code = np.asarray(raw, np.uint8).astype(np.uint32)
        magnitude, high = code & 0x7F, (code >> 7) << 31
        if element is F8E4M3:
            wide = bits(minifloat_number(magnitude, 3, 7))
            wide = np.where(magnitude == 0x7F, 0x7FF00000, wide)
        else:
            wide = bits(minifloat_number(np.minimum(magnitude, 0x7B), 2, 15))
            wide = np.where(magnitude == 0x7C, 0x7F800000, wide)
            wide = np.where(magnitude > 0x7C, 0x7FC00000 | (magnitude & 3) << 21, wide)
        return from_bits(wide | high)
    return np.ascontiguousarray(raw, element.accumulator)


@np.errstate(all="ignore")
def narrow(element: Element, wide: np.ndarray) -> np.ndarray:
    """Returns accumulators rounded to elements. Section "Element types", Narrowing."""
    if element is F16:
        b = bits(wide)
        nan = ((b >> 31) << 15) | 0x7E00 | (b >> 13 & 0x3FF)
        rounded = wide.astype(np.float16).view(np.uint16)
        return np.where(np.isnan(wide), nan, rounded).astype(np.uint16)
    if element is BF16:
        b = bits(wide)
        magnitude, high = b & 0x7FFFFFFF, (b >> 31) << 15
        rounded = magnitude + 0x7FFF + (magnitude >> 16 & 1) >> 16
        nan = (b >> 16 & 0x7FFF) | 0x40
        return (high | np.where(magnitude > 0x7F800000, nan, rounded)).astype(np.uint16)
    if element in (F8E4M3, F8E5M2):
        b = bits(wide)
        magnitude = from_bits(b & 0x7FFFFFFF)
        high = (b >> 31) << 7
        if element is F8E4M3:
            beyond = ~(magnitude <= 464)
            code = minifloat_code(np.where(beyond, F32(0), magnitude), 3, 7)
            code = np.where(beyond, 0x7F, code)
        else:
            beyond = ~(magnitude < 61440)
            code = minifloat_code(np.where(beyond, F32(0), magnitude), 2, 15)
            code = np.where(beyond, 0x7C, code)
            code = np.where(np.isnan(magnitude), 0x7E | (b >> 21 & 3), code)
        return (high | code).astype(np.uint8)
    return np.ascontiguousarray(wide, element.storage)
