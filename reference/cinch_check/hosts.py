"""Part `hosts`: hierarchical collectives over processes that count as hosts.

Each process runs the ranks of one host, with the host's name in `CINCH_HOST_ID`. All processes derive the
same calls and inputs from the seed, and store their outputs as files.
"""

import argparse
import copy
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from cinch_reference import collectives
from cinch_reference.communicator import REDUCING, Arguments, Communicator, Groups
from cinch_reference.elements import BF16, F16, F32E
from cinch_reference.spec import parse

from .collectives import Buffers, buffers_of, compare, describe, random_factors, run_library
from .compare import Result
from .library import Library, Ranks

HOSTS = [
    [0, 0, 1, 1],
    [0, 1, 0, 1, 1],
    [0, 0, 0, 1],
    [0, 1, 1, 2],
    [0, 0, 1, 1, 2, 2],
    [1, 0, 1, 2, 2, 0, 1],
]
"""Number of each rank's host."""

CODECS = [
    ("raw", None), ("linear8", None), ("linear8", "raw"), ("minmax4:seed=3", "cast16"),
    ("raw", "dynamic8"), ("terngrad", "raw"), ("cast_bf16", "cast_bf16"), ("fp8_e4m3", "minmax8:seed=1"),
    ("trunc16", None), ("minmax1:seed=9", None), ("minmax1", "terngrad"),
    ("dynamic8:block=64", "linear8:block=512"), ("onebit", None),
]  # fmt: skip
"""Codecs between hosts and inside, None for the same."""

KINDS = [
    ("all_reduce", "hierarchical"), ("all_reduce", "hierarchical"), ("all_reduce", "hierarchical"),
    ("reduce", "hierarchical"), ("reduce_scatter", "hierarchical"), ("broadcast", "hierarchical"),
    ("all_gather", "hierarchical"), ("all_reduce", "ring"), ("all_reduce", "direct"),
]  # fmt: skip

SLOT = 4096

SETTINGS = {
    "CINCH_SOCKET_IFNAME": "lo",
    "CINCH_CODEC_COLLECTIVES": "all_reduce,reduce_scatter,reduce,broadcast,all_gather",
}
"""Settings of every host."""


@dataclass
class Case:
    """One call and its inputs."""

    arguments: Arguments
    buffers: Buffers
    exports: list[np.ndarray] = field(default_factory=list)


def cases(seed: int, nranks: int, number: int, pair: int) -> list[Case]:
    """Returns the calls with one pair of codecs, which are the same in every process."""
    random = np.random.default_rng((seed, pair))
    found, tensor = [], 0
    between, inside = CODECS[pair]
    while len(found) < number:
        collective, algorithm = KINDS[random.integers(len(KINDS))]
        element = [F32E, F16, BF16][random.integers(3)]
        op = ["sum", "avg", "premulsum"][random.integers(3)] if collective in REDUCING else "sum"
        factors = random_factors(element, random, nranks) if op == "premulsum" else None
        arguments = Arguments(
            collective, element, int(random.choice([1, 64, 300, 1001, 4100, 9001])), algorithm, op,
            parse(between), None if inside is None else parse(inside),
            root=int(random.integers(nranks)) if collective in ("reduce", "broadcast") else 0,
            factors=factors,
        )  # fmt: skip
        repeats = 1
        # Error feedback refuses minmax1 with a seed, and raw messages have no residuals.
        can_feed_back = between not in ("raw", "minmax1:seed=9") and inside != "raw"
        if collective in REDUCING and can_feed_back and random.random() < 0.3:
            tensor += 1
            repeats = 3
            arguments = replace(arguments, feedback=tensor)
        for _ in range(repeats):
            found.append(Case(arguments, buffers_of(arguments, random, nranks)))
    return found


def groups_of(hosts: list[int]) -> list[tuple[int, ...]]:
    """Returns the ranks of each host, hosts numbered by their lowest rank."""
    found: dict[int, list[int]] = {}
    for rank, host in enumerate(hosts):
        found.setdefault(host, []).append(rank)
    return [tuple(ranks) for ranks in found.values()]


def work(options: argparse.Namespace) -> None:
    """Runs the ranks of one host."""
    library = Library(options.library)
    local = [int(rank) for rank in options.local.split(",")]
    if options.first:
        ids = [library.unique_id() for _ in CODECS]
        for unique_id in ids:
            print(unique_id.hex(), flush=True)
    else:
        ids = [bytes.fromhex(sys.stdin.readline().strip()) for _ in CODECS]
    for pair, unique_id in enumerate(ids):
        between, inside = CODECS[pair]
        by_level = inside and f"intra={inside},inter={between}"
        folder = Path(options.folder, str(pair))
        folder.mkdir(exist_ok=True)
        with Ranks(library, options.nranks, SLOT, unique_id, local, by_level) as ranks:
            for i, case in enumerate(cases(options.seed, options.nranks, options.cases, pair)):
                run_library(ranks, case.arguments, case.buffers)
                for rank in local:
                    if case.buffers.outputs[rank] is not None:
                        np.save(folder / f"{i}.{rank}.npy", case.buffers.outputs[rank])
                    if case.arguments.feedback:
                        (folder / f"{i}.{rank}.export").write_bytes(ranks.feedback_export(rank))


def run_hosts(path: str, hosts: list[int], seed: int, number: int, folder: str) -> None:
    """Starts one process for each host and waits for them."""
    workers, ids = [], []
    for j, local in enumerate(groups_of(hosts)):
        command = [sys.executable, "-m", "cinch_check.hosts", "--library", path, "--seed", str(seed)]
        command += ["--nranks", str(len(hosts)), "--cases", str(number), "--folder", folder]
        command += ["--local", ",".join(map(str, local))] + ([] if j else ["--first"])
        environment = os.environ | SETTINGS | {"CINCH_HOST_ID": f"host{j}"}
        pipe = subprocess.PIPE
        worker = subprocess.Popen(command, stdin=pipe, stdout=pipe, env=environment, text=True)
        workers.append(worker)
        if j == 0:
            ids = [worker.stdout.readline() for _ in CODECS]
        else:
            worker.stdin.writelines(ids)
            worker.stdin.flush()
    codes = [worker.wait() for worker in workers]
    if any(codes):
        raise RuntimeError(f"a process of part `hosts` failed: {codes}")


def simulate(comm: Communicator, case: Case, what: str) -> tuple[Communicator, Result]:
    """Returns the state and the result of the algorithm between groups that the planner has chosen.

    No function of the library reports it, so each is tried, and the first without differences counts.
    """
    tried = []
    for between in ("direct", "ring", "tree"):
        other = copy.deepcopy(comm)
        other.groups = Groups(comm.groups.ranks, comm.groups.rails, between)
        expected = collectives.call(other, case.arguments, case.buffers.inputs)
        trial = Result("trial")
        compare(trial, case.arguments, expected, case.buffers.outputs, what)
        for rank, theirs in enumerate(case.exports):
            ours = np.frombuffer(other.feedback[rank].export(), np.uint8)
            trial.compare(f"export of {what}, rank {rank}", 0, ours, theirs)
        tried.append((trial.differing, other, trial))
        if not trial.differing:
            break
    _, comm, trial = min(tried, key=lambda entry: entry[0])
    return comm, trial


def check_hosts(library: Library, elements: int, random: np.random.Generator) -> Result:
    """Compares hierarchical collectives."""
    result = Result("hosts")
    # A short run takes one layout of hosts, since the creation of communicators takes most of the time.
    layouts = HOSTS if elements > 500_000 else [HOSTS[random.integers(len(HOSTS))]]
    for hosts in layouts:
        nranks, seed = len(hosts), int(random.integers(2**31))
        groups = groups_of(hosts)
        number = max(elements // len(layouts) // len(CODECS) // (2500 * nranks), 3)
        with tempfile.TemporaryDirectory() as folder:
            run_hosts(library.path, hosts, seed, number, folder)
            for pair in range(len(CODECS)):
                comm = Communicator(nranks, SLOT)
                comm.groups = Groups(tuple(groups), min(map(len, groups)), "")
                check_pair(result, comm, hosts, cases(seed, nranks, number, pair), Path(folder, str(pair)))
    return result


def check_pair(result: Result, comm: Communicator, hosts: list[int], found: list, folder: Path) -> None:
    """Compares the calls with one pair of codecs."""
    for i, case in enumerate(found):
        for rank in range(comm.size):
            if case.buffers.outputs[rank] is not None:
                case.buffers.outputs[rank] = np.load(folder / f"{i}.{rank}.npy")
            if case.arguments.feedback:
                case.exports.append(np.fromfile(folder / f"{i}.{rank}.export", np.uint8))
        what = f"call {i} of hosts {hosts}: {describe(case.arguments, comm.size)}"
        comm, trial = simulate(comm, case, what)
        result.merge(trial)


def main() -> None:
    """Runs one host."""
    parser = argparse.ArgumentParser()
    for name in ("--library", "--local", "--folder"):
        parser.add_argument(name, required=True)
    for name in ("--seed", "--nranks", "--cases"):
        parser.add_argument(name, type=int, required=True)
    parser.add_argument("--first", action="store_true")
    work(parser.parse_args())


if __name__ == "__main__":
    main()


