"""Residuals of one rank: section "Error feedback"."""

import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np

from .arithmetic import F32, fl

WORKER, OWNER = 0, 1
MAGIC = b"cinchEF1"

Key = tuple[int, int]
"""Number of a chunk, and role."""

Shape = tuple[int, int, int, int]
"""Kind, count, chunk and chunks."""


def kind(collective: int, operator: int, element: int, root: int) -> int:
    """Returns the word `kind` of host memory. Section "Error feedback", Export."""
    return collective | operator << 8 | element << 16 | root << 32


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
    ) -> np.ndarray:
        """Returns the message of x plus its residual, and keeps the new residual until `commit`."""
        kept = self.tensors[tensor]
        r = kept.residuals.get(key)
        if r is None and key in kept.pending:
            r = np.zeros(x.size, F32)
        with np.errstate(all="ignore"):
            v = x
            if r is not None:
                total = x + r
                v = np.where(np.isfinite(total), total, x)
            message = encode(v)
            rest = v - decode(message)
            before = np.zeros(x.size, F32) if r is None else r
            # The residual of the first encode counts where a call encodes a chunk several times.
            kept.pending.setdefault(key, np.where(np.isfinite(rest), rest, before))
        return message

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
