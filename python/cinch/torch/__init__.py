"""Backend `cinch` of torch.distributed, and communication hooks that compress gradients.

    import torch.distributed as dist
    dist.init_process_group("cinch")

`init_method="cinch://"` finds the ranks by the environment of cinch run, mpirun or srun; without it the variables of
torchrun are used. In an installed wheel `import torch` registers the backend; without one, `import cinch.torch` does.
The first process group loads libcinch.so.0.
"""

import importlib
from typing import Any

import torch.distributed as _dist

_PLACES = {"backend": ("CinchProcessGroup",), "hooks": ("CompressionState", "ddp_hook", "fsdp_hook")}
_MODULES = {name: module for module, names in _PLACES.items() for name in names}

__all__ = ["register", *sorted(_MODULES)]


def register() -> None:
    """Registers the backend. Torch calls it through the entry point group `torch.backends`."""
    if _dist.is_available() and "cinch" not in _dist.Backend.backend_list:
        _dist.Backend.register_backend("cinch", _create, extended_api=True, devices=["cpu", "cuda"])
        _dist.register_rendezvous_handler("cinch", _from_launcher)


def _create(options: Any, backend_options: Any = None) -> Any:
    from .backend import create

    return create(options, backend_options)


def _from_launcher(url: str, **options: Any) -> Any:
    from .rendezvous import from_launcher

    return from_launcher(url, **options)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'cinch.torch' has no attribute {name!r}")
    return getattr(importlib.import_module("." + _MODULES[name], __name__), name)


register()
