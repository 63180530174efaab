"""Names, parameters and sizes of codecs: section "Codecs"."""

from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from .arithmetic import fl, up16

NAMES = [
    "raw",
    "linear8",
    "dynamic8",
    "static8",
    "mantissa8",
    "cast_bf16",
    "cast16",
    "minmax1",
    "minmax2",
    "minmax4",
    "minmax8",
    "trunc8",
    "trunc16",
    "trunc24",
    "fp8_e4m3",
    "fp8_e5m2",
    "terngrad",
    "onebit",
    "threshold2",
]
"""Names by number."""

PARAMETERS = {
    "raw": (),
    "linear8": ("block", "tensor", "seed"),
    "dynamic8": ("block", "tensor", "seed"),
    "static8": ("offset",),
    "mantissa8": ("offset",),
    "cast_bf16": (),
    "cast16": (),
    "minmax1": ("block", "seed"),
    "minmax2": ("block", "seed"),
    "minmax4": ("block", "seed"),
    "minmax8": ("block", "seed"),
    "trunc8": (),
    "trunc16": (),
    "trunc24": (),
    "fp8_e4m3": ("block", "tensor"),
    "fp8_e5m2": ("block", "tensor"),
    "terngrad": ("block", "seed"),
    "onebit": ("block",),
    "threshold2": ("tau",),
}

CODE_BITS = {
    "linear8": 8,
    "dynamic8": 8,
    "static8": 8,
    "mantissa8": 8,
    "cast_bf16": 16,
    "cast16": 16,
    "minmax1": 1,
    "minmax2": 2,
    "minmax4": 4,
    "minmax8": 8,
    "trunc8": 8,
    "trunc16": 16,
    "trunc24": 24,
    "fp8_e4m3": 8,
    "fp8_e5m2": 8,
    "terngrad": 2,
    "onebit": 1,
    "threshold2": 2,
}

SCALED = ("linear8", "dynamic8", "fp8_e4m3", "fp8_e5m2")
"""Codecs with one scale for each block."""

NUMBERS = {name: 1 for name in (*SCALED, "terngrad")} | {
    name: 2 for name in ("minmax1", "minmax2", "minmax4", "minmax8", "onebit")
}
"""Numbers of each block, for codecs with blocks."""


@dataclass(frozen=True)
class Codec:
    """Codec and its parameters. A parameter that the codec lacks is 0."""

    name: str
    block: int = 0
    tensor: int = 0
    offset: int = 0
    seed: int = 0
    tau: float = 0.0

    def __str__(self) -> str:
        """Returns the printed form."""
        parameters = []
        for key in PARAMETERS[self.name]:
            value = getattr(self, key)
            if value:
                parameters.append(f"{key}={np.float32(value)}" if key == "tau" else f"{key}={value}")
        return ":".join([self.name, *parameters])

    @property
    def number(self) -> int:
        """Returns the number of the codec."""
        return NAMES.index(self.name)

    @property
    def is_raw(self) -> bool:
        """Returns whether messages hold elements as they are."""
        return self.name == "raw"

    @property
    def code_bits(self) -> int:
        """Returns the bits of one code."""
        return CODE_BITS[self.name]

    @property
    def numbers(self) -> int:
        """Returns how many fp32 numbers a block has."""
        return NUMBERS.get(self.name, 0)

    @property
    def granule(self) -> int:
        """Returns the elements of which chunks are multiples."""
        if self.tensor:
            return 1
        return 4 if self.name == "threshold2" else max(self.block, 1)

    @property
    def draws(self) -> bool:
        """Returns whether an encode draws random numbers. Section "Random numbers"."""
        return self.name == "terngrad" or self.seed > 0

    def blocks(self, n: int) -> int:
        """Returns the number of blocks of n elements."""
        if self.tensor:
            return min(n, 1)
        return -(-n // self.block) if self.block else 0

    def code_bytes(self, n: int) -> int:
        """Returns the bytes of n codes without padding."""
        return -(-n * self.code_bits // 8)

    def wire_bytes(self, n: int, element_bytes: int = 4) -> int:
        """Returns the bytes of a message of n elements."""
        if self.is_raw:
            return n * element_bytes
        return up16(self.code_bytes(n)) + 4 * self.numbers * self.blocks(n)


RAW = Codec("raw")


def parse(text: str) -> Codec:
    """Returns the codec that `NAME[:PARAMETER=VALUE]...` denotes."""
    name, *rest = text.split(":")
    values = {}
    for part in rest:
        key, value = part.split("=")
        if key not in PARAMETERS[name]:
            raise ValueError(f"{name} has no parameter {key}")
        values[key] = float(fl(Fraction(value))) if key == "tau" else int(value)
    if "block" in PARAMETERS[name] and "tensor" not in values:
        values.setdefault("block", 256)
    if name == "threshold2" and "tau" not in values:
        raise ValueError("threshold2 needs tau=T")
    return Codec(name, **values)
