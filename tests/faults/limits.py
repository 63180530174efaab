"""Ranks of scripts/test-faults under low limits. A rank passes with right bits, or with a sentence that has the
number of the limit or of the need."""

import dataclasses
import os
import pathlib
import re
import shutil
import tempfile

import cells
import job

CGROUPS = pathlib.Path("/sys/fs/cgroup")
MIB = 1 << 20


@dataclasses.dataclass
class Limit:
    name: str
    # Words before those of a rank.
    wrapper: list
    environment: dict
    # Pattern that an error must contain, or None if the ranks must succeed.
    sentence: str | None
    transport: str = "shm"


def limits(cgroup):
    """Returns the limits; `cgroup` is a folder, or None where none can be made."""
    # Large slots, so that memory is what lacks.
    large = {"CINCH_SLOTS": "64", "CINCH_SLOT_BYTES": str(MIB), "CINCH_BUFFER_BYTES": str(4096 * MIB)}
    found = [
        Limit("memlock of 64 KiB", ["prlimit", "--memlock=65536"], {}, None),
        Limit("64 descriptors", ["prlimit", "--nofile=64"], {}, None, "tcp"),
        Limit("64 descriptors, many sockets", ["prlimit", "--nofile=64"],
              {"CINCH_CHANNELS": "8", "CINCH_TCP_SOCKETS": "4"}, r"\b64\b.*ulimit -n", "tcp"),
        Limit("8 descriptors", ["prlimit", "--nofile=8"], {}, r"\b8\b.*ulimit -n|Too many open files", "tcp"),
        Limit("address space of 200 MiB", ["prlimit", f"--as={200 * MIB}"], large,
              r"mapping \d+ (shared )?bytes.*Cannot allocate memory"),
        Limit("files of 1 MiB", ["prlimit", f"--fsize={MIB}"], large, rf"\b{MIB} bytes.*ulimit -f"),
        Limit("full standard error", [], {"CINCH_LOG": "info"}, None),
        Limit("/dev/shm of 1 MiB", ["unshare", "-m", "sh", "-c",
                                    "mount -t tmpfs -o size=1m tmpfs /dev/shm && exec \"$@\"", "sh"], {}, None),
    ]
    if os.geteuid() == 0:
        # The number counts threads of all processes of the user. Root has no such limit.
        user = ["setpriv", "--reuid=65534", "--clear-groups"]
        found.append(Limit("4 processes and threads", [*user, "prlimit", "--nproc=4"], {},
                           r"ulimit -u.*\b4\b|\b4\b.*ulimit -u"))
    if cgroup:
        into = ["sh", "-c", f"echo $$ > {cgroup}/cgroup.procs && exec \"$@\"", "sh"]
        found.append(Limit("cgroup of 64 MiB", into, large | {"RANK_ELEMENTS": str(2 * MIB)}, r"\b67108864\b|64 MiB"))
    return found


def make_cgroup():
    """Makes a memory cgroup of 64 MiB; returns its folder, or None where that is not possible."""
    for root, name in ((CGROUPS / "memory", "memory.limit_in_bytes"), (CGROUPS, "memory.max")):
        folder = root / f"cinch-faults-{os.getpid()}"
        try:
            folder.mkdir()
            (folder / name).write_text(str(64 * MIB), encoding="ascii")
            return folder
        except OSError:
            if folder.is_dir():
                folder.rmdir()
    return None


def missing(limit):
    """Returns why this machine cannot run the ranks, or None."""
    tools = [word for word in limit.wrapper if word in ("prlimit", "unshare", "setpriv")]
    for tool in tools:
        if not shutil.which(tool):
            return f"{tool} is not installed"
    if "unshare" in tools and os.geteuid() != 0:
        return "needs root"
    return None


def check(programs, limit, seed):
    """Runs four ranks under a limit. Returns what is wrong, as text, and the sentence of the error that passes."""
    cell = cells.Cell("stderr", "id", limit.transport, "point") if limit.name == "full standard error" else None
    ran = job.Job(programs, cell, seed, environment=limit.environment, wrapper=limit.wrapper, transport=limit.transport)
    outcome = ran.run()
    if limit.sentence is None or not outcome.wrong:
        return "; ".join(outcome.wrong), "right bits"
    # Ranks may fail, with the sentence, but must not die or leave anything.
    others = [text for text in outcome.wrong if "error in phase" not in text]
    if others:
        return "; ".join(others), ""
    explained = [text for text in outcome.wrong if re.search(limit.sentence, text)]
    if not explained:
        return "no error has the number: " + "; ".join(outcome.wrong), ""
    return "", explained[0]


def run(programs, seed):
    """Checks all limits. Returns how many passed, failed and were skipped."""
    counts = {"passed": 0, "failed": 0, "skipped": 0}
    cgroup = make_cgroup()
    try:
        with tempfile.TemporaryDirectory(prefix="cinch-faults-") as folder:
            # Another user may not reach the build folder.
            copies = pathlib.Path(folder)
            copies.chmod(0o755)
            for name in ("rank", "shim.so"):
                shutil.copy(programs / name, copies)
            for limit in limits(cgroup):
                if why := missing(limit):
                    print(f"SKIPPED {limit.name}: {why}")
                    counts["skipped"] += 1
                    continue
                wrong, how = check(copies, limit, seed)
                print(f"FAILED {limit.name}: {wrong}" if wrong else f"ok {limit.name}: {how}", flush=True)
                counts["failed" if wrong else "passed"] += 1
            if cgroup is None:
                print("SKIPPED cgroup of 64 MiB: no memory cgroup can be made")
                counts["skipped"] += 1
    finally:
        if cgroup:
            cgroup.rmdir()
    return counts
