"""Shared by the benchmark scripts: the machine, the build, and baseline files."""

import datetime
import json
import os
import pathlib
import platform
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
CINCH = ROOT / "target" / "release" / "cinch"
BASELINES = ROOT / "benches" / "baselines"


def machine():
    """Returns the machine as a baseline row names it."""
    model = "unknown"
    with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
        for line in lines:
            if line.startswith("model name"):
                model = line.split(":", 1)[1].strip()
                break
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "load": round(os.getloadavg()[0], 2),
    }


def build():
    """Builds the tool; exits if the build fails."""
    command = ["cargo", "build", "--release", "--locked", "--quiet", "-p", "cinch-cli"]
    if subprocess.run(command, cwd=ROOT).returncode != 0:
        sys.exit("the release build failed")


def commit():
    """Returns the commit that was measured, with a + if files differ from it."""
    command = ["git", "describe", "--always", "--dirty=+", "--match", "none"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


def write(name, rows, folder=BASELINES):
    """Replaces a file of rows: JSON lines, each with machine, date and commit."""
    common = {
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%MZ"),
        "commit": commit(),
        "machine": machine(),
    }
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", encoding="utf-8") as out:
        for row in rows:
            out.write(json.dumps(common | row) + "\n")
    print(f"written: {path.relative_to(ROOT)}")


def rows(path):
    """Returns the rows of `cinch bench --json`: one JSON object a line."""
    with open(path, encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def size_name(size):
    """Formats a size: 1048576 is 1M."""
    for unit, shift in (("G", 30), ("M", 20), ("K", 10)):
        if size >= 1 << shift and size % (1 << shift) == 0:
            return f"{size >> shift}{unit}"
    return str(size)
