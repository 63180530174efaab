"""Test of the check itself: a wrong rounding in the reference must be found."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import numpy as np

from cinch_reference import arithmetic, averages, chunk, collectives, communicator, element_codecs, elements
from cinch_reference import feedback, kept_scales, minmax
from cinch_reference import random_numbers, scaled, trees
from cinch_reference.communicator import Arguments, Communicator

from . import codecs, state
from . import collectives as calls
from .compare import Result
from .library import Library, Ranks


@contextmanager
def replaced(module: object, name: str, function: Callable) -> Iterator[None]:
    """Replaces a function of a module for the duration of a block."""
    original = getattr(module, name)
    setattr(module, name, function)
    try:
        yield
    finally:
        setattr(module, name, original)


def fma_rounded_twice(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """Returns fl(fl(a * b) + c)."""
    return np.multiply(a, b, dtype=np.float32) + c


def fma_in_fp64(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """Returns fl(fl64(a * b + c)), which rounds twice."""
    return (np.multiply(a, b, dtype=np.float64) + c).astype(np.float32)


def total_in_order(v: np.ndarray) -> np.ndarray:
    """Returns totals added from the first element to the last."""
    return np.cumsum(v, axis=1)[:, -1]


def half_up(t: np.ndarray, largest: np.float32, u: np.ndarray | None) -> np.ndarray:
    """Returns codes of which ties round up."""
    return np.minimum(np.floor(t + np.float32(0.5)), largest)


def bf16_cut(element: elements.Element, wide: np.ndarray) -> np.ndarray:
    """Returns bf16 elements whose lower bits are cut."""
    if element is elements.BF16:
        return (arithmetic.bits(wide) >> 16).astype(np.uint16)
    return elements.narrow(element, wide)


def trunc8_unlimited(x: np.ndarray) -> np.ndarray:
    """Returns codes of `trunc8` without its limit."""
    return arithmetic.bits(x) >> 24


def ring_reversed(run, first, last, number, at, n):
    """Returns the ring's message with ranks in descending order."""
    rank = last % run.size
    m = run.encode(rank, number, at, run.x(rank, at, n))
    while rank != first % run.size:
        rank = (rank - 1) % run.size
        m = run.encode(rank, number, at, run.add(run.x(rank, at, n), m), is_sum=True)
    return m


def not_subnormal(codec: object, w: np.ndarray, raised: np.ndarray) -> np.ndarray:
    """Returns d(c) without the rounding of tiny blocks to subnormal numbers."""
    return original_decodable(codec, w, np.ones_like(raised))


def up_at_random(distance: np.ndarray, gap: np.ndarray, u: np.ndarray) -> np.ndarray:
    """Returns whether an element becomes the upper neighbour, also one that a code decodes to."""
    return (distance > u * gap) | (u > np.float32(0.999))


def key_of_contribution(seed: int, operation: int, hop: int) -> tuple[int, int]:
    """Returns the key with the hop of a contribution, also for sums."""
    return original_key(seed, operation, hop // 2 * 2)


def divide_by_more(element: elements.Element, acc: np.ndarray, nranks: int, s: int) -> np.ndarray:
    """Returns averages over one rank more."""
    return original_final_sum(element, acc, nranks + 1, s)


def no_shift(element: elements.Element, codecs: tuple, algorithm: str, nranks: int) -> int:
    """Returns s of averages whose contributions are not scaled."""
    return 0


def no_limit(v: np.ndarray, m: object) -> np.ndarray:
    """Returns numbers without their limit."""
    return v


def no_limit_of_f16(codec: object) -> None:
    """Returns that a codec needs no limit for elements of f16."""


def no_damping(codec: object, message: np.ndarray, n: int) -> np.ndarray:
    """Returns the message without damping."""
    return message


def not_rounded(element: elements.Element, d: np.ndarray) -> np.ndarray:
    """Returns decoded numbers without the rounding of the output."""
    return d


def always_new(kept: kept_scales.Scales, number: int, v: np.ndarray) -> np.float32:
    """Returns a new scale for each call."""
    return scaled.largest_finite(v)


def right_before_left(m: int, v: int) -> list[int]:
    """Returns the nodes below node v, right before left."""
    return original_children(m, v)[::-1]


original_key = random_numbers.key
original_decodable = scaled.decodable
original_final_sum = averages.final_sum
original_children = trees.children_of_node


def on_type(element: elements.Element, *specs: str) -> Callable[..., Result]:
    """Returns the part `codecs` with these codecs on one element type."""
    return partial(codecs.check_codecs, specs=list(specs), types=[element])


def on_f32(*specs: str) -> Callable[..., Result]:
    """Returns the part `codecs` with these codecs on f32 only."""
    return on_type(elements.F32E, *specs)


def check_tree(library: Library, number: int, random: np.random.Generator) -> Result:
    """Compares an exact all_reduce by trees in which ranks have two children."""
    result = Result("tree")
    with Ranks(library, 8, 4096) as ranks:
        comm = Communicator(8, 4096)
        for _ in range(4):
            arguments = Arguments("all_reduce", elements.F32E, 3001, "tree")
            calls.check_call(result, ranks, comm, arguments, random)
    return result


def check_limit(library: Library, number: int, random: np.random.Generator) -> Result:
    """Compares averages whose roundings leave the range of the smallest type."""
    result = Result("limit")
    with Ranks(library, 8, 4096) as ranks:
        comm = Communicator(8, 4096)
        for _ in range(20):
            arguments = Arguments("all_reduce", elements.BY_NAME["f8e4m3"], 1000, "ring", "avg")
            buffers = calls.buffers_of(arguments, random, 8)
            buffers.inputs = calls.edge_inputs(arguments, random, buffers.inputs)
            calls.check_call(result, ranks, comm, arguments, random, buffers)
    return result


DEFECTS = [
    ("fma rounds its product", arithmetic, "fma", fma_rounded_twice, on_f32("linear8")),
    ("fma rounds to fp64 first", arithmetic, "fma", fma_in_fp64, on_f32("linear8", "dynamic8", "minmax4")),
    ("total adds in order", arithmetic, "total", total_in_order, on_f32("onebit")),
    ("minmax rounds ties up", minmax, "round_code", half_up, on_f32("minmax4")),
    ("draws have no subnormals", scaled, "decodable", not_subnormal,
        on_f32("linear8:seed=7", "dynamic8:seed=7")),
    ("draws go up at random", scaled, "takes_high", up_at_random, on_f32("dynamic8:tensor=2:seed=3")),
    ("trunc8 has no limit", element_codecs, "encode_trunc8", trunc8_unlimited, on_f32("trunc8")),
    ("decode cuts bf16", chunk, "narrow", bf16_cut, codecs.check_hostile),
    ("ring adds in reverse", collectives, "ring_sum", ring_reversed, calls.check_collectives),
    ("trees add right before left", trees, "children_of_node", right_before_left, check_tree),
    ("sums draw like contributions", random_numbers, "key", key_of_contribution, calls.check_collectives),
    ("division by the wrong N", averages, "final_sum", divide_by_more, calls.check_collectives),
    ("averages are not scaled", averages, "shift", no_shift, calls.check_averages),
    ("averages have no limit", averages, "limit", no_limit, check_limit),
    ("no limit for elements of f16", element_codecs, "f16_limit", no_limit_of_f16,
        on_type(elements.F16, "cast_bf16")),
    ("feedback without damping", communicator, "damp", no_damping, state.check_feedback),
    ("feedback without rounding", feedback, "rounded_to_element", not_rounded, state.check_feedback),
    ("scales are not kept", kept_scales, "scale_of", always_new, state.check_tensors),
]
"""Defect, the function that has it, and a part that must find it."""

ELEMENTS = 1_000_000


def run(library: Library) -> int:
    """Returns 0 if every defect is found."""
    missed = 0
    for what, module, name, function, check in DEFECTS:
        with replaced(module, name, function):
            with np.errstate(all="ignore"):
                result: Result = check(library, ELEMENTS, np.random.default_rng(1))
        found = "found" if result.differing else "MISSED"
        missed += not result.differing
        print(f"{what:32} {found}: {result.differing:,} of {result.bytes:,} bytes differ", flush=True)
    print(f"{len(DEFECTS) - missed} of {len(DEFECTS)} planted defects were found")
    return 1 if missed else 0
