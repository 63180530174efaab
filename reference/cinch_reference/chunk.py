"""Messages of one chunk: sections "Chunk layout", "Block codecs" and "Arrays"."""

from collections.abc import Callable

import numpy as np

from . import element_codecs, minmax, onebit, random_numbers, scaled, terngrad
from .arithmetic import F32, NAN, add, up16
from .elements import F32E, Element, narrow, widen
from .spec import Codec

Key = tuple[int, int]


def pack(codes: np.ndarray, code_bits: int) -> np.ndarray:
    """Returns codes as bytes, least significant bit first. Section "Chunk layout"."""
    if code_bits >= 8:
        wide = np.ascontiguousarray(codes, np.dtype("<u4")).view(np.uint8).reshape(-1, 4)
        return np.ascontiguousarray(wide[:, : code_bits // 8]).reshape(-1)
    each = 8 // code_bits
    padded = np.zeros(-(-codes.size // each) * each, np.uint8)
    padded[: codes.size] = codes
    shifts = (np.arange(each) * code_bits).astype(np.uint8)
    return np.bitwise_or.reduce(padded.reshape(-1, each) << shifts, axis=1, initial=np.uint8(0))


def unpack(data: np.ndarray, n: int, code_bits: int) -> np.ndarray:
    """Returns the n codes at the beginning of the bytes. Section "Chunk layout"."""
    if code_bits >= 8:
        each = code_bits // 8
        wide = np.zeros((n, 4), np.uint8)
        wide[:, :each] = data[: n * each].reshape(n, each)
        return wide.reshape(-1).view(np.dtype("<u4"))
    shifts = (np.arange(8 // code_bits) * code_bits).astype(np.uint8)
    spread = data[: -(-n * code_bits // 8), None] >> shifts & np.uint8(2**code_bits - 1)
    return spread.reshape(-1)[:n]


def rows(codec: Codec, n: int) -> list[slice]:
    """Returns the full blocks, and the shorter last block, as ranges of elements."""
    full = n // codec.block * codec.block
    ranges = [slice(0, full), slice(full, n)]
    return [r for r in ranges if r.stop > r.start]


def encode_rows(codec: Codec, x: np.ndarray, u: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """Returns codes and numbers of blocks of one length. Section "Block codecs", steps 1 to 4."""
    poisoned = ~np.isfinite(x).all(axis=1)
    x = np.where(poisoned[:, None], F32(0), x)
    if codec.name == "terngrad":
        codes, numbers = terngrad.encode_blocks(codec, x, u)
    elif codec.name == "onebit":
        codes, numbers = onebit.encode_blocks(codec, x)
    elif codec.name.startswith("minmax"):
        codes, numbers = minmax.encode_blocks(codec, x, u)
    else:
        codes, numbers = scaled.encode_blocks(codec, x, u)
    codes[poisoned] = 0
    numbers[poisoned] = NAN
    return codes, numbers


def decode_rows(
    codec: Codec, codes: np.ndarray, numbers: np.ndarray, acc: np.ndarray | None
) -> np.ndarray:
    """Returns decoded numbers, or accumulators after decode-add. Section "Block codecs"."""
    poisoned = ~np.isfinite(numbers).all(axis=1)
    numbers = np.where(poisoned[:, None], F32(0), numbers)
    if codec.name in ("linear8", "dynamic8", "fp8_e4m3", "fp8_e5m2"):
        if acc is None:
            result = scaled.decode_blocks(codec, codes, numbers)
        else:
            result = scaled.decode_add_blocks(codec, codes, numbers, acc)
    else:
        decode: Callable[..., np.ndarray] = {
            "terngrad": terngrad.decode_blocks,
            "onebit": onebit.decode_blocks,
        }.get(codec.name, minmax.decode_blocks)
        result = decode(codec, codes, numbers)
        if acc is not None:
            result = add(acc, result)
    result[poisoned] = NAN
    return result


def encode(
    codec: Codec,
    x: np.ndarray,
    key: Key | None = None,
    first: int = 0,
    scale: np.float32 | None = None,
    element: Element = F32E,
) -> np.ndarray:
    """Returns the message of the fp32 numbers x, in a call of these elements.

    `key` and `first` give the random numbers: element i has index `first + i`. `scale` is the kept scale
    of a codec with `tensor=K`; without it the largest finite magnitude counts. Section "Chunk layout".
    """
    n = x.size
    u = random_numbers.u(key, first, n) if codec.draws else None
    numbers = np.zeros(0, F32)
    if codec.tensor:
        if n:
            a = scaled.largest_finite(x) if scale is None else scale
            codes, numbers = scaled.encode_tensor(codec, x, a, u)
        else:
            codes = np.zeros(0, np.uint8)
    elif codec.block:
        codes = np.zeros(n, np.uint8)
        parts = []
        for part in rows(codec, n):
            length = min(codec.block, part.stop - part.start)
            row_u = None if u is None else u[part].reshape(-1, length)
            row_codes, row_numbers = encode_rows(codec, x[part].reshape(-1, length), row_u)
            codes[part] = row_codes.reshape(-1)
            parts.append(row_numbers.reshape(-1))
        numbers = np.concatenate(parts) if parts else numbers
    else:
        codes = element_codecs.encode(codec, element_codecs.limit_elements(codec, element, x))
    message = np.zeros(codec.wire_bytes(n), np.uint8)
    message[: codec.code_bytes(n)] = pack(codes, codec.code_bits)
    begin = up16(codec.code_bytes(n))
    message[begin:] = numbers.astype(np.dtype("<f4")).view(np.uint8)
    return message


def numbers_of(codec: Codec, message: np.ndarray, n: int) -> np.ndarray:
    """Returns the numbers of all blocks. Section "Chunk layout"."""
    begin = up16(codec.code_bytes(n))
    count = codec.numbers * codec.blocks(n)
    return message[begin : begin + 4 * count].copy().view(np.dtype("<f4")).astype(F32)


def _decode(codec: Codec, message: np.ndarray, n: int, acc: np.ndarray | None) -> np.ndarray:
    codes = unpack(message, n, codec.code_bits)
    if not codec.numbers:
        y = element_codecs.decode(codec, codes)
        return y if acc is None else add(acc, y)
    numbers = numbers_of(codec, message, n).reshape(-1, codec.numbers)
    if n == 0:
        return np.zeros(0, F32)
    if codec.tensor:
        row_acc = None if acc is None else acc[None, :]
        return decode_rows(codec, codes[None, :], numbers, row_acc)[0]
    result = np.zeros(n, F32)
    for part in rows(codec, n):
        length = min(codec.block, part.stop - part.start)
        row_numbers = numbers[part.start // codec.block :][: (part.stop - part.start) // length]
        row_acc = None if acc is None else acc[part].reshape(-1, length)
        row = decode_rows(codec, codes[part].reshape(-1, length), row_numbers, row_acc)
        result[part] = row.reshape(-1)
    return result


def decode(codec: Codec, message: np.ndarray, n: int) -> np.ndarray:
    """Returns the n fp32 numbers of a message, whoever wrote it. Section "Block codecs"."""
    with np.errstate(all="ignore"):
        return _decode(codec, message, n, None)


def decode_add(codec: Codec, message: np.ndarray, acc: np.ndarray) -> np.ndarray:
    """Returns accumulators after decode-add of a message. Section "Block codecs", acc'."""
    with np.errstate(all="ignore"):
        return _decode(codec, message, acc.size, acc)


def encode_array(codec: Codec, element: Element, raw: np.ndarray, draw: int = 0) -> np.ndarray:
    """Returns the bytes of `cinch_encode` with the chunk layout. Section "Arrays"."""
    if codec.is_raw:
        return np.ascontiguousarray(raw).view(np.uint8).copy()
    key = random_numbers.key(codec.seed, draw, 0)
    return encode(codec, widen(element, raw), key, element=element)


def decode_array(codec: Codec, element: Element, message: np.ndarray, n: int) -> np.ndarray:
    """Returns the elements of `cinch_decode` with the chunk layout. Section "Arrays"."""
    if codec.is_raw:
        return message[: n * element.bytes].copy().view(element.storage)
    with np.errstate(all="ignore"):
        return narrow(element, decode(codec, message, n))
