#!/usr/bin/env python3
"""Trains with NCCL, with cinch raw and with cinch in 8 bits, and compares the final test errors.

    examples/ddp/compare.py --library target/release/libnccl.so [--ranks N] [--seeds 5]

Starts train.py under torchrun for each variant. Prints test errors, the verdict of examples/learning's
criterion on the paired differences to the exact run, bytes sent and saved, and steps per second. Fails if
replicas differ, if a codec is worse by more than the margin, if it saved nothing, or if the process loaded
another library. NCCL needs a GPU for each rank: it is a printed skip if ranks share a GPU.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "learning"))

import criterion  # noqa: E402 - behind the path

#: Margin of the test error in points, as in examples/learning.
MARGIN = 0.3
# Matches the last line that a communicator writes to the log.
COUNTS = re.compile(r"calls of communicator .*: (\d+) coded, (\d+) exact.*; (\d+) bytes sent, (\d+) saved")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--library", type=Path, required=True, help="cinch's libnccl")
    parser.add_argument("--ranks", type=int, help="default: one for each GPU, at least 2")
    parser.add_argument("--seeds", type=int, default=5, choices=range(2, 21), metavar="2..20")
    parser.add_argument("--tasks", default="digits,text")
    parser.add_argument("--codecs", default="dynamic8,linear8")
    parser.add_argument("--epochs", type=int, help="default: each task's")
    parser.add_argument("--digits", help="a file like examples/train/digits.bin, or `sklearn`")
    parser.add_argument("--limit", type=int, default=900, help="seconds for each training")
    options = parser.parse_args()
    import torch

    gpus = torch.cuda.device_count()
    if gpus == 0:
        print("skip: there is no GPU\n0 passed, 0 failed, 1 skipped")
        return 0
    ranks = options.ranks or max(2, gpus)
    library = options.library.resolve(strict=True)
    variants = [("cinch raw", library, None)]
    variants += [(f"cinch {codec}", library, codec) for codec in options.codecs.split(",")]
    passed = failed = skipped = 0
    if ranks <= gpus:
        variants.insert(0, ("NCCL", None, None))
    else:
        print(f"skip NCCL: it needs a GPU for each of {ranks} ranks, and there are {gpus}")
        skipped += 1
    print(f"{ranks} ranks on {gpus} GPUs, {options.seeds} seeds, {library}")
    print(f"{'task':8}{'carried by':18}{'test error %':>14}{'beside exact':>30}{'bytes sent':>14}"
          f"{'saved':>14}{'steps/s':>10}")
    for task in options.tasks.split(","):
        exact = None
        for name, preload, codec in variants:
            try:
                result, counts = run(options, task, ranks, preload, codec)
                errors = [100 * one["error"] for one in result["runs"]]
                verdict = criterion.judge(exact, errors, MARGIN) if exact and codec else None
                row(task, name, errors, verdict, result, counts)
                exact = exact or errors
                if verdict and (verdict.diverged or verdict.low > MARGIN):
                    raise Wrong(f"it is {verdict.verdict}")
                if codec and not counts["saved"] > 0:
                    raise Wrong("it saved nothing")
                if not codec and counts["coded"] > 0:
                    raise Wrong("calls ran with a codec without a setting for it")
                passed += 1
            except Wrong as why:
                failed += 1
                print(f"FAIL {task}, {name}: {why}")
    print(f"{passed} passed, {failed} failed, {skipped} skipped")
    return int(failed > 0)


class Wrong(Exception):
    pass


def run(options, task, ranks, preload, codec):
    """Runs a training and returns its results and the statistics of its communicators."""
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        environment = {name: value for name, value in os.environ.items()
                       if not name.startswith(("CINCH_CODEC", "NCCL_DEBUG", "LD_PRELOAD"))}
        environment.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
        if preload:
            environment["LD_PRELOAD"] = str(preload)
            environment["CINCH_LOG"] = "info"
            environment["CINCH_LOG_FILE"] = str(folder / "log.%p")
        if codec:
            environment["CINCH_CODEC"] = codec
        result = folder / "result.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
                   str(ranks), str(HERE / "train.py"), "--task", task, "--seeds", str(options.seeds),
                   "--result", str(result)]
        if options.epochs:
            command += ["--epochs", str(options.epochs)]
        if options.digits:
            command += ["--digits", options.digits]
        try:
            ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=options.limit)
        except subprocess.TimeoutExpired:
            raise Wrong(f"it did not end within {options.limit} s") from None
        if ran.returncode != 0 or not result.exists():
            raise Wrong(f"code {ran.returncode}: " + " | ".join((ran.stdout + ran.stderr).splitlines()[-12:]))
        found = json.loads(result.read_text())
        if preload and found["library"] != str(preload):
            raise Wrong(f"it ran on {found['library']}")
        counts = dict.fromkeys(["coded", "exact", "sent", "saved"], 0)
        for log in folder.glob("log.*"):
            for line in COUNTS.findall(log.read_text()):
                for name, value in zip(counts, line):
                    counts[name] += int(value)
        if preload and counts["coded"] + counts["exact"] == 0:
            raise Wrong("no communicator logged its calls")
        return found, counts


def row(task, name, errors, verdict, result, counts):
    speed = sum(one["steps_per_second"] for one in result["runs"]) / len(errors)
    known = counts["sent"] > 0
    print(f"{task:8}{name:18}{sum(errors) / len(errors):14.3f}{verdict.verdict if verdict else '-':>30}"
          f"{counts['sent'] if known else '-':>14}{counts['saved'] if known else '-':>14}{speed:10.1f}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
