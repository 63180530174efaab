#!/usr/bin/env python3
"""Benchmarks all_reduce of two builds of the tool in alternation; fails if the new build is slower.

    scripts/bench --against OLD_TOOL [--new TOOL] [--rounds 9] [--only host|gpu] [--quick]

OLD_TOOL is the `cinch` of an earlier commit; TOOL defaults to target/release/cinch, which is built first.
On host memory the ranks are 2 and 4 and the sizes 1 KiB to 64 MiB; on a GPU, if there is one, 2 ranks share
it, with 8 B to 256 MiB through peer memory and through pinned memory (CINCH_P2P_DISABLE=1). All run raw and
with linear8. Only options that both tools have are used.

Prints the median us of both tools for each row, and the median over rounds of new / old. A row is slower if
this ratio is above 1.03 and differs from 1 by more than three standard errors. A benchmark with such a row
runs for as many rounds again, and all its rounds count. Exits 1 if a row is slower, or the geometric mean of
a device's rows is above 1.03. Writes target/bench/against.jsonl. On host memory rows have the least and the most
round trip of a cache line between two cores before a round, on which copies between ranks depend.
"""

import argparse
import json
import math
import os
import pathlib
import shlex
import statistics
import subprocess
import sys
import tempfile

sys.dont_write_bytecode = True
import baseline  # noqa: E402
import mpi_peers  # noqa: E402

LIMIT = 1.03
K, M = 1 << 10, 1 << 20
# Rows of benchmarks on host memory: ranks, first and last size in bytes, iterations, warm-up calls.
HOST = [(2, K, 64 * K, 1000, 100), (2, 256 * K, 4 * M, 60, 8), (2, 16 * M, 64 * M, 6, 3),
        (4, K, 64 * K, 300, 50), (4, 256 * K, 4 * M, 30, 6), (4, 16 * M, 64 * M, 5, 3)]
# Rows of benchmarks on a GPU: first and last size in bytes, iterations.
GPU = [(8, 512 * K, 15), (M, 256 * M, 7)]


class Case:
    """A benchmark that prints several rows, with the times of both tools."""

    def __init__(self, device, name, words, environment=None):
        self.device, self.name, self.words = device, name, [*map(str, words)]
        self.environment = environment or {}
        self.times = {}
        self.trips = []

    def run(self, side, tool):
        """Runs the benchmark with a tool, and adds its times as those of `side`: 0 is old, 1 new."""
        with tempfile.NamedTemporaryFile(suffix=".jsonl") as out:
            command = [str(tool), "bench", "all_reduce", *self.words, "-d", "f32", "-o", "sum", "-c", "0",
                       "--codec", "raw,linear8", "--json", out.name]
            done = subprocess.run(command, env=clean_environment() | self.environment, text=True,
                                  stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=600)
            if done.returncode != 0:
                sys.exit(f"failed: {shlex.join(command)}\n{done.stdout}")
            for row in rows(out.name):
                key = (row["codec"], row["size"])
                self.times.setdefault(key, ([], []))[side].append(row["out_of_place"]["time_us"])

    def results(self):
        """Returns a row for each codec and size."""
        for (codec, size), (old, new) in self.times.items():
            ratios = [b / a for a, b in zip(old, new, strict=True)]
            ratio, error = statistics.median(ratios), standard_error(ratios)
            trips = {"line_trip_ns": {"min": min(self.trips), "max": max(self.trips)}} if self.trips else {}
            yield {"device": self.device, "case": self.name, "codec": codec, "size": size,
                   "old_us": statistics.median(old), "new_us": statistics.median(new),
                   "ratio": round(ratio, 4), "error": round(error, 4), "rounds": len(ratios),
                   "slower": ratio > LIMIT and ratio - 1 > 3 * error} | trips


def clean_environment():
    """Returns the environment without settings of cinch; streams of ranks on a GPU get queues of their own."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("CINCH_")}
    return kept | {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}


def rows(path):
    """Returns the rows of `cinch bench --json`: one object with all, or one JSON object a line."""
    text = pathlib.Path(path).read_text(encoding="utf-8")
    try:
        whole = json.loads(text)
        return whole.get("results", [whole])
    except json.JSONDecodeError:
        return [json.loads(line) for line in text.splitlines()]


def standard_error(values):
    """Returns the standard error of the median of normally distributed values."""
    return math.sqrt(math.pi / 2 / len(values)) * statistics.stdev(values)


def gpu_name():
    """Returns the name of the first GPU, or None."""
    try:
        done = subprocess.run(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"], text=True,
                              capture_output=True)
    except FileNotFoundError:
        return None
    return done.stdout.splitlines()[0] if done.returncode == 0 and done.stdout else None


def cases(only, quick):
    """Returns the benchmarks to run."""
    factor = 8 if quick else 4
    found = []
    if only != "gpu":
        found += [Case("host", f"{ranks} ranks", ["--ranks", ranks, "-b", first, "-e", last, "-f", factor,
                                                  "-n", iterations, "-w", warm_ups, "--transport", "shm"])
                  for ranks, first, last, iterations, warm_ups in HOST]
    if only != "host":
        gpu = gpu_name()
        if not gpu and only:
            sys.exit("there is no GPU")
        if not gpu:
            print("SKIPPED the rows on a GPU: there is none")
        for name, environment in [("peer memory", {}), ("pinned memory", {"CINCH_P2P_DISABLE": "1"})]:
            found += [Case(gpu, name, ["--device", "gpu", "--gpus", 1, "--ranks-per-gpu", 2, "--graph", "-b",
                                       first, "-e", last, "-f", factor, "-n", iterations, "-w", 3], environment)
                      for first, last, iterations in (GPU if gpu else [])]
    return found


def alternate(chosen, tools, rounds):
    """Runs all benchmarks with both tools in each round."""
    trip = mpi_peers.LineTrip()
    if any(case.device == "host" for case in chosen):
        trip.build()
    for number in range(rounds if chosen else 0):
        print(f"round {number + 1} of {rounds}, {len(chosen)} benchmarks", flush=True)
        for case in chosen:
            if case.device == "host":
                case.trips += filter(None, [trip.measure()])
            # The order alternates, so that a changing clock rate favours neither tool.
            for side in (0, 1) if number % 2 == 0 else (1, 0):
                case.run(side, tools[side])


def report(results):
    """Prints all rows and the geometric mean of each device; returns whether the new tool passes."""
    print(f"{'case':>14} {'codec':>18} {'size':>6} {'old us':>11} {'new us':>11} {'ratio':>7} {'+-':>6} {'line ns':>8}")
    for row in results:
        print(f"{row['case']:>14} {row['codec']:>18} {baseline.size_name(row['size']):>6} "
              f"{row['old_us']:>11.2f} {row['new_us']:>11.2f} {row['ratio']:>7.3f} {row['error']:>6.3f}"
              f" {'-'.join(str(ns) for ns in row.get('line_trip_ns', {}).values()):>8}"
              f"{' SLOWER' if row['slower'] else ''}")
    passes = not any(row["slower"] for row in results)
    for device in dict.fromkeys(row["device"] for row in results):
        mean = statistics.geometric_mean(row["ratio"] for row in results if row["device"] == device)
        print(f"{device}: geometric mean of new / old {mean:.4f}, limit {LIMIT}")
        passes &= mean <= LIMIT
    return passes


def main():
    parser = argparse.ArgumentParser(prog="scripts/bench", description=__doc__.splitlines()[0])
    parser.add_argument("--against", type=pathlib.Path, required=True, metavar="OLD_TOOL",
                        help="the cinch of an earlier commit")
    parser.add_argument("--new", type=pathlib.Path, metavar="TOOL",
                        help="the cinch to judge; default: target/release/cinch, built first")
    parser.add_argument("--rounds", type=int, default=9, help="alternations (9)")
    parser.add_argument("--only", choices=["host", "gpu"], help="skips the other device")
    parser.add_argument("--quick", action="store_true", help="multiplies sizes by 8 instead of 4")
    options = parser.parse_args()
    if options.rounds < 2:
        parser.error("--rounds is at least 2, because one round shows no noise")
    if not options.new:
        baseline.build()
    tools = [options.against.resolve(strict=True), (options.new or baseline.CINCH).resolve(strict=True)]
    chosen = cases(options.only, options.quick)
    alternate(chosen, tools, options.rounds)
    alternate([case for case in chosen if any(row["slower"] for row in case.results())], tools, options.rounds)
    results = [row for case in chosen for row in case.results()]
    command = shlex.join(["scripts/bench"] + sys.argv[1:])
    baseline.write("against.jsonl", [{"command": command} | row for row in results],
                   baseline.ROOT / "target" / "bench")
    sys.exit(0 if report(results) else 1)


if __name__ == "__main__":
    main()
