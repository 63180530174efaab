"""Collectives by simulation of all ranks: section "Collectives"."""

from dataclasses import replace

import numpy as np

from . import averages, hierarchical, raw, trees
from .chunks import Chunk
from .communicator import REDUCING, Arguments, Communicator, Message, Run
from .elements import narrow, widen

Outputs = list[np.ndarray | None]


def ring_sum(run: Run, first: int, last: int, number: int, at: int, n: int) -> Message:
    """Returns m after the ranks `first` to `last`, modulo N. Section "Ring"."""
    rank = first % run.size
    m = run.encode(rank, number, at, run.x(rank, at, n))
    while rank != last % run.size:
        rank = (rank + 1) % run.size
        m = run.encode(rank, number, at, run.add(run.x(rank, at, n), m), is_sum=True)
    return m


def ring_total(run: Run, k: int, number: int, at: int, n: int) -> np.ndarray:
    """Returns `x[k] + m` of the ring that ends at rank k. Section "Ring"."""
    return run.add(run.x(k, at, n), ring_sum(run, k + 1, k - 1, number, at, n))


def tree_message(run: Run, tree: int, label: int, root: int, c: Chunk) -> Message:
    """Returns the message of a label to its parent. Section "Tree", reduce."""
    rank = (root + label) % run.size
    below = trees.children(tree, run.size, label)
    acc = run.x(rank, c.begin, c.n)
    for child in below:
        acc = run.add(acc, tree_message(run, tree, child, root, c))
    return run.encode(rank, c.number, c.begin, acc, is_sum=bool(below))


def tree_total(run: Run, tree: int, root: int, c: Chunk) -> np.ndarray:
    """Returns `x + m_child` at the root. Section "Tree"."""
    acc = run.x(root, c.begin, c.n)
    for child in trees.children(tree, run.size, 0):
        acc = run.add(acc, tree_message(run, tree, child, root, c))
    return acc


def direct_total(run: Run, own: int | None, number: int, at: int, n: int) -> np.ndarray:
    """Returns the sum in rank order, with the own contribution exact. Sections "Direct", "Flat tree", "One-shot"."""
    acc = None
    for rank in range(run.size):
        x = run.x(rank, at, n)
        acc = run.add_own(acc, x) if rank == own else run.add(acc, run.encode(rank, number, at, x))
    return acc


def total(run: Run, owner: int, c: Chunk, at: int) -> np.ndarray:
    """Returns the sum of a chunk at its owner, before `fin`."""
    algorithm = run.arguments.algorithm
    if algorithm == "ring":
        return ring_total(run, owner, c.number, at, c.n)
    if algorithm == "tree":
        return tree_total(run, c.q, owner, c)
    return direct_total(run, owner, c.number, at, c.n)


def parts_of(run: Run) -> int:
    """Returns P. Section "Chunks"."""
    arguments, algorithm = run.arguments, run.arguments.algorithm
    if algorithm == "hierarchical":
        return hierarchical.parts(arguments.collective, run.comm.groups)
    if arguments.collective == "all_reduce":
        return {"ring": run.size, "tree": 2, "oneshot": 1, "direct": run.size, "flat_tree": 1}[algorithm]
    if arguments.collective in ("broadcast", "reduce"):
        return {"ring": 1, "tree": 2, "oneshot": 1, "direct": run.size}[algorithm]
    return 1


def oneshot(run: Run, c: Chunk) -> Outputs:
    """Returns every rank's sum of a chunk. Section "One-shot", all_reduce."""
    acc = direct_total(run, None, c.number, c.begin, c.n)
    return [run.out(run.fin(acc))] * run.size


def all_reduce(run: Run) -> Outputs:
    """Returns the outputs of an all_reduce."""
    outputs = [np.empty(run.arguments.count, run.element.storage) for _ in range(run.size)]
    division = run.divide(parts_of(run))
    run.begin_state(1)
    for c in division.chunks():
        if run.arguments.algorithm == "oneshot":
            values = oneshot(run, c)
        else:
            if run.arguments.algorithm == "hierarchical":
                e = hierarchical.all_reduce(run, c)
            else:
                owner = 0 if run.arguments.algorithm == "tree" else c.q
                acc = total(run, owner, c, c.begin)
                e = run.encode_result(owner, c.number, c.begin, acc)
            values = [run.out(run.decode(e))] * run.size
        for rank, value in enumerate(values):
            outputs[rank][c.begin : c.begin + c.n] = value
    return outputs


def reduce(run: Run) -> Outputs:
    """Returns the outputs of a reduce; only the root has one."""
    root, algorithm = run.arguments.root, run.arguments.algorithm
    result = np.empty(run.arguments.count, run.element.storage)
    division = run.divide(parts_of(run))
    run.begin_state(1)
    for c in division.chunks():
        if algorithm == "hierarchical":
            value = hierarchical.reduce(run, c)
        elif algorithm == "direct" and c.q != root:
            acc = run.fin(direct_total(run, c.q, c.number, c.begin, c.n))
            value = run.decode(run.encode(c.q, c.number, c.begin, acc, is_sum=True))
        else:
            value = run.fin(total(run, root, c, c.begin))
        result[c.begin : c.begin + c.n] = run.out(value)
    return [result if rank == root else None for rank in range(run.size)]


def reduce_scatter(run: Run) -> Outputs:
    """Returns the outputs of a reduce_scatter."""
    count, outputs = run.arguments.count, []
    division = run.divide(parts_of(run))
    run.begin_state(run.size)
    for k in range(run.size):
        output = np.empty(count, run.element.storage)
        for c in division.chunks(k, run.size):
            if run.arguments.algorithm == "hierarchical":
                acc = hierarchical.reduce_scatter(run, k, c, k * count + c.begin)
            else:
                acc = total(run, k, c, k * count + c.begin)
            output[c.begin : c.begin + c.n] = run.out(run.fin(acc))
        outputs.append(output)
    return outputs


def move(run: Run, sender: int, block: int, blocks: int, source: np.ndarray, at: int) -> np.ndarray:
    """Returns `D(E(x))` of a message or block, whose first element is `at` in the sender's input."""
    if run.arguments.codec.is_raw:
        return source.copy()
    result = np.empty(source.size, run.element.storage)
    for c in run.division.chunks(block if blocks > 1 else None, blocks):
        e = run.encode(sender, c.number, at + c.begin, run.x(sender, at + c.begin, c.n))
        result[c.begin : c.begin + c.n] = run.out(run.decode(e))
    return result


def broadcast(run: Run) -> Outputs:
    """Returns the outputs of a broadcast."""
    run.divide(parts_of(run))
    run.begin_state(1)
    root = run.arguments.root
    result = move(run, root, 0, 1, run.inputs[root], 0)
    return [result] * run.size


def all_gather(run: Run) -> Outputs:
    """Returns the outputs of an all_gather."""
    run.divide(parts_of(run))
    run.begin_state(run.size)
    blocks = [move(run, rank, rank, run.size, run.inputs[rank], 0) for rank in range(run.size)]
    return [np.concatenate(blocks)] * run.size


def gather(run: Run) -> Outputs:
    """Returns the outputs of a gather; only the root has one."""
    run.divide(1)
    run.begin_state(run.size)
    root = run.arguments.root
    blocks = [
        run.copy(rank, 0, x.size) if rank == root else move(run, rank, rank, run.size, x, 0)
        for rank, x in enumerate(run.inputs)
    ]
    return [np.concatenate(blocks) if rank == root else None for rank in range(run.size)]


def scatter(run: Run) -> Outputs:
    """Returns the outputs of a scatter."""
    run.divide(1)
    run.begin_state(run.size)
    root, count, outputs = run.arguments.root, run.arguments.count, []
    for rank in range(run.size):
        source = run.inputs[root][rank * count : (rank + 1) * count]
        if rank == root:
            outputs.append(run.copy(root, rank * count, count))
        else:
            outputs.append(move(run, root, rank, run.size, source, rank * count))
    return outputs


def all_to_all(run: Run) -> Outputs:
    """Returns the outputs of an all_to_all."""
    run.divide(1)
    run.begin_state(run.size**2)
    count, n = run.arguments.count, run.size
    outputs = []
    for receiver in range(n):
        blocks = []
        for sender in range(n):
            at = receiver * count
            source = run.inputs[sender][at : at + count]
            if sender == receiver:
                blocks.append(run.copy(sender, at, count))
            else:
                blocks.append(move(run, sender, sender * n + receiver, n * n, source, at))
        outputs.append(np.concatenate(blocks))
    return outputs


RUNNERS = {
    "all_reduce": all_reduce,
    "reduce": reduce,
    "reduce_scatter": reduce_scatter,
    "broadcast": broadcast,
    "all_gather": all_gather,
    "gather": gather,
    "scatter": scatter,
    "all_to_all": all_to_all,
}


def single_rank(arguments: Arguments, x: np.ndarray) -> np.ndarray:
    """Returns the output of a communicator of one rank. Section "Raw arithmetic", last item."""
    average = arguments.op == "avg"
    if arguments.collective not in REDUCING or (arguments.factors is None and not average):
        return x.copy()
    element = arguments.element
    acc = widen(element, x)
    if arguments.factors is not None:
        acc = raw.multiply(element, acc, arguments.factors[0])
    return narrow(element, averages.final_sum(element, acc, 1, 0) if average else acc)


def call(comm: Communicator, arguments: Arguments, inputs: list[np.ndarray | None]) -> Outputs:
    """Runs a call on all ranks and returns their outputs, None where a rank has none."""
    operation = comm.next_sequence()
    if comm.size == 1:
        return [single_rank(arguments, inputs[0])]
    run = Run(comm, arguments, inputs, operation)
    outputs = RUNNERS[arguments.collective](run)
    run.commit()
    comm.reports = run.reports
    return outputs


def send_recv(comm: Communicator, arguments: Arguments, sender: int, receiver: int, x: np.ndarray):
    """Returns what the receiver of a send stores. Section "Direct", send_recv."""
    operation = comm.next_of_pair(sender, receiver)
    arguments = replace(arguments, collective="send_recv", algorithm="direct", root=sender)
    run = Run(comm, arguments, [x if rank == sender else None for rank in range(comm.size)], operation)
    run.divide(1)
    run.begin_state(1)
    return move(run, sender, 0, 1, x, 0)
