"""Finds address, element type and size of the arrays that programs pass: numpy, PyTorch, CuPy, buffers."""

import ctypes
import dataclasses
import math
import sys
from typing import Any, Iterable, Optional, Tuple

from ._abi import cinch_dtype_t

#: Element types by the names that numpy, ml_dtypes and PyTorch give them.
DTYPES = {
    "int8": cinch_dtype_t.CINCH_I8,
    "uint8": cinch_dtype_t.CINCH_U8,
    "int32": cinch_dtype_t.CINCH_I32,
    "uint32": cinch_dtype_t.CINCH_U32,
    "int64": cinch_dtype_t.CINCH_I64,
    "uint64": cinch_dtype_t.CINCH_U64,
    "float16": cinch_dtype_t.CINCH_F16,
    "float32": cinch_dtype_t.CINCH_F32,
    "float64": cinch_dtype_t.CINCH_F64,
    "bfloat16": cinch_dtype_t.CINCH_BF16,
    "float8_e4m3fn": cinch_dtype_t.CINCH_F8E4M3,
    "float8_e5m2": cinch_dtype_t.CINCH_F8E5M2,
}

#: numpy's names by kind and size of an element, for `__array_interface__` and `__cuda_array_interface__`.
TYPE_STRINGS = {
    "i1": "int8",
    "u1": "uint8",
    "i4": "int32",
    "u4": "uint32",
    "i8": "int64",
    "u8": "uint64",
    "f2": "float16",
    "f4": "float32",
    "f8": "float64",
}

#: numpy's names by the format letter and size of a buffer's element.
FORMATS = {
    ("b", 1): "int8",
    ("B", 1): "uint8",
    ("c", 1): "uint8",
    ("i", 4): "int32",
    ("l", 4): "int32",
    ("I", 4): "uint32",
    ("L", 4): "uint32",
    ("l", 8): "int64",
    ("q", 8): "int64",
    ("L", 8): "uint64",
    ("Q", 8): "uint64",
    ("e", 2): "float16",
    ("f", 4): "float32",
    ("d", 8): "float64",
}


@dataclasses.dataclass
class Array:
    """Memory of an array. `owner` keeps it alive; `stream` is that of its `__cuda_array_interface__`, 0 for none."""

    owner: Any
    address: int
    shape: Tuple[int, ...]
    dtype: cinch_dtype_t
    writable: bool
    on_gpu: bool
    stream: int = 0

    @property
    def count(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def pointer(self) -> ctypes.c_void_p:
        """The address for C; NULL if there are no elements."""
        return ctypes.c_void_p(self.address if self.count else None)


def element_type(name: Any) -> cinch_dtype_t:
    """Returns the element type with numpy's or PyTorch's name, such as `float32` or `torch.bfloat16`."""
    text = str(name).rsplit(".", 1)[-1]
    if text in DTYPES:
        return DTYPES[text]
    raise TypeError(f"elements of type {name} are not supported; there are {', '.join(DTYPES)}")


def describe(value: Any, what: str) -> Array:
    """Returns the memory of `value`, whose elements must lie next to each other in C order."""
    if hasattr(value, "data_ptr") and hasattr(value, "is_contiguous"):
        return _tensor(value, what)
    numpy = sys.modules.get("numpy")
    # The interface of a scalar has the address of a copy, which ends with the interface.
    if numpy is not None and isinstance(value, numpy.generic):
        return _buffer(value, what)
    gpu = getattr(value, "__cuda_array_interface__", None)
    host = getattr(value, "__array_interface__", None)
    if gpu is not None or host is not None:
        return _interface(value, gpu or host, gpu is not None, what)
    return _buffer(value, what)


def _tensor(value: Any, what: str) -> Array:
    if not value.is_contiguous():
        raise ValueError(f"{what} is not contiguous; pass {what}.contiguous()")
    if value.device.type not in ("cpu", "cuda"):
        raise ValueError(f"{what} is on device {value.device}; cinch takes cpu and cuda tensors")
    on_gpu = value.device.type == "cuda"
    return Array(value, value.data_ptr(), tuple(value.shape), element_type(value.dtype), True, on_gpu)


def _interface(value: Any, facts: dict, on_gpu: bool, what: str) -> Array:
    name = type(value).__name__
    if facts.get("mask") is not None or (hasattr(value, "mask") and hasattr(value, "filled")):
        raise TypeError(f"{what} is a {name} with a mask, which no rank would see; pass {what}.filled(number)")
    if not isinstance(facts.get("data"), tuple):
        raise TypeError(f"the array interface of {what}, a {name}, has no address; pass numpy.array({what})")
    address, read_only = facts["data"]
    shape, strides = tuple(facts["shape"]), facts.get("strides")
    kind = facts["typestr"]
    # Types that numpy does not know, such as bfloat16, are `V2` there and have their name in `dtype`.
    if kind[0] == ">":
        raise TypeError(f"{what} is big endian; pass {what}.astype('<{kind[1:]}')")
    dtype = element_type(TYPE_STRINGS.get(kind[1:], getattr(value, "dtype", kind)))
    if strides is not None and math.prod(shape) > 1:
        expected = _c_strides(shape, int(kind[2:]))
        if any(s != e for s, e, n in zip(strides, expected, shape) if n > 1):
            raise ValueError(f"{what} is not contiguous in C order; pass a copy")
    return Array(value, address or 0, shape, dtype, not read_only, on_gpu, facts.get("stream") or 0)


def _c_strides(shape: Tuple[int, ...], size: int) -> Tuple[int, ...]:
    strides = []
    for length in reversed(shape):
        strides.append(size)
        size *= length
    return tuple(reversed(strides))


def _buffer(value: Any, what: str) -> Array:
    try:
        view = memoryview(value)
    except TypeError:
        raise TypeError(
            f"{what} is a {type(value).__name__}; pass a numpy array, a torch tensor, or an object with "
            "__cuda_array_interface__ or a buffer"
        ) from None
    name = FORMATS.get((view.format.lstrip("@=<"), view.itemsize))
    if name is None:
        raise TypeError(f"{what} has elements of format {view.format!r}, which are not supported")
    if not view.c_contiguous:
        raise ValueError(f"{what} is not contiguous in C order; pass a copy")
    holder, address = _address_of(view)
    return Array((value, view, holder), address, tuple(view.shape), DTYPES[name], not view.readonly, False)


def _address_of(view: memoryview) -> Tuple[Any, int]:
    """Returns the address of a contiguous buffer, and an object that must live as long as it is used."""
    if view.nbytes == 0:
        return None, 0
    if not view.readonly:
        holder = (ctypes.c_char * view.nbytes).from_buffer(view)
        return holder, ctypes.addressof(holder)
    # ctypes refuses read-only buffers; the C interface of Python gives their address.
    filled = _PyBuffer()
    ctypes.pythonapi.PyObject_GetBuffer(ctypes.py_object(view), ctypes.byref(filled), 0)
    address = filled.buf
    ctypes.pythonapi.PyBuffer_Release(ctypes.byref(filled))
    return None, address


class _PyBuffer(ctypes.Structure):
    """`Py_buffer` of Python's C interface."""

    _fields_ = [
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.c_void_p),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.POINTER(ctypes.c_ssize_t)),
        ("strides", ctypes.POINTER(ctypes.c_ssize_t)),
        ("suboffsets", ctypes.POINTER(ctypes.c_ssize_t)),
        ("internal", ctypes.c_void_p),
    ]


def like(value: Any, shape: Tuple[int, ...], what: str) -> Any:
    """Returns a new array of `shape`, of the library and element type of `value`."""
    if hasattr(value, "new_empty"):
        return value.new_empty(shape)
    if hasattr(value, "__cuda_array_interface__"):
        raise TypeError(f"pass {what}: cinch does not create arrays of {type(value).__name__}")
    numpy = _numpy(what)
    if isinstance(value, numpy.ndarray):
        return numpy.empty(shape, value.dtype)
    return numpy.empty(shape, numpy.asarray(memoryview(value)).dtype)


def _numpy(what: str) -> Any:
    try:
        import numpy
    except ImportError:
        raise TypeError(f"pass {what}: without numpy cinch creates no arrays") from None
    return numpy


def described_output(value: Any, count: int, dtype: Optional[cinch_dtype_t], what: str) -> Array:
    """Returns the memory of an output, which must be writable and have `count` elements of `dtype`."""
    array = describe(value, what)
    if not array.writable:
        raise ValueError(f"{what} is read-only")
    if array.count != count:
        raise ValueError(f"{what} has {array.count} elements, the call writes {count}")
    if dtype is not None and array.dtype != dtype:
        raise TypeError(f"{what} has elements {array.dtype.name}, the input {dtype.name}")
    return array


def stream_of(stream: Any, arrays: Iterable[Optional[Array]]) -> Optional[int]:
    """Returns the address of a stream for C; NULL is CUDA's default stream.

    `stream` is an address, or an object with `cuda_stream` or `ptr`. None is the stream on which the arrays' library
    works: torch's current stream, or the one in `__cuda_array_interface__`.
    """
    for name in ("cuda_stream", "ptr"):
        stream = getattr(stream, name, stream)
    if stream is not None:
        return int(stream) or None
    on_gpu = [one for one in arrays if one is not None and one.on_gpu]
    tensors = [one.owner for one in on_gpu if hasattr(one.owner, "record_stream")]
    if tensors:
        current = sys.modules["torch"].cuda.current_stream(tensors[0].device)
        for one in tensors:
            # The allocator must not give the memory away before the call has used it.
            one.record_stream(current)
        return current.cuda_stream or None
    # 1 is the interface's number of the default stream.
    return next((one.stream for one in on_gpu if one.stream not in (0, 1)), None)
