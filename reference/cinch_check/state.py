"""Parts that keep state between calls: `feedback`, `tensor`, `fused`, `pairs`, `reports`, `training`."""

import ctypes
import math
from dataclasses import replace

import numpy as np

from cinch_reference import collectives, fused, training
from cinch_reference.communicator import Arguments, Communicator
from cinch_reference.elements import BF16, F16, F32E
from cinch_reference.spec import RAW, parse

from . import values
from .collectives import buffers_of, check_call, check_refused, compare, describe, random_factors
from .compare import Result
from .library import OPERATORS, REPORT_INPUT, REPORT_RESIDUAL, Awp, CallArguments, Library, LibraryError
from .library import LossScaler, Ranks

FEEDBACK_SPECS = [
    "linear8", "dynamic8:block=64", "static8", "mantissa8", "cast_bf16", "cast16", "minmax1",
    "minmax2:seed=3", "minmax4", "minmax8", "trunc8", "trunc16", "trunc24", "fp8_e4m3", "fp8_e5m2",
    "terngrad", "onebit", "threshold2:tau=0.5", "linear8:tensor=2", "dynamic8:tensor=3",
    "linear8:seed=6", "dynamic8:tensor=2:seed=8",
]  # fmt: skip

TENSOR_SPECS = ["linear8:tensor=1", "linear8:tensor=3", "dynamic8:tensor=2", "fp8_e4m3:tensor=4",
    "fp8_e5m2:tensor=2", "linear8:tensor=2:seed=4"]  # fmt: skip

REDUCTIONS = [
    ("all_reduce", "ring"), ("all_reduce", "tree"), ("all_reduce", "oneshot"),
    ("all_reduce", "direct"), ("all_reduce", "flat_tree"), ("reduce", "ring"), ("reduce", "tree"),
    ("reduce", "oneshot"), ("reduce", "direct"), ("reduce_scatter", "ring"), ("reduce_scatter", "direct"),
]  # fmt: skip

MOVES = [
    ("broadcast", "ring"), ("broadcast", "tree"), ("broadcast", "direct"), ("all_gather", "ring"),
    ("all_gather", "direct"), ("gather", "direct"), ("scatter", "direct"), ("all_to_all", "direct"),
]  # fmt: skip


def random_call(
    random: np.random.Generator, nranks: int, spec: str, choices: list, count: int
) -> Arguments:
    """Returns arguments of a random collective."""
    collective, algorithm = choices[random.integers(len(choices))]
    element = [F32E, F16, BF16][random.integers(3)]
    op = "sum"
    if (collective, algorithm) in REDUCTIONS:
        op = ["sum", "avg", "premulsum"][random.integers(3)]
    factors = random_factors(element, random, nranks) if op == "premulsum" else None
    codec = parse(spec)
    root = int(random.integers(nranks)) if collective in ("reduce", "broadcast") else 0
    return Arguments(
        collective, element, count, algorithm, op, codec, root=root, factors=factors
    )


def random_count(random: np.random.Generator) -> int:
    """Returns a count, often odd, that makes one to several passes of small slots."""
    return int(random.choice([1, 5, 63, 300, 1001, 4100, 9001]))


def compare_exports(result: Result, ranks: Ranks, comm: Communicator, what: str) -> list[bytes]:
    """Compares the exported residuals of all ranks."""
    exports = []
    for rank in range(ranks.size):
        ours, theirs = comm.feedback[rank].export(), ranks.feedback_export(rank)
        ours_bytes = np.frombuffer(ours, np.uint8)
        label = f"export of {what}, rank {rank}"
        result.compare(label, 0, ours_bytes, np.frombuffer(theirs, np.uint8))
        exports.append(theirs)
    return exports


def check_feedback(library: Library, elements: int, random: np.random.Generator) -> Result:
    """Compares outputs and exported residuals over several calls."""
    result = Result("feedback")
    tensor = 0
    for nranks in (2, 3, 5):
        begin = result.elements
        comm = Communicator(nranks, 4096)
        with Ranks(library, nranks, 4096) as ranks:
            while result.elements - begin < elements // 3:
                for spec in FEEDBACK_SPECS:
                    tensor += 1
                    check_tensor(result, ranks, comm, random, spec, tensor)
                stochastic = Arguments("all_reduce", F32E, 300, "ring", "sum", parse("minmax1:seed=3"))
                check_refused(result, ranks, replace(stochastic, feedback=tensor + 1), random)
                for rank in range(nranks):
                    comm.feedback[rank].forget(0)
                    ranks.feedback_forget(rank, 0)
    return result


def check_tensor(result, ranks, comm, random, spec: str, tensor: int) -> None:
    """Compares the calls of one tensor."""
    choices = REDUCTIONS
    if "tensor" in spec:
        choices = [choice for choice in REDUCTIONS if choice[1] != "oneshot"]
    arguments = random_call(random, comm.size, spec, choices, random_count(random))
    kept = tensor if arguments.codec.tensor else 0
    arguments = replace(arguments, feedback=tensor, tensor=kept)
    for call in range(5):
        check_call(result, ranks, comm, arguments, random)
        what = f"call {call} of {describe(arguments, comm.size)}"
        exports = compare_exports(result, ranks, comm, what)
        event = random.integers(0, 11)
        if event == 0:
            factor = float(random.choice([0.5, 2.0, 1e30, 0.1, 2.0**-140]))
            for rank in range(comm.size):
                comm.feedback[rank].rescale(factor)
                ranks.feedback_rescale(rank, factor)
        elif event == 1:
            for rank in range(comm.size):
                ranks.feedback_import(rank, exports[rank])
        elif event == 2:
            arguments = replace(arguments, count=random_count(random))
        elif event == 3:
            for rank in range(comm.size):
                comm.feedback[rank].forget(tensor)
                ranks.feedback_forget(rank, tensor)
        elif event == 4 and not arguments.codec.tensor:
            arguments = replace(arguments, codec=parse(str(random.choice(FEEDBACK_SPECS[:18]))))
        elif event == 5:
            algorithms = [algorithm for collective, algorithm in choices if collective == arguments.collective]
            arguments = replace(arguments, algorithm=str(random.choice(algorithms)))


def check_tensors(library: Library, elements: int, random: np.random.Generator) -> Result:
    """Compares calls with kept scales."""
    result = Result("tensor")
    tensor = 0
    for nranks in (2, 3, 4):
        begin = result.elements
        comm = Communicator(nranks, 4096)
        with Ranks(library, nranks, 4096) as ranks:
            while result.elements - begin < elements // 3:
                spec = TENSOR_SPECS[tensor % len(TENSOR_SPECS)]
                choices = [choice for choice in REDUCTIONS + MOVES if choice[1] != "oneshot"]
                tensor += 1
                first = random_call(random, nranks, spec, choices, random_count(random))
                first = replace(first, tensor=tensor)
                other = replace(first, count=random_count(random))
                for _ in range(9):
                    arguments = other if random.random() < 0.2 else first
                    check_call(result, ranks, comm, arguments, random)
    return result


def check_fused(library: Library, elements: int, random: np.random.Generator) -> Result:
    """Compares groups of small all_reduces."""
    result = Result("fused")
    specs = ["raw", "raw", "linear8", "minmax4:seed=2", "cast16", "onebit", "terngrad", "threshold2:tau=1"]
    for nranks in (2, 3, 4):
        begin = result.elements
        comm = Communicator(nranks, 8192)
        with Ranks(library, nranks, 8192) as ranks:
            while result.elements - begin < elements // 3:
                calls, buffers = [], []
                algorithm = str(random.choice(["ring", "tree", "oneshot", "direct", "flat_tree"]))
                spec, element = str(random.choice(specs)), [F32E, F16, BF16][random.integers(3)]
                for _ in range(random.integers(1, 9)):
                    if random.random() < 0.15:
                        spec = str(random.choice(specs))
                    count = int(random.choice([1, 3, 17, 64, 256, 512, 1000, 4096, 16384, 32768, 32769]))
                    op = "avg" if random.random() < 0.1 else "sum"
                    arguments = Arguments("all_reduce", element, count, algorithm, op, parse(spec))
                    calls.append(arguments)
                    buffers.append(buffers_of(arguments, random, nranks))
                run_group(result, ranks, comm, calls, buffers)
    return result


def run_group(result: Result, ranks: Ranks, comm: Communicator, calls: list, buffers: list) -> None:
    """Compares one group."""

    def of_rank(rank: int) -> list[CallArguments]:
        return [
            CallArguments(
                "all_reduce",
                buffer.inputs[rank],
                buffer.outputs[rank],
                arguments.count,
                arguments.element,
                op=OPERATORS[arguments.op],
                algorithm=arguments.algorithm,
                codec=str(arguments.codec),
            )
            for arguments, buffer in zip(calls, buffers, strict=True)
        ]

    reports = ranks.call(of_rank, group=True)
    expected = fused.run(comm, calls, [buffer.inputs for buffer in buffers])
    sizes = {i: len(members) for members in fused.batches(calls) for i in members}
    for i, (arguments, buffer) in enumerate(zip(calls, buffers, strict=True)):
        compare(result, arguments, expected[i], buffer.outputs, f"fused {describe(arguments, ranks.size)}")
        result.expect(f"members of {describe(arguments, ranks.size)}", sizes[i], reports[0][i].fused)


def check_pairs(library: Library, elements: int, random: np.random.Generator) -> Result:
    """Compares sends and receives."""
    result = Result("pairs")
    specs = ["raw", "linear8", "minmax2:seed=5", "terngrad:seed=1", "terngrad", "cast16", "minmax8:seed=2"]
    nranks = 3
    comm = Communicator(nranks, 4096)
    with Ranks(library, nranks, 4096) as ranks:
        while result.elements < elements:
            spec, element = str(random.choice(specs)), [F32E, F16, BF16][random.integers(3)]
            codec = RAW if spec == "raw" else parse(spec)
            arguments = Arguments("send_recv", element, random_count(random), "direct", codec=codec)
            sender, receiver = random.permutation(nranks)[:2]
            x = values.elements(None if codec.is_raw else codec, element, random, arguments.count)
            x = x.astype(element.storage)
            received = np.zeros_like(x)

            def of_rank(rank: int) -> list[CallArguments]:
                if rank == sender:
                    return [CallArguments("send", x, None, x.size, element, peer=receiver, codec=spec)]
                if rank == receiver:
                    return [CallArguments("recv", None, received, x.size, element, peer=sender, codec=spec)]
                return []

            ranks.call(of_rank)
            expected = collectives.send_recv(comm, arguments, int(sender), int(receiver), x)
            result.compare(f"send of {spec} {element.name} x {x.size}", x.size, expected, received)
    return result


def check_reports(library: Library, elements: int, random: np.random.Generator) -> Result:
    """Compares fields of reports."""
    result = Result("reports")
    specs = ["linear8", "cast16", "cast_bf16", "trunc8", "threshold2:tau=0.5", "static8", "mantissa8:offset=-3",
        "onebit", "linear8:tensor=3", "dynamic8:tensor=2"]  # fmt: skip
    tensor = 0
    for nranks in (2, 3, 4):
        begin = result.elements
        comm = Communicator(nranks, 4096)
        with Ranks(library, nranks, 4096) as ranks:
            while result.elements - begin < elements // 3:
                tensor += 1
                spec = str(random.choice(specs))
                choices = REDUCTIONS + MOVES
                if "tensor" in spec:
                    choices = [choice for choice in choices if choice[1] != "oneshot"]
                arguments = random_call(random, nranks, spec, choices, random_count(random))
                arguments = replace(arguments, tensor=tensor if arguments.codec.tensor else 0)
                if arguments.collective in ("all_reduce", "reduce") and random.random() < 0.4:
                    arguments = replace(arguments, feedback=tensor)
                for _ in range(3):
                    _, reports = check_call(result, ranks, comm, arguments, random)
                    compare_reports(result, comm, arguments, reports)
    return result


def compare_reports(result: Result, comm: Communicator, arguments: Arguments, reports: list) -> None:
    """Compares the reports of all ranks."""
    for rank, (ours, theirs) in enumerate(zip(comm.reports, reports, strict=True)):
        what = f"{describe(arguments, comm.size)}, feedback {arguments.feedback}, rank {rank}"
        if not theirs.valid & REPORT_INPUT:
            result.expect(f"valid of {what}", 0, len(ours.counted))
            continue
        result.expect(f"saturated of {what}", ours.saturated, theirs.saturated)
        result.expect(f"non_finite of {what}", ours.non_finite, theirs.non_finite)
        result.expect(f"abs_max of {what}", ours.abs_max, theirs.abs_max)
        expect_near(result, f"l2_norm of {what}", ours.l2_norm, theirs.l2_norm)
        measured = bool(theirs.valid & REPORT_RESIDUAL)
        result.expect(f"residual is valid of {what}", ours.residual_l2_norm is not None, measured)
        if measured and ours.residual_l2_norm is not None:
            expect_near(result, f"residual of {what}", ours.residual_l2_norm, theirs.residual_l2_norm)


def expect_near(result: Result, what: str, ours: float, theirs: float) -> None:
    """Counts a norm, whose order of additions is unspecified. Section "Reports"."""
    result.expect(what, ours, ours if math.isclose(ours, theirs, rel_tol=1e-12) else theirs)


def check_training(library: Library, elements: int, random: np.random.Generator) -> Result:
    """Compares the structs of loss scalers and of AWP after every update."""
    result = Result("training")
    while result.elements < elements:
        check_scaler(library, result, random)
        check_awp(library, result, random)
    return result


def check_scaler(library: Library, result: Result, random: np.random.Generator) -> None:
    """Compares one loss scaler over 40 steps."""
    theirs = library.initialised(LossScaler, "cinch_loss_scaler_init")
    ours = training.LossScaler(rescale=theirs.rescale)
    fields = ("scale", "growth", "backoff", "smallest", "largest", "rescale", "skipped", "interval", "clean")
    for name in fields:
        result.expect(f"default {name}", getattr(ours, name), getattr(theirs, name))
    interval = int(random.choice([0, 1, 2, 5]))
    growth, backoff = float(random.choice([0, 2.0, 1.7])), float(random.choice([0, 0.5, 0.3]))
    scale = float(random.choice([65536.0, 2.0**125, 2.0**-124, 3e10]))
    for scaler in (ours, theirs):
        scaler.interval, scaler.growth, scaler.backoff, scaler.scale = interval, growth, backoff, scale
    for _ in range(40):
        non_finite = bool(random.random() < 0.4)
        apply = ctypes.c_int()
        update = library.c.cinch_loss_scaler_update
        library.check(update(ctypes.byref(theirs), int(non_finite), ctypes.byref(apply)))
        result.expect("apply", int(ours.update(non_finite)), apply.value)
        for name in fields:
            result.expect(f"scaler {name}", getattr(ours, name), getattr(theirs, name))
        result.elements += 1


def check_awp(library: Library, result: Result, random: np.random.Generator) -> None:
    """Compares one AWP over 40 batches."""
    theirs = library.initialised(Awp, "cinch_awp_init")
    ours = training.Awp()
    threshold, interval = float(random.choice([0.0, 0.01, 1e-3])), int(random.choice([1, 2, 4]))
    step_bits, bits = int(random.choice([0, 1, 3, 8])), int(random.choice([0, 4, 8, 17]))
    most_bits = int(random.choice([0, 4, 8, 16, 20, 32]))
    for awp in (ours, theirs):
        awp.threshold, awp.interval = threshold, interval
        awp.step_bits, awp.bits, awp.most_bits = step_bits, bits, most_bits
    norm = 1.0
    for _ in range(40):
        norm *= float(random.choice([1.0, 1.02, 0.9, 1.0005]))
        special = [0.0, float("nan"), float("inf"), float("-inf"), -1.0, 5e-324, 1e308]
        given = float(random.choice(special)) if random.random() < 0.2 else norm
        codec = ctypes.c_char_p()
        try:
            library.check(library.c.cinch_awp_update(ctypes.byref(theirs), ctypes.c_double(given), ctypes.byref(codec)))
            answer = codec.value.decode()
        except LibraryError:
            answer = None
        result.expect(f"AWP({given})", ours.update(given), answer)
        for name in ("threshold", "previous", "interval", "step_bits", "bits", "count", "has_previous", "most_bits"):
            result.expect(f"AWP {name} after {given}", getattr(ours, name), getattr(theirs, name))
        result.elements += 1


