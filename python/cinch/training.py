"""Helpers for training loops: adaptive weight precision, loss scaling, and the count that a loss scaler needs."""

import ctypes
from typing import Any

from . import _abi
from ._arrays import describe
from ._library import LIBRARY, check, structure


def count_non_finite(array: Any) -> int:
    """Returns the number of NaN and infinite elements of an array in host memory."""
    given = describe(array, "array")
    if given.on_gpu:
        raise ValueError("array is on a GPU; count there, for example with torch.isfinite")
    found = ctypes.c_uint64()
    check(LIBRARY.cinch_count_non_finite(given.pointer(), given.count, given.dtype, ctypes.byref(found)))
    return found.value


class Awp:
    """Chooses how many bits of a group of weights to keep: few at first, more once their L2 norm stops growing.

    `threshold` is the relative growth of the norm that counts as growth, `interval` the number of successive batches
    without it after which `step_bits` are added, up to `most_bits`. Pass equal norms on all ranks, or they choose
    different codecs.
    """

    def __init__(
        self, threshold: float, interval: int, start_bits: int = 8, step_bits: int = 8, most_bits: int = 32
    ) -> None:
        self._raw = structure(_abi.cinch_awp_t, LIBRARY.cinch_awp_init)
        self._raw.threshold, self._raw.interval = threshold, interval
        self._raw.bits, self._raw.step_bits, self._raw.most_bits = start_bits, step_bits, most_bits
        #: Codec that keeps the bits, rounded up to bytes: `trunc8`, `trunc16`, `trunc24` or `raw`.
        self.codec: str = ("trunc8", "trunc16", "trunc24", "raw")[min(3, (start_bits - 1) // 8)]

    @property
    def bits(self) -> int:
        """Bits to keep, 1 to 32."""
        return self._raw.bits

    def update(self, l2_norm: float) -> str:
        """Takes the norm after a batch; returns the codec from now on. A norm that is not finite changes nothing."""
        name = ctypes.c_char_p()
        check(LIBRARY.cinch_awp_update(ctypes.byref(self._raw), l2_norm, ctypes.byref(name)))
        self.codec = name.value.decode()
        return self.codec


class LossScaler:
    """Scales a loss so that 16-bit gradients neither vanish nor overflow.

    Settings are the fields of `cinch_loss_scaler_t`: `scale`, `growth`, `backoff`, `smallest`, `largest`, `interval`.
    """

    def __init__(self, **settings: Any) -> None:
        self._raw = structure(_abi.cinch_loss_scaler_t, LIBRARY.cinch_loss_scaler_init)
        names = [name for name, _ in self._raw._fields_[3:]]
        for name, value in settings.items():
            if name not in names:
                raise TypeError(f"a loss scaler has no setting {name!r}; there are {', '.join(names)}")
            setattr(self._raw, name, value)

    @property
    def scale(self) -> float:
        """Factor of the loss in the next step."""
        return self._raw.scale

    @property
    def rescale(self) -> float:
        """New scale divided by the old one at the last update, for `Communicator.feedback_rescale`."""
        return self._raw.rescale

    @property
    def skipped(self) -> int:
        """Number of skipped steps."""
        return self._raw.skipped

    def update(self, non_finite: int) -> bool:
        """Returns whether to apply the step whose summed gradients had `non_finite` such elements."""
        apply = ctypes.c_int()
        check(LIBRARY.cinch_loss_scaler_update(ctypes.byref(self._raw), int(non_finite > 0), ctypes.byref(apply)))
        return bool(apply.value)
