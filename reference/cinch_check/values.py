"""Inputs of the check: special values, ties, all patterns, and random numbers of every size."""

import numpy as np

from cinch_reference.elements import BF16, F16, Element, narrow
from cinch_reference.spec import Codec
from cinch_reference.tables import dynamic8, mantissa8, static8

SPECIAL_BITS = [
    0x00000000, 0x80000000, 0x00000001, 0x80000001, 0x00000002, 0x00000003, 0x007FFFFF, 0x807FFFFF,
    0x00800000, 0x80800000, 0x00800001, 0x01000000, 0x0D7FFFFF, 0x0D800000, 0x0D800001, 0x33000000,
    0x33000001, 0x337FFFFF, 0x387FC000, 0x387FE000, 0x387FF000, 0x38800000, 0x477FE000, 0x477FEFFF,
    0x477FF000, 0x477FF001, 0xC77FF000, 0x47800000, 0x3F800000, 0xBF800000, 0x3F7FFFFF, 0x3F800001,
    0x3F000000, 0xBF000000, 0x40000000, 0x42FE0000, 0x43E00000, 0x43E80000, 0x43E80001, 0x47600000,
    0x47700000, 0x7E7FFFFF, 0x7E800000, 0x7E800001, 0xFE800000, 0x7EFFFFFF, 0x7F000000, 0x7F010203,
    0x7F7EFFFF, 0x7F7F0000, 0x7F7F7FFF, 0x7F7F8000, 0x7F7FFFFE, 0x7F7FFFFF, 0xFF7FFFFF, 0x71800000,
    0x717FFFFF, 0x72000000, 0x00200000, 0x80200000, 0x00010000, 0x80008000, 0x0000FFFF, 0x3DCCCCCD,
]  # fmt: skip
"""Finite fp32 numbers at the edges of formats and of rules."""

NON_FINITE_BITS = [
    0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC00000, 0x7F800001, 0xFF800001, 0x7FFFFFFF, 0xFFFFFFFF,
    0x7F802000, 0x7F801FFF, 0x7F80FFFF, 0x7F810000, 0x7FBFFFFF, 0x7FC12345, 0xFFC12345, 0x7F8000FF,
]  # fmt: skip
"""Infinities and NaN of every class of payload."""


def floats(patterns: list[int] | np.ndarray) -> np.ndarray:
    """Returns fp32 numbers by their bits."""
    return np.array(patterns, np.uint32).view(np.float32)


def finite_bits(random: np.random.Generator, n: int) -> np.ndarray:
    """Returns random finite fp32 numbers, uniform in their bits."""
    b = random.integers(0, 2**32, n, dtype=np.uint32)
    return np.where(b & 0x7F800000 == 0x7F800000, b ^ 0x40000000, b).view(np.float32)


def order_of_sums(random: np.random.Generator, block: int, blocks: int) -> np.ndarray:
    """Returns blocks whose mean is a tie of fp32 if their elements are added in order.

    1 + 2^-24 is a tie. Numbers of 2^-55 vanish beside it in fp64, but count if they are added first. Every
    second block begins with the large ones, so that an addition in order loses all others.
    """
    x = np.full((blocks, block), 2.0**-55, np.float32)
    for i, row in enumerate(x):
        at = random.permutation(block)[:2] if i % 2 else [0, 1]
        row[at] = np.float32([1, 2.0**-24])
    return x.reshape(-1) * np.float32(random.choice([-1, 1]) * 2.0 ** random.integers(-60, 60))


def ties(codec: Codec | None, random: np.random.Generator, n: int) -> np.ndarray:
    """Returns numbers on and beside the ties of a codec, the first being the scale of all."""
    side = random.integers(-1, 2, n).astype(np.int32)
    name = codec.name if codec else ""
    if name in ("static8", "mantissa8", "dynamic8"):
        found = {
            "static8": lambda: static8(codec.offset),
            "mantissa8": lambda: mantissa8(codec.offset),
            "dynamic8": dynamic8,
        }[name]()
        x = random.choice(found.midpoints, n).astype(np.float32)
        largest = np.float32(1)
    elif name == "threshold2":
        x = np.full(n, codec.tau, np.float32)
        largest = x[0]
    else:
        steps = {"minmax1": 1, "minmax2": 3, "minmax4": 15, "minmax8": 255}.get(name, 127)
        largest = np.float32(2.0 ** random.integers(-120, 120)) * np.float32(
            random.choice([1, 1, 127, 255, 1.7])
        )
        x = largest * ((2 * random.integers(0, steps, n) + 1) / (2 * steps)).astype(np.float32)
    x = (x.view(np.int32) + side).view(np.float32)
    x = np.where(np.isfinite(x), x, np.float32(1))
    x[0] = largest
    if random.random() < 0.5:
        x *= random.choice(np.array([-1, 1], np.float32), n)
    else:
        x[n // 2] = 0
    return x


def numbers(codec: Codec | None, random: np.random.Generator, n: int) -> np.ndarray:
    """Returns n fp32 numbers: segments of different kinds, some with NaN or infinities."""
    result = np.empty(n, np.float32)
    begin = 0
    with np.errstate(all="ignore"):
        while begin < n:
            length = min(int(random.choice([32, 77, 256, 512, 1024, 4096])), n - begin)
            kind = random.integers(0, 13)
            x = random.standard_normal(length, np.float32)
            if kind < 3:
                x *= np.float32(2.0 ** random.integers(-40, 40))
            elif kind == 3:
                x *= np.float32(2.0 ** random.integers(-149, -95))
            elif kind == 4:
                x = np.clip(x / 4, -0.999, 0.999) * np.float32(2.0 ** random.integers(95, 128))
            elif kind == 5:
                x = np.exp(x * random.integers(1, 20)).astype(np.float32) * np.sign(x)
            elif kind == 6:
                x = finite_bits(random, length)
            elif kind == 7:
                x = random.choice(floats(SPECIAL_BITS), length)
            elif kind == 8:
                x = ties(codec, random, length)
            elif kind == 9:
                x = ties(None, random, length)
            elif kind == 10:
                x[random.integers(0, length, 1 + length // 100)] = random.choice(
                    floats(NON_FINITE_BITS)
                )
            elif kind == 11:
                x = np.full(length, random.choice(floats(SPECIAL_BITS)), np.float32)
            else:
                x = (x * 8).astype(np.int32).astype(np.float32) * np.float32(-0.0 + 0.5)
            result[begin : begin + length] = np.where(np.isnan(x) & (kind != 10), np.float32(0), x)
            begin += length
    return result


def elements(
    codec: Codec | None, element: Element, random: np.random.Generator, n: int
) -> np.ndarray:
    """Returns n elements of f32, f16 or bf16."""
    x = numbers(codec, random, n)
    if element is F16:
        # Half of the segments of fp32 lie outside the range of f16; wrapping exponents keeps variety.
        far = (np.abs(x) > 65504) & np.isfinite(x) | (np.abs(x) < 2.0**-25)
        pattern = random.integers(0, 2**16, n).astype(np.uint16)
        pattern = np.where(pattern & 0x7C00 == 0x7C00, pattern ^ 0x4000, pattern)
        raw = narrow(element, x)
        return np.where(far & (random.random(n) < 0.7), pattern, raw)
    return narrow(element, x) if element is BF16 else x


def all_patterns(random: np.random.Generator, element: Element, shuffled: bool) -> np.ndarray:
    """Returns all patterns of a 16-bit type in order, and the finite ones shuffled; else special values."""
    if element in (F16, BF16):
        pattern = np.arange(65536, dtype=np.uint16)
        nan = 0x7C00 if element is F16 else 0x7F80
        finite = pattern[(pattern & nan) != nan]
        return np.concatenate([pattern, random.permutation(finite)]) if shuffled else pattern
    special = floats(SPECIAL_BITS)
    return np.concatenate([special, random.permutation(special), floats(NON_FINITE_BITS), special])


def hostile(codec: Codec, random: np.random.Generator, message: np.ndarray, n: int) -> np.ndarray:
    """Returns a message of n elements with random codes, padding and numbers."""
    wire = random.integers(0, 256, message.size, dtype=np.uint8)
    count = codec.numbers * codec.blocks(n)
    if count:
        chosen = numbers(None, random, count)
        chosen = np.where(random.random(count) < 0.2, random.permutation(chosen), chosen)
        special = random.choice(floats(SPECIAL_BITS + NON_FINITE_BITS), count)
        chosen = np.where(random.random(count) < 0.3, special, chosen)
        wire[wire.size - 4 * count :] = chosen.astype(np.float32).view(np.uint8)
    return wire
