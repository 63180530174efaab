"""Every collective of the package on numpy arrays, beside numpy itself. Run as ranks of a launcher:

python -m cinch run -n 4 python/tests/collectives.py
"""

import array
import subprocess
import sys

import cinch
import numpy
from cinch.communicator import _is_on_gpu


def same(found, expected):
    """Ends the process unless two arrays have equal shapes and bits."""
    expected = numpy.asarray(expected)
    if found.shape != expected.shape or found.dtype != expected.dtype or found.tobytes() != expected.tobytes():
        raise SystemExit(f"found {found!r}, expected {expected!r}")


def raises(kind, part, function, *arguments, **options):
    """Ends the process unless a call raises `kind` with `part` in its text."""
    try:
        function(*arguments, **options)
    except kind as error:
        if part not in str(error):
            raise SystemExit(f"the text lacks {part!r}: {error}") from error
    else:
        raise SystemExit(f"{function} raised no {kind}")


def inputs(comm, count, dtype):
    """Returns all ranks' arrays: small integers, whose sums are exact in every type."""
    return [numpy.random.default_rng(rank).integers(0, 5, count).astype(dtype) for rank in range(comm.size)]


def exact_collectives(comm, dtype):
    """Compares each collective with numpy."""
    size, rank = comm.size, comm.rank
    every = inputs(comm, 6 * size, dtype)
    own, total = every[rank], sum(every).astype(dtype)
    same(comm.all_reduce(own), total)
    same(comm.all_reduce(own, op="max"), numpy.max(every, axis=0))
    in_place = own.copy()
    if comm.all_reduce(in_place, out=in_place) is not in_place:
        raise SystemExit("in place returned another array")
    same(in_place, total)
    same(comm.all_gather(own.reshape(size, 6)), numpy.stack(every).reshape(size, size, 6))
    same(comm.reduce_scatter(own.reshape(2 * size, 3)), total.reshape(2 * size, 3)[2 * rank : 2 * rank + 2])
    same(comm.broadcast(own.copy(), root=size - 1), every[-1])
    reduced = comm.reduce(own, root=1)
    gathered = comm.gather(own, root=1)
    if rank == 1:
        same(reduced, total)
        same(gathered, numpy.stack(every))
    elif reduced is not None or gathered is not None:
        raise SystemExit("a rank that is not the root got a result")
    out = numpy.empty(6, dtype)
    same(comm.scatter(own if rank == 0 else None, out), every[0][6 * rank : 6 * rank + 6])
    blocks = [it.reshape(size, 6)[rank] for it in every]
    same(comm.all_to_all(own.reshape(size, 6)), numpy.stack(blocks))


def messages(comm):
    """Sends round a ring in one group."""
    sent = numpy.arange(5) + 10 * comm.rank
    received = numpy.empty_like(sent)
    with cinch.group():
        comm.send(sent, (comm.rank + 1) % comm.size)
        comm.recv(received, (comm.rank - 1) % comm.size)
    same(received, numpy.arange(5) + 10 * ((comm.rank - 1) % comm.size))
    try:
        with cinch.group():
            comm.send(sent, (comm.rank + 1) % comm.size)
            raise KeyError("left the group")
    except KeyError:
        comm.barrier()


def compressed(comm):
    """Checks the error and the report of an 8-bit sum."""
    every = [numpy.random.default_rng(rank).standard_normal(100_000).astype("f4") for rank in range(comm.size)]
    found = comm.all_reduce(every[comm.rank], codec="linear8")
    error = numpy.sqrt(numpy.mean((found - sum(every)) ** 2)) / numpy.sqrt(numpy.mean(sum(every) ** 2))
    if not 1e-4 < error < 0.03:
        raise SystemExit(f"relative RMS error {error}")
    report = comm.report
    if not report.codec.startswith("linear8") or not 0 < report.wire_bytes < 300_000:
        raise SystemExit(f"{report}")
    if "linear8" not in comm.explain("all_reduce", 100_000, codec="linear8") or comm.name != "":
        raise SystemExit(f"{comm.name!r}")
    if not comm.codec_policy.startswith("compression off"):
        raise SystemExit(comm.codec_policy)
    raises(ValueError, "all_gather", comm.explain, "allreduce", 1)
    if comm.stats()["coded_calls"] < 1 or len(cinch.stats()) != 1:
        raise SystemExit(f"{cinch.stats()}")
    classes = [it for it in comm.stats()["calls"] if (it["collective"], it["codec"]) == ("all_reduce", "linear8")]
    if [(it["size_class"], it["calls"], it["bytes"]) for it in classes] != [(524288, 1, 400_000)]:
        raise SystemExit(f"{comm.stats()}")
    same(comm.all_gather(found), numpy.stack([found] * comm.size))


def codecs():
    """Encodes and decodes arrays, and checks the published layout's own count."""
    values = numpy.linspace(-3, 3, 1000, dtype="f4")
    wire = cinch.encode(values, "linear8")
    if len(wire) != cinch.wire_bytes("linear8", 1000):
        raise SystemExit(f"{len(wire)} bytes")
    decoded = cinch.decode(wire, "linear8", 1000)
    if numpy.abs(decoded - values).max() > 3 / 127:
        raise SystemExit("linear8 is off by more than a step")
    published = cinch.encode(values, "minmax8", layout="published")
    same(cinch.decode(published, "minmax8", layout="published"), cinch.decode(published, "minmax8", 1000, layout="published"))
    half = numpy.empty(1000, "f2")
    same(cinch.decode(wire, "linear8", out=half), decoded.astype("f2"))


def training_helpers():
    """Runs adaptive weight precision and a loss scaler by their published rules."""
    awp = cinch.Awp(1e-3, 3)
    # Growing norms keep 8 bits; three without growth add 8.
    found = [awp.update(norm) for norm in (1.0, 1.1, 1.2, 1.3, 1.3, 1.3001, 1.2)]
    if (found, awp.bits) != (["trunc8"] * 6 + ["trunc16"], 16):
        raise SystemExit(f"AWP chose {found}")
    scaler = cinch.LossScaler(interval=3)
    values = numpy.array([1.0, numpy.nan, numpy.inf, -2.0], "f4")
    counts = [cinch.count_non_finite(part) for part in (values[:1], values, values.astype("f2"))]
    applied = [scaler.update(count) for count in (*counts[:2], 0, 0, 0)]
    if (counts, applied, scaler.scale, scaler.skipped) != ([0, 2, 2], [True, False, True, True, True], 65536.0, 1):
        raise SystemExit(f"the loss scaler gave {counts}, {applied}, {scaler.scale}, {scaler.skipped}")
    raises(TypeError, "no setting 'start'", cinch.LossScaler, start=1.0)
    raises(cinch.InvalidArgumentError, "norm", awp.update, -1.0)
    limited = cinch.Awp(1e-3, 1, most_bits=16)
    if [limited.update(1.0) for _ in range(3)] != ["trunc16"] * 3:
        raise SystemExit(f"AWP chose {limited.codec} with at most 16 bits")


def other_arrays(comm):
    """Takes buffers of the standard library, and refuses what it cannot take, before anything moves."""
    numbers = array.array("d", [1.0, 2.0, comm.rank])
    comm.all_reduce(numbers, out=numbers)
    if list(numbers) != [comm.size, 2.0 * comm.size, sum(range(comm.size))]:
        raise SystemExit(f"{numbers}")
    same(comm.all_gather(bytes([comm.rank])), numpy.arange(comm.size, dtype="u1").reshape(-1, 1))
    matrix = numpy.zeros((4, 6), "f4")
    raises(ValueError, "not contiguous", comm.all_reduce, matrix[:, ::2])
    raises(ValueError, "not contiguous", comm.all_reduce, matrix.T)
    raises(TypeError, "big endian", comm.all_reduce, matrix.astype(">f4"))
    raises(TypeError, "not supported", comm.all_reduce, matrix.astype("c8"))
    raises(TypeError, "list", comm.all_reduce, [1.0, 2.0])
    raises(ValueError, "elements", comm.all_reduce, matrix, out=numpy.zeros(5, "f4"))
    raises(TypeError, "CINCH_F64", comm.all_reduce, matrix, out=numpy.zeros((4, 6)))
    if comm.rank:
        raises(ValueError, "array is read-only", comm.broadcast, b"12")
    received = bytearray(4)
    same(numpy.frombuffer(comm.broadcast(received if comm.rank else b"1234"), "u1"), numpy.frombuffer(b"1234", "u1"))
    raises(ValueError, "operator 'mean' is unknown", comm.all_reduce, matrix, op="mean")
    raises(cinch.InvalidArgumentError, "codec", comm.all_reduce, matrix, codec="linear9")
    raises(cinch.Error, "", comm.all_reduce, numpy.zeros(4, "i4"), codec="linear8")
    raises(TypeError, "no setting 'colour'", cinch.init, colour=3)
    comm.barrier()


class WithInterface:
    """An object whose array interface has some facts."""

    def __init__(self, name, **facts):
        setattr(self, name, {"shape": (2,), "typestr": "<f4", "version": 3, **facts})


def odd_arrays(comm):
    """Takes scalars of numpy, and refuses interfaces without an address, masks, and arrays in other memory."""
    for kind in (numpy.float32, numpy.float64, numpy.int64, numpy.uint8, numpy.float16):
        scalar = kind(comm.rank + 1)
        # Memory that is free again is likely to be reused by these.
        totals = [comm.all_reduce(scalar) for _ in range(20)]
        for total in totals:
            same(total, numpy.array(sum(range(comm.size + 1)), kind))
        raises(ValueError, "read-only", comm.all_reduce, scalar, out=scalar)
    for data in (b"12345678", None):
        raises(TypeError, "WithInterface, has no address", comm.all_reduce, WithInterface("__array_interface__", data=data))
    raises(TypeError, "mask", comm.all_reduce, numpy.ma.array([1.0, 2.0], mask=[False, True]))
    masked = WithInterface("__cuda_array_interface__", data=(8, False), mask=numpy.zeros(2, bool))
    raises(TypeError, "mask", comm.all_reduce, masked)
    # An address that would end the process if it were read.
    gpu = WithInterface("__cuda_array_interface__", data=(4096, False))
    raises(ValueError, "on a GPU, rank", comm.all_reduce, gpu, out=gpu)
    raises(ValueError, "device='cuda'", comm.send, gpu, 0)
    raises(ValueError, "out is in host memory", cinch.encode, gpu, "linear8")
    raises(ValueError, "out is on a GPU", cinch.decode, bytes(100), "linear8", out=gpu)
    if not _is_on_gpu({"device": "cuda:1"}) or _is_on_gpu({"device": " host "}) or comm.split(0)._on_gpu:
        raise SystemExit("the memory of a communicator is wrong")
    comm._on_gpu = True
    raises(ValueError, "in host memory, rank", comm.all_reduce, numpy.zeros(4))
    comm._on_gpu = False
    comm.barrier()


def streams():
    """Finds the stream of a call: the argument's, else that of the arrays' library."""
    from cinch._arrays import describe, stream_of

    def found(stream, number):
        facts = {"data": (4096, False), "stream": number}
        return stream_of(stream, [None, describe(WithInterface("__cuda_array_interface__", **facts), "array")])

    class Cupy:
        ptr = 77

    expected = [(None, None, None), (None, 1, None), (None, 2, 2), (None, 99, 99), (0, 99, None), (Cupy, 99, 77)]
    for stream, number, address in expected:
        if found(stream, number) != address:
            raise SystemExit(f"stream {stream} of an array on {number}: {found(stream, number)}")
    if stream_of(None, [describe(numpy.zeros(3), "array")]) is not None:
        raise SystemExit("an array in host memory has a stream")


def integers(comm):
    """Refuses integers that C would wrap, and timeouts out of range."""
    one = numpy.ones(3, "f4")
    for options in ({"root": 1 << 32}, {"root": -(1 << 31) - 1}, {"peer": 1 << 31}):
        call = comm.send if "peer" in options else comm.broadcast
        raises(ValueError, f"{[*options][0]} is {[*options.values()][0]}; it is from -2147483648", call, one, **options)
    for options in ({"feedback": (1 << 64) + 5}, {"tensor": -1}):
        raises(ValueError, "it is from 0 to 18446744073709551615", comm.all_reduce, one, **options)
    raises(TypeError, "it is an integer", comm.broadcast, one, root=0.5)
    raises(ValueError, "op is", comm.all_reduce, one, op=(1 << 32) + 1)
    raises(ValueError, "draw is -1", cinch.encode, one, "linear8", draw=-1)
    raises(ValueError, "count is -1", cinch.wire_bytes, "linear8", -1)
    raises(ValueError, "count is -1", cinch.decode, b"", "linear8", -1)
    raises(ValueError, "feedback is -1", comm.feedback_forget, -1)
    raises(ValueError, "color is 4294967296", comm.split, 1 << 32)
    raises(ValueError, "exclude is", comm.shrink, [(1 << 32) + 1])
    raises(ValueError, "slots is 4294967304", cinch.init, slots=(1 << 32) + 8)
    for timeout in (-5, 0, float("nan"), 1e7):
        raises(ValueError, "timeout is", cinch.init, timeout=timeout)
        raises(ValueError, "init_timeout is", cinch.init, init_timeout=timeout)
    raises(TypeError, "name is 5; it is a text", cinch.init, name=5)


def versions():
    """Refuses a library of another version than the package."""
    program = "import cinch; cinch.__version__ = '9.8.7'; cinch.unique_id"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    if ran.returncode == 0 or f"is version {cinch.__version__}, the package cinch 9.8.7" not in ran.stderr:
        raise SystemExit(f"{ran}")


def main():
    """Runs all checks in one job."""
    with cinch.init(timeout=60) as comm:
        for dtype in ("f4", "f8", "i4", "u1", "i8", "f2"):
            exact_collectives(comm, dtype)
        messages(comm)
        compressed(comm)
        codecs()
        training_helpers()
        other_arrays(comm)
        odd_arrays(comm)
        streams()
        integers(comm)
        versions()
        part = comm.split(comm.rank % 2)
        same(part.all_reduce(numpy.array([comm.rank])), [sum(range(comm.rank % 2, comm.size, 2))])
        part.destroy()
        comm.prepare_to_shrink()
        comm.barrier()
        if comm.rank < comm.size - 1:
            fewer = comm.shrink([comm.size - 1])
            same(fewer.all_reduce(numpy.ones(3)), numpy.full(3, comm.size - 1.0))
            fewer.finalize()
        raises(ValueError, "destroyed", part.barrier)
    print(f"rank {comm.rank} of {comm.size}: all checks passed", file=sys.stderr)


if __name__ == "__main__":
    main()
