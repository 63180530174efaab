"""Reductions without a codec: section "Raw arithmetic"."""

import numpy as np

from .arithmetic import F32, NAN
from .elements import Element, widen

OPERATORS = {"sum": 0, "prod": 1, "max": 2, "min": 3, "avg": 4, "premulsum": 5}

NAN64 = np.array(0x7FF8 << 48, np.uint64).view(np.float64)[()]


def nan_of(acc: np.ndarray) -> np.ndarray:
    """Returns acc with the NaN of section "Raw arithmetic" in the place of every NaN."""
    if acc.dtype.kind != "f":
        return acc
    return np.where(np.isnan(acc), NAN if acc.dtype == F32 else NAN64, acc)


def combine(op: str, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Returns the accumulator operation. Section "Raw arithmetic"."""
    with np.errstate(all="ignore"):
        if op in ("sum", "avg", "premulsum"):
            return nan_of(np.add(a, b, dtype=a.dtype))
        if op == "prod":
            return nan_of(np.multiply(a, b, dtype=a.dtype))
        if a.dtype.kind != "f":
            return np.maximum(a, b) if op == "max" else np.minimum(a, b)
        # numpy leaves the order of zeros open: -0 is below +0 here.
        low = (a < b) | ((a == b) & np.signbit(a))
        chosen = np.where(low, b, a) if op == "max" else np.where(low, a, b)
        return nan_of(np.where(np.isnan(a), a, np.where(np.isnan(b), b, chosen)))


def multiply(element: Element, acc: np.ndarray, factor: np.ndarray) -> np.ndarray:
    """Returns elements times the factor, one element of their type. Section "Raw arithmetic"."""
    with np.errstate(all="ignore"):
        return nan_of(np.multiply(acc, widen(element, factor), dtype=acc.dtype))
