"""Functions of `cinch.h` through ctypes."""

import ctypes
from concurrent.futures import ThreadPoolExecutor
from ctypes import byref, c_char, c_char_p, c_double, c_int, c_size_t, c_uint32, c_uint64
from ctypes import c_void_p
from dataclasses import dataclass

import numpy as np

from cinch_reference.elements import Element

API_VERSION = 1
CHUNK, PUBLISHED = 0, 1
REPORT_INPUT, REPORT_RESIDUAL = 1, 2

COLLECTIVES = {
    "all_reduce": 0,
    "all_gather": 1,
    "reduce_scatter": 2,
    "broadcast": 3,
    "reduce": 4,
    "gather": 5,
    "scatter": 6,
    "all_to_all": 7,
    "send": 8,
    "recv": 9,
}
ALGORITHMS = {"": 0, "ring": 2, "tree": 3, "oneshot": 4, "direct": 5, "hierarchical": 6, "flat_tree": 7}
OPERATORS = {"sum": 0, "prod": 1, "max": 2, "min": 3, "avg": 4}


class Config(ctypes.Structure):
    """`cinch_config_t`."""

    _fields_ = [
        ("size", c_size_t),
        ("magic", c_uint32),
        ("version", c_uint32),
        ("codec", c_char_p),
        ("network_interface", c_char_p),
        ("transport", c_uint32),
        ("algorithm", c_uint32),
        ("slots", c_uint32),
        ("channels", c_uint32),
        ("tcp_sockets", c_uint32),
        ("heartbeat_ms", c_uint32),
        ("slot_bytes", c_uint64),
        ("buffer_bytes", c_uint64),
        ("codec_min_bytes", c_uint64),
        ("timeout_ms", c_uint64),
        ("init_timeout_ms", c_uint64),
        ("device", c_char_p),
        ("name", c_char_p),
    ]


class Report(ctypes.Structure):
    """`cinch_report_t`."""

    _fields_ = [
        ("size", c_size_t),
        ("magic", c_uint32),
        ("version", c_uint32),
        ("valid", c_uint32),
        ("algorithm", c_uint32),
        ("transport", c_uint32),
        ("channels", c_uint32),
        ("wire_bytes", c_uint64),
        ("saturated", c_uint64),
        ("non_finite", c_uint64),
        ("abs_max", c_double),
        ("l2_norm", c_double),
        ("codec", c_char * 64),
        ("fused", c_uint64),
        ("residual_l2_norm", c_double),
    ]


class Call(ctypes.Structure):
    """`cinch_call_t`."""

    _fields_ = [
        ("size", c_size_t),
        ("magic", c_uint32),
        ("version", c_uint32),
        ("comm", c_void_p),
        ("sendbuf", c_void_p),
        ("recvbuf", c_void_p),
        ("count", c_size_t),
        ("collective", c_uint32),
        ("dtype", c_uint32),
        ("op", c_uint32),
        ("root", c_int),
        ("peer", c_int),
        ("algorithm", c_uint32),
        ("codec", c_char_p),
        ("tensor", c_uint64),
        ("stream", c_void_p),
        ("feedback", c_uint64),
    ]


class Awp(ctypes.Structure):
    """`cinch_awp_t`."""

    _fields_ = [
        ("size", c_size_t),
        ("magic", c_uint32),
        ("version", c_uint32),
        ("threshold", c_double),
        ("previous", c_double),
        ("interval", c_uint32),
        ("step_bits", c_uint32),
        ("bits", c_uint32),
        ("count", c_uint32),
        ("has_previous", c_uint32),
        ("most_bits", c_uint32),
    ]


class LossScaler(ctypes.Structure):
    """`cinch_loss_scaler_t`."""

    _fields_ = [
        ("size", c_size_t),
        ("magic", c_uint32),
        ("version", c_uint32),
        ("scale", c_double),
        ("growth", c_double),
        ("backoff", c_double),
        ("smallest", c_double),
        ("largest", c_double),
        ("rescale", c_double),
        ("skipped", c_uint64),
        ("interval", c_uint32),
        ("clean", c_uint32),
    ]


class LibraryError(Exception):
    """A function of the library failed; the text is that of `cinch_last_error`."""

    def __init__(self, code: int, text: str):
        super().__init__(f"code {code}: {text}")
        self.code = code


@dataclass
class CallArguments:
    """Arguments of one collective on one rank."""

    collective: str
    send: np.ndarray | None
    recv: np.ndarray | None
    count: int
    element: Element
    op: int = 0
    root: int = 0
    peer: int = 0
    algorithm: str = ""
    codec: str | None = None
    tensor: int = 0
    feedback: int = 0


def address(array: np.ndarray | None) -> int | None:
    """Returns the address of an array's memory."""
    return None if array is None else array.ctypes.data


class Library:
    """The loaded library."""

    def __init__(self, path: str):
        self.path = path
        self.c = ctypes.CDLL(path)
        self.c.cinch_last_error.restype = c_char_p
        self.c.cinch_version_string.restype = c_char_p

    def version(self) -> str:
        """Calls `cinch_version_string`."""
        return self.c.cinch_version_string().decode()

    def check(self, code: int) -> None:
        """Raises the library's error if `code` is one."""
        if code:
            raise LibraryError(code, self.c.cinch_last_error().decode())

    def initialised(self, kind: type, function: str) -> ctypes.Structure:
        """Returns a struct that its `cinch_*_init` has initialised."""
        value = kind()
        init = getattr(self.c, function)
        self.check(init(byref(value), c_size_t(ctypes.sizeof(kind)), c_uint32(API_VERSION)))
        return value

    def unique_id(self) -> bytes:
        """Calls `cinch_unique_id_create`."""
        identity = (c_char * 128)()
        self.check(self.c.cinch_unique_id_create(byref(identity)))
        return identity.raw

    def wire_bytes(self, codec: str, layout: int, count: int) -> int:
        """Calls `cinch_wire_bytes`."""
        result = c_size_t()
        self.check(self.c.cinch_wire_bytes(codec.encode(), layout, c_size_t(count), byref(result)))
        return result.value

    def wire_count(self, codec: str, message: np.ndarray) -> int:
        """Calls `cinch_wire_count` for the published layout."""
        result = c_size_t()
        data = c_void_p(address(message))
        self.check(
            self.c.cinch_wire_count(
                codec.encode(), PUBLISHED, data, c_size_t(message.size), byref(result)
            )
        )
        return result.value

    def encode(
        self, codec: str, layout: int, element: Element, raw: np.ndarray, draw: int = 0
    ) -> np.ndarray:
        """Calls `cinch_encode`."""
        wire = np.full(self.wire_bytes(codec, layout, raw.size), 0xA5, np.uint8)
        self.check(
            self.c.cinch_encode(
                codec.encode(),
                layout,
                c_void_p(address(raw)),
                c_size_t(raw.size),
                element.number,
                c_uint64(draw),
                c_void_p(address(wire)),
                c_size_t(wire.size),
                None,
            )
        )
        return wire

    def decode(
        self, codec: str, layout: int, element: Element, wire: np.ndarray, count: int
    ) -> np.ndarray:
        """Calls `cinch_decode`."""
        result = np.zeros(count, element.storage)
        self.check(
            self.c.cinch_decode(
                codec.encode(),
                layout,
                c_void_p(address(wire)),
                c_size_t(wire.size),
                c_void_p(address(result)),
                c_size_t(count),
                element.number,
                None,
            )
        )
        return result


class Ranks:
    """Ranks of one communicator, as threads of this process: all, or the `local` ones of an id."""

    def __init__(
        self,
        library: Library,
        nranks: int,
        slot_bytes: int = 0,
        unique_id: bytes | None = None,
        local: list[int] | None = None,
        codec: str | None = None,
        transport: int = 0,
        interface: str | None = None,
    ):
        self.library = library
        self.size = nranks
        self.local = list(range(nranks)) if local is None else local
        self.pool = ThreadPoolExecutor(len(self.local))
        self.comms = [c_void_p() for _ in range(nranks)]
        identity = c_char * 128
        identity = identity.from_buffer_copy(unique_id or library.unique_id())

        def init(rank: int) -> None:
            config = library.initialised(Config, "cinch_config_init")
            config.slot_bytes = slot_bytes
            config.codec = codec.encode() if codec else None
            config.transport = transport
            config.network_interface = interface.encode() if interface else None
            comm = byref(self.comms[rank])
            library.check(
                library.c.cinch_comm_init(byref(identity), rank, nranks, byref(config), comm)
            )

        self.on_all(init)

    def on_all(self, function) -> list:
        """Returns function(rank) of the local ranks, which run at the same time."""
        tasks = [self.pool.submit(function, rank) for rank in self.local]
        return [task.result() for task in tasks]

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, *_) -> None:
        self.on_all(lambda rank: self.library.c.cinch_comm_finalize(self.comms[rank]))
        self.on_all(lambda rank: self.library.c.cinch_comm_destroy(self.comms[rank]))
        self.pool.shutdown()

    def _call(self, rank: int, arguments: CallArguments, report: Report | None) -> None:
        library = self.library
        call = library.initialised(Call, "cinch_call_init")
        call.comm = self.comms[rank].value
        call.sendbuf, call.recvbuf = address(arguments.send), address(arguments.recv)
        call.count = arguments.count
        call.collective = COLLECTIVES[arguments.collective]
        call.dtype, call.op = arguments.element.number, arguments.op
        call.root, call.peer = arguments.root, arguments.peer
        call.algorithm = ALGORITHMS[arguments.algorithm]
        call.codec = arguments.codec.encode() if arguments.codec else None
        call.tensor, call.feedback = arguments.tensor, arguments.feedback
        library.check(library.c.cinch_call(byref(call), byref(report) if report else None))

    def call(self, of_rank, group: bool = False) -> list[list[Report]]:
        """Runs the calls `of_rank(rank)` of each rank, in one group or one after the other.

        Returns the reports of each rank.
        """
        library = self.library

        def run(rank: int) -> list[Report]:
            reports = []
            if group:
                library.check(library.c.cinch_group_start())
            for arguments in of_rank(rank):
                report = library.initialised(Report, "cinch_report_init")
                self._call(rank, arguments, report)
                reports.append(report)
            if group:
                library.check(library.c.cinch_group_end())
            return reports

        return self.on_all(run)

    def premulsum(self, rank: int, element: Element, factor: np.ndarray) -> int:
        """Calls `cinch_op_create_premulsum`."""
        op = c_uint32()
        create = self.library.c.cinch_op_create_premulsum
        scalar = c_void_p(address(factor))
        self.library.check(create(self.comms[rank], scalar, element.number, byref(op)))
        return op.value

    def feedback_export(self, rank: int) -> bytes:
        """Calls `cinch_feedback_export`."""
        library, size = self.library, c_size_t()
        export = library.c.cinch_feedback_export
        library.check(export(self.comms[rank], None, c_size_t(0), byref(size)))
        data = (c_char * size.value)()
        library.check(export(self.comms[rank], byref(data), size, byref(size)))
        return data.raw

    def feedback_import(self, rank: int, data: bytes) -> None:
        """Calls `cinch_feedback_import`."""
        function = self.library.c.cinch_feedback_import
        self.library.check(function(self.comms[rank], c_char_p(data), c_size_t(len(data))))

    def feedback_rescale(self, rank: int, factor: float) -> None:
        """Calls `cinch_feedback_rescale`."""
        function = self.library.c.cinch_feedback_rescale
        self.library.check(function(self.comms[rank], c_double(factor)))

    def feedback_forget(self, rank: int, tensor: int) -> None:
        """Calls `cinch_feedback_forget`."""
        function = self.library.c.cinch_feedback_forget
        self.library.check(function(self.comms[rank], c_uint64(tensor)))

    def barrier(self) -> None:
        """Calls `cinch_barrier` on all ranks."""
        library = self.library
        self.on_all(lambda rank: library.check(library.c.cinch_barrier(self.comms[rank])))


