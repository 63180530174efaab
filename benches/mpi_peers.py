"""Runs collectives of cinch and of MPI libraries in alternation. Shared by scripts/bench-mpi's comparisons."""

import dataclasses
import json
import os
import pathlib
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time

import baseline

SOURCE = baseline.ROOT / "benches" / "mpi" / "collectives_mpi.c"
#: Seconds between samples of memory, and seconds of calls in a run that is sampled.
SAMPLE_INTERVAL, SAMPLED_SECONDS = 0.2, 3


@dataclasses.dataclass(frozen=True)
class Job:
    """Calls of one collective at several sizes, which a program measures in one run."""

    collective: str
    ranks: int
    first: int
    last: int
    iterations: int
    warm_ups: int
    factor: int = 4
    #: Seconds after which the program is stopped.
    timeout: float = 600
    #: Seconds of an MPI library's calls of one size, from which on it makes fewer iterations; 0: none.
    limit: float = 0
    #: Whether cinch compares results with exact ones in the first turn, where a wrong one fails.
    check: bool = False

    def options(self):
        return ["-b", str(self.first), "-e", str(self.last), "-f", str(self.factor),
                "-n", str(self.iterations), "-w", str(self.warm_ups)]


@dataclasses.dataclass
class Outcome:
    """Microseconds by size, why sizes are missing, and MiB of a rank by proportional set size."""

    times: dict
    failure: str | None = None
    memory: float | None = None


class LineTrip:
    """Nanoseconds that a cache line takes between the first two cores of the process and back. The times of all sides
    depend on it."""

    def __init__(self):
        self.program = baseline.ROOT / "target" / "mpi" / "line_trip"
        self.cores = [str(core) for core in sorted(os.sched_getaffinity(0))[:2]]

    def build(self):
        self.program.parent.mkdir(parents=True, exist_ok=True)
        source = SOURCE.with_name("line_trip.c")
        subprocess.run(["cc", "-O2", "-Wall", "-Wextra", "-pthread", "-o", str(self.program), str(source)], check=True)

    def measure(self):
        """Returns the nanoseconds; None with one core, or where threads cannot be bound."""
        if len(self.cores) < 2:
            return None
        done = subprocess.run([str(self.program), *self.cores], capture_output=True, text=True)
        return int(done.stdout) if done.returncode == 0 else None


class Mpi:
    """An MPI library and its build of the benchmark program."""

    def __init__(self, name, suffix, packages, mark):
        self.name, self.suffix, self.packages, self.mark = name, suffix, packages, mark
        self.program = baseline.ROOT / "target" / "mpi" / f"collectives_{suffix}"
        self.launcher = self.version = None

    def build(self):
        """Builds the program; returns why it cannot, or None."""
        # Debian adds the library to the names; elsewhere the library may have the plain names.
        for ending in (f".{self.suffix}", ""):
            compiler, launcher = f"mpicc{ending}", f"mpirun{ending}"
            if not shutil.which(compiler) or not shutil.which(launcher):
                continue
            text = subprocess.run([launcher, "--version"], capture_output=True, text=True).stdout
            if self.mark in text:
                break
        else:
            return f"no mpicc and mpirun of it; on Debian and Ubuntu: apt-get install {self.packages}"
        self.launcher = launcher
        self.version = f"{self.name} {text.splitlines()[self.version_line].split()[-1]}"
        self.program.parent.mkdir(parents=True, exist_ok=True)
        command = [compiler, "-O3", "-Wall", "-Wextra", "-o", str(self.program), str(SOURCE)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            sys.exit(f"failed: {shlex.join(command)}\n{done.stderr}")
        return None

    def command(self, job):
        arguments = [str(self.program), job.collective, *job.options(), "-t", str(job.limit)]
        return [self.launcher, *self.placement(job.ranks), "-np", str(job.ranks), *arguments]

    def measure(self, job, with_memory):
        text, failure, memory = run(self.command(job), job, self.program, with_memory)
        return Outcome(times_of(text, lambda row: row["time_us"]), failure, memory)


class OpenMpi(Mpi):
    """Open MPI. With more ranks than cores its waits yield the core."""

    version_line = 0

    def __init__(self):
        super().__init__("Open MPI", "openmpi", "openmpi-bin libopenmpi-dev", "Open MPI")

    def placement(self, ranks):
        if ranks <= len(os.sched_getaffinity(0)):
            return ["--allow-run-as-root", "--bind-to", "core"]
        return ["--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "--mca", "mpi_yield_when_idle", "1"]


class Mpich(Mpi):
    """MPICH. Its waits with the device ch4 never yield the core: version 4.0.2 makes no call of sched_yield,
    whatever MPIR_CVAR_POLLS_BEFORE_YIELD is."""

    version_line = 1

    def __init__(self):
        super().__init__("MPICH", "mpich", "mpich libmpich-dev", "HYDRA")

    def placement(self, ranks):
        return ["-bind-to", "core"] if ranks <= len(os.sched_getaffinity(0)) else []


class Cinch:
    """The tool of this project."""

    name = "cinch"

    def build(self):
        baseline.build()

    def measure(self, job, with_memory):
        with tempfile.NamedTemporaryFile(suffix=".json") as out:
            command = [str(baseline.CINCH), "bench", job.collective, "--ranks", str(job.ranks), *job.options(),
                       "-c", str(int(job.check)), "-d", "f32", "--transport", "shm", "--codec", "raw",
                       "--json", out.name]
            if with_memory:
                command += ["--time-limit", str(job.limit)]
            _, failure, memory = run(command, job, baseline.CINCH, with_memory)
            text = pathlib.Path(out.name).read_text(encoding="utf-8")
        # MPI_Bcast has one buffer, as cinch's broadcast in place.
        place = "in_place" if job.collective == "broadcast" else "out_of_place"
        return Outcome(times_of(text, lambda row: row[place]["time_us"]), failure, memory)


def times_of(text, microseconds):
    """Returns microseconds by size from rows of JSON; a program that was stopped may end in a part of a row."""
    rows = [json.loads(line) for line in text.splitlines() if line.startswith("{") and line.endswith("}")]
    return {row["size"]: microseconds(row) for row in rows}


def descendants(pid):
    """Returns the process and all processes below it."""
    found = [pid]
    for parent in found:
        try:
            for task in os.listdir(f"/proc/{parent}/task"):
                children = pathlib.Path(f"/proc/{parent}/task/{task}/children").read_text(encoding="ascii")
                found += map(int, children.split())
        except OSError:
            pass  # the process has ended
    return found


def memory_of_ranks(pids, program):
    """Returns the mean MiB of the processes that run the program, without the first process, which starts
    them: shared pages count in proportion (PSS). None if there is none."""
    sizes = []
    for pid in pids[1:]:
        try:
            if os.path.samefile(os.readlink(f"/proc/{pid}/exe"), program):
                lines = pathlib.Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines()
                sizes += [int(line.split()[1]) / 1024 for line in lines if line.startswith("Pss:")]
        except OSError:
            pass  # the process has ended
    return statistics.mean(sizes) if sizes else None


def stop(process):
    """Ends a program with all its processes."""
    pids = descendants(process.pid)
    for sign, pause in ((signal.SIGTERM, 3), (signal.SIGKILL, 10)):
        for pid in pids:
            try:
                os.kill(pid, sign)
            except ProcessLookupError:
                pass
        try:
            process.wait(pause)
        except subprocess.TimeoutExpired:
            pass


def run(command, job, program, with_memory):
    """Runs a program; returns its output, why it failed or None, and the most MiB of a rank, if requested."""
    deadline, most = time.monotonic() + job.timeout, None
    with tempfile.TemporaryFile("w+", encoding="utf-8") as out, tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, stdout=out, stderr=errors)
        failure, pause = None, SAMPLE_INTERVAL if with_memory else job.timeout
        while True:
            try:
                process.wait(max(0, min(pause, deadline - time.monotonic())))
                break
            except subprocess.TimeoutExpired:
                pass
            if time.monotonic() >= deadline:
                failure = f"not finished after {job.timeout:g} s"
                stop(process)
                break
            sample = memory_of_ranks(descendants(process.pid), program) if with_memory else None
            most = max(filter(None, (most, sample)), default=None)
        out.seek(0)
        errors.seek(0)
        text = out.read()
        if failure is None and process.returncode != 0:
            # The last lines of a launcher are its frame, so that the first ones have the cause.
            lines = [line for line in (errors.read() or text).splitlines() if line.strip(" -=")]
            failure = f"exit code {process.returncode}: {' '.join(lines[:3])[:300]}"
    return text, failure, most


def alternate(sides, jobs, turns, trip, with_memory=False):
    """Runs each job on all sides by turns, and returns {size: {side: ([microseconds of each turn], MiB)}},
    {size: {side: why it has no time}} and {size: [round trips of a line before each turn]}.

    The order of the sides alternates too, so that a changing clock rate favours none. A side that fails is not
    run again for the job, whose sizes without a time of every turn count as failed. Samples of memory take time
    of the cores, so that they come from a run before the turns whose times do not count.
    """
    times, failures, trips = {}, {}, {}
    for job in jobs:
        job_trips = []
        failed, measured = {}, {side.name: {} for side in sides}
        memory = dict.fromkeys(measured)

        def measure(side, job, with_memory=False):
            if side.name in failed:
                return {}
            outcome = side.measure(job, with_memory)
            if outcome.failure:
                failed[side.name] = outcome.failure
                print(f"{side.name}, {job.collective}, {job.ranks} ranks: {outcome.failure}", flush=True)
            memory[side.name] = outcome.memory or memory[side.name]
            return outcome.times

        if with_memory:
            longer = dataclasses.replace(job, iterations=10 * job.iterations, limit=SAMPLED_SECONDS, check=False)
            for side in sides:
                measure(side, longer, True)
        for turn in range(turns):
            job_trips.append(trip.measure())
            now = dataclasses.replace(job, check=job.check and turn == 0)
            for side in sides if turn % 2 == 0 else sides[::-1]:
                for size, microseconds in measure(side, now).items():
                    measured[side.name].setdefault(size, []).append(microseconds)
        size = job.first
        while size <= job.last:
            times[size], failures[size], trips[size] = {}, {}, job_trips
            for name, by_size in measured.items():
                if len(by_size.get(size, [])) == turns:
                    times[size][name] = (by_size[size], memory[name])
                else:
                    failures[size][name] = failed.get(name, "no result of this size")
            size *= job.factor
    return times, failures, trips


def row(collective, ranks, size, measured, peers, goal):
    """Returns the row of one size: times, ratios of the peers' times to cinch's, and the least of these, which
    is that to the better peer, beside the goal. `measured` has the times, failures and round trips of the size."""
    times, failures, trips = measured
    found = {"collective": collective, "ranks": ranks, "size": size, "dtype": "f32", "codec": "raw"}
    cinch, cinch_memory = times.get("cinch", ([], None))
    for peer in peers:
        entry = {"version": peer.version}
        if peer.name in failures:
            entry["failed"] = failures[peer.name]
        else:
            values, memory = times[peer.name]
            entry |= {"us": round(statistics.median(values), 3), "turns": len(values)}
            if memory:
                entry["mib"] = round(memory, 2)
            if cinch:
                ratios = [theirs / ours for theirs, ours in zip(values, cinch)]
                entry |= {"ratio": round(statistics.median(ratios), 3), "ratio_min": round(min(ratios), 3),
                          "ratio_max": round(max(ratios), 3)}
        found.setdefault("peers", {})[peer.name] = entry
    if cinch:
        found["cinch_us"] = round(statistics.median(cinch), 3)
    if None not in trips:
        found["line_trip_ns"] = {"median": round(statistics.median(trips)), "min": min(trips), "max": max(trips)}
    if cinch_memory:
        found["cinch_mib"] = round(cinch_memory, 2)
    if "cinch" in failures:
        found["failed"] = failures["cinch"]
    compared = {name: entry["ratio"] for name, entry in found["peers"].items() if "ratio" in entry}
    if compared:
        found["better"] = min(compared, key=compared.get)
        found["ratio"] = compared[found["better"]]
    if goal is not None:
        # Peers that all fail leave nothing to compare with; a failure of cinch misses the goal.
        found |= {"goal": goal, "met": found["ratio"] >= goal if compared else "cinch" not in failures}
    return found


def summary(rows, bound):
    """Returns lines with the median ratio below `bound` bytes and from there on, for each number of ranks."""
    lines = [f"median ratio below {baseline.size_name(bound)} and from there on"]
    for ranks in sorted({row["ranks"] for row in rows}):
        parts = [[], []]
        for row in rows:
            if row["ranks"] == ranks and "ratio" in row:
                parts[row["size"] >= bound].append(row["ratio"])
        lines.append(f"{ranks:>5} ranks: "
                     + ", ".join(f"{statistics.median(part):.2f}" if part else "-" for part in parts))
    return "\n".join(lines)


def table(rows, peers, header):
    """Prints rows; returns the number of missed goals."""
    has_memory = any("cinch_mib" in row for row in rows)
    names = [peer.name for peer in peers]
    print(f"\n{header}\n{'collective':>14} {'ranks':>5} {'size':>6} {'cinch us':>10}"
          + "".join(f" {name + ' us':>12}" for name in names)
          + ("".join(f" {name + ' MiB':>12}" for name in ["cinch", *names]) if has_memory else "")
          + "  line ns  ratio  goal")
    for row in rows:
        entries = [row["peers"][name] for name in names]
        cells = [f"{row['cinch_us']:>10.2f}" if "cinch_us" in row else f"{'failed' if 'failed' in row else '-':>10}"]
        cells += [f"{entry['us']:>12.2f}" if "us" in entry else f"{'failed':>12}" for entry in entries]
        if has_memory:
            memory = [row.get("cinch_mib"), *(entry.get("mib") for entry in entries)]
            cells += [f"{'-' if value is None else value:>12}" for value in memory]
        trip = row.get("line_trip_ns", {}).get("median", "-")
        cells += [f"{trip:>8}", f"{row['ratio']:>6.2f}" if "ratio" in row else f"{'-':>6}"]
        if "goal" in row:
            cells.append(f"{row['goal']:>5.1f} {'pass' if row['met'] else 'MISSED'}")
        print(f"{row['collective']:>14} {row['ranks']:>5} {baseline.size_name(row['size']):>6}", *cells)
    sys.stdout.flush()
    return sum(not row["met"] for row in rows if "goal" in row)
