#!/usr/bin/env python3
"""Trains every task with every codec and loop, and writes verdicts as rows of JSON.

    python3 examples/learning/run.py --small                         all loops in the short form; fails if a check fails
    python3 examples/learning/run.py --full DATA.npz --out FILE      the parts named by --parts, on the CPU
    python3 examples/learning/run.py --full DATA.npz --gpu --out FILE

`data.py` writes DATA.npz. A row has everything that its verdict needs: the metric of each seed with and without the
codec, margin, hash of the data, commit and versions. Rows are written as they come, so a run may be ended at any time.
"""

import argparse
import contextlib
import datetime
import json
import math
import os
import pathlib
import platform
import shlex
import subprocess
import sys
import time
from typing import Any, Dict, Iterable, List, Optional

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent.parent / "python")]

import cases  # noqa: E402 - behind the path
import cinch  # noqa: E402
import criterion  # noqa: E402
import data  # noqa: E402
import loops  # noqa: E402
import numpy  # noqa: E402
import profiles  # noqa: E402
from cases import Case  # noqa: E402
from loops import AdaptiveWeights, LossScaling, Outcome, Task  # noqa: E402
from ranks import Exchange, Ranks  # noqa: E402

PARTS = (
    "diabetes",
    "ratings",
    "digits",
    "split",
    "weights",
    "half",
    "textures-mlp",
    "textures-conv",
    "profile",
    "characters",
)
#: Seconds of processor time of the short run: 3 minutes on two cores.
SHORT_LIMIT = 360
#: A power of two by which the planted task's loss shrinks: its gradients are below the smallest number of fp16.
VANISHING = 2.0**-20
#: Loss scale at which gradients of the task digits overflow, and clean steps until a scale grows.
OVERFLOWING, GROWTH_INTERVAL = 2.0**24, 50
#: Batches without growth after which AWP adds bits, in epochs. Growth counts from so many mean growths of the first
#: quarter of exact training. Small networks' norms change more from batch to batch than the source's. A run with at most
#: 16 bits moves half of the bytes or less.
AWP_EPOCHS, AWP_GROWTHS, AWP_MOST_BITS = (2, 6), 16.0, 16


class Writer:
    """Writes rows with the facts that all of them share, and prints a line for each."""

    def __init__(self, path: Optional[pathlib.Path], digest: str, on_gpu: bool) -> None:
        self._path, self.rows = path, []
        commit = os.environ.get("LEARNING_COMMIT") or _output(["git", "-C", str(HERE), "rev-parse", "--short", "HEAD"])
        self._facts = {
            "commit": commit,
            "data": digest[:16],
            "machine": _machine(on_gpu),
            "versions": _versions(on_gpu),
        }

    def write(self, row: Dict[str, Any]) -> None:
        """Appends a row to the file, and prints what it is about."""
        now = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%MZ")
        row = {"date": now, **self._facts, "command": _command(), **_plain(row)}
        self.rows.append(row)
        if self._path:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
        finite = [value for value in row.get("metrics", []) if value is not None]
        mean = sum(finite) / max(1, len(finite))
        print(
            f"{row['task']:14} {row['loop']:10} {row['case']:44} {mean:9.4f} {row.get('verdict', ''):28} "
            f"{row.get('seconds', 0):6.1f} s",
            flush=True,
        )

    def outcome(
        self, task: str, loop: str, name: str, outcome: Outcome, seeds: List[int], exact: Any = None, **more: Any
    ):
        """Writes the row of one way to train, with its verdict beside the exact outcome if there is one."""
        row: Dict[str, Any] = {"task": task, "loop": loop, "case": name, "seeds": seeds}
        row["metrics"] = [float(f"{value:.6g}") for value in outcome.metrics]
        if exact is not None:
            row["exact"] = [float(f"{value:.6g}") for value in exact.metrics]
            verdict = criterion.judge(exact.metrics, outcome.metrics, cases.margin(task, exact.metrics)).row()
            row.update({**verdict, "seeds": seeds})
        row.update(losses=outcome.losses, steps=outcome.steps, seconds=round(outcome.seconds, 2))
        row["replicas_equal"] = outcome.replicas_equal
        self.write({**row, **outcome.extra, **more})


def _plain(value: Any) -> Any:
    """Returns a value with None for numbers that JSON lacks."""
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _command() -> str:
    """Returns the command line, whose files have no folders: those are the machine's."""
    words = [word.rpartition("=") for word in sys.argv]
    return shlex.join(f"{option}{equals}{pathlib.Path(file).name if '/' in file else file}" for option, equals, file in words)


def _output(command: List[str]) -> str:
    with contextlib.suppress(OSError):
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    return ""


def _machine(on_gpu: bool) -> Dict[str, Any]:
    facts: Dict[str, Any] = {"cores": os.cpu_count()}
    if on_gpu:
        import torch

        facts["gpu"] = torch.cuda.get_device_name()
    return facts


def _versions(on_gpu: bool) -> Dict[str, str]:
    found = {"cinch": cinch.__version__, "python": platform.python_version(), "numpy": numpy.__version__}
    if on_gpu:
        import torch

        found["torch"] = torch.__version__
    return found


class Runner:
    """Runs parts on communicators of one process."""

    def __init__(
        self,
        tasks: Dict[str, Task],
        writer: Writer,
        seeds: int,
        on_gpu: bool,
        limit: float,
        host_averages: bool = False,
        first_seed: int = 1,
    ) -> None:
        self.tasks = {name: task.on_gpu() if on_gpu else task for name, task in tasks.items()}
        self.writer, self.on_gpu, self.limit = writer, on_gpu, limit
        self.seeds = list(range(first_seed, first_seed + seeds))
        self.ranks = Ranks(cases.RANKS, on_gpu and not host_averages)
        self.exact: Dict[Any, Outcome] = {}
        self._end = float("inf")

    def part(self, name: str, wanted: Iterable[Case]) -> None:
        """Runs one part, limited to some seconds; cases that do not begin in time are left out."""
        self._end = time.monotonic() + self.limit
        special = {"split": self.split, "weights": self.weights, "half": self.half, "profile": self.profile}
        if name in special:
            special[name]()
        else:
            self.codecs(name, wanted)

    def _has_time(self, what: str) -> bool:
        if time.monotonic() < self._end:
            return True
        print(f"left out, no time: {what}", flush=True)
        return False

    def exact_of(self, name: str, rate: float = 1.0) -> Outcome:
        """Returns the outcome of data-parallel training without a codec, which is run once."""
        key = (name, rate)
        if key not in self.exact:
            outcome = loops.train(self.tasks[name], self.seeds, Exchange(self.ranks), rate)
            self.exact[key] = outcome
            self.writer.outcome(name, "data", "raw", outcome, self.seeds, rate=rate)
        return self.exact[key]

    def codecs(self, name: str, wanted: Iterable[Case]) -> None:
        """Trains a task data parallel with each codec."""
        for case in wanted:
            exact = self.exact_of(name, case.rate)
            if not self._has_time(case.name):
                continue
            if self.ranks.on_gpu and "tensor=" in case.codec:
                print(f"left out, GPUs refuse it: {case.name}", flush=True)
                continue
            exchange = Exchange(self.ranks, case.codec, case.feedback, case.harm)
            outcome = loops.train(self.tasks[name], self.seeds, exchange, case.rate)
            self.writer.outcome(name, "data", case.name, outcome, self.seeds, exact, rate=case.rate)

    def split(self) -> None:
        """Trains data and model parallel: 8 bits on activations and gradients, or 1 bit for data-parallel layers."""
        name = "digits"
        exact = self.exact_of(name)
        for own, between, feedback, overlap in [
            ("raw", "raw", False, False),
            ("raw", "raw", False, True),
            ("dynamic8", "dynamic8", False, False),
            ("dynamic8", "dynamic8", False, True),
            ("linear8", "linear8", False, True),
            ("onebit", "dynamic8", True, True),
        ]:
            if self.on_gpu and overlap or not self._has_time(f"split {own} {between}"):
                continue
            exchange = Exchange(self.ranks, own, feedback)
            outcome = loops.train_split(self.tasks[name], self.seeds, exchange, between, overlap)
            words = f"{own}{', with feedback' if feedback else ''} | {between} between layers"
            self.writer.outcome(name, "split", words, outcome, self.seeds, exact, overlap=overlap)

    def weights(self, name: str = "digits") -> None:
        """Trains with weights packed by AWP and ADT, and with each fixed number of bits: the best is the oracle."""
        task, exact = self.tasks[name], self.exact_of(name)
        epoch = task.steps(cases.RANKS) // task.epochs
        threshold = AWP_GROWTHS * profiles.growth(task, self.seeds[:1], cases.RANKS)
        adaptive = [*((0, epochs, 32) for epochs in AWP_EPOCHS), (0, AWP_EPOCHS[0], AWP_MOST_BITS)]
        for bits, epochs, most_bits in [*adaptive, *((bits, 0, bits) for bits in (8, 16, 24))]:
            words = f"fixed {bits} bits" if bits else f"AWP, interval of {epochs} epochs"
            words += f", at most {most_bits} bits" if bits < most_bits < 32 else ""
            if not self._has_time(words):
                continue
            kept = AdaptiveWeights(task.net, len(self.seeds), threshold, max(1, epochs * epoch), bits, most_bits)
            outcome = loops.train(task, self.seeds, Exchange(self.ranks), weights=kept)
            more = {} if bits else {"threshold": threshold, "interval": epochs * epoch}
            self.writer.outcome(name, "weights", words, outcome, self.seeds, exact, **more)

    def half(self, name: str = "digits") -> None:
        """Trains in fp16 with and without loss scaling: plain, from a scale that overflows, and on a planted task."""
        task, exact, count = self.tasks[name], self.exact_of(name), len(self.seeds)
        for words, factor, scale in [
            ("fp16 with scaler", 1.0, 65536.0),
            ("fp16 without scaler", 1.0, None),
            ("fp16 with scaler, overflow on purpose", 1.0, OVERFLOWING),
            ("fp16 with scaler, vanishing gradients", VANISHING, OVERFLOWING),
            ("fp16 without scaler, vanishing gradients", VANISHING, None),
        ]:
            if not self._has_time(words):
                continue
            scaling = LossScaling(count, scale=scale, interval=GROWTH_INTERVAL) if scale else None
            # A loss that is 2^-20 as large takes a rate 2^20 as large: in fp32 nothing changes.
            outcome = loops.train(task, self.seeds, Exchange(self.ranks), 1.0, None, True, scaling, factor)
            self.writer.outcome(name, "half", words, outcome, self.seeds, exact)

    def profile(self) -> None:
        """Measures encode and all_reduce times of a number, with and without a scale that is kept, and AWP's steps."""
        for row in profiles.rows(self.ranks):
            self.writer.write({"task": "profile", "loop": "time", **row})


def characters(
    runner: Runner, arrays: Dict[str, Any], seeds: int, steps: int, limit: float, wanted: List[Case]
) -> None:
    """Trains the transformer with each codec, within `limit` seconds."""
    import torch
    from characters import Transformer, train

    train_codes, test_codes, alphabet = data.text(arrays)
    device = "cuda" if runner.on_gpu else "cpu"
    net = Transformer(alphabet)
    texts = {"train": torch.tensor(train_codes, device=device), "test": torch.tensor(test_codes, device=device)}
    numbers, end, exact = runner.seeds[:seeds], time.monotonic() + limit, {}
    for case in wanted:
        if case.rate not in exact:
            exact[case.rate] = train(net, texts, numbers, Exchange(runner.ranks), steps, rate=case.rate)
            runner.writer.outcome(
                "characters", "data", "raw", exact[case.rate], numbers, rate=case.rate, parameters=net.size
            )
        if runner.ranks.on_gpu and "tensor=" in case.codec:
            continue
        if time.monotonic() > end:
            print(f"left out, no time: characters with {case.name}", flush=True)
            continue
        exchange = Exchange(runner.ranks, case.codec, case.feedback, case.harm)
        outcome = train(net, texts, numbers, exchange, steps, rate=case.rate)
        runner.writer.outcome("characters", "data", case.name, outcome, numbers, exact[case.rate], rate=case.rate)


def n_gram(writer: Writer, arrays: Dict[str, Any]) -> None:
    """Writes the 5-gram model's loss."""
    from characters import n_gram_loss

    loss = n_gram_loss(*data.text(arrays))
    writer.write({"task": "characters", "loop": "n-gram", "case": "5-gram, Witten-Bell", "metrics": [loss]})


def short_checks(rows: List[Dict[str, Any]]) -> List[str]:
    """Returns what is wrong with the rows of the short run, whose few seeds decide gross cases only."""
    wrong = []
    by_name = {(row["task"], row["loop"], row["case"], row.get("rate", 1.0)): row for row in rows if "metrics" in row}
    for key, row in by_name.items():
        if not row["replicas_equal"]:
            wrong.append(f"{key}: ranks received different bits")
        is_close = key[2] in [case.name for case in cases.CLOSE]
        # With few seeds a small difference decides nothing.
        if key[1] == "data" and is_close and (row["diverged"] or row["low"] > row["margin"]):
            wrong.append(f"{key}: {row['verdict']}")
        if key[2] == "raw" and not row["losses"][-1] < 0.8 * row["losses"][0]:
            wrong.append(f"{key}: the loss went from {row['losses'][0]} to {row['losses'][-1]}")
    for key in (("digits", "data", "onebit", 1.0), ("digits", "half", "fp16 without scaler, vanishing gradients", 1.0)):
        if not str(by_name[key]["verdict"]).startswith("worse"):
            wrong.append(f"{key}: planted harm was not found: {by_name[key]['verdict']}")
    exact = by_name["digits", "data", "raw", 1.0]["metrics"]
    if by_name["digits", "split", "raw | raw between layers", 1.0]["metrics"] != exact:
        wrong.append("dividing a layer without a codec changed the result")
    if not any(by_name["digits", "half", "fp16 with scaler, overflow on purpose", 1.0]["skipped"]):
        wrong.append("no step was skipped where gradients overflow on purpose")
    if not by_name["digits", "weights", "AWP, interval of 2 epochs", 1.0]["weight_bytes_share"] < 1:
        wrong.append("AWP moved as many bytes as plain copies")
    return wrong


def main() -> int:
    """Runs the chosen parts."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--small", action="store_true", help="the short run, on host memory with numpy alone")
    parser.add_argument("--full", type=pathlib.Path, metavar="DATA", help="frozen data of data.py")
    parser.add_argument("--gpu", action="store_true", help="train on the GPU, with ranks that share it")
    parser.add_argument("--host-averages", action="store_true", help="with --gpu: average gradients in host memory")
    parser.add_argument("--parts", default=",".join(PARTS[:-1]), help=f"of {', '.join(PARTS)}")
    parser.add_argument("--cases", default="all", choices=cases.CHOICES, help="codecs of the tasks")
    parser.add_argument("--out", type=pathlib.Path, help="file to which rows are added")
    parser.add_argument("--seeds", type=int, help="default: 20, in the short run 4")
    parser.add_argument("--first-seed", type=int, default=1, help="new seeds for a case that more of them must decide")
    parser.add_argument("--only", help="names of cases, divided by semicolons; default: all")
    parser.add_argument("--rate", type=float, help="only cases with this share of the learning rate; default: all")
    parser.add_argument("--steps", type=int, default=1000, help="steps of the transformer")
    parser.add_argument("--limit", type=float, default=1e6, help="seconds for each part")
    options = parser.parse_args()
    # A run that diverges is a result: its metric is NaN.
    numpy.seterr(all="ignore")
    if options.small == bool(options.full):
        parser.error("give --small or --full DATA")
    arrays = data.load(data.SMALL if options.small else options.full)
    tasks = cases.small_tasks() if options.small else cases.full_tasks(options.full)
    writer = Writer(options.out, arrays["sha256"], options.gpu)
    seeds = options.seeds or (4 if options.small else cases.SEEDS)
    runner = Runner(tasks, writer, seeds, options.gpu, options.limit, options.host_averages, options.first_seed)
    names = PARTS[:-1] if options.small else options.parts.split(",")
    for name in names:
        wanted = [
            case
            for case in cases.of(name, "short" if options.small else options.cases)
            if (not options.only or case.name in options.only.split(";")) and options.rate in (None, case.rate)
        ]
        if name == "characters":
            characters(runner, arrays, min(5, len(runner.seeds)), options.steps, options.limit, wanted)
            if not options.only:
                n_gram(writer, arrays)
        else:
            runner.part(name, wanted)
    runner.ranks.close()
    wrong = short_checks(writer.rows) if options.small else []
    if options.small:
        print(f"{time.process_time():.0f} s of processor time, of at most {SHORT_LIMIT}")
        if time.process_time() > SHORT_LIMIT:
            wrong.append("the short run takes too long for continuous integration")
    for line in wrong:
        print("FAILED", line)
    print(f"{len(writer.rows)} rows" + (f", {len(wrong)} checks failed" if options.small else ""))
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
