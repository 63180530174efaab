"""Fused all_reduces of a group: section "Fused calls"."""

from dataclasses import replace

import numpy as np

from . import collectives
from .communicator import Arguments, Communicator

FUSE_BYTES = 65536
LARGEST = 1 << 20
"""Largest padded total in bytes."""


def step(arguments: Arguments) -> int:
    """Returns g."""
    codecs = [arguments.codec, arguments.inside or arguments.codec]
    line = 64 // arguments.element.bytes
    return max(max(codec.granule, line) for codec in codecs)


def can_fuse(arguments: Arguments) -> bool:
    """Returns whether a call may be a member."""
    size = arguments.count * arguments.element.bytes
    if arguments.collective != "all_reduce" or not 0 < size <= FUSE_BYTES:
        return False
    if arguments.factors is not None or arguments.tensor or arguments.feedback:
        return False
    for codec in (arguments.codec, arguments.inside or arguments.codec):
        whole = codec.granule if codec.name in ("onebit", "terngrad") else 1
        if arguments.count % whole:
            return False
    return True


def alike(a: Arguments, b: Arguments) -> bool:
    """Returns whether two calls may be members of one fused call."""
    return replace(a, count=b.count, root=b.root) == b


def round_up(n: int, g: int) -> int:
    """Returns n rounded up to a multiple of g."""
    return -(-n // g) * g


def batches(calls: list[Arguments]) -> list[list[int]]:
    """Returns the indices of the calls that run together, in order."""
    found: list[list[int]] = []
    total = 0
    for i, arguments in enumerate(calls):
        g = step(arguments)
        padded = round_up(arguments.count, g)
        last = calls[found[-1][-1]] if found else None
        joins = last is not None and can_fuse(arguments) and can_fuse(last) and alike(last, arguments)
        if joins and (total + padded) * arguments.element.bytes <= LARGEST:
            found[-1].append(i)
            total += padded
        else:
            found.append([i])
            total = padded
    return found


def run(comm: Communicator, calls: list[Arguments], inputs: list[list[np.ndarray]]) -> list:
    """Runs a group of all_reduces; `inputs[i]` are those of call i. Returns the outputs of each."""
    outputs: list = [None] * len(calls)
    for members in batches(calls):
        first = calls[members[0]]
        if len(members) == 1:
            outputs[members[0]] = collectives.call(comm, first, inputs[members[0]])
            continue
        g = step(first)
        repeats = first.codec.numbers > 0 or bool(first.inside and first.inside.numbers)
        padded = [[] for _ in range(comm.size)]
        for i in members:
            gap = round_up(calls[i].count, g) - calls[i].count
            for rank in range(comm.size):
                x = inputs[i][rank]
                fill = x[-1] if repeats else np.zeros(1, x.dtype)[0]
                padded[rank].append(np.concatenate([x, np.full(gap, fill, x.dtype)]))
        joined = [np.concatenate(parts) for parts in padded]
        results = collectives.call(comm, replace(first, count=joined[0].size), joined)
        start = 0
        for i in members:
            outputs[i] = [result[start : start + calls[i].count] for result in results]
            start += round_up(calls[i].count, g)
    return outputs
