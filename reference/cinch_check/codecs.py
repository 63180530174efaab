"""Parts `codecs`, `hostile` and `published`: arrays through `cinch_encode` and `cinch_decode`."""

import numpy as np

from cinch_reference import chunk, published
from cinch_reference.elements import BF16, F16, F32E, Element, narrow
from cinch_reference.spec import Codec, parse

from . import values
from .compare import Result
from .library import CHUNK, PUBLISHED, Library, LibraryError

SEEDED_SPECS = [
    "linear8:seed=7", "linear8:block=32:seed=255", "linear8:tensor=2:seed=3",
    "dynamic8:seed=7", "dynamic8:block=64:seed=1", "dynamic8:tensor=2:seed=3",
]  # fmt: skip
"""The scaled codecs with stochastic rounding."""

SPECS = [
    "linear8", "linear8:block=32", "linear8:block=4096", "linear8:tensor=1", "linear8:tensor=7",
    "dynamic8", "dynamic8:block=64", "dynamic8:tensor=1",
    "static8", "static8:offset=-2", "static8:offset=30", "static8:offset=-30",
    "mantissa8", "mantissa8:offset=3", "mantissa8:offset=-30", "mantissa8:offset=30",
    "cast_bf16", "cast16",
    "minmax1", "minmax1:block=32", "minmax1:seed=3",
    "minmax2", "minmax2:block=64", "minmax2:seed=255",
    "minmax4", "minmax4:block=128:seed=7", "minmax4:seed=1",
    "minmax8", "minmax8:block=512", "minmax8:seed=9",
    "trunc8", "trunc16", "trunc24",
    "fp8_e4m3", "fp8_e4m3:block=32", "fp8_e4m3:tensor=1",
    "fp8_e5m2", "fp8_e5m2:block=1024", "fp8_e5m2:tensor=3",
    "terngrad", "terngrad:seed=5", "terngrad:block=32:seed=200", "terngrad:block=2048",
    "onebit", "onebit:block=32", "onebit:block=4096",
    "threshold2:tau=0.5", "threshold2:tau=1e-40", "threshold2:tau=3e38", "threshold2:tau=0.1",
    *SEEDED_SPECS,
]  # fmt: skip
"""All 18 codecs, with parameters."""

ELEMENTS = [F32E, F16, BF16]
COUNTS = [0, 1, 2, 3, 5, 15, 16, 17, 31, 33, 63, 255, 256, 257, 300, 511, 513, 1000, 4097]
"""Small counts: tails of blocks, of code bytes and of vectors."""

PIECE = 1 << 16
"""Largest number of elements compared at once."""


def round_trip(library: Library, result: Result, codec: Codec, element, raw, draw: int) -> None:
    """Compares one array's message, and its decoded elements."""
    text, n = str(codec), raw.size
    what = f"{text} {element.name} x {n}, draw {draw}"
    ours = chunk.encode_array(codec, element, raw, draw)
    theirs = library.encode(text, CHUNK, element, raw, draw)
    result.compare(f"encode {what}", n, ours, theirs)
    if theirs.size == ours.size:
        decoded = chunk.decode_array(codec, element, theirs, n)
        result.compare(f"decode {what}", 0, decoded, library.decode(text, CHUNK, element, theirs, n))


def sizes(total: int) -> list[int]:
    """Returns the counts of arrays that have `total` elements together, the last ones odd."""
    counts = list(COUNTS)
    left = total - sum(counts)
    while left > 0:
        counts.append(min(PIECE + 37, left))
        left -= counts[-1]
    return counts


def check_codecs(
    library: Library,
    elements: int,
    random: np.random.Generator,
    specs: list[str] = SPECS,
    types: list[Element] = ELEMENTS,
) -> Result:
    """Compares encodes and decodes of every codec and element type."""
    result = Result("codecs")
    share = elements // (len(specs) * len(types))
    for spec in specs:
        codec = parse(spec)
        for element in types:
            raw = values.all_patterns(random, element, shuffled=share > 500_000)
            round_trip(library, result, codec, element, raw, 1)
            if codec.name == "onebit":
                raw = narrow(element, values.order_of_sums(random, codec.block, 64))
                round_trip(library, result, codec, element, raw, 1)
            for n in sizes(share - raw.size):
                raw = values.elements(codec, element, random, n)
                round_trip(library, result, codec, element, raw, int(random.integers(0, 2**63)))
    return result


def check_hostile(library: Library, elements: int, random: np.random.Generator) -> Result:
    """Compares decodes of random bytes."""
    result = Result("hostile")
    share = elements // (len(SPECS) * len(ELEMENTS))
    for spec in SPECS:
        codec = parse(spec)
        for element in ELEMENTS:
            for n in sizes(share):
                wire = np.zeros(codec.wire_bytes(n), np.uint8)
                wire = values.hostile(codec, random, wire, n)
                ours = chunk.decode_array(codec, element, wire, n)
                theirs = library.decode(spec, CHUNK, element, wire, n)
                result.compare(f"decode {spec} {element.name} x {n}", n, ours, theirs)
    return result


PUBLISHED_SPECS = [
    "minmax1", "minmax2", "minmax4", "minmax8", "minmax1:seed=3", "minmax4:seed=77", "minmax8:seed=1",
    "minmax2:block=32", "trunc8", "trunc16", "trunc24",
]  # fmt: skip


def library_decode(library: Library, spec: str, element, wire: np.ndarray, n: int):
    """Returns decoded elements of the published layout, None for an error."""
    try:
        return library.decode(spec, PUBLISHED, element, wire, n)
    except LibraryError:
        return None


def library_count(library: Library, spec: str, wire: np.ndarray) -> int | None:
    """Returns the number of elements of a message, None for an error."""
    try:
        return library.wire_count(spec, wire)
    except LibraryError:
        return None


def malformed(wire: np.ndarray, random: np.random.Generator) -> list[np.ndarray]:
    """Returns a message with changed headers and lengths."""
    changed = []
    for at, values_ in ((0, (0, 1, 2, 3, 4, 8, 255)), (1, (0, 1, 2, 3, 7, 8, 255))):
        for value in values_:
            if wire.size > at:
                other = wire.copy()
                other[at] = value
                changed.append(other)
    changed += [wire[:-1], wire[:9], wire[:10], wire[:0], np.append(wire, np.uint8(0))]
    changed += [np.append(wire, random.integers(0, 256, 9, dtype=np.uint8))]
    return changed


def check_published(library: Library, elements: int, random: np.random.Generator) -> Result:
    """Compares the layouts of the formats' authors, malformed messages included."""
    result = Result("published")
    share = elements // (len(PUBLISHED_SPECS) * len(ELEMENTS))
    for spec in PUBLISHED_SPECS:
        codec = parse(spec)
        for element in ELEMENTS:
            for n in sizes(share):
                raw = values.elements(codec, element, random, n)
                if codec.name.startswith("minmax") and random.random() < 0.7:
                    # One NaN poisons the array, which is one block.
                    bad = ~np.isfinite(chunk.widen(element, raw))
                    raw = np.where(bad, np.array(0, raw.dtype), raw)
                draw = int(random.integers(0, 2**63))
                what = f"{spec} {element.name} x {n}, draw {draw}"
                ours = published.encode_array(codec, element, raw, draw)
                theirs = library.encode(spec, PUBLISHED, element, raw, draw)
                result.compare(f"encode {what}", n, ours, theirs)
                if n > 5000 and codec.name.startswith("minmax"):
                    theirs[2:10] = random.choice(values.floats(values.SPECIAL_BITS), 2).view(np.uint8)
                messages = [theirs] + (malformed(theirs, random) if n in (0, 1, 5, 17, 300) else [])
                for wire in messages:
                    result.expect(
                        f"count {what}, {wire[:2]}",
                        published.count(codec, wire),
                        library_count(library, spec, wire),
                    )
                    ours = published.decode_array(codec, element, wire, n)
                    theirs = library_decode(library, spec, element, wire, n)
                    label = f"decode {what}, {wire.size} bytes, {wire[:2]}"
                    result.expect(f"{label}: is error", ours is None, theirs is None)
                    if ours is not None and theirs is not None:
                        result.compare(label, 0, ours, theirs)
    return result
