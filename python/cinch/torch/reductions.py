"""Reductions of torch's element types and operators, by those that cinch has. Integers are exact."""

import dataclasses
from typing import Any, Optional

import torch
from torch.distributed import ReduceOp

from .._arrays import element_type

RedOpType = ReduceOp.RedOpType

#: Names of cinch's operators.
NATIVE = {
    RedOpType.SUM: "sum",
    RedOpType.PRODUCT: "prod",
    RedOpType.MIN: "min",
    RedOpType.MAX: "max",
    RedOpType.AVG: "avg",
    RedOpType.PREMUL_SUM: "sum",
}
#: Operators on bool, whose elements are bytes 0 and 1.
ON_BOOL = {
    RedOpType.SUM: "max",
    RedOpType.MAX: "max",
    RedOpType.BOR: "max",
    RedOpType.PRODUCT: "min",
    RedOpType.MIN: "min",
    RedOpType.BAND: "min",
    # Sums of bytes wrap at 256, which keeps the lowest bit.
    RedOpType.BXOR: "sum",
}
BITWISE = {
    RedOpType.BAND: torch.bitwise_and,
    RedOpType.BOR: torch.bitwise_or,
    RedOpType.BXOR: torch.bitwise_xor,
}
#: Element types that are reduced in a wider one. Its sums and products, cut to the narrow type, are the narrow ones.
WIDER = {torch.int16: torch.int32, torch.uint16: torch.int32}
LINEAR = (RedOpType.SUM, RedOpType.AVG, RedOpType.PREMUL_SUM)


def is_native(dtype: torch.dtype) -> bool:
    """Whether cinch has an element type."""
    try:
        element_type(dtype)
    except TypeError:
        return False
    return True


def is_integer(dtype: torch.dtype) -> bool:
    """Whether elements are integers, bool excluded."""
    return not dtype.is_floating_point and not dtype.is_complex and dtype != torch.bool


@dataclasses.dataclass(frozen=True)
class Reduction:
    """An operator on an element type.

    `operator` is cinch's operator on the tensors that `encode` returns, or None for bitwise operators, which
    `bitwise` reduces. `decode` turns the result into one that can be copied to the output.
    """

    kind: Any
    dtype: torch.dtype
    size: int
    operator: Optional[str]
    factor: Any = None

    @classmethod
    def of(cls, op: Any, dtype: torch.dtype, size: int) -> "Reduction":
        """Returns the reduction over `size` ranks. Raises ValueError if torch's operator does not fit the type."""
        kind, factor = op if isinstance(op, RedOpType) else op.op, None
        if kind == RedOpType.PREMUL_SUM:
            factor = op.__getstate__()[1]
        if dtype == torch.bool:
            operator = ON_BOOL.get(kind)
            fits = operator is not None
        elif kind in BITWISE:
            operator, fits = None, is_integer(dtype)
        elif dtype.is_complex:
            operator, fits = NATIVE[kind], kind in LINEAR
        elif is_integer(dtype):
            operator = "sum" if kind == RedOpType.AVG else NATIVE[kind]
            fits = (is_native(dtype) or dtype in WIDER) and (kind, dtype) != (RedOpType.AVG, torch.uint64)
        else:
            operator, fits = NATIVE[kind], is_native(dtype)
        if not fits:
            raise ValueError(f"cinch does not reduce {dtype} by {kind.name}: convert the tensor first")
        return cls(kind, dtype, size, operator, factor)

    def encode(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns contiguous elements that cinch reduces: `tensor` itself where nothing must be changed."""
        if self.factor is not None:
            factor = self.factor
            tensor = tensor * (factor.to(tensor.device, tensor.dtype) if torch.is_tensor(factor) else factor)
        tensor = tensor.resolve_conj().resolve_neg()
        if tensor.is_complex():
            return torch.view_as_real(tensor.contiguous())
        if self.dtype == torch.bool:
            return tensor.contiguous().view(torch.uint8)
        if self.dtype in WIDER:
            return tensor.to(WIDER[self.dtype]).contiguous()
        if self._is_integer_average():
            # Halves of 32 bits, so that no sum wraps.
            wide = tensor.to(torch.int64)
            return torch.stack((wide >> 32, wide & 0xFFFFFFFF), dim=-1)
        return tensor.contiguous()

    def decode(self, result: torch.Tensor) -> torch.Tensor:
        """Returns the reduced elements in the shape of the tensor that was given to `encode`."""
        if self.dtype.is_complex:
            return torch.view_as_complex(result)
        if self.dtype == torch.bool:
            return (result & 1).view(torch.bool) if self.kind == RedOpType.BXOR else result.view(torch.bool)
        if self._is_integer_average():
            return self._average(result)
        return result

    def is_in_place(self, tensor: torch.Tensor) -> bool:
        """Whether `encode` returns the memory of `tensor`, and `decode` changes nothing."""
        changes = self.factor is not None or self.dtype in WIDER or self._is_integer_average()
        is_plain = tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
        return is_plain and not changes and self.kind != RedOpType.BXOR

    def bitwise(self, rows: torch.Tensor) -> torch.Tensor:
        """Reduces the first dimension by a bitwise operator."""
        total = rows[0].clone()
        for row in rows[1:]:
            BITWISE[self.kind](total, row, out=total)
        return total

    def _is_integer_average(self) -> bool:
        return self.kind == RedOpType.AVG and is_integer(self.dtype)

    def _average(self, halves: torch.Tensor) -> torch.Tensor:
        """Divides sums of halves by the number of ranks, towards zero."""
        high, low = halves[..., 0], halves[..., 1]
        quotient = torch.div(high, self.size, rounding_mode="floor")
        rest = ((high - quotient * self.size) << 32) + low
        floor = (quotient << 32) + torch.div(rest, self.size, rounding_mode="floor")
        is_inexact = torch.remainder(rest, self.size) != 0
        return (floor + ((floor < 0) & is_inexact).to(torch.int64)).to(self.dtype)
