"""Scales of `tensor=K` on one rank: section "Kept scales"."""

from dataclasses import dataclass, field

import numpy as np

from .scaled import largest_finite


@dataclass
class Scales:
    """Scales of one tensor by chunk number, and the calls since they were dropped."""

    calls: int = 0
    scales: dict[int, np.float32] = field(default_factory=dict)


class KeptScales:
    """Scales of all tensors of one rank."""

    def __init__(self) -> None:
        self.tensors: dict[tuple, Scales] = {}

    def begin(self, key: tuple, k: int) -> Scales:
        """Begins a call of a tensor and returns its scales."""
        kept = self.tensors.setdefault(key, Scales())
        if kept.calls == k:
            kept.calls = 0
            kept.scales = {}
        kept.calls += 1
        return kept


def scale_of(kept: Scales, number: int, v: np.ndarray) -> np.float32:
    """Returns the scale of one encode, and keeps a new one. Section "Kept scales"."""
    if number in kept.scales:
        return kept.scales[number]
    a = largest_finite(v)
    if a != 0 and np.isfinite(v).all():
        kept.scales[number] = a
    return a
