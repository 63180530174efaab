"""Collective communication that compresses inside every pipeline chunk.

    import cinch, numpy
    comm = cinch.init(codec="linear8", codec_min_bytes=1)   # ranks by cinch run, torchrun, mpirun or srun
    total = comm.all_reduce(numpy.ones(1000, "float32"))

`python -m cinch run -n 4 script.py` starts 4 ranks. `cinch.preload()` puts this package's libnccl.so.2 in the place
of NCCL for PyTorch. Loading libcinch.so.0 waits for the first use of a name that needs it.
"""

import importlib
from typing import TYPE_CHECKING, Any

from .run import nccl_path, preload, tool_path

if TYPE_CHECKING:
    from ._library import (
        AbortedError,
        Error,
        InvalidArgumentError,
        InvalidUsageError,
        MismatchError,
        RemoteError,
        SystemCallError,
        TimeoutError,
        UnsupportedError,
    )
    from .codecs import copy, copy_to_gpus, decode, encode, wire_bytes
    from .communicator import Communicator, Report, group, init, stats, unique_id
    from .training import Awp, LossScaler, count_non_finite

__version__ = "0.1.0"

_PLACES = {
    "._library": (
        "AbortedError",
        "Error",
        "InvalidArgumentError",
        "InvalidUsageError",
        "MismatchError",
        "RemoteError",
        "SystemCallError",
        "TimeoutError",
        "UnsupportedError",
    ),
    ".codecs": ("copy", "copy_to_gpus", "decode", "encode", "wire_bytes"),
    ".communicator": ("Communicator", "Report", "group", "init", "stats", "unique_id"),
    ".training": ("Awp", "LossScaler", "count_non_finite"),
}
_MODULES = {name: module for module, names in _PLACES.items() for name in names}

__all__ = ["nccl_path", "preload", "tool_path", *sorted(_MODULES)]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'cinch' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name], __name__), name)


def __dir__():
    return sorted([*globals(), *_MODULES])
