"""Layouts of the formats' authors: section "Published layouts"."""

import numpy as np

from . import minmax, random_numbers
from .arithmetic import F32, NAN, bits, from_bits
from .chunk import encode_rows, pack, unpack
from .elements import Element, narrow, widen
from .spec import Codec

HEADER = 10
"""Bytes of the header of CompLL's message."""


def wire_bytes(codec: Codec, n: int) -> int:
    """Returns the bytes of n elements."""
    return codec.code_bytes(n) + (HEADER if codec.name.startswith("minmax") else 0)


def encode_array(codec: Codec, element: Element, raw: np.ndarray, draw: int = 0) -> np.ndarray:
    """Returns the bytes of `cinch_encode` with the published layout."""
    x = widen(element, raw)
    if not codec.name.startswith("minmax"):
        return pack(bits(x) >> np.uint32(32 - codec.code_bits), codec.code_bits)
    codes, numbers = np.zeros((1, 0), np.uint8), np.zeros((1, 2), F32)
    if x.size:
        u = None
        if codec.draws:
            u = random_numbers.u(random_numbers.key(codec.seed, draw, 0), 0, x.size)[None, :]
        codes, numbers = encode_rows(codec, x[None, :], u)
    unused = -x.size % (8 // codec.code_bits)
    header = np.array([codec.code_bits, unused], np.uint8)
    numbers = numbers.reshape(-1).astype(np.dtype("<f4")).view(np.uint8)
    return np.concatenate([header, numbers, pack(codes.reshape(-1), codec.code_bits)])


def count(codec: Codec, message: np.ndarray) -> int | None:
    """Returns the number of elements of a whole message, None if it is malformed."""
    if not codec.name.startswith("minmax"):
        each = codec.code_bits // 8
        return None if message.size % each else message.size // each
    if message.size < HEADER or message[0] != codec.code_bits:
        return None
    each, unused = 8 // codec.code_bits, int(message[1])
    n = (message.size - HEADER) * each - unused
    return None if unused >= each or n < 0 else n


def decode_array(codec: Codec, element: Element, message: np.ndarray, n: int) -> np.ndarray | None:
    """Returns the elements of `cinch_decode` with the published layout, None for an error."""
    if message.size != wire_bytes(codec, n):
        return None
    with np.errstate(all="ignore"):
        if not codec.name.startswith("minmax"):
            codes = unpack(message, n, codec.code_bits).astype(np.uint32)
            return narrow(element, from_bits(codes << np.uint32(32 - codec.code_bits)))
        if count(codec, message) != n:
            return None
        numbers = message[2:HEADER].copy().view(np.dtype("<f4")).astype(F32)
        if not np.isfinite(numbers).all():
            return narrow(element, np.full(n, NAN, F32))
        codes = unpack(message[HEADER:], n, codec.code_bits)
        return narrow(element, minmax.decode_blocks(codec, codes[None, :], numbers[None, :])[0])
