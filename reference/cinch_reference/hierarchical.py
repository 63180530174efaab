"""Collectives in groups of ranks: section "Hierarchical"."""

import numpy as np

from . import trees
from .chunks import Chunk
from .communicator import Groups, Message, Run


def parts(collective: str, groups: Groups) -> int:
    """Returns P. Section "Chunks"."""
    if collective in ("all_gather", "reduce_scatter"):
        return 1
    tree = groups.rails if groups.rails > 1 else 2
    if collective == "all_reduce" and groups.between != "tree":
        return groups.rails * len(groups.ranks)
    return tree


def group_sum(run: Run, j: int, a: int, number: int, at: int, n: int) -> np.ndarray:
    """Returns S[j] at its rank a."""
    inside = run.arguments.inside or run.arguments.codec
    acc = None
    for rank in run.comm.groups.ranks[j % len(run.comm.groups.ranks)]:
        x = run.x(rank, at, n)
        if rank == a:
            acc = run.add_own(acc, x)
        else:
            acc = run.add(acc, run.encode(rank, number, at, x, codec=inside))
    return acc


def is_single(run: Run, j: int) -> bool:
    """Returns whether a group has one rank."""
    return len(run.comm.groups.ranks[j % len(run.comm.groups.ranks)]) == 1


def sum_message(run: Run, j: int, rail: int, number: int, at: int, n: int) -> Message:
    """Returns `E(S[j])`, a contribution if the group has one rank."""
    a = run.comm.groups.at(j, rail)
    acc = group_sum(run, j, a, number, at, n)
    return run.encode(a, number, at, acc, is_sum=not is_single(run, j))


def tree_message(run: Run, tree: int, label: int, root: int, rail: int, c: Chunk) -> Message:
    """Returns the message of a group to its parent in a tree of groups."""
    groups = run.comm.groups
    size = len(groups.ranks)
    j = (root + label) % size
    below = trees.children(tree, size, label)
    a = groups.at(j, rail)
    acc = group_sum(run, j, a, c.number, c.begin, c.n)
    for child in below:
        acc = run.add(acc, tree_message(run, tree, child, root, rail, c))
    single = is_single(run, j) and not below
    return run.encode(a, c.number, c.begin, acc, is_sum=not single)


def tree_total(run: Run, tree: int, root: int, rail: int, c: Chunk) -> np.ndarray:
    """Returns S[root] plus the messages of its children in a tree of groups."""
    groups = run.comm.groups
    acc = group_sum(run, root, groups.at(root, rail), c.number, c.begin, c.n)
    for child in trees.children(tree, len(groups.ranks), 0):
        acc = run.add(acc, tree_message(run, tree, child, root, rail, c))
    return acc


def all_reduce(run: Run, c: Chunk) -> Message:
    """Returns e of a chunk."""
    groups = run.comm.groups
    size = len(groups.ranks)
    if groups.between == "tree":
        rail = c.q % groups.rails
        acc = tree_total(run, c.q % 2, 0, rail, c)
        return run.encode_result(groups.at(0, rail), c.number, c.begin, acc)
    rail, k = c.q // size, c.q % size
    at = (c.number, c.begin, c.n)
    acc = group_sum(run, k, groups.at(k, rail), *at)
    if groups.between == "ring":
        m = sum_message(run, k + 1, rail, *at)
        for j in range(k + 2, k + size):
            a = groups.at(j, rail)
            partial = run.add(group_sum(run, j, a, *at), m)
            m = run.encode(a, c.number, c.begin, partial, is_sum=True)
        acc = run.add(acc, m)
    else:
        for j in range(size):
            if j != k:
                acc = run.add(acc, sum_message(run, j, rail, *at))
    return run.encode_result(groups.at(k, rail), c.number, c.begin, acc)


def group_of(groups: Groups, rank: int) -> tuple[int, int]:
    """Returns the group of a rank and its place there."""
    for j, ranks in enumerate(groups.ranks):
        if rank in ranks:
            return j, ranks.index(rank)
    raise ValueError(f"rank {rank} is in no group")


def reduce(run: Run, c: Chunk) -> np.ndarray:
    """Returns what the root stores."""
    groups, root = run.comm.groups, run.arguments.root
    h, _ = group_of(groups, root)
    rail = c.q % groups.rails
    a = groups.at(h, rail)
    acc = tree_total(run, c.q % 2, h, rail, c)
    acc = run.fin(acc)
    if a == root:
        return acc
    return run.decode(run.encode(a, c.number, c.begin, acc, is_sum=True))


def reduce_scatter(run: Run, k: int, c: Chunk, at: int) -> np.ndarray:
    """Returns what rank k finishes for its block."""
    groups = run.comm.groups
    h, p = group_of(groups, k)
    acc = group_sum(run, h, k, c.number, at, c.n)
    for j in range(len(groups.ranks)):
        if j != h:
            acc = run.add(acc, sum_message(run, j, p, c.number, at, c.n))
    return acc
