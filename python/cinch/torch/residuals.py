"""Residuals of error feedback by tensor id: parts of what `Communicator.feedback_export` returns."""

import struct
from typing import Dict

#: `cinchEF1`, rank, number of ranks and number of tensors. docs/format.md defines the format.
HEADER = struct.Struct("<8sIIQ")
#: Id, kind, count, chunk, chunks and number of arrays of a tensor.
TENSOR = struct.Struct("<6Q")
#: Role, number of the chunk and number of elements of an array. Elements have 4 bytes.
ARRAY = struct.Struct("<3Q")
MAGIC = b"cinchEF1"


def split(exported: bytes) -> Dict[int, bytes]:
    """Returns the bytes of each tensor, without its id."""
    tensors: Dict[int, bytes] = {}
    try:
        magic, _, _, count = HEADER.unpack_from(exported)
        at = HEADER.size
        for _ in range(count):
            number, *_, arrays = TENSOR.unpack_from(exported, at)
            begin, at = at + 8, at + TENSOR.size
            for _ in range(arrays):
                at += ARRAY.size + 4 * ARRAY.unpack_from(exported, at)[2]
            tensors[number] = exported[begin:at]
    except struct.error:
        raise ValueError(f"residuals end after {len(exported)} bytes, inside a tensor") from None
    if magic != MAGIC or at != len(exported):
        raise ValueError(f"{len(exported)} bytes are no residuals of cinch, or damaged")
    return tensors


def join(tensors: Dict[int, bytes], rank: int, size: int) -> bytes:
    """Returns the export of tensors on a rank of `size` ranks."""
    parts = [HEADER.pack(MAGIC, rank, size, len(tensors))]
    for number in sorted(tensors):
        parts += [number.to_bytes(8, "little"), tensors[number]]
    return b"".join(parts)


def select(exported: bytes, ids: range) -> Dict[int, bytes]:
    """Returns the tensors whose ids are in `ids`, by their place there."""
    return {number - ids.start: each for number, each in split(exported).items() if number in ids}


def replace(exported: bytes, ids: range, tensors: Dict[int, bytes], rank: int, size: int) -> bytes:
    """Returns an export in which `tensors` have taken the place of those whose ids are in `ids`."""
    others = {number: each for number, each in split(exported).items() if number not in ids}
    return join({**others, **{ids[place]: each for place, each in tensors.items()}}, rank, size)
