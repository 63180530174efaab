"""Signatures and frames: section "Messages"."""

import struct

import numpy as np

from . import FORMAT_VERSION
from .communicator import ALGORITHMS, COLLECTIVES, Arguments
from .random_numbers import MASK64
from .raw import OPERATORS
from .spec import Codec

MAGIC = bytes.fromhex("68633163")
FRAME = 64
"""Bytes of a frame."""


def codec_word(codec: Codec) -> int:
    """Returns word 4 of a signature."""
    rule, parameter = 0, codec.block or 256
    if codec.tensor:
        rule, parameter = 1, codec.tensor
    if codec.name == "threshold2":
        rule, parameter = 2, int(np.float32(codec.tau).view(np.uint32))
    offset = codec.offset & 0xFF
    return codec.number | rule << 8 | offset << 16 | codec.seed << 24 | parameter << 32


def digest_inside(codec: Codec) -> int:
    """Returns the digest of the codec inside hosts."""
    return (codec_word(codec) * 0x9E3779B97F4A7C15 & MASK64) >> 48


def digest_fused(counts: list[int]) -> int:
    """Returns the digest of fused calls."""
    d = 0
    for count in counts:
        d = (d ^ count) * 0x9E3779B97F4A7C15 & MASK64
        d ^= d >> 32
    return d & 0xFFFFFFFF


def signature(
    arguments: Arguments, sequence: int, fused: list[int] | None = None, receiver: int = 0
) -> bytes:
    """Returns the five words of a call's signature. The root of a send is its sender."""
    reducing = arguments.collective in ("all_reduce", "reduce_scatter", "reduce")
    word = FORMAT_VERSION | COLLECTIVES[arguments.collective] << 8 | arguments.element.number << 16
    word |= OPERATORS[arguments.op] << 24 if reducing else 0
    word |= ALGORITHMS.index(arguments.algorithm) << 32
    if arguments.inside is not None and arguments.inside != arguments.codec:
        word |= (arguments.inside.number + 1 | digest_inside(arguments.inside) << 8) << 40
    second = arguments.root | receiver << 32
    if fused:
        second = len(fused) | digest_fused(fused) << 32
    return struct.pack("<5Q", word, second, arguments.count, sequence, codec_word(arguments.codec))


def frame(call: bytes, payload: int, number: int) -> bytes:
    """Returns the frame before a payload of so many bytes, the message with this number."""
    return call + struct.pack("<I4sQQ", payload, MAGIC, number, 0)
