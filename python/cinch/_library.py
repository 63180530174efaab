"""Loads libcinch.so.0 and turns its result codes into exceptions."""

import builtins
import ctypes
import operator
import pathlib
from typing import Any

from . import __version__, _abi

#: Folder of the libraries and the tool inside an installed wheel.
FOLDER = pathlib.Path(__file__).resolve().parent / "lib"


class Error(RuntimeError):
    """A call failed. The text names ranks, hosts, numbers and the next step; `code` is the C result code."""

    code = _abi.cinch_result_t.CINCH_ERROR_INTERNAL


class SystemCallError(Error):
    """A call of the operating system or the CUDA driver failed."""

    code = _abi.cinch_result_t.CINCH_ERROR_SYSTEM


class InvalidArgumentError(Error, ValueError):
    """An argument is outside its documented range. The call had no effect."""

    code = _abi.cinch_result_t.CINCH_ERROR_INVALID_ARGUMENT


class InvalidUsageError(Error):
    """The call is not allowed in this state, or with this combination of arguments."""

    code = _abi.cinch_result_t.CINCH_ERROR_INVALID_USAGE


class RemoteError(Error):
    """A peer exited, died or is unreachable. The communicator has failed."""

    code = _abi.cinch_result_t.CINCH_ERROR_REMOTE


class MismatchError(Error):
    """Ranks disagree about a call or a setting. The communicator has failed."""

    code = _abi.cinch_result_t.CINCH_ERROR_MISMATCH


class TimeoutError(Error, builtins.TimeoutError):  # noqa: A001 - the word of the C result code
    """A timeout expired. The communicator has failed."""

    code = _abi.cinch_result_t.CINCH_ERROR_TIMEOUT


class AbortedError(Error):
    """The communicator was aborted."""

    code = _abi.cinch_result_t.CINCH_ERROR_ABORTED


class UnsupportedError(Error):
    """This build or this machine lacks a feature that the call needs."""

    code = _abi.cinch_result_t.CINCH_ERROR_UNSUPPORTED


ERRORS = {
    kind.code: kind
    for kind in (
        Error,
        SystemCallError,
        InvalidArgumentError,
        InvalidUsageError,
        RemoteError,
        MismatchError,
        TimeoutError,
        AbortedError,
        UnsupportedError,
    )
}


def check(result):
    """Raises the exception of a result code other than CINCH_SUCCESS."""
    if result != _abi.cinch_result_t.CINCH_SUCCESS:
        kind = ERRORS.get(result, Error)
        raise kind(LIBRARY.cinch_last_error().decode(errors="replace"))


def _load():
    packaged = FOLDER / "libcinch.so.0"
    # Without a wheel this is the library of an installation, which the dynamic linker finds.
    library = ctypes.CDLL(str(packaged) if packaged.exists() else "libcinch.so.0")
    for name, (result, arguments) in _abi.FUNCTIONS.items():
        try:
            function = getattr(library, name)
        except AttributeError:
            raise ImportError(
                f"{library._name} has no {name}: library and package are of different versions; install both together"
            ) from None
        function.restype = result
        function.argtypes = arguments
    version = library.cinch_version_string().decode()
    if version != __version__:
        raise ImportError(
            f"{library._name} is version {version}, the package cinch {__version__}: install both together"
        )
    return library


#: The loaded library. ctypes releases the interpreter's lock during each call.
LIBRARY = _load()


def structure(kind, initialise):
    """Returns a struct of `kind` with its defaults, which the library's function `initialise` sets."""
    value = kind()
    check(initialise(ctypes.byref(value), ctypes.sizeof(value), _abi.CINCH_API_VERSION))
    return value


def integer(value: Any, kind: Any, what: str) -> int:
    """Returns an integer that fits ctypes' type `kind`, which would wrap others without an error."""
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{what} is {value!r}; it is an integer") from None
    # An unsigned type turns -1 into its largest number.
    most = kind(-1).value
    least = 0 if most > 0 else -(1 << (8 * ctypes.sizeof(kind) - 1))
    most = most if most > 0 else -1 - least
    if not least <= number <= most:
        raise ValueError(f"{what} is {number}; it is from {least} to {most}")
    return number
