"""The process group of torch.distributed's backend `cinch`.

Torch calls a subclass of ProcessGroup directly where the caller is Python, and through virtual functions where it is
C++ (DDP's reducer, functional collectives). Each method takes torch's lists and options and queues one call.

Tensors in host memory: a thread runs the calls in order. CUDA tensors: calls are queued on the current stream, or, if
they are asynchronous, on a side stream that waits for it, so that they overlap with computing. The communicators of
host memory and of the GPU are created by the first call that needs them.
"""

import threading
from typing import Any, Callable, Dict, List, Optional, Sequence

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Work
from torch.distributed import ReduceOp

from .. import _library
from ..communicator import Communicator
from . import rendezvous
from .collectives import TensorCollectives
from .messages import Messages
from .reductions import Reduction
from .sparse import all_reduce_sparse
from .work import AllWork, HostWork, StreamWork, Worker, seconds, torch_error

#: Seconds that `shutdown` waits for other ranks and for calls in flight.
SHUTDOWN_TIMEOUT = 10.0

Run = Callable[[TensorCollectives], Any]


def _list(tensors: Any) -> List[torch.Tensor]:
    return [tensors] if torch.is_tensor(tensors) else list(tensors)


def _nested(tensors: Any) -> List[torch.Tensor]:
    """Returns the inner list of torch's lists of lists, which have one entry per device of the process."""
    first = tensors[0] if tensors else None
    return _list(tensors if first is None or torch.is_tensor(first) else first)


def _operator(opts: Any) -> Any:
    """Returns the operator of options, or of the operator itself; the sum by default."""
    return ReduceOp.SUM if opts is None else getattr(opts, "reduceOp", opts)


class CinchProcessGroup(dist.ProcessGroup):
    """Collectives and messages of one group of ranks, for torch.distributed."""

    def __init__(self, store: Any, rank: int, size: int, timeout: float) -> None:
        # Torch 2.11 dispatches virtual functions to Python for this form of the constructor only.
        super().__init__(rank, size)
        self._store, self._own_rank, self._own_size = store, rank, size
        self._name, self._description = "", "undefined"
        self._timeout = timeout
        self._worker = Worker(f"cinch rank {rank}")
        self._host: Optional[Communicator] = None
        self._gpus: Dict[int, Communicator] = {}
        self._side_streams: Dict[int, Any] = {}
        self._messages = Messages(store, rank, size, timeout, self._check_host)
        self._coalesced: Optional[List[Work]] = None
        self._sequence, self._monitored = 0, 0
        self._next_id = 1
        self._create_lock = threading.Lock()
        self._closed = False

    # ---- facts ----

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        """Returns `cinch`."""
        return "cinch"

    def getRank(self) -> int:  # noqa: N802 - torch's name
        """Returns this process's rank in the group."""
        return self._own_rank

    def getSize(self) -> int:  # noqa: N802 - torch's name
        """Returns the number of ranks."""
        return self._own_size

    def setGroupName(self, name: str) -> None:  # noqa: N802 - torch's name
        """Sets the name that torch gives the group."""
        self._name = name

    def getGroupName(self) -> str:  # noqa: N802 - torch's name
        """Returns the group's name."""
        return self._name

    def setGroupDesc(self, description: str) -> None:  # noqa: N802 - torch's name
        """Sets the description that the program gave the group."""
        self._description = description

    def getGroupDesc(self) -> str:  # noqa: N802 - torch's name
        """Returns the group's description."""
        return self._description

    def get_group_store(self) -> Any:
        """Returns the store that the group was created with."""
        return self._store

    @property
    def _device_types(self) -> List[torch.device]:
        kinds = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
        return [torch.device(kind) for kind in kinds]

    def _get_backend(self, device: Any) -> "CinchProcessGroup":
        return self

    @property
    def supports_coalescing(self) -> bool:
        """Whether `_start_coalescing` works."""
        return True

    #: Torch asks backends for these.
    supports_splitting = False
    supports_shrinking = False
    supports_time_estimate = False

    def _set_default_timeout(self, timeout: Any) -> None:
        self._timeout = seconds(timeout) or self._timeout
        self._messages.timeout = self._timeout

    def set_timeout(self, timeout: Any) -> None:
        """Sets the timeout of later calls. Communicators that exist keep theirs as an upper limit."""
        self._set_default_timeout(timeout)

    def _set_sequence_number_for_group(self) -> None:
        self._sequence = 0

    def _get_sequence_number_for_group(self) -> int:
        return self._sequence

    # ---- queueing ----

    def enqueue(
        self, what: str, tensors: Sequence[torch.Tensor], outputs: Any, run: Run, opts: Any = None
    ) -> Work:
        """Queues `run`, which gets the collectives of the communicator for the device of `tensors`.

        All ranks must queue the same calls in the same order. `outputs` is the result of the returned work.
        """
        device = tensors[0].device if tensors else torch.device("cpu")
        if any(one.device != device for one in tensors):
            raise ValueError(f"{what}: the tensors are on several devices: {sorted({str(t.device) for t in tensors})}")
        if device.type not in ("cpu", "cuda"):
            raise ValueError(f"{what}: cinch takes tensors on cpu and cuda, not on {device}")
        if self._closed:
            raise RuntimeError(f"{what}: the process group was destroyed")
        self._sequence += 1
        if torch._C._autograd._profiler_enabled():
            with torch.profiler.record_function(f"cinch:{what}"):
                work = self._queue(what, device, tensors, outputs, run, opts)
        else:
            work = self._queue(what, device, tensors, outputs, run, opts)
        return self._collected(work)

    def _queue(self, what: str, device: torch.device, tensors: Any, outputs: Any, run: Run, opts: Any) -> Work:
        if device.type == "cuda":
            return self._queue_on_gpu(device, tensors, outputs, run, getattr(opts, "asyncOp", True))
        own_timeout = seconds(getattr(opts, "timeout", None))
        timeout = own_timeout if own_timeout is not None and own_timeout < self._timeout else None
        work = HostWork(what, outputs, self._worker, timeout, self.abort)
        self._worker.submit(work, lambda: run(TensorCollectives(self._host_communicator())))
        return work

    def _queue_on_gpu(self, device: torch.device, tensors: Any, outputs: Any, run: Run, is_async: bool) -> Work:
        try:
            with torch.cuda.device(device), torch.no_grad():
                comm = self._gpu_communicator(device)
                stream = torch.cuda.current_stream(device)
                # A captured graph has its own order; a side stream would only lengthen it.
                if is_async and not torch.cuda.is_current_stream_capturing():
                    stream = self._side_stream(device, stream)
                    for one in tensors:
                        one.record_stream(stream)
                with torch.cuda.stream(stream):
                    run(TensorCollectives(comm, stream))
        except _library.Error as error:
            raise torch_error(error) from None
        return StreamWork(outputs, device, stream, comm.check)

    def _side_stream(self, device: torch.device, current: Any) -> Any:
        if device.index not in self._side_streams:
            self._side_streams[device.index] = torch.cuda.Stream(device)
        stream = self._side_streams[device.index]
        stream.wait_stream(current)
        return stream

    def _collected(self, work: Work) -> Work:
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    # ---- communicators ----

    def _host_communicator(self) -> Communicator:
        with self._create_lock:
            if self._host is None:
                self._host = self._connect("host")
            return self._host

    def _gpu_communicator(self, device: torch.device) -> Communicator:
        with self._create_lock:
            if device.index not in self._gpus:
                if self._gpus:
                    used = next(iter(self._gpus))
                    raise ValueError(f"this rank used cuda:{used} in this group; one rank works on one GPU")
                self._gpus[device.index] = self._connect(f"cuda:{device.index}")
            return self._gpus[device.index]

    def _connect(self, device: str) -> Communicator:
        is_described = self._description not in ("", "undefined")
        return rendezvous.connect(
            self._store,
            f"cinch/{device.split(':')[0]}",
            self._own_rank,
            self._own_size,
            self._timeout,
            self._check_open,
            device=device,
            timeout=min(self._timeout, rendezvous.LONGEST),
            name=self._description if is_described else self._name,
        )

    def communicator(self, device: Any = "cpu") -> Communicator:
        """Returns the communicator for a device, and creates it if no call has. All ranks must do so together.

        Calls on it must not be mixed with calls of the process group that have not ended.
        """
        device = torch.device(device)
        if device.type == "cuda":
            return self._gpu_communicator(device)
        work = HostWork("creating a communicator", None, self._worker)
        self._worker.submit(work, self._host_communicator)
        work.wait()
        return self._host_communicator()

    def next_ids(self, count: int) -> int:
        """Returns the first of `count` tensor ids that nothing else uses. All ranks must ask in the same order."""
        first, self._next_id = self._next_id, self._next_id + count
        return first

    def _check_open(self) -> None:
        if self._closed:
            raise _library.AbortedError("the process group was destroyed")

    def _check_host(self) -> None:
        """Raises the failure of the host communicator, if there is one."""
        host = self._host
        if host is not None and not self._closed:
            host.check()

    # ---- reductions ----

    def _reduction(self, opts: Any, tensor: torch.Tensor) -> Reduction:
        return Reduction.of(_operator(opts), tensor.dtype, self._own_size)

    def allreduce(self, tensors: Any, opts: Any = None, timeout: Any = None) -> Work:
        """Reduces each tensor in place."""
        tensors = _list(tensors)
        if any(one.layout == torch.sparse_coo for one in tensors):
            return self._allreduce_sparse(tensors, opts)
        reductions = [self._reduction(opts, one) for one in tensors]

        def run(collectives: TensorCollectives) -> None:
            for one, reduction in zip(tensors, reductions):
                collectives.all_reduce(one, reduction)

        return self.enqueue("all_reduce", tensors, tensors, run, opts)

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> Work:
        """Reduces each tensor in place."""
        return self.allreduce(tensors, opts)

    def _allreduce_sparse(self, tensors: List[torch.Tensor], opts: Any) -> Work:
        if _operator(opts) != ReduceOp.SUM:
            raise ValueError("cinch reduces sparse tensors by SUM only")

        def run(collectives: TensorCollectives) -> None:
            for one in tensors:
                all_reduce_sparse(collectives, one)

        return self.enqueue("all_reduce", tensors, tensors, run, opts)

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

        return self.enqueue("broadcast", tensors, tensors, run, opts)

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
        limit = seconds(timeout) or self._timeout
        self._monitored += 1
        prefix = f"cinch/monitored/{self._monitored}"
        if self._own_rank:
            self._store.set(f"{prefix}/{self._own_rank}", "here")
            try:
                rendezvous.wait_for(self._store, f"{prefix}/all", 2 * limit, self._check_open, "rank 0")
            except _library.Error as error:
                raise torch_error(error) from None
            return
        missing = rendezvous.missing(
            self._store, {rank: f"{prefix}/{rank}" for rank in range(1, self._own_size)}, limit, not wait_all_ranks
        )
        if missing:
            text = f"monitored_barrier: within {limit:g} s these ranks did not come: {', '.join(map(str, missing))}"
            raise torch_error(_library.TimeoutError(text))
        self._store.set(f"{prefix}/all", "here")

    def _start_coalescing(self, device: Any = None) -> None:
        self._coalesced = []

    def _end_coalescing(self, device: Any = None) -> Work:
        works, self._coalesced = self._coalesced or [], None
        return AllWork(works)

    # ---- end ----

    def abort(self) -> None:
        """Fails all communicators on this rank at once, and on the others by a message."""
        self._messages.abort()
        for comm in self._communicators():
            comm.abort()

    def shutdown(self) -> None:
        """Ends the calls that are queued, waits shortly for the other ranks, and frees everything."""
        if self._closed:
            return
        finalize = HostWork("shutdown", None, self._worker)
        self._worker.submit(finalize, self._finalize)
        self._closed = True
        self._messages.close(SHUTDOWN_TIMEOUT)
        if not self._worker.close(SHUTDOWN_TIMEOUT):
            self.abort()
            self._worker.close(SHUTDOWN_TIMEOUT)
        for comm in self._communicators():
            comm.destroy()

    def _communicators(self) -> List[Communicator]:
        return [comm for comm in (self._host, *self._gpus.values()) if comm is not None]

    def _finalize(self) -> None:
        for comm in self._communicators():
            comm.finalize()


def create(options: Any, backend_options: Any = None) -> CinchProcessGroup:
    """Creates a process group, for `torch.distributed.Backend.register_backend`."""
    timeout = seconds(options.timeout) or rendezvous.LONGEST
    return CinchProcessGroup(options.store, options.group_rank, options.group_size, timeout)
