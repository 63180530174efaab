"""What programs do that call the library beside torch, as vLLM and SGLang do: its functions by ctypes, on
communicators and streams of their own. Checks as in torch_checks."""

import ctypes

import torch
import torch.distributed as dist
from torch_checks import Skip, check

FLOAT32, SUM = 7, 0
COUNTS = [3, 5000, 3_000_000]


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


@check("green context")
def green(rank, ranks, device):
    nccl = ctypes.CDLL("libnccl.so.2")
    nccl.ncclGetErrorString.restype = nccl.ncclGetLastError.restype = ctypes.c_char_p

    def ok(result):
        assert result == 0, f"{nccl.ncclGetErrorString(result)}: {nccl.ncclGetLastError(None)}"

    stream = green_stream(device)
    data = [torch.full((count,), rank + 1.0, device=device) for count in COUNTS]
    name = UniqueId()
    if rank == 0:
        ok(nccl.ncclGetUniqueId(ctypes.byref(name)))
    names = [bytes(name)]
    dist.broadcast_object_list(names, src=0, device=device)
    comm = ctypes.c_void_p()
    ok(nccl.ncclCommInitRank(ctypes.byref(comm), ranks, UniqueId.from_buffer_copy(names[0]), rank))
    torch.cuda.synchronize()
    for one in data:
        place = ctypes.c_void_p(one.data_ptr())
        for _ in range(3):
            ok(nccl.ncclAllReduce(place, place, ctypes.c_size_t(one.numel()), FLOAT32, SUM, comm, stream))
    torch.cuda.ExternalStream(stream.value, device=device).synchronize()
    total = ranks * (ranks + 1) / 2 * ranks ** 2
    for one in data:
        assert (one == total).all(), f"{one.numel()} elements: {one[0]} for {total}"
    ok(nccl.ncclCommDestroy(comm))
