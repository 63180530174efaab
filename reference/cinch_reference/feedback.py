"""Residuals of one rank: section "Error feedback"."""

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np

from .arithmetic import F32, fl, up16
from .chunk import numbers_of
from .elements import Element, narrow, widen
from .spec import Codec

WORKER, OWNER = 0, 1
MAGIC = b"cinchEF1"

Key = tuple[int, int]
"""Number of a chunk, and role."""

Shape = tuple[int, int, int, int]
"""Kind, count, chunk and chunks."""


DAMPING = {"terngrad": F32(0.25), "minmax1": F32(0.5), "minmax2": F32(0.5)}
"""Damping of the codecs for which it is not 1. Section "Error feedback"."""


def kind(
    collective: int, operator: int, element: int, root: int, algorithm: int, codec: int, inside: int
) -> int:
    """Returns the word `kind` of host memory, from numbers. Section "Error feedback", Export."""
    word = collective | operator << 8 | element << 16 | codec << 24 | root << 32
    return word | inside << 48 | algorithm << 56


def damp(codec: Codec, message: np.ndarray, n: int) -> np.ndarray:
    """Returns the message with the numbers of its blocks times the damping."""
    damping = DAMPING.get(codec.name)
    if damping is None:
        return message
    numbers = numbers_of(codec, message, n) * damping
    begin = up16(codec.code_bytes(n))
    return np.concatenate([message[:begin], numbers.astype(np.dtype("<f4")).view(np.uint8)])


def rounded_to_element(element: Element, d: np.ndarray) -> np.ndarray:
    """Returns decoded numbers as the output holds them. Section "Error feedback", role owner."""
    return widen(element, narrow(element, d))


@dataclass
class Tensor:
    """Residuals of one tensor, and those of the call that runs."""

    shape: Shape
    residuals: dict[Key, np.ndarray] = field(default_factory=dict)
    pending: dict[Key, np.ndarray] = field(default_factory=dict)


class Feedback:
    """Residuals of all tensors of one rank."""

    def __init__(self, rank: int, nranks: int):
        self.rank, self.nranks = rank, nranks
        self.tensors: dict[int, Tensor] = {}

    def begin(self, tensor: int, shape: Shape) -> None:
        """Begins a call; another shape drops the residuals."""
        kept = self.tensors.get(tensor)
        if kept is None or kept.shape != shape:
            self.tensors[tensor] = Tensor(shape)

    def encode(
        self,
        tensor: int,
        key: Key,
        x: np.ndarray,
        encode: Callable[[np.ndarray], np.ndarray],
        decode: Callable[[np.ndarray], np.ndarray],
        element: Element,
    ) -> np.ndarray:
        """Returns the message of x plus its residual, and keeps the new residual until `commit`.

        `encode` includes the damping.
        """
        kept = self.tensors[tensor]
        r = kept.residuals.get(key)
        if r is None:
            r = np.zeros(x.size, F32)
        with np.errstate(all="ignore"):
            total = x + r
            v = np.where(np.isfinite(total), total, x)
            message = encode(v)
            d = decode(message)
            if key[1] == OWNER:
                d = rounded_to_element(element, d)
            rest = v - d
            kept.pending[key] = np.where(np.isfinite(rest), rest, r)
        return message

    def l2_norm(self, tensor: int) -> float:
        """Returns the norm of the residuals of a tensor. Section "Reports", `residual_l2_norm`."""
        arrays = self.tensors[tensor].residuals.values()
        return math.sqrt(sum(float(np.square(r, dtype=np.float64).sum()) for r in arrays))

    def commit(self, tensor: int) -> None:
        """Ends a successful call."""
        kept = self.tensors[tensor]
        kept.residuals |= kept.pending
        kept.pending = {}

    def rescale(self, factor: float) -> None:
        """Multiplies all residuals. Section "Error feedback", `cinch_feedback_rescale`."""
        f = fl(Fraction(factor))
        for tensor in self.tensors.values():
            for key, r in tensor.residuals.items():
                with np.errstate(all="ignore"):
                    scaled = r * f
                tensor.residuals[key] = np.where(np.isfinite(scaled), scaled, F32(0))

    def forget(self, tensor: int) -> None:
        """Drops the residuals of one tensor, or of all for 0."""
        if tensor:
            self.tensors.pop(tensor, None)
        else:
            self.tensors.clear()

    def export(self) -> bytes:
        """Returns the bytes of `cinch_feedback_export`. Section "Error feedback", Export."""
        data = [MAGIC, struct.pack("<IIQ", self.rank, self.nranks, len(self.tensors))]
        for number, tensor in sorted(self.tensors.items()):
            arrays = {key: r for key, r in sorted(tensor.residuals.items()) if r.size}
            data.append(struct.pack("<6Q", number, *tensor.shape, len(arrays)))
            for (chunk, role), r in arrays.items():
                data.append(struct.pack("<3Q", role, chunk, r.size))
                data.append(r.astype("<f4").tobytes())
        return b"".join(data)
