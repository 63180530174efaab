"""Communication hooks that compress gradients: for DistributedDataParallel and for FSDP2's fully_shard.

    state = cinch.torch.CompressionState(codec="linear8")
    ddp_model.register_comm_hook(state, cinch.torch.ddp_hook)

Each gradient has a number of its own, by the order in which DDP first reduces them. So error feedback stays with its
parameter when DDP rebuilds its buckets after the first step, or when a run continues from a checkpoint.
"""

import weakref
from typing import Any, Dict, List, Optional

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from ..communicator import Communicator, group
from . import residuals
from .backend import CinchProcessGroup
from .collectives import TensorCollectives
from .reductions import Reduction

try:
    from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter
except ImportError:
    # Torch before 2.8 has no custom reduce_scatter; fsdp_hook reports that.
    ReduceScatter = object  # type: ignore[assignment,misc]

#: Element types that codecs take.
CODED = (torch.float32, torch.float16, torch.bfloat16)
#: Ids that one state may use.
IDS = 1 << 32


class CompressionState:
    """Settings and residuals of a hook, on one rank.

    `codec`: codec of gradients with at least `min_bytes` bytes; smaller ones are reduced exactly. `feedback`: whether
    each step adds the compression error of the step before. `process_group`: ranks that reduce; the default group if
    None. If its backend is another one, a group of the same ranks with backend cinch is created, which all of them
    must do together.
    """

    def __init__(
        self,
        codec: str = "linear8",
        feedback: bool = True,
        min_bytes: int = 16384,
        process_group: Optional[dist.ProcessGroup] = None,
    ) -> None:
        self.codec, self.feedback, self.min_bytes = codec, feedback, min_bytes
        found = process_group if process_group is not None else dist.group.WORLD
        if not isinstance(found, CinchProcessGroup):
            ranks = dist.get_process_group_ranks(found)
            found = dist.new_group(ranks, backend="cinch", use_local_synchronization=True)
        #: Group that reduces.
        self.process_group: CinchProcessGroup = found
        # Two states of one group have different ids, because its communicator holds the residuals of both.
        first = found.next_ids(IDS)
        self._tensors = range(first, first + IDS)
        self._ids: Dict[int, int] = {}
        self._comm: "Optional[weakref.ref[Communicator]]" = None
        #: Residuals of a checkpoint by number, until the first call.
        self._saved: Optional[Dict[int, bytes]] = None

    def number(self, parameter: torch.Tensor) -> int:
        """Returns the number of a parameter's gradient in this state."""
        return self._ids.setdefault(id(parameter), len(self._ids))

    def options(self, gradient: torch.Tensor, number: int) -> Dict[str, Any]:
        """Returns codec, ids and feedback of one gradient's call."""
        tensor = self._tensors[number]
        size = gradient.numel() * gradient.element_size()
        if gradient.dtype not in CODED or size < self.min_bytes:
            return {"codec": "raw"}
        return {"codec": self.codec, "tensor": tensor, "feedback": tensor if self.feedback else 0}

    def attach(self, comm: Communicator) -> Communicator:
        """Notes the communicator of the calls, and gives it the residuals of a checkpoint before the first call."""
        if self._saved is not None:
            exported = comm.feedback_export()
            comm.feedback_import(residuals.replace(exported, self._tensors, self._saved, comm.rank, comm.size))
            self._saved = None
        self._comm = weakref.ref(comm)
        return comm

    def stats(self) -> Dict[str, Any]:
        """Returns the counts of the communicator; none before the first step."""
        comm = None if self._comm is None else self._comm()
        return {} if comm is None else comm.stats()

    def state_dict(self) -> Dict[str, Any]:
        """Returns settings and this rank's residuals, for a checkpoint of this rank. Call it between steps."""
        return {
            "codec": self.codec,
            "feedback": self.feedback,
            "min_bytes": self.min_bytes,
            "first_id": self._tensors.start,
            "rank": self.process_group.rank(),
            "size": self.process_group.size(),
            "residuals": self._residuals(),
        }

    def _residuals(self) -> torch.Tensor:
        comm = None if self._comm is None else self._comm()
        tensors = self._saved or {}
        if comm is not None:
            tensors = residuals.select(comm.feedback_export(), self._tensors)
        if not tensors:
            return torch.empty(0, dtype=torch.uint8)
        numbered = {self._tensors[number]: each for number, each in tensors.items()}
        saved = residuals.join(numbered, self.process_group.rank(), self.process_group.size())
        return torch.frombuffer(bytearray(saved), dtype=torch.uint8)

    def load_state_dict(self, state: Dict[str, Any]) -> None:
        """Continues from what `state_dict` returned on the same rank of a group with as many ranks."""
        own = (self.process_group.rank(), self.process_group.size())
        if (state["rank"], state["size"]) != own:
            raise ValueError(
                f"the checkpoint is of rank {state['rank']} of {state['size']}, this is rank {own[0]} of {own[1]}: "
                "residuals belong to one rank; save and load one file for each"
            )
        self.codec, self.feedback, self.min_bytes = state["codec"], state["feedback"], state["min_bytes"]
        # Another state of this group may use the ids of the checkpoint, so the residuals take those of this state.
        saved = range(state["first_id"], state["first_id"] + IDS)
        exported = state["residuals"].numpy().tobytes()
        self._saved = residuals.select(exported, saved) if exported else {}
        comm = None if self._comm is None else self._comm()
        if comm is not None:
            self.attach(comm)


def ddp_hook(state: CompressionState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Averages a bucket of gradients over the ranks, for `DistributedDataParallel.register_comm_hook`."""
    buffer = bucket.buffer()
    parts: List[Any] = []
    for parameter, gradient in zip(bucket.parameters(), bucket.gradients()):
        # Gradients may have strides of their own; their elements lie next to each other in the bucket.
        start = gradient.storage_offset() - buffer.storage_offset()
        part = buffer.narrow(0, start, gradient.numel())
        parts.append((part, state.options(part, state.number(parameter))))

    def run(collectives: TensorCollectives) -> None:
        comm = state.attach(collectives.comm)
        # In a group, small gradients travel in one message.
        with group():
            for part, options in parts:
                comm.all_reduce(part, out=part, op="avg", stream=collectives.stream, **options)

    return state.process_group.enqueue("ddp_hook", [buffer], buffer, run).get_future()


class CompressedReduceScatter(ReduceScatter):  # type: ignore[misc,valid-type]
    """Reduces the gradients of one FSDP2 module, for `FSDPModule.set_custom_reduce_scatter`."""

    def __init__(self, state: CompressionState, number: int) -> None:
        self._state, self._number = state, number

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Returns memory for an input or an output."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, op: Any, async_op: bool = False
    ) -> Optional[dist.Work]:
        """Reduces as `torch.distributed.reduce_scatter_tensor` does, but compressed."""
        if not isinstance(group, CinchProcessGroup):
            raise TypeError(f"the mesh of fully_shard has backend {dist.get_backend(group)}; it needs cinch")
        own = self._state.process_group
        if group is not own:
            raise ValueError(
                f"fully_shard reduces over the group {group.getGroupName()!r} of {group.size()} ranks, the state is of "
                f"{own.getGroupName()!r} with {own.size()}: create CompressionState(process_group=mesh.get_group())"
            )
        reduction = Reduction.of(op, input_tensor.dtype, group.size())
        options = self._state.options(input_tensor, self._number)

        def run(collectives: TensorCollectives) -> None:
            comm = self._state.attach(collectives.comm)
            given = reduction.encode(input_tensor)
            comm.reduce_scatter(
                given, out=output_tensor, op=reduction.operator, stream=collectives.stream, **options
            )

        opts = dist.ReduceScatterOptions()
        opts.asyncOp = async_op
        work = group.enqueue("fsdp_hook", [output_tensor, input_tensor], [output_tensor], run, opts)
        if async_op:
            return work
        work.wait()
        return None


def fsdp_hook(state: CompressionState, model: torch.nn.Module) -> None:
    """Compresses the gradients of every module in `model` to which `fully_shard` was applied.

    Parameters that are gathered stay exact. The state's group must be the group that shards the parameters.
    """
    if ReduceScatter is object:
        raise RuntimeError(f"torch {torch.__version__} has no FSDPModule.set_custom_reduce_scatter; 2.8 has")
    modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if not modules:
        raise ValueError("fully_shard was applied to no module of the model")
    for index, module in enumerate(modules):
        module.set_custom_reduce_scatter(CompressedReduceScatter(state, index))
