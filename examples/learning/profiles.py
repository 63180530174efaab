"""Times of codecs, of averages and of packed weights, and the threshold that AWP takes from a run without it."""

import time
from typing import Any, Dict, Iterator, Sequence

import cinch
import numpy
from loops import MOMENTUM, Task, batches, place, rate_at
from nets import library
from ranks import Ranks

#: Elements of timed arrays, and repetitions, of which the fastest counts.
COUNT, REPEATS = 1 << 20, 9


def growth(task: Task, seeds: Sequence[int], ranks: int, share: float = 0.25) -> float:
    """Returns the mean relative growth of a layer's norm in a batch, over the first `share` of exact training.

    The source sets AWP's threshold so: the mean change over the epochs until the validation error first drops.
    """
    net, steps = task.net, task.steps(ranks)
    parts = [part for part in net.parts if not part.is_bias]
    master = place(numpy.stack([net.start(seed) for seed in seeds]), task.train)
    speed, norms = master * 0, []
    for step, (inputs, labels) in enumerate(batches(task, seeds, ranks)):
        if step >= max(2, share * steps):
            break
        _, gradients = net.gradients(master, inputs, labels)
        speed = MOMENTUM * speed + gradients.mean(1)
        master = master - rate_at(step, steps, task.rate) * speed
        xp = library(master)
        squares = [(master[:, part.begin : part.end] ** 2).sum() for part in parts]
        norms.append([float(xp.sqrt(value)) for value in squares])
    values = numpy.array(norms)
    return float((numpy.diff(values, axis=0) / values[:-1]).mean())


def rows(ranks: Ranks) -> Iterator[Dict[str, Any]]:
    """Yields rows of times: one encode and decode, one average over the ranks, and one copy of packed weights."""
    draws, on_gpu = numpy.random.default_rng(5), ranks.on_gpu
    values = draws.standard_normal((ranks.size, COUNT)).astype(numpy.float32)
    if on_gpu:
        import torch

        values = torch.tensor(values).cuda()
    for codec in ("dynamic8", "linear8", "onebit", "minmax4"):
        wire = _bytes(cinch.wire_bytes(codec, COUNT), values)
        target = values[0] * 0
        encode = _fastest(lambda: cinch.encode(values[0], codec, out=wire), on_gpu)
        decode = _fastest(lambda: cinch.decode(wire, codec, out=target), on_gpu)
        yield {"case": f"encode {codec}", "elements": COUNT, "encode_ns": encode, "decode_ns": decode}
    for codec in (
        "raw",
        "dynamic8",
        "dynamic8:tensor=1",
        "dynamic8:tensor=50",
        "linear8",
        "linear8:tensor=1",
        "linear8:tensor=50",
        "onebit",
    ):
        if on_gpu and "tensor=" in codec:
            continue  # GPUs refuse it
        spent = _fastest(lambda: ranks.all_reduce(values, codec=codec, algorithm="direct", tensor=7), on_gpu)
        yield {"case": f"all_reduce {codec}", "elements": COUNT, "ranks": ranks.size, "average_ns": spent}
    if on_gpu:
        yield from _copies(values[0])


def _copies(device: Any) -> Iterator[Dict[str, Any]]:
    """Yields times of weights from the host to the GPU: pack, move and unpack apart, and `cinch_copy` as a whole."""
    import torch

    host = device.cpu().pin_memory()
    plain = _fastest(lambda: device.copy_(host, non_blocking=True), True)
    for codec in ("trunc8", "trunc16", "trunc24"):
        size = cinch.wire_bytes(codec, COUNT)
        packed = torch.empty(size, dtype=torch.uint8).pin_memory()
        moved = torch.empty(size, dtype=torch.uint8, device="cuda")
        pack = _fastest(lambda: cinch.encode(host, codec, out=packed), False)
        move = _fastest(lambda: moved.copy_(packed, non_blocking=True), True)
        unpack = _fastest(lambda: cinch.decode(moved, codec, out=device), True)
        whole = _fastest(lambda: cinch.copy(host, device, codec), True)
        yield {
            "case": f"weights {codec}",
            "elements": COUNT,
            "plain_ns": plain,
            "pack_ns": pack,
            "move_ns": move,
            "unpack_ns": unpack,
            "copy_ns": whole,
        }


def _bytes(count: int, like: Any) -> Any:
    if isinstance(like, numpy.ndarray):
        return numpy.empty(count, numpy.uint8)
    import torch

    return torch.empty(count, dtype=torch.uint8, device=like.device)


def _fastest(call: Any, on_gpu: bool) -> float:
    """Returns nanoseconds for each of COUNT elements: the fastest of REPEATS calls."""
    best = float("inf")
    for _ in range(REPEATS):
        if on_gpu:
            import torch

            torch.cuda.synchronize()
        began = time.perf_counter()
        call()
        if on_gpu:
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - began)
    return float(f"{1e9 * best / COUNT:.4g}")
