"""Runs the ranks of one cell of scripts/test-faults, and judges how they ended."""

import itertools
import os
import pathlib
import re
import signal
import socket
import struct
import subprocess
import tempfile
import time

import cells

# Settings of the ranks in seconds; with them a limit of 10 s means something.
CALL_TIMEOUT, INIT_TIMEOUT = 5, 4
# Time in seconds that ranks have from the fault, or from its end if it lasts.
LIMIT = 10
# Time that the library's threads have to end after the last call. The shim may delay them by 10 s.
END_TIMEOUT = LIMIT + INIT_TIMEOUT + 1
# Time that a stopped rank stays stopped, and time after which a cell is given up.
STOPPED, GIVE_UP = 1.5, 40
REPORT = struct.Struct(f"IIqq{len(cells.PHASES) * len(cells.CALLS)}I")


class Outcome:
    """How the ranks of a cell ended: what is wrong, how often the fault happened, and how long ranks took after it."""

    def __init__(self):
        self.wrong, self.reached, self.fired, self.seconds = [], False, 0, 0.0
        # Errors of all ranks, and the number of wrong results of exact calls: the oracle does not know what a lossy
        # codec gives.
        self.lines, self.wrong_results = [], 0


# Numbers of the ports that jobs have taken.
PORTS = itertools.count(os.getpid() * 61)


def free_port():
    """Returns a port below those that the kernel gives to other jobs' sockets."""
    limit = int(pathlib.Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="ascii").split()[0])
    for _ in range(1000):
        port = limit - 1 - next(PORTS) % (limit // 2)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
                return port
            except OSError:
                continue
    raise RuntimeError("no free port")


class Job:
    """The rank processes of one cell, in a folder of their own."""

    def __init__(self, programs, cell, seed, pinned=None, environment=None, wrapper=(), transport="tcp"):
        self.programs, self.cell, self.seed = programs, cell, seed
        self.victim, self.nth, self.span = pinned or (cell.draw(seed) if cell else (0, 0, 0))
        self.extra, self.wrapper = environment or {}, wrapper
        self.transport = cell.transport if cell else transport
        self.children, self.pipes = [], []
        self.stopped = self.resumed = self.died = 0

    def run(self):
        with tempfile.TemporaryDirectory(prefix="cinch-faults-") as folder:
            self.folder = pathlib.Path(folder)
            try:
                self.start()
                hung = self.wait()
                return self.judge(hung)
            finally:
                for child in self.children:
                    if child.poll() is None:
                        child.kill()
                        child.wait()
                for pipe in self.pipes:
                    os.close(pipe)

    def start(self):
        by_environment = self.cell is not None and self.cell.by_environment()
        self.folder.chmod(0o777)
        shared = {"CINCH_TIMEOUT": str(CALL_TIMEOUT), "CINCH_INIT_TIMEOUT": str(INIT_TIMEOUT),
                  "CINCH_DEVICE": "host", "RANK_END_TIMEOUT": str(int(END_TIMEOUT * 1000)),
                  "LD_PRELOAD": str(self.programs / "shim.so")}
        if by_environment:
            secret = self.folder / "secret"
            secret.write_text("0123456789abcdef" * 4 + "\n", encoding="utf-8")
            secret.chmod(0o600)
            shared |= {"WORLD_SIZE": str(cells.RANKS), "MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port()),
                       "CINCH_SECRET_FILE": str(secret)}
        for rank in range(cells.RANKS):
            report = self.folder / f"report{rank}"
            report.write_bytes(bytes(REPORT.size))
            report.chmod(0o666)
            environment = {key: value for key, value in os.environ.items() if not key.startswith("CINCH_")}
            environment |= shared | self.extra | {"FAULT_REPORT": str(report)}
            if by_environment:
                environment |= {"RANK": str(rank), "FAULT_THREADS": "1" if rank == 0 else "0"}
            if self.cell and self.cell.ending == "flipped":
                environment["RANK_GOES_ON"] = "1"
            if spec := self.spec(rank):
                environment["FAULT_SPEC"] = spec
            if self.cell and self.cell.call == "write":
                environment |= {"CINCH_LOG": "info", "CINCH_LOG_FILE": str(self.folder / f"log{rank}")}
            words = [*self.wrapper, self.programs / "rank", str(rank), str(cells.RANKS),
                     "env" if by_environment else str(self.folder / "id"), self.transport, str(self.seed)]
            with open(self.folder / f"out{rank}", "wb") as out:
                self.children.append(subprocess.Popen(
                    words, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=self.stderr(rank, environment),
                    start_new_session=True))
        for pipe in self.pipes[1::2]:
            os.close(pipe)
        self.pipes = self.pipes[::2]

    def stderr(self, rank, environment):
        """Returns the standard error of a rank: a file, or for the fault `stderr` a pipe that nobody reads."""
        if not self.cell or not self.cell.fault.startswith("stderr"):
            return open(self.folder / f"err{rank}", "wb")
        environment["CINCH_LOG"] = "info"
        self.pipes += os.pipe()
        return self.pipes[-1]

    def spec(self, rank):
        if not self.cell:
            return None
        fault, phase = self.cell.fault, cells.PHASES.index(self.cell.phase)
        if rank != self.victim:
            # All ranks write to a full pipe while one of them dies.
            return f"stderr {phase} 0 1 1 0" if fault.startswith("stderr") else None
        return f"{fault} {phase} {cells.CALLS.index(self.cell.call)} {self.nth} {self.span} {self.seed}"

    def wait(self):
        """Waits for all ranks. Returns the ranks that hung."""
        begin = time.monotonic()
        until = begin + GIVE_UP
        while time.monotonic() < until:
            running = [rank for rank, child in enumerate(self.children) if child.poll() is None]
            if self.victim not in running:
                self.died = self.died or time.monotonic()
            if not running:
                return []
            if self.cell and self.cell.fault == "stop" and not self.resumed:
                self.resume()
            if self.cell is not None and self.overdue(running):
                return running
            time.sleep(0.02)
        return [rank for rank, child in enumerate(self.children) if child.poll() is None]

    def resume(self):
        """Lets the victim continue when it has been stopped for long enough."""
        child, now = self.children[self.victim], time.monotonic()
        try:
            stat = pathlib.Path(f"/proc/{child.pid}/stat").read_text(encoding="utf-8")
        except OSError:
            return
        if stat.rsplit(")", 1)[1].split()[0] == "T":
            self.stopped = self.stopped or now
        if self.stopped and now - self.stopped >= STOPPED:
            child.send_signal(signal.SIGCONT)
            self.resumed = now

    def overdue(self, running):
        """Returns whether a rank has not ended its calls in time after the fault."""
        fired, _, last, _ = self.report(self.victim)
        since = max(last / 1e9, self.resumed)
        if not fired or self.stopped and not self.resumed or self.cell.fault in ("eintr", "short"):
            return False
        if self.cell.fault == "delay10" and time.monotonic() < since + 10:
            return False
        unfinished = [rank for rank in running if "end" not in self.lines(rank)]
        return bool(unfinished) and time.monotonic() > since + LIMIT + 2

    def report(self, rank):
        """Returns from the report of a rank: times that the fault happened, first and last time, calls by phase."""
        _, fired, first, last, *seen = REPORT.unpack((self.folder / f"report{rank}").read_bytes())
        return fired, first, last, seen

    def lines(self, rank):
        """Returns the lines of a rank as a dictionary: the first word, and the rest of the first such line; the last
        phase."""
        text = (self.folder / f"out{rank}").read_text(encoding="utf-8", errors="replace")
        found = {}
        for line in text.splitlines():
            word, _, rest = line.partition(" ")
            found[word] = rest if word == "phase" else found.get(word, rest)
        return found

    def judge(self, hung):
        outcome = Outcome()
        fired, first, last, _ = self.report(self.victim)
        # The kernel's timer leaves no report.
        timed = self.cell is not None and self.cell.call == "timer"
        if timed and self.children[self.victim].returncode == -signal.SIGKILL:
            last = self.died * 1e9
        outcome.reached = bool(self.cell is None or fired or timed and (
            self.stopped or self.children[self.victim].returncode == -signal.SIGKILL))
        outcome.fired = fired
        since = max(last / 1e9, self.resumed)
        for rank, child in enumerate(self.children):
            text = (self.folder / f"out{rank}").read_text(encoding="utf-8", errors="replace")
            outcome.wrong_results += sum(line.startswith("wrong ") and " of f32 by " not in line for line in text.splitlines())
            lines = self.lines(rank)
            found = self.error_of(rank, lines, child.returncode, rank in hung)
            if found:
                outcome.wrong.append(f"rank {rank}: {found}")
            if "end" in lines and since:
                outcome.seconds = max(outcome.seconds, int(lines["end"]) / 1e9 - since)
            if "error" in lines:
                outcome.lines.append(f"rank {rank}: error {lines['error']}")
        if outcome.seconds > LIMIT:
            outcome.wrong.append(f"the last rank returned {outcome.seconds:.1f} s after the fault")
        return outcome

    def error_of(self, rank, lines, code, is_hung):
        """Returns what is wrong with the end of a rank, or None."""
        cell = self.cell
        is_victim = cell is not None and rank == self.victim
        if is_hung:
            return f"hangs in phase {lines.get('phase')}"
        if is_victim and cell.ending == "death" and "end" not in lines:
            return None if cells.is_death(cell, code) else f"ended with {code}"
        if code != 0 or "end" not in lines:
            return f"ended with {code} in phase {lines.get('phase')}: {self.last_words(rank)}"
        if "wrong" in lines and (cell is None or cell.ending != "flipped"):
            return f"wrong bits: {lines['wrong']}"
        if "error" in lines:
            phase, number, text = lines["error"].split(" ", 2)
            pids = [child.pid for child in self.children]
            if cell is None or not cells.is_explained(cell, self.victim, pids, rank, int(number), text):
                return f"error in phase {phase}, code {number}: {text}"
        before, after = lines.get("left", " | ").split(" | ")
        if before != after:
            return f"held {before} at its start and {after} at its end"
        try:
            os.killpg(self.children[rank].pid, 0)
        except ProcessLookupError:
            return None
        return "a process of its session is left"

    def last_words(self, rank):
        path = self.folder / f"err{rank}"
        text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
        return re.sub(r"\s+", " ", text)[-500:]
