"""What programs do that call the library beside torch, as vLLM and SGLang do: its functions by ctypes, on
communicators and streams of their own. Checks as in torch_checks."""

import ctypes
import os

import torch
import torch.distributed as dist
from torch_checks import Skip, check

FLOAT32, SUM = 7, 0
COUNTS = [3, 5000, 3_000_000]
# Number of elements in 2 MiB of fp32: twice the size from which process-wide codecs apply.
CODED = 1 << 19


class UniqueId(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_byte * 128)]


class Resource(ctypes.Structure):
    """CUdevResource."""
    _fields_ = [("words", ctypes.c_uint64 * 18)]


def green_stream(device, multiprocessors=32):
    """A stream of a green context: of so many multiprocessors of the GPU."""
    cuda = ctypes.CDLL("libcuda.so.1")
    if not hasattr(cuda, "cuGreenCtxStreamCreate"):
        raise Skip("the driver has no green contexts")

    def ok(result):
        assert result == 0, f"the driver answers {result}"

    number, groups = ctypes.c_int(), ctypes.c_uint(1)
    whole, part, rest = Resource(), Resource(), Resource()
    description, context, stream = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
    by = ctypes.byref
    ok(cuda.cuDeviceGet(by(number), device.index))
    ok(cuda.cuDeviceGetDevResource(number, by(whole), 1))
    ok(cuda.cuDevSmResourceSplitByCount(by(part), by(groups), by(whole), by(rest), 0, multiprocessors))
    ok(cuda.cuDevResourceGenerateDesc(by(description), by(part), 1))
    ok(cuda.cuGreenCtxCreate(by(context), description, number, 1))
    ok(cuda.cuGreenCtxStreamCreate(by(stream), context, 1, 0))
    return stream


class Joined:
    """A communicator of all ranks, with the library's functions."""

    def __init__(self, rank, ranks, device):
        self.library = ctypes.CDLL("libnccl.so.2")
        self.library.ncclGetErrorString.restype = ctypes.c_char_p
        self.library.ncclGetLastError.restype = ctypes.c_char_p
        self.comm = ctypes.c_void_p()
        name = UniqueId()
        if rank == 0:
            self.call("ncclGetUniqueId", ctypes.byref(name))
        names = [bytes(name)]
        dist.broadcast_object_list(names, src=0, device=device)
        self.call("ncclCommInitRank", ctypes.byref(self.comm), ranks,
                  UniqueId.from_buffer_copy(names[0]), rank)
        torch.cuda.synchronize()

    def call(self, function, *arguments):
        result = getattr(self.library, function)(*arguments)
        if result != 0:
            said = self.library.ncclGetLastError(None)
            raise AssertionError(f"{function}: {self.library.ncclGetErrorString(result)}: {said}")

    def run(self, function, given, taken, count, *others, stream=None):
        """A collective of `count` elements of fp32 from one tensor to the other."""
        stream = stream or ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        self.call(function, ctypes.c_void_p(given.data_ptr()), ctypes.c_void_p(taken.data_ptr()),
                  ctypes.c_size_t(count), FLOAT32, *others, self.comm, stream)

    def end(self):
        self.call("ncclCommDestroy", self.comm)


@check("green context")
def green(rank, ranks, device):
    stream = green_stream(device)
    data = [torch.full((count,), rank + 1.0, device=device) for count in COUNTS]
    joined = Joined(rank, ranks, device)
    for one in data:
        for _ in range(3):
            joined.run("ncclAllReduce", one, one, one.numel(), SUM, stream=stream)
    torch.cuda.ExternalStream(stream.value, device=device).synchronize()
    total = ranks * (ranks + 1) / 2 * ranks ** 2
    for one in data:
        assert (one == total).all(), f"{one.numel()} elements: {one[0]} for {total}"
    joined.end()


@check("process-wide codec")
def coded(rank, ranks, device):
    """Sums from 1 MiB on are coded, alike on all ranks; smaller ones and what is no sum are exact."""
    if ranks == 1:
        raise Skip("nothing travels")
    generator = torch.Generator().manual_seed(11)
    given = torch.randn(ranks, CODED, generator=generator)
    exact, whole = given.double().sum(0), torch.arange(1000.0)
    os.environ["CINCH_CODEC"] = "dynamic8"
    try:
        joined = Joined(rank, ranks, device)
    finally:
        del os.environ["CINCH_CODEC"]
    mine, summed = given[rank].to(device), torch.full((CODED,), torch.nan, device=device)
    part = torch.full((CODED // ranks,), torch.nan, device=device)
    gathered = torch.full((ranks, CODED), torch.nan, device=device)
    small = whole.to(device)
    joined.run("ncclAllReduce", mine, summed, CODED, SUM)
    joined.run("ncclReduceScatter", mine, part, CODED // ranks, SUM)
    joined.run("ncclAllGather", mine, gathered, CODED)
    joined.run("ncclAllReduce", small, small, len(whole), SUM)
    torch.cuda.synchronize()
    begin = rank * (CODED // ranks)
    for found, expected, what in [(summed, exact, "all_reduce"),
                                  (part, exact[begin:begin + CODED // ranks], "reduce_scatter")]:
        off = found.cpu().double() - expected
        error = (off.square().mean() / expected.square().mean()).sqrt().item()
        # Normally distributed numbers lose about 1 % in each encoding, and there are at most two
        # encodings.
        assert 1e-4 < error < 0.05, f"{what} is off by {error}"
    assert torch.equal(gathered.cpu(), given), "all_gather is not exact"
    assert torch.equal(small.cpu(), ranks * whole), "a small sum is not exact"
    sums = [torch.empty_like(summed) for _ in range(ranks)]
    dist.all_gather(sums, summed)
    assert all(torch.equal(one, summed) for one in sums), "ranks have other sums"
    joined.end()
