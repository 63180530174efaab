"""Errors that are exceptions of cinch and of torch.distributed at once."""

import torch.distributed as dist

from .. import _library


def _torch_class(kind: type) -> type:
    # Pickle finds a class by its module and name, so it must be an attribute of this module.
    return type(kind.__name__, (kind, dist.DistBackendError), {"__module__": __name__, "__doc__": kind.__doc__})


_CLASSES = {kind: _torch_class(kind) for kind in _library.ERRORS.values()}
globals().update({kind.__name__: both for kind, both in _CLASSES.items()})


def torch_error(error: BaseException) -> BaseException:
    """Returns an error of cinch as one that is a `torch.distributed.DistBackendError` too; others unchanged."""
    if not isinstance(error, _library.Error) or isinstance(error, dist.DistBackendError):
        return error
    text = str(error)
    if text.startswith("timeout: "):
        text = "the timeout expired: " + text[len("timeout: ") :]
    changed = _CLASSES.get(type(error), _CLASSES[_library.Error])(text)
    changed.__cause__ = error.__cause__
    return changed


def timeout_error(text: str) -> BaseException:
    """Returns the error of a wait that took too long."""
    return torch_error(_library.TimeoutError(text))
