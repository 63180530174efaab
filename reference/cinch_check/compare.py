"""Counts of compared and differing elements."""

from dataclasses import dataclass, field

import numpy as np

from cinch_reference.elements import BF16, F16, F32E, F64E, F8E4M3, F8E5M2, Element


@dataclass
class Result:
    """Result of one part of the check."""

    name: str
    elements: int = 0
    bytes: int = 0
    differing: int = 0
    examples: list[str] = field(default_factory=list)

    def compare(self, what: str, elements: int, ours: np.ndarray, library: np.ndarray) -> None:
        """Counts the bytes of two arrays that differ. `elements` is the number that they stand for."""
        ours = np.ascontiguousarray(ours).reshape(-1).view(np.uint8)
        library = np.ascontiguousarray(library).reshape(-1).view(np.uint8)
        self.elements += elements
        self.bytes += ours.size
        if ours.size != library.size:
            self.differ(what, max(ours.size, library.size), f"{ours.size} bytes, {library.size}")
            return
        if ours.tobytes() == library.tobytes():
            return
        unequal = np.flatnonzero(ours != library)
        at = int(unequal[0])
        near = slice(max(at - 4, 0), at + 12)
        text = f"byte {at}: reference {ours[near].tobytes().hex()}, library {library[near].tobytes().hex()}"
        self.differ(what, unequal.size, text)

    def expect(self, what: str, ours: object, library: object) -> None:
        """Counts one value, such as a field of a report."""
        self.bytes += 1
        if ours != library:
            self.differ(what, 1, f"reference {ours}, library {library}")

    def merge(self, other: "Result") -> None:
        """Adds the counts of another result."""
        self.elements += other.elements
        self.bytes += other.bytes
        self.differing += other.differing
        self.examples += other.examples[: 10 - len(self.examples)]

    def differ(self, what: str, count: int, text: str) -> None:
        """Counts differing bytes and keeps the first examples."""
        self.differing += count
        if len(self.examples) < 10:
            self.examples.append(f"{what}: {text}")


NAN_BITS = {
    F16: (0x7FFF, 0x7C00, 0x7E00),
    BF16: (0x7FFF, 0x7F80, 0x7FC0),
    F32E: (0x7FFFFFFF, 0x7F800000, 0x7FC00000),
    F64E: (2**63 - 1, 0x7FF0 << 48, 0x7FF8 << 48),
    F8E4M3: (0x7F, 0x7E, 0x7F),
    F8E5M2: (0x7F, 0x7C, 0x7E),
}
"""Bits of a magnitude, of the largest number that is no NaN, and of one NaN."""


def one_nan(element: Element, raw: np.ndarray) -> np.ndarray:
    """Returns elements in which every NaN has the same bits, where the page leaves them unspecified."""
    if element not in NAN_BITS:
        return raw
    mask, largest, nan = NAN_BITS[element]
    b = np.ascontiguousarray(raw).view(f"u{element.bytes}")
    return np.where((b & mask) > largest, np.array(nan, b.dtype), b).view(raw.dtype)
