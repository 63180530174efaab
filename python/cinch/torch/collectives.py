"""Collectives on tensors of any layout and element type, over one communicator of cinch."""

from typing import Any, Callable, List, Optional, Sequence, Tuple

import torch

from ..communicator import Communicator, group
from .reductions import Reduction, is_native


def wire(tensor: torch.Tensor) -> torch.Tensor:
    """Returns contiguous elements as one dimension of a type that cinch moves: bytes where cinch lacks the type."""
    flat = tensor.resolve_conj().resolve_neg().contiguous().reshape(-1)
    return flat if is_native(flat.dtype) else flat.view(torch.uint8)


def _target(tensor: torch.Tensor) -> Tuple[torch.Tensor, Callable[[], None]]:
    """Returns memory for the elements of `tensor`, and a function that copies them there if it is other memory."""
    if tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
        return wire(tensor), lambda: None
    room = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    return wire(room), lambda: tensor.copy_(room)


def _joined(tensors: Sequence[torch.Tensor]) -> Tuple[torch.Tensor, Callable[[], None]]:
    """Returns memory for the elements of all tensors, and a function that copies them there."""
    first, total = tensors[0], sum(one.numel() for one in tensors)
    room = torch.empty(total, dtype=first.dtype, device=first.device)

    def copy() -> None:
        for one, part in zip(tensors, room.split([each.numel() for each in tensors])):
            one.copy_(part.view(one.shape))

    return wire(room), copy


class TensorCollectives:
    """Collectives of one communicator. On a GPU they are queued on `stream`, which must be the current stream."""

    def __init__(self, comm: Communicator, stream: Any = None) -> None:
        #: The communicator.
        self.comm = comm
        #: Stream of the calls; None on host memory.
        self.stream = stream

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.comm.size

    def all_reduce(self, tensor: torch.Tensor, reduction: Reduction) -> None:
        """Reduces in place."""
        given = reduction.encode(tensor)
        if reduction.is_in_place(tensor):
            self._all_reduce(given, reduction)
            return
        if given.data_ptr() == tensor.data_ptr():
            given = given.clone()
        self._all_reduce(given, reduction)
        tensor.copy_(reduction.decode(given))

    def reduce(self, tensor: torch.Tensor, reduction: Reduction, root: int) -> None:
        """Reduces in place on the root; other ranks' tensors keep their elements."""
        if reduction.operator is None:
            copy = tensor.clone()
            self.all_reduce(copy, reduction)
            if self.comm.rank == root:
                tensor.copy_(copy)
            return
        is_root = self.comm.rank == root
        given = reduction.encode(tensor)
        out = torch.empty_like(given) if is_root and not reduction.is_in_place(tensor) else given
        self.comm.reduce(given, out=out if is_root else None, op=reduction.operator, root=root, stream=self.stream)
        if is_root and not reduction.is_in_place(tensor):
            tensor.copy_(reduction.decode(out))

    def reduce_scatter(self, output: torch.Tensor, given: torch.Tensor, reduction: Reduction) -> None:
        """Writes block r of the reduced elements to `output` on rank r."""
        if given.numel() != self.size * output.numel():
            raise ValueError(f"the input has {given.numel()} elements; {self.size} outputs have {output.numel()} each")
        rows = given.reshape(self.size, output.numel())
        if reduction.operator is None:
            output.copy_(reduction.bitwise(self._scattered(rows)).view(output.shape))
            return
        encoded = reduction.encode(rows)
        result = torch.empty(encoded.shape[1:], dtype=encoded.dtype, device=encoded.device)
        self.comm.reduce_scatter(encoded, out=result, op=reduction.operator, stream=self.stream)
        output.copy_(reduction.decode(result).reshape(output.shape))

    def all_gather(self, output: torch.Tensor, given: torch.Tensor) -> None:
        """Writes all ranks' elements to `output`, in rank order."""
        if output.numel() != self.size * given.numel():
            raise ValueError(f"the output has {output.numel()} elements; {self.size} inputs have {given.numel()} each")
        room, copy = _target(output)
        self.comm.all_gather(wire(given), out=room, stream=self.stream)
        copy()

    def all_gather_list(self, outputs: Sequence[torch.Tensor], given: torch.Tensor) -> None:
        """Writes rank r's elements to `outputs[r]`. Ranks may give different numbers of elements."""
        if len({one.numel() for one in outputs}) > 1:
            self.exchange([given] * self.size, outputs)
            return
        room, copy = _joined(outputs)
        self.comm.all_gather(wire(given), out=room, stream=self.stream)
        copy()

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        """Copies the root's elements to all ranks."""
        if self.comm.rank == root:
            self.comm.broadcast(wire(tensor), root, stream=self.stream)
            return
        room, copy = _target(tensor)
        self.comm.broadcast(room, root, stream=self.stream)
        copy()

    def gather(self, outputs: Optional[Sequence[torch.Tensor]], given: torch.Tensor, root: int) -> None:
        """Writes rank r's elements to `outputs[r]` on the root."""
        room, copy = _joined(outputs) if outputs else (None, lambda: None)
        self.comm.gather(wire(given), out=room, root=root, stream=self.stream)
        copy()

    def scatter(self, output: torch.Tensor, given: Optional[Sequence[torch.Tensor]], root: int) -> None:
        """Writes the root's `given[r]` to `output` on rank r."""
        room, copy = _target(output)
        blocks = None if not given else wire(torch.cat([one.reshape(-1) for one in given]))
        self.comm.scatter(blocks, room, root=root, stream=self.stream)
        copy()

    def all_to_all(self, output: torch.Tensor, given: torch.Tensor) -> None:
        """Sends equal blocks of `given` to the ranks, and receives theirs in `output`."""
        if given.numel() % self.size or given.numel() != output.numel():
            raise ValueError(f"{given.numel()} elements in and {output.numel()} out are no equal blocks of {self.size}")
        room, copy = _target(output)
        blocks = wire(given)
        shape = (self.size, blocks.numel() // self.size)
        self.comm.all_to_all(blocks.view(shape), out=room.view(shape), stream=self.stream)
        copy()

    def exchange(self, sent: Sequence[torch.Tensor], received: Sequence[torch.Tensor]) -> None:
        """Sends `sent[r]` to rank r and receives `received[r]` from it, for all ranks at once."""
        kept: List[Any] = []
        with group():
            for peer, (given, output) in enumerate(zip(sent, received)):
                outgoing, (room, copy) = wire(given), _target(output)
                kept.append((outgoing, room, copy))
                if peer == self.comm.rank:
                    room.copy_(outgoing)
                    continue
                self.comm.send(outgoing, peer, stream=self.stream)
                self.comm.recv(room, peer, stream=self.stream)
        for _, _, copy in kept:
            copy()

    # ---- inside ----

    def _all_reduce(self, given: torch.Tensor, reduction: Reduction) -> None:
        if reduction.operator is not None:
            self.comm.all_reduce(given, out=given, op=reduction.operator, stream=self.stream)
            return
        block = -(-given.numel() // self.size)
        padded = torch.zeros(block * self.size, dtype=given.dtype, device=given.device)
        padded[: given.numel()] = given.reshape(-1)
        own = reduction.bitwise(self._scattered(padded.view(self.size, block)))
        self.all_gather(padded, own)
        given.copy_(padded[: given.numel()].view(given.shape))

    def _scattered(self, rows: torch.Tensor) -> torch.Tensor:
        """Sends row r to rank r; returns the rows received."""
        received = torch.empty(rows.shape, dtype=rows.dtype, device=rows.device)
        self.all_to_all(received, rows)
        return received
