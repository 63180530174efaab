"""Division of a call into chunks: section "Chunks"."""

from dataclasses import dataclass

from .elements import Element
from .spec import Codec

SLOT_BYTES = 131072
CHANNELS = 2
SLOTS = 4
BUFFER_BYTES = 67108864


def slot_bytes(nranks: int, setting: int = SLOT_BYTES) -> int:
    """Returns the slot bytes in effect. Section "Chunks"."""
    size = setting
    while 2 * nranks * CHANNELS * SLOTS * (size + 64) > BUFFER_BYTES:
        size = max(size // 2 // 64 * 64, 4096)
    return size


@dataclass(frozen=True)
class Chunk:
    """Part q of a pass: elements `begin` to `begin + n - 1` of the message or of a rank's block."""

    number: int
    q: int
    begin: int
    n: int


@dataclass(frozen=True)
class Division:
    """Division of a call: P parts, elements of a full chunk, passes."""

    parts: int
    chunk: int
    passes: int
    count: int

    def chunks(self, block: int | None = None, blocks: int = 1) -> list[Chunk]:
        """Returns the chunks in order.

        For collectives of blocks, `block` is the number of the block among `blocks`.
        """
        found = []
        for p in range(self.passes):
            for q in range(self.parts):
                begin = min((p * self.parts + q) * self.chunk, self.count)
                end = min(begin + self.chunk, self.count)
                c = q if block is None else block * self.parts + q
                number = p * self.parts * blocks + c
                found.append(Chunk(number, q, begin, end - begin))
        return found


def divide(
    element: Element, codecs: tuple[Codec, ...], parts: int, count: int, slot: int
) -> Division:
    """Returns the division of a call whose messages use these codecs. Section "Chunks"."""
    line = 64 // element.bytes
    steps = [line if codec.is_raw else max(codec.granule, line) for codec in codecs]
    g = max(steps)
    most = min(
        largest_chunk(codec, step, element, slot) for codec, step in zip(codecs, steps, strict=True)
    )
    most = most // g * g
    least = max(1, -(-count // (parts * most)))
    chunk = max(1, -(-count // (least * parts)))
    chunk = -(-chunk // g) * g
    passes = max(1, -(-count // (parts * chunk)))
    return Division(parts, chunk, passes, count)


def largest_chunk(codec: Codec, g: int, element: Element, slot: int) -> int:
    """Returns `most` of one codec. Section "Chunks"."""
    # A chunk has at most as many elements as a slot has bytes.
    low, high = 1, slot // g + 1
    while high - low > 1:
        middle = (low + high) // 2
        if codec.wire_bytes(middle * g, element.bytes) <= slot:
            low = middle
        else:
            high = middle
    most = low * g
    return max(min(most, 65536 // g * g), g) if codec.tensor else most
