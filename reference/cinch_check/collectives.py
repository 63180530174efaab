"""Parts `collectives` and `averages`: whole collectives over threads, compared with the simulation."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from cinch_reference import averages, collectives
from cinch_reference.chunks import SLOT_BYTES
from cinch_reference.communicator import REDUCING, Arguments, Communicator
from cinch_reference.elements import BF16, ELEMENTS, F16, F32E, F64E, Element, narrow
from cinch_reference.spec import RAW, parse

from . import values
from .compare import Result, one_nan
from .library import OPERATORS, CallArguments, Library, LibraryError, Ranks

SPECS = [
    "linear8", "linear8:block=32", "dynamic8", "static8", "mantissa8:offset=1", "cast_bf16", "cast16",
    "minmax1", "minmax2:seed=3", "minmax4", "minmax4:seed=9", "minmax8:block=64", "trunc8", "trunc16",
    "trunc24", "fp8_e4m3", "fp8_e5m2:block=128", "terngrad", "terngrad:seed=4", "onebit",
    "threshold2:tau=0.25", "linear8:seed=3", "dynamic8:block=64:seed=5",
]  # fmt: skip

ALGORITHMS = {
    "all_reduce": ["ring", "tree", "oneshot", "direct", "flat_tree"],
    "reduce": ["ring", "tree", "oneshot", "direct"],
    "reduce_scatter": ["ring", "direct"],
    "broadcast": ["ring", "tree", "oneshot", "direct"],
    "all_gather": ["ring", "direct"],
    "gather": ["direct"],
    "scatter": ["direct"],
    "all_to_all": ["direct"],
}

COUNTS = [1, 7, 64, 257, 1000, 1500, 2051, 3001, 5003]


@dataclass
class Buffers:
    """Inputs and outputs of all ranks."""

    inputs: list[np.ndarray | None]
    outputs: list[np.ndarray | None]


def sizes_of(arguments: Arguments, nranks: int) -> tuple[int, int]:
    """Returns the elements of a rank's input and output."""
    count = arguments.count
    inputs = {"reduce_scatter": nranks, "scatter": nranks, "all_to_all": nranks}
    outputs = {"all_gather": nranks, "gather": nranks, "all_to_all": nranks}
    collective = arguments.collective
    return count * inputs.get(collective, 1), count * outputs.get(collective, 1)


def random_elements(arguments: Arguments, random: np.random.Generator, n: int) -> np.ndarray:
    """Returns one rank's input."""
    element = arguments.element
    if element.is_float and random.random() < 0.5:
        # Numbers of one size on all ranks, whose sums depend on the order in most elements.
        return narrow(element, random.standard_normal(n).astype(element.accumulator))
    if element in (F32E, F16, BF16):
        codec = None if arguments.codec.is_raw else arguments.codec
        raw = values.elements(codec, element, random, n)
        return raw if element is F32E else raw.astype(np.uint16)
    if element is F64E:
        with np.errstate(all="ignore"):
            return values.numbers(None, random, n).astype(np.float64) * random.random(n)
    return np.frombuffer(random.bytes(n * element.bytes), element.storage).copy()


def buffers_of(arguments: Arguments, random: np.random.Generator, nranks: int) -> Buffers:
    """Returns random inputs and empty outputs."""
    size_in, size_out = sizes_of(arguments, nranks)
    only_root_in = arguments.collective in ("broadcast", "scatter")
    only_root_out = arguments.collective in ("reduce", "gather")
    inputs, outputs = [], []
    for rank in range(nranks):
        root = rank == arguments.root
        has_input = root or not only_root_in
        inputs.append(random_elements(arguments, random, size_in) if has_input else None)
        has_output = root or not only_root_out
        outputs.append(np.zeros(size_out, arguments.element.storage) if has_output else None)
    return Buffers(inputs, outputs)


def codec_text(arguments: Arguments) -> str:
    """Returns the codec of a call as the library takes it."""
    if arguments.inside is None:
        return str(arguments.codec)
    return f"intra={arguments.inside},inter={arguments.codec}"


def describe(arguments: Arguments, nranks: int) -> str:
    """Returns the call in words."""
    return (
        f"{arguments.collective} {arguments.algorithm} {arguments.op} {codec_text(arguments)} "
        f"{arguments.element.name} x {arguments.count} over {nranks}"
    )


def run_library(ranks: Ranks, arguments: Arguments, buffers: Buffers) -> list:
    """Runs the call on all ranks and returns their reports."""

    def of_rank(rank: int) -> list[CallArguments]:
        if arguments.factors is None:
            op = OPERATORS[arguments.op]
        else:
            op = ranks.premulsum(rank, arguments.element, arguments.factors[rank])
        return [
            CallArguments(
                arguments.collective,
                buffers.inputs[rank],
                buffers.outputs[rank],
                arguments.count,
                arguments.element,
                op=op,
                root=arguments.root,
                algorithm=arguments.algorithm,
                # Only a communicator's setting names codecs by level.
                codec=str(arguments.codec) if arguments.inside is None else None,
                tensor=arguments.tensor,
                feedback=arguments.feedback,
            )
        ]

    return [reports[0] for reports in ranks.call(of_rank)]


def compare(
    result: Result, arguments: Arguments, expected: list, outputs: list, what: str = ""
) -> None:
    """Compares the outputs of all ranks."""
    label = what or describe(arguments, len(expected))
    lossy = not arguments.codec.is_raw and arguments.collective in REDUCING
    for rank, (ours, theirs) in enumerate(zip(expected, outputs, strict=True)):
        if ours is None:
            continue
        if lossy:
            # Section "Notation": sign and payload of a NaN are unspecified in a sum with a codec.
            ours, theirs = one_nan(arguments.element, ours), one_nan(arguments.element, theirs)
        result.compare(f"{label}, rank {rank}", ours.size, ours, theirs)


def check_call(
    result: Result,
    ranks: Ranks,
    comm: Communicator,
    arguments: Arguments,
    random: np.random.Generator,
    buffers: Buffers | None = None,
) -> tuple[Buffers, list]:
    """Runs one call in the library and in the simulation; returns buffers and reports."""
    buffers = buffers or buffers_of(arguments, random, ranks.size)
    reports = run_library(ranks, arguments, buffers)
    expected = collectives.call(comm, arguments, buffers.inputs)
    compare(result, arguments, expected, buffers.outputs)
    return buffers, reports


def check_refused(
    result: Result, ranks: Ranks, arguments: Arguments, random: np.random.Generator
) -> None:
    """Expects that the library refuses a call. A refused call takes no sequence number."""
    buffers, refused = buffers_of(arguments, random, ranks.size), False
    try:
        run_library(ranks, arguments, buffers)
    except LibraryError:
        refused = True
    result.expect(f"{describe(arguments, ranks.size)} is refused", True, refused)


def random_factors(element: Element, random: np.random.Generator, nranks: int) -> tuple:
    """Returns one factor for each rank."""
    if not element.is_float:
        chosen = random.integers(0, 100, nranks)
        return tuple(np.array([factor], element.storage) for factor in chosen)
    chosen = random.choice(np.array([0.5, 1, -3, 0.1, 1e-3, 7.3], np.float32), nranks)
    if element in (F64E, F32E):
        return tuple(np.array([factor], element.storage) for factor in chosen)
    return tuple(narrow(element, np.array([factor])) for factor in chosen)


def plans(random: np.random.Generator) -> Iterator[Arguments]:
    """Yields all combinations of collective, algorithm and codec, in a random order, for ever."""
    combinations = [
        (collective, algorithm, spec)
        for collective, algorithms in ALGORITHMS.items()
        for algorithm in algorithms
        for spec in SPECS + ["raw"] * 5
    ]
    while True:
        for at in random.permutation(len(combinations)):
            collective, algorithm, spec = combinations[at]
            codec = parse(spec)
            element = [F32E, F16, BF16][random.integers(3)]
            ops = ["sum", "avg", "premulsum"]
            if codec.is_raw:
                element = ELEMENTS[random.integers(len(ELEMENTS))]
                ops += ["prod", "max", "min"]
            op = ops[random.integers(len(ops))] if collective in REDUCING else "sum"
            yield Arguments(collective, element, 0, algorithm, op, codec)


SETTINGS = [
    (1, 4096, 1), (2, 4096, 5), (3, 4096, 10), (4, 4096, 16), (5, 8192, 20), (6, 4096, 20), (7, 4160, 20),
    (8, 4096, 30), (2, SLOT_BYTES, 10), (3, SLOT_BYTES, 10), (8, SLOT_BYTES, 20),
]  # fmt: skip
"""Numbers of ranks, slot bytes, and shares of the elements. Small slots make calls of several passes."""


def check_collectives(library: Library, elements: int, random: np.random.Generator) -> Result:
    """Compares collectives of 1 to 8 ranks."""
    result = Result("collectives")
    shares = sum(share for _, _, share in SETTINGS)
    for nranks, slot, weight in SETTINGS:
        share = elements * weight // shares
        plan = plans(random)
        comm = Communicator(nranks, slot)
        begin = result.elements
        with Ranks(library, nranks, slot) as ranks:
            while result.elements - begin < share:
                arguments = next(plan)
                count = int(random.choice(COUNTS))
                if slot == SLOT_BYTES:
                    count = int(random.choice([5003, 40_000, 150_001, 300_007]))
                count = min(count, max(share // (nranks * nranks), 1))
                factors = None
                if arguments.op == "premulsum":
                    factors = random_factors(arguments.element, random, nranks)
                arguments = replace(
                    arguments, count=count, root=int(random.integers(nranks)), factors=factors
                )
                if arguments.op == "avg" and not arguments.element.is_float:
                    # Section "Raw arithmetic": the sum of integers would wrap before the division.
                    check_refused(result, ranks, arguments, random)
                    continue
                check_call(result, ranks, comm, arguments, random)
                if random.random() < 0.02:
                    # A barrier takes a sequence number.
                    ranks.barrier()
                    comm.next_sequence()
    return result


def edge_inputs(arguments: Arguments, random: np.random.Generator, inputs: list) -> list[np.ndarray]:
    """Returns inputs whose sums are beyond the largest element, or smaller than normal numbers.

    The elements of all ranks at one place have one sign.
    """
    element = arguments.element
    if arguments.codec.name == "cast16":
        largest = 65504.0
    elif element in averages.LARGEST:
        largest = float(averages.LARGEST[element])
    else:
        largest = float(np.finfo(element.accumulator).max)
    smallest = float(np.finfo(element.accumulator).smallest_subnormal)
    found = []
    n = inputs[0].size
    sign, tiny = random.choice([-1.0, 1.0], n), random.random() < 0.2
    for _ in inputs:
        if tiny:
            x = random.integers(0, 1000, n) * smallest
        else:
            x = largest * np.where(random.random(n) < 0.5, 1.0, random.uniform(0.9, 1.0, n))
        found.append(narrow(element, (x * sign).astype(element.accumulator)))
    return found


def check_averages(library: Library, elements: int, random: np.random.Generator) -> Result:
    """Compares averages of the largest and of the smallest elements."""
    result = Result("averages")
    kinds = [(collective, algorithm) for collective in REDUCING for algorithm in ALGORITHMS[collective]]
    for nranks in (2, 3, 5, 8):
        begin = result.elements
        comm = Communicator(nranks, 4096)
        with Ranks(library, nranks, 4096) as ranks:
            while result.elements - begin < elements // 4:
                codec = parse(str(random.choice(["raw", str(random.choice(SPECS))])))
                types = [F32E, F16, BF16] if not codec.is_raw else [e for e in ELEMENTS if e.is_float]
                collective, algorithm = kinds[random.integers(len(kinds))]
                element, count = types[random.integers(len(types))], int(random.choice(COUNTS))
                arguments = Arguments(collective, element, count, algorithm, "avg", codec)
                buffers = buffers_of(arguments, random, nranks)
                buffers.inputs = edge_inputs(arguments, random, buffers.inputs)
                check_call(result, ranks, comm, arguments, random, buffers)
    return result
