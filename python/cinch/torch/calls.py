"""Parts that all calls of a process group share: communicators, order, devices, the end.

Tensors in host memory: a thread runs the calls in order. CUDA tensors: calls are queued on the current stream, or, if
they are asynchronous, on a side stream that waits for it, so that they overlap with computing. The communicators of
host memory and of the GPU are created by the first call that needs them.
"""

import contextlib
import threading
from typing import Any, Callable, Dict, List, Optional, Sequence

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Work

from .. import _library
from ..communicator import Communicator
from . import rendezvous
from .collectives import TensorCollectives
from .errors import torch_error
from .messages import Messages
from .work import HostWork, StreamWork, Worker, seconds

#: Seconds that `shutdown` waits for sends, for other ranks' shutdown, and for calls after it has aborted them.
SHUTDOWN_TIMEOUT = 10.0

Run = Callable[[TensorCollectives], Any]


class CallQueue(dist.ProcessGroup):
    """Communicators of one group of ranks, and the order in which its calls use them."""

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
        # A rank may create the communicator of host memory, on the worker, while it creates one of a GPU. Ranks may
        # do so in different orders, so neither waits for the other.
        self._host_lock, self._gpu_lock = threading.Lock(), threading.Lock()
        #: Timeout of the communicator of host memory in seconds, once it exists.
        self._host_timeout: Optional[float] = None
        #: Whether new calls are refused, and whether those that are queued must end.
        self._closed, self._gave_up = False, False

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

    def _get_backend(self, device: Any) -> "CallQueue":
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
        self,
        what: str,
        tensors: Sequence[torch.Tensor],
        outputs: Any,
        run: Run,
        opts: Any = None,
        timeout: Any = None,
    ) -> Work:
        """Queues `run`, which gets the collectives of the communicator for the device of `tensors`.

        All ranks must queue the same calls in the same order. `outputs` is the result of the returned work. The
        timeout of a call on host memory is `timeout` or that of the options, but at most the group's.
        """
        self._worker.check_process()
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
                work = self._queue(what, device, tensors, outputs, run, opts, timeout)
        else:
            work = self._queue(what, device, tensors, outputs, run, opts, timeout)
        return self._collected(work)

    def _queue(
        self, what: str, device: torch.device, tensors: Any, outputs: Any, run: Run, opts: Any, timeout: Any
    ) -> Work:
        if device.type == "cuda":
            return self._queue_on_gpu(device, tensors, outputs, run, getattr(opts, "asyncOp", True))
        work = HostWork(what, outputs, self._worker, self._shorter_timeout(opts, timeout), self._fail)
        self._worker.submit(work, lambda: run(TensorCollectives(self._host_communicator())))
        return work

    def _shorter_timeout(self, opts: Any, timeout: Any) -> Optional[float]:
        """Returns the timeout of a call; None if the communicator ends the call in time by its own."""
        own = seconds(timeout) or seconds(getattr(opts, "timeout", None)) or self._timeout
        limit = min(own, self._timeout)
        library = self._timeout if self._host_timeout is None else self._host_timeout
        return limit if limit < library else None

    def _queue_on_gpu(self, device: torch.device, tensors: Any, outputs: Any, run: Run, is_async: bool) -> Work:
        try:
            with torch.cuda.device(device), torch.no_grad():
                comm = self._gpu_communicator(device)
                stream = torch.cuda.current_stream(device)
                # A captured graph has its own order; a side stream would only lengthen it.
                if is_async and not torch.cuda.is_current_stream_capturing():
                    stream = self._side_stream(device, stream)
                    for one in tensors:
                        _record(one, stream)
                with torch.cuda.stream(stream):
                    run(TensorCollectives(comm, stream))
        except _library.Error as error:
            raise torch_error(error) from None
        return StreamWork(outputs, device, stream, lambda: _check_gpu(comm))

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
        with self._host_lock:
            if self._host is None:
                timeout = self._timeout
                self._host = self._connect("host")
                self._host_timeout = timeout
            return self._host

    def _gpu_communicator(self, device: torch.device) -> Communicator:
        with self._gpu_lock:
            if device.index not in self._gpus:
                if self._gpus:
                    used = next(iter(self._gpus))
                    raise ValueError(f"this rank used cuda:{used} in this group; one rank works on one GPU")
                self._gpus[device.index] = self._connect(f"cuda:{device.index}")
            comm = self._gpus[device.index]
        if comm.is_destroyed:
            _check_gpu(comm)
        return comm

    def _connect(self, device: str) -> Communicator:
        self._check_given_up()
        is_described = self._description not in ("", "undefined")
        return rendezvous.connect(
            self._store,
            f"cinch/{device.split(':')[0]}",
            self._own_rank,
            self._own_size,
            self._timeout,
            self._check_given_up,
            device=device,
            timeout=min(self._timeout, rendezvous.LONGEST),
            name=self._description if is_described else self._name,
        )

    def communicator(self, device: Any = "cpu") -> Communicator:
        """Returns the communicator for a device, and creates it if no call has. All ranks must do so together.

        Calls on it must not be mixed with calls of the process group that have not ended.
        """
        self._worker.check_process()
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

    def _check_given_up(self) -> None:
        if self._gave_up:
            raise _library.AbortedError("the process group was aborted")

    def _check_host(self) -> None:
        """Raises the failure of the host communicator, if there is one."""
        self._check_given_up()
        host = self._host
        if host is not None and not host.is_destroyed:
            host.check()

    # ---- end ----

    def abort(self) -> None:
        """Fails all communicators on this rank at once, and on the others by a message. Frees those on GPUs."""
        self._gave_up = True
        self._fail()

    def _fail(self) -> None:
        self._messages.abort()
        gpus = [comm for comm in self._gpus.values() if not comm.is_destroyed]
        for comm in self._communicators():
            comm.abort()
        if gpus:
            # It waits until the other ranks have unmapped their memory, which may take seconds.
            threading.Thread(target=_destroy_all, args=(gpus,), name="cinch-free", daemon=True).start()

    def shutdown(self) -> None:
        """Ends the calls that are queued, waits for the other ranks, and frees everything.

        Queued calls have the group's timeout, and sends have `SHUTDOWN_TIMEOUT`. Ranks that come later than that get
        what this rank has sent in host memory. On GPUs this rank waits for them, up to the group's timeout.
        """
        if self._closed:
            return
        if self._worker.is_forked():
            self._closed = True
            return
        finalize = HostWork("shutdown", None, self._worker)
        self._worker.submit(finalize, self._finalize)
        self._closed = True
        self._messages.close(SHUTDOWN_TIMEOUT)
        # Queued calls and the end on GPUs have the group's timeout, unless they were aborted.
        if not self._worker.close(SHUTDOWN_TIMEOUT + (0 if self._gave_up else self._timeout)):
            self.abort()
            self._worker.close(SHUTDOWN_TIMEOUT)
        for comm in self._communicators():
            comm.destroy()

    def _communicators(self) -> List[Communicator]:
        every = (self._host, *self._gpus.values())
        return [comm for comm in every if comm is not None and not comm.is_destroyed]

    def _finalize(self) -> None:
        comms = self._communicators()
        if not comms or self._gave_up:
            return

        def check() -> None:
            self._check_given_up()
            for comm in comms:
                comm.check()

        # To finalize without the others would fail the ranks that come later, and that need only what was sent.
        have_come = rendezvous.all_come(self._store, "cinch/shutdown", self._own_size, SHUTDOWN_TIMEOUT, check)
        for comm in comms:
            # GPUs map each other's memory, which must stay until all ranks have ended.
            if have_come or comm is not self._host:
                with contextlib.suppress(_library.Error):
                    comm.finalize()


def _record(tensor: torch.Tensor, stream: Any) -> None:
    """Keeps the memory of a tensor from new use until `stream` has used it."""
    parts = (tensor,) if tensor.layout == torch.strided else (tensor._indices(), tensor._values())
    for part in parts:
        part.record_stream(stream)


def _check_gpu(comm: Communicator) -> None:
    """Raises the failure of a communicator of a GPU, if there is one."""
    if comm.is_destroyed:
        raise torch_error(_library.AbortedError("the process group was aborted"))
    comm.check()


def _destroy_all(comms: List[Communicator]) -> None:
    for comm in comms:
        comm.destroy()
