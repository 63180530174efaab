"""Ranks of one process that call cinch's collectives together, on host memory or on one GPU.

A value of all ranks is one array whose first dimension is the rank. Each collective is a group call over the
communicators of all ranks, so data pass through the engine, the codec and the transport as between processes;
`processes.py` proves that the bits are equal.

Several independent runs, one for each seed, share a call. A run's vector is padded to a multiple of ranks x 256 and
cut into one shard for each rank; the call has shard 0 of all runs, then shard 1, and so on. Blocks of 256 elements then
belong to one run, and, while a shard of all runs fits one chunk of host memory, rank r reduces the elements that it
would reduce if the run had a call of its own.
"""

import os
import threading
from typing import Any, Callable, List

import numpy

# Streams of one process must not serialize, or kernels of two ranks wait for each other.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")

import cinch  # noqa: E402 - after the variable that CUDA reads

#: Elements of a block of every codec with blocks, without `block=`.
BLOCK = 256


class Ranks:
    """Communicators of `size` ranks in this process, on host memory, or on the current GPU of torch."""

    def __init__(self, size: int = 4, on_gpu: bool = False, **settings: Any) -> None:
        self.size, self.on_gpu = size, on_gpu
        self._id = cinch.unique_id()
        self._settings = {"device": "cuda" if on_gpu else "host", "init_timeout": 120, "timeout": 300, **settings}
        self.comms: List[Any] = [None] * size
        self._streams: List[Any] = [None] * size
        errors: List[Exception] = []

        def join(rank: int) -> None:
            try:
                self._join(rank)
            except Exception as error:  # noqa: BLE001 - raised again below
                errors.append(error)

        threads = [threading.Thread(target=join, args=(rank,)) for rank in range(size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]

    def _join(self, rank: int) -> None:
        if self.on_gpu:
            import torch

            torch.cuda.set_device(0)
            stream = torch.cuda.Stream()
            # The first kernel of a stream may wait for all kernels of the GPU, so it runs before any collective.
            with torch.cuda.stream(stream):
                torch.zeros(1, device="cuda").add_(1)
            stream.synchronize()
            self._streams[rank] = stream
        self.comms[rank] = cinch.Communicator(self._id, rank, self.size, **self._settings)

    def call(self, start: Callable[[int, Any, Any], None], which: Any = None) -> None:
        """Runs `start(rank, communicator, stream)` of all ranks, or of those in `which`, as one group."""
        which = range(self.size) if which is None else which
        current = None
        if self.on_gpu:
            import torch

            current = torch.cuda.current_stream()
            for rank in which:
                self._streams[rank].wait_stream(current)
        with cinch.group():
            for rank in which:
                start(rank, self.comms[rank], self._streams[rank])
        if current is not None:
            for rank in which:
                current.wait_stream(self._streams[rank])
                # A failure after a launch does not appear in the stream.
                self.comms[rank].check()

    def all_reduce(self, values: Any, **options: Any) -> Any:
        """Sums or averages `values[rank]` over the ranks; returns every rank's result."""
        out = _empty_like(values)
        self.call(lambda rank, comm, stream: comm.all_reduce(values[rank], out[rank], stream=stream, **options))
        return out

    def broadcast(self, values: Any, root: int, **options: Any) -> Any:
        """Copies `values[root]` to all ranks' parts, in place; with a codec the root's too, as every rank gets it."""
        self.call(lambda rank, comm, stream: comm.broadcast(values[rank], root=root, stream=stream, **options))
        return values

    def gather(self, values: Any, root: int, **options: Any) -> Any:
        """Returns all ranks' parts as the root receives them."""
        out = _empty_like(values)
        self.call(
            lambda rank, comm, stream: comm.gather(
                values[rank], out if rank == root else None, root=root, stream=stream, **options
            )
        )
        return out

    def scatter(self, values: Any, root: int, **options: Any) -> Any:
        """Returns every rank's part of `values`, (ranks, ...), which the root has."""
        out = _empty_like(values)
        self.call(
            lambda rank, comm, stream: comm.scatter(
                values if rank == root else None, out[rank], root=root, stream=stream, **options
            )
        )
        return out

    def reduce(self, values: Any, root: int, **options: Any) -> Any:
        """Returns the sum of all ranks' parts as the root receives it."""
        out = _empty_like(values[0])
        self.call(
            lambda rank, comm, stream: comm.reduce(
                values[rank], out if rank == root else None, root=root, stream=stream, **options
            )
        )
        return out

    def sent(self) -> int:
        """Returns the payload bytes that all ranks have sent, after encoding."""
        return sum(comm.stats()["wire_bytes"] for comm in self.comms)

    def forget(self) -> None:
        """Drops residuals of error feedback, before another run."""
        for comm in self.comms:
            comm.feedback_forget()

    def close(self) -> None:
        """Ends the communicators. Each waits for the others, so they end in threads."""
        threads = [threading.Thread(target=comm.finalize) for comm in self.comms]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for comm in self.comms:
            comm.destroy()


def _empty_like(values: Any) -> Any:
    return values.new_empty(values.shape) if hasattr(values, "new_empty") else numpy.empty_like(values)


class Exchange:
    """Averages the gradients of all ranks by all_reduce with a codec, for several independent runs at once.

    `codec` is cinch's word for it. With `feedback` the ranks keep encoding errors for the next step. A codec whose
    scale belongs to a tensor (`tensor=`) takes one call for each run. `harm` changes what the ranks pass in (`HARMS`).
    """

    def __init__(self, ranks: Ranks, codec: str = "raw", feedback: bool = False, harm: str = "") -> None:
        self.ranks, self.codec, self.harm = ranks, codec, HARMS[harm]
        self.each = "tensor=" in codec
        self.feedback = feedback
        ranks.forget()
        #: Whether all ranks have received equal bits in every call.
        self.replicas_equal = True

    def mean(self, gradients: Any) -> Any:
        """Returns the averages, shape (runs, elements), of gradients of shape (runs, ranks, elements).

        Gradients on a GPU go through host memory if the ranks are there.
        """
        if getattr(gradients, "is_cuda", False) and not self.ranks.on_gpu:
            return gradients.new_tensor(self.mean(gradients.cpu().numpy()))
        runs, size, count = gradients.shape
        packed = self.harm(_packed(gradients))
        if self.each:
            out = self._by_run(packed)
        else:
            options = {"feedback": 1} if self.feedback else {}
            out = self.ranks.all_reduce(packed, op="avg", codec=self.codec, algorithm="direct", **options)
        # Bits are compared, because NaN differs from itself.
        first = _bits(out[0])
        self.replicas_equal &= all(bool((_bits(out[rank]) == first).all()) for rank in range(1, size))
        return out[0].reshape(size, runs, -1).swapaxes(0, 1).reshape(runs, -1)[:, :count]

    def _by_run(self, packed: Any) -> Any:
        """Makes one call for each run: a run's vector is the concatenation of its shards."""
        size, _, runs, width = packed.shape
        vectors = _contiguous(packed.swapaxes(1, 2)).reshape(size, runs, -1)
        out = _empty_like(vectors)

        def start(rank: int, comm: Any, stream: Any) -> None:
            for run in range(runs):
                options = {"tensor": run + 1, "feedback": run + 1 if self.feedback else 0}
                comm.all_reduce(
                    vectors[rank, run],
                    out[rank, run],
                    op="avg",
                    codec=self.codec,
                    algorithm="direct",
                    stream=stream,
                    **options,
                )

        self.ranks.call(start)
        return _contiguous(out.reshape(size, runs, size, width).swapaxes(1, 2))


def _packed(gradients: Any) -> Any:
    """Returns gradients as (ranks, shards, runs, elements of a shard), padded with zeros."""
    runs, size, count = gradients.shape
    width = -(-count // (size * BLOCK)) * BLOCK
    shape = (runs, size, size * width)
    padded = gradients.new_zeros(shape) if hasattr(gradients, "new_zeros") else numpy.zeros(shape, gradients.dtype)
    padded[:, :, :count] = gradients
    shards = padded.reshape(runs, size, size, width).swapaxes(0, 1).swapaxes(1, 2)
    return _contiguous(shards)


def _contiguous(values: Any) -> Any:
    return values.contiguous() if hasattr(values, "contiguous") else numpy.ascontiguousarray(values)


def _bits(values: Any) -> Any:
    if isinstance(values, numpy.ndarray):
        return values.view(f"u{values.itemsize}")
    import torch

    return values.view({2: torch.int16, 4: torch.int32}[values.element_size()])


def _saturated(packed: Any) -> Any:
    """Limits each block to half of its largest magnitude: what an encoder with a scale twice too small keeps."""
    blocks = packed.reshape(-1, BLOCK)
    largest = abs(blocks)
    # torch and numpy have `amax` and `max` with different results.
    limit = (largest.amax(1) if hasattr(largest, "amax") else largest.max(1))[:, None] / 2
    if isinstance(blocks, numpy.ndarray):
        return numpy.clip(blocks, -limit, limit).reshape(packed.shape)
    return blocks.clamp(-limit, limit).reshape(packed.shape)


#: Planted harms by name.
HARMS = {"": lambda packed: packed, "half scale": _saturated}
