"""Codecs on whole arrays, without a communicator. The bytes are those that collectives send."""

import ctypes
from typing import Any, Optional, Sequence

from . import _abi
from ._arrays import Array, describe, described_output, stream_of
from ._library import LIBRARY, check, integer

LAYOUTS = {
    "chunk": _abi.cinch_layout_t.CINCH_LAYOUT_CHUNK,
    "published": _abi.cinch_layout_t.CINCH_LAYOUT_PUBLISHED,
}


def _layout(name: str) -> int:
    if name not in LAYOUTS:
        raise ValueError(f"layout {name!r} is unknown; there are {', '.join(LAYOUTS)}")
    return LAYOUTS[name]


def wire_bytes(codec: str, count: int, layout: str = "chunk") -> int:
    """Returns the bytes of `count` elements encoded with `codec`."""
    size = ctypes.c_size_t()
    count = integer(count, ctypes.c_size_t, "count")
    check(LIBRARY.cinch_wire_bytes(codec.encode(), _layout(layout), count, ctypes.byref(size)))
    return size.value


def encode(array: Any, codec: str, layout: str = "chunk", draw: int = 0, out: Any = None, stream: Any = None) -> Any:
    """Returns `array` (f32, f16 or bf16) encoded with `codec`: bytes, or `out`, an array of uint8.

    Codecs with random rounding (`minmax4:seed=1`) draw the same numbers for equal seed and `draw`. Arrays on a GPU
    are encoded on `stream`, as by `Communicator`.
    """
    given = describe(array, "array")
    size = wire_bytes(codec, given.count, layout)
    room = ctypes.create_string_buffer(size) if out is None else out
    written = _bytes_of(room, "out", writable=True)
    _check_memory("array", given, written)
    draw = integer(draw, ctypes.c_uint64, "draw")
    check(
        LIBRARY.cinch_encode(
            codec.encode(), _layout(layout), given.pointer(), given.count, given.dtype, draw, written.pointer(),
            written.count, stream_of(stream, (given, written)),
        )
    )
    return room.raw if out is None else out


def decode(
    wire: Any,
    codec: str,
    count: Optional[int] = None,
    dtype: Any = "float32",
    layout: str = "chunk",
    out: Any = None,
    stream: Any = None,
) -> Any:
    """Returns the first `count` elements of encoded bytes as a numpy array of `dtype`, or in `out`.

    `count` may be left out with `out`, and with the layout `published` where the bytes contain it.
    """
    given = _bytes_of(wire, "wire")
    if count is None and out is not None:
        count = describe(out, "out").count
    if count is None:
        if given.on_gpu:
            raise ValueError("wire is on a GPU, where its count cannot be read: pass count or out")
        found = ctypes.c_size_t()
        check(
            LIBRARY.cinch_wire_count(
                codec.encode(), _layout(layout), given.pointer(), given.count, ctypes.byref(found)
            )
        )
        count = found.value
    count = integer(count, ctypes.c_size_t, "count")
    if out is None:
        import numpy

        out = numpy.empty(count, str(dtype))
    target = described_output(out, count, None, "out")
    _check_memory("wire", given, target)
    check(
        LIBRARY.cinch_decode(
            codec.encode(), _layout(layout), given.pointer(), given.count, target.pointer(), count, target.dtype,
            stream_of(stream, (given, target)),
        )
    )
    return out


def copy(array: Any, out: Any, codec: str, draw: int = 0, stream: Any = None) -> Any:
    """Copies an array (f32, f16 or bf16) between host memory and a GPU, encoded by `codec` on the way; returns `out`.

    One of both lies in host memory, the other on a GPU. `out` receives decoded elements, in the order of `stream`. In a
    capture each replay copies the elements that `array` has then: keep both arrays as long as the graph.
    """
    draw = integer(draw, ctypes.c_uint64, "draw")
    given = describe(array, "array")
    target = described_output(out, given.count, given.dtype, "out")
    check(
        LIBRARY.cinch_copy(
            codec.encode(), given.pointer(), target.pointer(), given.count, given.dtype, draw,
            stream_of(stream, (given, target)),
        )
    )
    return out


def copy_to_gpus(array: Any, outs: Sequence[Any], codec: str, draw: int = 0, streams: Optional[Sequence[Any]] = None) -> None:
    """Copies an array (f32, f16 or bf16) in host memory to arrays on one or several GPUs, encoded by `codec` on the way.

    It is encoded once, and its encoding crosses the bus once for each GPU. Each of `outs` receives decoded elements, in the
    order of its entry of `streams`; without `streams`, of the current stream of its GPU. In a capture all are one stream, and
    each replay copies the elements that `array` has then: keep the arrays as long as the graph.
    """
    draw = integer(draw, ctypes.c_uint64, "draw")
    given = describe(array, "array")
    targets = [described_output(out, given.count, given.dtype, f"outs[{at}]") for at, out in enumerate(outs)]
    wanted = [None] * len(targets) if streams is None else list(streams)
    if len(wanted) != len(targets):
        raise ValueError(f"{len(wanted)} streams for {len(targets)} arrays")
    queues = [stream_of(stream, (target,)) for stream, target in zip(wanted, targets)]
    addresses = ctypes.c_void_p * len(targets)  # a type
    check(
        LIBRARY.cinch_copy_to_gpus(
            codec.encode(), given.pointer(), addresses(*(target.pointer() for target in targets)), addresses(*queues),
            len(targets), given.count, given.dtype, draw,
        )
    )


def _bytes_of(value: Any, what: str, writable: bool = False) -> Array:
    array = describe(value, what)
    if array.dtype not in (_abi.cinch_dtype_t.CINCH_U8, _abi.cinch_dtype_t.CINCH_I8):
        raise TypeError(f"{what} has elements {array.dtype.name}; encoded bytes are uint8")
    if writable and not array.writable:
        raise ValueError(f"{what} is read-only")
    return array


def _check_memory(what: str, given: Array, out: Array) -> None:
    if given.on_gpu != out.on_gpu:
        here, there = ("on a GPU", "in host memory") if given.on_gpu else ("in host memory", "on a GPU")
        raise ValueError(f"{what} is {here}, out is {there}: pass an out that is {here}")
