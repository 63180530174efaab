"""Loss scaler and adaptive weight precision: section "Training helpers". Arithmetic is fp64."""

from dataclasses import dataclass

import numpy as np

F64 = np.float64


@dataclass
class LossScaler:
    """State of a loss scaler."""

    scale: float = 65536.0
    growth: float = 2.0
    backoff: float = 0.5
    smallest: float = 2.0**-126
    largest: float = 2.0**127
    rescale: float = 0.0
    skipped: int = 0
    interval: int = 2000
    clean: int = 0

    def update(self, non_finite: bool) -> bool:
        """Returns whether the step is to be applied. Section "Training helpers", loss scaler."""
        scale = self.scale or 65536.0
        new = scale
        with np.errstate(all="ignore"):
            if non_finite:
                new = max(F64(scale) * (self.backoff or 0.5), self.smallest or 2.0**-126)
                self.clean = 0
                self.skipped += 1
            else:
                self.clean += 1
                if self.clean == (self.interval or 2000):
                    new = min(F64(scale) * (self.growth or 2.0), self.largest or 2.0**127)
                    self.clean = 0
            self.rescale = float(F64(new) / F64(scale))
        self.scale = float(new)
        return not non_finite


@dataclass
class Awp:
    """State of adaptive weight precision."""

    threshold: float = 0.0
    previous: float = 0.0
    interval: int = 0
    step_bits: int = 0
    bits: int = 0
    count: int = 0
    has_previous: int = 0
    most_bits: int = 0

    def update(self, norm: float) -> str | None:
        """Returns the codec after a batch, None for an error. Section "Training helpers", AWP."""
        most_bits = self.most_bits or 32
        if (np.isfinite(norm) and norm < 0) or (self.bits or 8) > most_bits:
            return None
        self.bits, self.step_bits = self.bits or 8, self.step_bits or 8
        bits = self.bits
        if np.isfinite(norm):
            with np.errstate(all="ignore"):
                growth = (F64(norm) - F64(self.previous)) / F64(self.previous)
            grown = bool(self.has_previous) and bool(growth > self.threshold)
            self.count = 0 if grown else self.count + 1
            self.previous, self.has_previous = float(norm), 1
            if self.count >= self.interval:
                bits = min(bits + (self.step_bits or 8), most_bits)
                self.previous, self.has_previous = 0.0, 0
                self.count = 0
            self.bits = bits
        for limit, codec in ((8, "trunc8"), (16, "trunc16"), (24, "trunc24")):
            if bits <= limit:
                return codec
        return "raw"
