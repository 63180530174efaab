"""Sums of sparse tensors, whose ranks have elements at different places."""

import torch

from .collectives import TensorCollectives


def _gather(collectives: TensorCollectives, given: torch.Tensor, counts: torch.Tensor, dim: int) -> torch.Tensor:
    """Returns all ranks' entries along `dim`, where rank r has `counts[r]`."""
    shapes = [[int(n) if at == dim else length for at, length in enumerate(given.shape)] for n in counts]
    rows = [torch.empty(shape, dtype=given.dtype, device=given.device) for shape in shapes]
    collectives.all_gather_list(rows, given)
    return torch.cat(rows, dim)


def all_reduce_sparse(collectives: TensorCollectives, tensor: torch.Tensor) -> None:
    """Sums a COO tensor in place."""
    own = tensor.coalesce()
    counts = torch.empty(collectives.size, dtype=torch.int64, device=own.device)
    collectives.all_gather(counts, torch.tensor([own._nnz()], device=own.device))
    indices = _gather(collectives, own.indices(), counts, 1)
    values = _gather(collectives, own.values(), counts, 0)
    tensor.copy_(torch.sparse_coo_tensor(indices, values, tensor.shape).coalesce())
