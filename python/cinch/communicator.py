"""Communicators: ranks that call collectives together."""

import contextlib
import ctypes
import dataclasses
import json
import os
import threading
import weakref
from typing import Any, Dict, Iterator, List, Optional, Sequence

from . import _abi, _arrays
from ._abi import cinch_collective_t as Collective
from ._arrays import DTYPES, Array, describe, described_output, stream_of
from ._library import LIBRARY, check, integer, structure

#: Operators by name.
OPERATORS = {
    "sum": _abi.cinch_op_t.CINCH_SUM,
    "prod": _abi.cinch_op_t.CINCH_PROD,
    "max": _abi.cinch_op_t.CINCH_MAX,
    "min": _abi.cinch_op_t.CINCH_MIN,
    "avg": _abi.cinch_op_t.CINCH_AVG,
}
ALGORITHMS = {it.name[len("CINCH_ALGORITHM_") :].lower(): it for it in _abi.cinch_algorithm_t}
TRANSPORTS = {it.name[len("CINCH_TRANSPORT_") :].lower(): it for it in _abi.cinch_transport_t}
EXACT_REASONS = {
    name[len("CINCH_EXACT_") :].lower(): index
    for name, index in vars(_abi).items()
    if name.startswith("CINCH_EXACT_") and name != "CINCH_EXACT_REASONS"
}

#: Smallest and largest timeout in seconds.
TIMEOUTS = (0.01, 1e6)

_living: "weakref.WeakSet[Communicator]" = weakref.WeakSet()
#: Per thread: depth of open groups, and what their calls use until the outermost group ends.
_group = threading.local()


@dataclasses.dataclass(frozen=True)
class Report:
    """What one call did on this rank. Fields are those of `cinch_report_t`."""

    algorithm: str
    transport: str
    codec: str
    channels: int
    #: Payload bytes that this rank sent, after encoding.
    wire_bytes: int
    #: Number of calls in the fused message of this call; 1 if it was not fused.
    fused: int
    #: Facts about the input; None where they were not measured (codec raw, GPUs).
    saturated: Optional[int]
    non_finite: Optional[int]
    abs_max: Optional[float]
    l2_norm: Optional[float]
    #: L2 norm of the residuals after a call with error feedback; None without.
    residual_l2_norm: Optional[float]


def _report(raw: Any) -> Report:
    has_input = raw.valid & _abi.CINCH_REPORT_INPUT
    has_residual = raw.valid & _abi.CINCH_REPORT_RESIDUAL
    return Report(
        algorithm=_name(ALGORITHMS, raw.algorithm),
        transport=_name(TRANSPORTS, raw.transport),
        codec=raw.codec.decode(),
        channels=raw.channels,
        wire_bytes=raw.wire_bytes,
        fused=raw.fused,
        saturated=raw.saturated if has_input else None,
        non_finite=raw.non_finite if has_input else None,
        abs_max=raw.abs_max if has_input else None,
        l2_norm=raw.l2_norm if has_input else None,
        residual_l2_norm=raw.residual_l2_norm if has_residual else None,
    )


def _name(table: Dict[str, int], number: int) -> str:
    return next((name for name, value in table.items() if value == number), str(number))


def _number(table: Dict[str, Any], name: Optional[str], what: str) -> int:
    if name is None:
        return 0
    if name in table:
        return table[name]
    raise ValueError(f"{what} {name!r} is unknown; there are {', '.join(table)}")


def unique_id() -> bytes:
    """Creates the id of one communicator. Send its 128 bytes to all ranks; whoever has them can join.

    This process serves the rendezvous, so it must become one of the ranks.
    """
    raw = _abi.cinch_unique_id_t()
    check(LIBRARY.cinch_unique_id_create(ctypes.byref(raw)))
    return bytes(raw)


def _config(settings: Dict[str, Any]) -> Any:
    """Returns a cinch_config_t with the fields that `settings` names."""
    config = structure(_abi.cinch_config_t, LIBRARY.cinch_config_init)
    kinds = dict(_abi.cinch_config_t._fields_[3:])
    for name, value in settings.items():
        if value is None:
            continue
        if name in ("timeout", "init_timeout"):
            name, value = f"{name}_ms", _milliseconds(value, name)
        elif name == "algorithm":
            value = _number(ALGORITHMS, value, "algorithm")
        elif name == "transport":
            value = _number(TRANSPORTS, value, "transport")
        if name not in kinds:
            raise TypeError(f"a communicator has no setting {name!r}; there are {', '.join(kinds)}")
        is_text = kinds[name] is ctypes.c_char_p
        setattr(config, name, _encoded(value, name) if is_text else integer(value, kinds[name], name))
    return config


def _milliseconds(timeout: float, what: str) -> int:
    least, most = TIMEOUTS
    if not least <= timeout <= most:
        raise ValueError(f"{what} is {timeout} s; it is from {least:g} to {most:g} s")
    return round(1000 * timeout)


def _encoded(value: Any, what: str) -> bytes:
    if isinstance(value, str):
        return value.encode()
    raise TypeError(f"{what} is {value!r}; it is a text")


def _is_on_gpu(settings: Dict[str, Any]) -> bool:
    """Returns whether a communicator with these settings works on a GPU. It has accepted them."""
    device = settings.get("device")
    return (os.environ.get("CINCH_DEVICE", "host") if device is None else device).strip() != "host"


def init(**settings: Any) -> "Communicator":
    """Creates the communicator that the launcher's environment describes: cinch run, torchrun, mpirun or srun.

    Settings are the fields of `cinch_config_t`, such as `codec="linear8"`, `device="cuda"`, `transport="tcp"`,
    and `timeout` and `init_timeout` in seconds. All others come from the environment.
    """
    handle = ctypes.c_void_p()
    check(LIBRARY.cinch_comm_init_from_env(ctypes.byref(_config(settings)), ctypes.byref(handle)))
    return Communicator._of(handle, _is_on_gpu(settings))


class Communicator:
    """A group of ranks that call collectives together.

    Arrays are numpy arrays, torch tensors, objects with `__cuda_array_interface__`, or buffers; their elements lie
    next to each other. On a communicator with `device="cuda"` they are arrays on that GPU, and calls are queued on
    `stream`: an integer, where 0 is the default stream, or an object with `cuda_stream` or `ptr`. None is torch's
    current stream for torch tensors, and the stream in `__cuda_array_interface__` for other arrays.

    Without `out` a call returns a new array; with `out` it writes there and returns it. `out` may be the input.
    """

    def __init__(self, unique_id: bytes, rank: int, size: int, **settings: Any) -> None:
        raw = _abi.cinch_unique_id_t.from_buffer_copy(unique_id)
        handle = ctypes.c_void_p()
        config = _config(settings)
        rank, size = integer(rank, ctypes.c_int, "rank"), integer(size, ctypes.c_int, "size")
        check(LIBRARY.cinch_comm_init(ctypes.byref(raw), rank, size, ctypes.byref(config), ctypes.byref(handle)))
        self._adopt(handle, _is_on_gpu(settings))

    @classmethod
    def _of(cls, handle: ctypes.c_void_p, on_gpu: bool) -> "Communicator":
        comm = cls.__new__(cls)
        comm._adopt(handle, on_gpu)
        return comm

    def _adopt(self, handle: ctypes.c_void_p, on_gpu: bool) -> None:
        self._handle: Optional[ctypes.c_void_p] = handle
        self._on_gpu = on_gpu
        number = ctypes.c_int()
        check(LIBRARY.cinch_comm_rank(handle, ctypes.byref(number)))
        #: This process's rank.
        self.rank: int = number.value
        check(LIBRARY.cinch_comm_size(handle, ctypes.byref(number)))
        #: Number of ranks.
        self.size: int = number.value
        #: What the last call outside of groups did; None before it.
        self.report: Optional[Report] = None
        _living.add(self)

    # ---- collectives ----

    def all_reduce(self, array: Any, out: Any = None, op: Any = "sum", **options: Any) -> Any:
        """Reduces all ranks' arrays and returns the result on every rank."""
        given = describe(array, "array")
        out = self._out(out, array, given.shape)
        return self._run(Collective.CINCH_ALL_REDUCE, given, out, given.count, given.count, op=op, **options)

    def all_gather(self, array: Any, out: Any = None, **options: Any) -> Any:
        """Returns all ranks' arrays, in rank order: shape (size, *array.shape)."""
        given = describe(array, "array")
        out = self._out(out, array, (self.size, *given.shape))
        return self._run(Collective.CINCH_ALL_GATHER, given, out, given.count, self.size * given.count, **options)

    def reduce_scatter(self, array: Any, out: Any = None, op: Any = "sum", **options: Any) -> Any:
        """Reduces all ranks' arrays and returns block r of the first dimension on rank r."""
        given = describe(array, "array")
        shape = self._block(given)
        count = given.count // self.size
        out = self._out(out, array, shape)
        return self._run(Collective.CINCH_REDUCE_SCATTER, given, out, count, count, op=op, **options)

    def broadcast(self, array: Any, root: int = 0, **options: Any) -> Any:
        """Copies the root's array into `array` on all other ranks, and returns it."""
        given = describe(array, "array")
        # The root's array is only read, so it may be read-only.
        target = given if self.rank == root else described_output(array, given.count, given.dtype, "array")
        self._start(Collective.CINCH_BROADCAST, given, target, given.count, root=root, **options)
        return array

    def reduce(self, array: Any, out: Any = None, op: Any = "sum", root: int = 0, **options: Any) -> Any:
        """Reduces all ranks' arrays and returns the result on the root, None on the other ranks."""
        given = describe(array, "array")
        out = self._out(out, array, given.shape) if self.rank == root else None
        return self._run(Collective.CINCH_REDUCE, given, out, given.count, given.count, op=op, root=root, **options)

    def gather(self, array: Any, out: Any = None, root: int = 0, **options: Any) -> Any:
        """Returns all ranks' arrays on the root: shape (size, *array.shape); None on the other ranks."""
        given = describe(array, "array")
        out = self._out(out, array, (self.size, *given.shape)) if self.rank == root else None
        total = self.size * given.count
        return self._run(Collective.CINCH_GATHER, given, out, given.count, total, root=root, **options)

    def scatter(self, array: Any, out: Any, root: int = 0, **options: Any) -> Any:
        """Copies block r of the root's `array` into `out` on rank r. Other ranks may pass None as `array`."""
        written = describe(out, "out")
        given = describe(array, "array") if self.rank == root else None
        if given is not None and given.count != self.size * written.count:
            raise ValueError(f"array has {given.count} elements, out {written.count}: array needs {self.size} times as many")
        return self._run(Collective.CINCH_SCATTER, given, out, written.count, written.count, root=root, **options)

    def all_to_all(self, array: Any, out: Any = None, **options: Any) -> Any:
        """Sends block r of the first dimension to rank r, and returns the blocks received, in rank order."""
        given = describe(array, "array")
        self._block(given)
        out = self._out(out, array, given.shape)
        count = given.count // self.size
        return self._run(Collective.CINCH_ALL_TO_ALL, given, out, count, given.count, **options)

    def send(self, array: Any, peer: int, **options: Any) -> None:
        """Sends an array to `peer`, which must receive as many elements."""
        given = describe(array, "array")
        self._run(Collective.CINCH_SEND, given, None, given.count, 0, peer=peer, **options)

    def recv(self, out: Any, peer: int, **options: Any) -> Any:
        """Receives an array from `peer` into `out`, and returns it."""
        count = describe(out, "out").count
        return self._run(Collective.CINCH_RECV, None, out, count, count, peer=peer, **options)

    def barrier(self) -> None:
        """Returns when every rank has called it."""
        check(LIBRARY.cinch_barrier(self._alive()))

    # ---- other communicators ----

    def split(self, color: Optional[int], key: int = 0) -> Optional["Communicator"]:
        """Splits into communicators of ranks with equal `color`, ordered by `key`, then rank; None joins none."""
        handle = ctypes.c_void_p()
        number = _abi.CINCH_SPLIT_NO_COLOR if color is None else integer(color, ctypes.c_int, "color")
        key = integer(key, ctypes.c_int64, "key")
        check(LIBRARY.cinch_comm_split(self._alive(), number, key, ctypes.byref(handle)))
        return Communicator._of(handle, self._on_gpu) if handle.value else None

    def prepare_to_shrink(self) -> None:
        """Prepares for `shrink`. All ranks must call it, while all of them exist."""
        check(LIBRARY.cinch_comm_prepare_to_shrink(self._alive()))

    def shrink(self, exclude: Sequence[int] = (), **settings: Any) -> "Communicator":
        """Returns a communicator of the ranks that are not in `exclude`; without any, of those that live."""
        ranks = (ctypes.c_int * len(exclude))(*(integer(rank, ctypes.c_int, "exclude") for rank in exclude))
        handle = ctypes.c_void_p()
        config = ctypes.byref(_config(settings)) if settings else None
        check(LIBRARY.cinch_comm_shrink(self._alive(), ranks, len(exclude), config, ctypes.byref(handle)))
        return Communicator._of(handle, _is_on_gpu(settings) if settings else self._on_gpu)

    def grow_id(self) -> bytes:
        """Creates the id with which new ranks join in the next `grow`. One rank calls it and sends it to them."""
        raw = _abi.cinch_unique_id_t()
        check(LIBRARY.cinch_comm_grow_id(self._alive(), ctypes.byref(raw)))
        return bytes(raw)

    def grow(self, size: int, **settings: Any) -> "Communicator":
        """Returns a communicator of `size` ranks: these ranks, and new ones that pass the id to `Communicator`."""
        handle = ctypes.c_void_p()
        config = ctypes.byref(_config(settings)) if settings else None
        size = integer(size, ctypes.c_int, "size")
        check(LIBRARY.cinch_comm_grow(self._alive(), size, config, ctypes.byref(handle)))
        return Communicator._of(handle, _is_on_gpu(settings) if settings else self._on_gpu)

    # ---- error feedback ----

    def feedback_export(self) -> bytes:
        """Returns this rank's residuals of error feedback, for a checkpoint."""
        size = ctypes.c_size_t()
        check(LIBRARY.cinch_feedback_export(self._alive(), None, 0, ctypes.byref(size)))
        room = ctypes.create_string_buffer(size.value)
        check(LIBRARY.cinch_feedback_export(self._alive(), room, size.value, ctypes.byref(size)))
        return room.raw[: size.value]

    def feedback_import(self, residuals: bytes) -> None:
        """Replaces this rank's residuals by those that `feedback_export` returned on the same rank."""
        check(LIBRARY.cinch_feedback_import(self._alive(), residuals, len(residuals)))

    def feedback_rescale(self, factor: float) -> None:
        """Multiplies this rank's residuals by `factor`, when the scale of a scaled loss changes."""
        check(LIBRARY.cinch_feedback_rescale(self._alive(), factor))

    def feedback_forget(self, feedback: int = 0) -> None:
        """Forgets this rank's residuals of the tensor `feedback`, or of all tensors if it is 0."""
        check(LIBRARY.cinch_feedback_forget(self._alive(), integer(feedback, ctypes.c_uint64, "feedback")))

    # ---- state ----

    def stats(self) -> Dict[str, Any]:
        """Returns counts since the communicator was created, on this rank. Does not wait."""
        raw = structure(_abi.cinch_comm_stats_t, LIBRARY.cinch_comm_stats_init)
        check(LIBRARY.cinch_comm_stats(self._alive(), ctypes.byref(raw)))
        fields = [name for name, _ in raw._fields_[3:] if name != "exact_calls"]
        counts = {name: getattr(raw, name) for name in fields}
        counts["exact_calls"] = {name: raw.exact_calls[index] for name, index in EXACT_REASONS.items()}
        return {"rank": self.rank, "size": self.size, **counts, **self._metrics()}

    def _metrics(self) -> Dict[str, Any]:
        """Returns `calls` by collective, codec and size class, and `peer_waits` in seconds."""
        return json.loads(_text(LIBRARY.cinch_comm_metrics, self._alive()))

    @property
    def name(self) -> str:
        """Name by which `CINCH_CODEC_RULES` know the communicator; empty without one."""
        return _text(LIBRARY.cinch_comm_name, self._alive())

    @property
    def codec_policy(self) -> str:
        """Codecs of calls that name none, and the setting that decided it, as a sentence."""
        return _text(LIBRARY.cinch_comm_codec_policy, self._alive())

    def explain(self, collective: str, count: int, dtype: str = "float32", **options: Any) -> str:
        """Returns how a call of `count` elements would run: candidates, predicted times and the choice.

        `collective` is a name such as "all_reduce"; options are those of the call. Nothing runs.
        """
        names = {it.name[len("CINCH_") :].lower(): it for it in Collective}
        call = self._call(_number(names, collective, "collective"), count, _number(DTYPES, dtype, "dtype"), **options)
        return _text(LIBRARY.cinch_call_explain, ctypes.byref(call))

    def check(self) -> None:
        """Raises the error that failed the communicator, if one did. Does not wait."""
        code = ctypes.c_uint32()
        check(LIBRARY.cinch_comm_async_error(self._alive(), ctypes.byref(code)))
        check(code.value)

    def abort(self) -> None:
        """Fails the communicator on this rank at once, and on the others by a message."""
        check(LIBRARY.cinch_comm_abort(self._alive()))

    def finalize(self) -> None:
        """Waits until every rank has called it, so that the end of this rank loses no rank's data."""
        check(LIBRARY.cinch_comm_finalize(self._alive()))

    def destroy(self) -> None:
        """Frees the communicator. Does not wait for other ranks. A second call has no effect."""
        handle, self._handle = self._handle, None
        if handle is not None:
            check(LIBRARY.cinch_comm_destroy(handle))

    def __enter__(self) -> "Communicator":
        return self

    def __exit__(self, kind: Any, value: Any, trace: Any) -> None:
        # After an error the other ranks may never come to a finalize.
        if kind is None and self._handle is not None:
            self.finalize()
        self.destroy()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self.destroy()

    @property
    def is_destroyed(self) -> bool:
        """Whether `destroy` was called."""
        return self._handle is None

    # ---- inside ----

    def _alive(self) -> ctypes.c_void_p:
        if self._handle is None:
            raise ValueError("the communicator was destroyed")
        return self._handle

    def _block(self, given: Array) -> tuple:
        """Returns the shape of one rank's block of an array."""
        first = given.shape[0] if given.shape else 0
        if not given.shape or first % self.size:
            raise ValueError(f"the first dimension is {first}, which {self.size} ranks do not divide")
        return (first // self.size, *given.shape[1:])

    @staticmethod
    def _out(out: Any, array: Any, shape: tuple) -> Any:
        return _arrays.like(array, shape, "out") if out is None else out

    def _call(
        self,
        collective: Collective,
        count: int,
        dtype: int,
        *,
        op: Any = "sum",
        root: int = 0,
        peer: int = 0,
        codec: Optional[str] = None,
        algorithm: Optional[str] = None,
        tensor: int = 0,
        feedback: int = 0,
        stream: Any = None,
        arrays: Sequence[Array] = (),
    ) -> Any:
        """Returns a cinch_call_t without buffers."""
        call = structure(_abi.cinch_call_t, LIBRARY.cinch_call_init)
        call.comm = self._alive()
        call.count = integer(count, ctypes.c_size_t, "count")
        call.collective = collective
        call.dtype = dtype
        call.op = integer(op, ctypes.c_uint32, "op") if isinstance(op, int) else _number(OPERATORS, op, "operator")
        call.root, call.peer = integer(root, ctypes.c_int, "root"), integer(peer, ctypes.c_int, "peer")
        call.algorithm = _number(ALGORITHMS, algorithm, "algorithm")
        call.codec = None if codec is None else codec.encode()
        call.tensor = integer(tensor, ctypes.c_uint64, "tensor")
        call.feedback = integer(feedback, ctypes.c_uint64, "feedback")
        call.stream = stream_of(stream, arrays)
        return call

    def _run(
        self, collective: Collective, given: Optional[Array], out: Any, count: int, written: int, **options: Any
    ) -> Any:
        """Runs a call whose output, if there is one, has `written` elements."""
        target = None
        if out is not None:
            target = described_output(out, written, given.dtype if given else None, "out")
        self._start(collective, given, target, count, **options)
        return out

    def _start(
        self, collective: Collective, given: Optional[Array], target: Optional[Array], count: int, **options: Any
    ) -> None:
        """Runs a call, or adds it to the open group."""
        arrays = [one for one in (given, target) if one is not None]
        for one in arrays:
            if one.on_gpu != self._on_gpu:
                raise ValueError(self._wrong_memory(one))
        call = self._call(collective, count, arrays[0].dtype, arrays=arrays, **options)
        call.sendbuf = given.pointer() if given else None
        call.recvbuf = target.pointer() if target else None
        report = structure(_abi.cinch_report_t, LIBRARY.cinch_report_init)
        check(LIBRARY.cinch_call(ctypes.byref(call), ctypes.byref(report)))
        if getattr(_group, "depth", 0):
            _group.kept.append((call, report, given, target))
        else:
            self.report = _report(report)

    def _wrong_memory(self, array: Array) -> str:
        gpu, host = ("on a GPU", "cuda"), ("in host memory", "host")
        (here, device), (works, _) = (gpu, host) if array.on_gpu else (host, gpu)
        kind = type(array.owner[0] if isinstance(array.owner, tuple) else array.owner).__name__
        return (
            f"a {kind} is {here}, rank {self.rank}'s communicator works {works}: copy it, or create the communicator "
            f"with device={device!r}"
        )


def _text(copy: Any, subject: Any) -> str:
    """Returns a text that the library copies to a buffer."""
    size = ctypes.c_size_t()
    check(copy(subject, None, 0, ctypes.byref(size)))
    # Metrics grow while other threads call.
    room = ctypes.create_string_buffer(2 * size.value + 4096)
    check(copy(subject, room, len(room), ctypes.byref(size)))
    return room.value.decode()


@contextlib.contextmanager
def group() -> Iterator[None]:
    """Runs the calls of a `with` block together when it ends. Their arrays must not be touched before.

    After an exception in the block nothing runs on this rank.
    """
    if not getattr(_group, "depth", 0):
        _group.depth, _group.kept = 0, []
    check(LIBRARY.cinch_group_start())
    _group.depth += 1
    try:
        yield
    except BaseException:
        _end_group(failed=True)
        raise
    _end_group(failed=False)


def _end_group(failed: bool) -> None:
    if failed:
        # A failing call inside the group makes the outermost end run nothing.
        LIBRARY.cinch_dtype_size(0xFFFF, ctypes.byref(ctypes.c_size_t()))
    result = LIBRARY.cinch_group_end()
    _group.depth -= 1
    if not _group.depth:
        _group.kept = []
    if not failed:
        check(result)


def stats() -> List[Dict[str, Any]]:
    """Returns the counts of all communicators of this process."""
    return [comm.stats() for comm in list(_living) if comm._handle is not None]
