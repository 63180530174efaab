"""The process group of torch.distributed's backend `cinch`: torch's methods by collectives and messages of cinch.

Torch calls a subclass of ProcessGroup directly where the caller is Python, and through virtual functions where it is
C++ (DDP's reducer, functional collectives). Each method takes torch's lists and options and queues one call.
"""

from typing import Any, List, Optional, Sequence

import torch
from torch._C._distributed_c10d import Work
from torch.distributed import ReduceOp

from .. import _library
from . import rendezvous
from .calls import CallQueue
from .collectives import TensorCollectives
from .errors import torch_error
from .reductions import Reduction
from .sparse import all_reduce_sparse
from .work import AllWork, seconds


def _list(tensors: Any) -> List[torch.Tensor]:
    return [tensors] if torch.is_tensor(tensors) else list(tensors)


def _nested(tensors: Any) -> List[torch.Tensor]:
    """Returns the inner list of torch's lists of lists, which have one entry per device of the process."""
    first = tensors[0] if tensors else None
    return _list(tensors if first is None or torch.is_tensor(first) else first)


def _operator(opts: Any) -> Any:
    """Returns the operator of options, or of the operator itself; the sum by default."""
    return ReduceOp.SUM if opts is None else getattr(opts, "reduceOp", opts)


class CinchProcessGroup(CallQueue):
    """Collectives and messages of one group of ranks, for torch.distributed."""

    # ---- reductions ----

    def _reduction(self, opts: Any, tensor: torch.Tensor) -> Reduction:
        return Reduction.of(_operator(opts), tensor.dtype, self._own_size)

    def allreduce(self, tensors: Any, opts: Any = None, timeout: Any = None) -> Work:
        """Reduces each tensor in place."""
        tensors = _list(tensors)
        if any(one.layout == torch.sparse_coo for one in tensors):
            return self._allreduce_sparse(tensors, opts, timeout)
        reductions = [self._reduction(opts, one) for one in tensors]

        def run(collectives: TensorCollectives) -> None:
            for one, reduction in zip(tensors, reductions):
                collectives.all_reduce(one, reduction)

        return self.enqueue("all_reduce", tensors, tensors, run, opts, timeout)

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> Work:
        """Reduces each tensor in place."""
        return self.allreduce(tensors, opts)

    def _allreduce_sparse(self, tensors: List[torch.Tensor], opts: Any, timeout: Any) -> Work:
        if _operator(opts) != ReduceOp.SUM:
            raise ValueError("cinch reduces sparse tensors by SUM only")

        def run(collectives: TensorCollectives) -> None:
            for one in tensors:
                all_reduce_sparse(collectives, one)

        return self.enqueue("all_reduce", tensors, tensors, run, opts, timeout)

    def reduce(self, tensors: Any, opts: Any) -> Work:
        """Reduces in place on the root."""
        tensors = _list(tensors)
        reductions = [self._reduction(opts, one) for one in tensors]

        def run(collectives: TensorCollectives) -> None:
            for one, reduction in zip(tensors, reductions):
                collectives.reduce(one, reduction, opts.rootRank)

        return self.enqueue("reduce", tensors, tensors, run, opts)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        """Reduces block r of the inputs to rank r. Blocks may have different sizes."""
        output, given = _list(outputs)[0], _nested(inputs)
        reduction = self._reduction(opts, output)
        if len(given) != self._own_size:
            raise ValueError(f"reduce_scatter: {len(given)} inputs for {self._own_size} ranks")

        def run(collectives: TensorCollectives) -> None:
            if len({one.numel() for one in given}) == 1:
                joined = torch.cat([one.reshape(-1) for one in given])
                collectives.reduce_scatter(output, joined, reduction)
                return
            for root, one in enumerate(given):
                reduced = one.clone()
                collectives.reduce(reduced, reduction, root)
                if root == self._own_rank:
                    output.copy_(reduced.view(output.shape))

        return self.enqueue("reduce_scatter", [output, *given], [output], run, opts)

    def _reduce_scatter_base(self, output: torch.Tensor, given: torch.Tensor, opts: Any = None) -> Work:
        return self.reduce_scatter_tensor_coalesced([output], [given], opts)

    def reduce_scatter_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        """Reduces each input; rank r receives block r."""
        outputs, inputs = _list(outputs), _list(inputs)
        reductions = [self._reduction(opts, one) for one in outputs]
        for output, given in zip(outputs, inputs):
            if given.dtype != output.dtype:
                raise ValueError(f"reduce_scatter: the input is {given.dtype}, the output {output.dtype}")
            if given.numel() != output.numel() * self._own_size:
                raise ValueError(
                    f"reduce_scatter: the input has {given.numel()} elements; {self._own_size} ranks receive "
                    f"{output.numel()} each"
                )

        def run(collectives: TensorCollectives) -> None:
            for output, given, reduction in zip(outputs, inputs, reductions):
                collectives.reduce_scatter(output, given, reduction)

        return self.enqueue("reduce_scatter", [*outputs, *inputs], outputs, run, opts)

    # ---- moving data ----

    def broadcast(self, tensors: Any, opts: Any = None, timeout: Any = None) -> Work:
        """Copies the root's tensors to all ranks."""
        tensors = _list(tensors)
        root = 0 if opts is None else getattr(opts, "rootRank", opts)

        def run(collectives: TensorCollectives) -> None:
            for one in tensors:
                collectives.broadcast(one, root)

        return self.enqueue("broadcast", tensors, tensors, run, opts, timeout)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        """Gathers all ranks' tensors, which may have different sizes, on all ranks."""
        given, received = _list(inputs)[0], _nested(outputs)
        self._check_list("all_gather", received, given)
        own = received[self._own_rank]
        if own.numel() != given.numel():
            raise ValueError(f"all_gather: this rank's output has {own.numel()} elements, its input {given.numel()}")
        run = lambda collectives: collectives.all_gather_list(received, given)  # noqa: E731
        return self.enqueue("all_gather", [*received, given], [received], run, opts)

    def _allgather_base(self, output: torch.Tensor, given: torch.Tensor, opts: Any = None) -> Work:
        return self.allgather_into_tensor_coalesced([output], [given], opts)

    def allgather_into_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        """Gathers each input of all ranks in one output."""
        outputs, inputs = _list(outputs), _list(inputs)
        for output, given in zip(outputs, inputs):
            if given.dtype != output.dtype:
                raise ValueError(f"all_gather: the input is {given.dtype}, the output {output.dtype}")
            if given.numel() * self._own_size != output.numel():
                raise ValueError(
                    f"all_gather: the output has {output.numel()} elements; {self._own_size} ranks send "
                    f"{given.numel()} each"
                )

        def run(collectives: TensorCollectives) -> None:
            for output, given in zip(outputs, inputs):
                collectives.all_gather(output, given)

        return self.enqueue("all_gather", [*outputs, *inputs], outputs, run, opts)

    def allgather_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        """Gathers each input of all ranks: input i of rank r in `outputs[r][i]`."""
        inputs = _list(inputs)
        for row in outputs:
            for one, given in zip(row, inputs):
                self._check_same("all_gather", one, given)

        def run(collectives: TensorCollectives) -> None:
            for at, given in enumerate(inputs):
                collectives.all_gather_list([row[at] for row in outputs], given)

        every = [one for row in outputs for one in row]
        return self.enqueue("all_gather", [*every, *inputs], outputs, run, opts)

    def gather(self, outputs: Any, inputs: Any, opts: Any) -> Work:
        """Gathers all ranks' tensors on the root."""
        given, root = _list(inputs)[0], opts.rootRank
        received = _nested(outputs) if self._own_rank == root else []
        if self._own_rank == root:
            self._check_list("gather", received, given)
            for one in received:
                self._check_same("gather", one, given)
        run = lambda collectives: collectives.gather(received, given, root)  # noqa: E731
        return self.enqueue("gather", [*received, given], [received], run, opts)

    def scatter(self, outputs: Any, inputs: Any, opts: Any) -> Work:
        """Sends the root's tensor r to rank r."""
        output, root = _list(outputs)[0], opts.rootRank
        given = _nested(inputs) if self._own_rank == root else []
        if self._own_rank == root:
            self._check_list("scatter", given, output)
            for one in given:
                self._check_same("scatter", one, output)
        run = lambda collectives: collectives.scatter(output, given, root)  # noqa: E731
        return self.enqueue("scatter", [*given, output], [output], run, opts)

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> Work:
        """Sends input r to rank r and receives output r from it."""
        outputs, inputs = _list(outputs), _list(inputs)
        self._check_list("all_to_all", outputs, inputs[0])
        self._check_list("all_to_all", inputs, outputs[0])
        run = lambda collectives: collectives.exchange(inputs, outputs)  # noqa: E731
        return self.enqueue("all_to_all", [*outputs, *inputs], outputs, run, opts)

    def alltoall_base(
        self, output: torch.Tensor, given: torch.Tensor, output_splits: Any, input_splits: Any, opts: Any = None
    ) -> Work:
        """Sends blocks of the first dimension to the ranks; the splits are the blocks' lengths, equal if empty."""
        self._check_type("all_to_all", output, given)
        if not output_splits and not input_splits:
            if output.numel() != given.numel() or (given.dim() and given.size(0) % self._own_size):
                raise ValueError(
                    f"all_to_all: {self._own_size} ranks do not divide the first dimension of {tuple(given.shape)}, "
                    f"or the output {tuple(output.shape)} has another size"
                )
            run = lambda collectives: collectives.all_to_all(output, given)  # noqa: E731
        else:
            received, sent = self._split(output, output_splits), self._split(given, input_splits)
            run = lambda collectives: collectives.exchange(sent, received)  # noqa: E731
        return self.enqueue("all_to_all", [output, given], [output], run, opts)

    def _split(self, tensor: torch.Tensor, splits: Any) -> List[torch.Tensor]:
        if not splits:
            if tensor.size(0) % self._own_size:
                raise ValueError(f"all_to_all: {self._own_size} ranks do not divide {tensor.size(0)}")
            splits = [tensor.size(0) // self._own_size] * self._own_size
        if len(splits) != self._own_size or sum(splits) != tensor.size(0):
            raise ValueError(f"all_to_all: splits {list(splits)} do not divide {tensor.size(0)} by {self._own_size}")
        return list(tensor.split(list(splits)))

    def _check_list(self, what: str, tensors: Sequence[torch.Tensor], like: torch.Tensor) -> None:
        if len(tensors) != self._own_size:
            raise ValueError(f"{what}: {len(tensors)} tensors for {self._own_size} ranks")
        for one in tensors:
            self._check_type(what, one, like)

    @staticmethod
    def _check_type(what: str, one: torch.Tensor, like: torch.Tensor) -> None:
        if one.dtype != like.dtype:
            raise ValueError(f"{what}: tensors of {one.dtype} and {like.dtype}")

    @classmethod
    def _check_same(cls, what: str, one: torch.Tensor, like: torch.Tensor) -> None:
        cls._check_type(what, one, like)
        if one.numel() != like.numel():
            raise ValueError(f"{what}: tensors of {one.numel()} and {like.numel()} elements")

    # ---- messages ----

    def send(self, tensors: Any, peer: int, tag: int = 0) -> Work:
        """Sends to a rank. Does not wait for receives of this process."""
        tensor = self._message("send", tensors, peer)
        if tensor.is_cuda:
            return self._collected(self._messages.queue(tensor, peer, is_send=True))
        return self._collected(self._messages.send(tensor, peer, tag))

    def recv(self, tensors: Any, peer: int, tag: int = 0) -> Work:
        """Receives from a rank."""
        tensor = self._message("recv", tensors, peer)
        if tensor.is_cuda:
            return self._collected(self._messages.queue(tensor, peer, is_send=False))
        return self._collected(self._messages.receive(tensor, peer, tag))

    def recv_anysource(self, tensors: Any, tag: int = 0) -> Work:
        """Receives from the rank whose message comes first, in host memory."""
        tensor = self._message("recv", tensors, None)
        if tensor.is_cuda:
            raise ValueError("recv: a receive on a GPU must name its source: the stream cannot wait for any rank")
        return self._collected(self._messages.receive(tensor, None, tag))

    def _message(self, what: str, tensors: Any, peer: Optional[int]) -> torch.Tensor:
        self._worker.check_process()
        tensors = _list(tensors)
        if len(tensors) != 1:
            raise ValueError(f"{what}: {len(tensors)} tensors; a message has one")
        if peer is not None and not 0 <= peer < self._own_size:
            raise ValueError(f"{what}: rank {peer} is no rank of this group of {self._own_size}")
        if tensors[0].layout != torch.strided:
            raise ValueError(f"{what}: tensors must be dense")
        return tensors[0]

    # ---- waiting for each other ----

    def barrier(self, opts: Any = None) -> Work:
        """Ends when every rank has called it, and the GPU has run the work that is queued on the current stream."""
        events = [torch.cuda.current_stream(index).record_event() for index in self._gpus]

        def run(collectives: TensorCollectives) -> None:
            for event in events:
                event.synchronize()
            collectives.comm.barrier()

        return self.enqueue("barrier", [], None, run, opts)

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        """Waits for every rank. After the timeout rank 0 raises an error that names the ranks that did not come."""
        limit = self._timeout if timeout is None else timeout.total_seconds()
        self._monitored += 1
        prefix = f"cinch/monitored/{self._monitored}"
        if self._own_rank:
            self._store.set(f"{prefix}/{self._own_rank}", "here")
            try:
                failure = "rank 0 has not reported that all ranks came to monitoredBarrier"
                rendezvous.wait_for(self._store, f"{prefix}/all", 2 * limit, self._check_open, failure)
            except _library.Error as error:
                raise torch_error(error) from None
            return
        missing = rendezvous.missing(
            self._store, {rank: f"{prefix}/{rank}" for rank in range(1, self._own_size)}, limit, not wait_all_ranks
        )
        if missing:
            text = (
                f"Rank {self._own_rank} timed out in monitoredBarrier after {limit:g} s, and these ranks did not come: "
                f"{', '.join(map(str, missing))}"
            )
            raise torch_error(_library.TimeoutError(text))
        self._store.set(f"{prefix}/all", "here")

    def _start_coalescing(self, device: Any = None) -> None:
        self._coalesced = []

    def _end_coalescing(self, device: Any = None) -> Work:
        works, self._coalesced = self._coalesced or [], None
        return AllWork(works)

    # ---- names of torch after 2.11 ----

    all_gather_single = _allgather_base
    all_gather_single_coalesced = allgather_into_tensor_coalesced
    reduce_scatter_single = _reduce_scatter_base
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced
    all_to_all_single = alltoall_base
    start_coalescing = _start_coalescing
    end_coalescing = _end_coalescing


def create(options: Any, backend_options: Any = None) -> CinchProcessGroup:
    """Creates a process group, for `torch.distributed.Backend.register_backend`."""
    timeout = seconds(options.timeout) or rendezvous.LONGEST
    return CinchProcessGroup(options.store, options.group_rank, options.group_size, timeout)
