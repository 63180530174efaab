#!/usr/bin/env python3
"""torch.distributed over cinch's libnccl.so.2, against results computed without communication.

    torch_collectives.py --library target/release/libnccl.so [--ranks 1,2,8] [--only TEXT,...] [--list]
    torch_collectives.py --backend cinch --library target/release/libcinch.so [...]

Starts ranks as processes with the library preloaded; ranks share GPUs where there are fewer. With --backend cinch the
ranks use the Python package's backend instead of NCCL's, on CPU tensors where there is no GPU.
Prints a line for each check and at the end `N passed, N failed, N skipped`. A check passes if it
does on every rank. After one that fails, its ranks are given up and the rest runs on new ones.
"""

import argparse
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

# Longest time in seconds between the ends of two checks, including start and exit of the ranks.
# Also the longest wait for another rank within a check.
QUIET_SECONDS = 300
# Name of the last check, that all processes exit as they should.
ENDING = "the end of all processes"
CHECK_SECONDS = 120
# Timeout of torch's watchdog in the check that kills a rank.
WATCHDOG_SECONDS = 15


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--library", type=Path)
    parser.add_argument("--backend", choices=["nccl", "cinch"], default="nccl")
    parser.add_argument("--ranks", help="default: 1, 2 and the number of GPUs")
    parser.add_argument("--only", default="",
                        help="checks whose names hold one of these texts, commas between")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--rank-work", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_work:
        return work(json.loads(options.rank_work))
    try:
        import torch
    except ImportError:
        return end(0, 0, 1, "torch is not installed")
    if options.backend == "nccl":
        import torch_direct  # noqa: F401: adds its checks to the others
    from torch_checks import CHECKS

    wanted = options.only.split(",")
    names = [name for name in CHECKS if any(text in name for text in wanted)]
    if options.list:
        print("\n".join(names))
        return 0
    if options.library is None or not options.library.is_file():
        return end(0, 1, 0, "no library: --library PATH")
    gpus = torch.cuda.device_count()
    if gpus == 0 and options.backend == "nccl":
        return end(0, 0, len(names), "there is no GPU")
    print(f"torch {torch.__version__}, {gpus} GPUs, {options.library.resolve()}", flush=True)
    sizes = sorted({1, 2, gpus})
    if options.ranks:
        sizes = [int(one) for one in options.ranks.split(",")]
    passed = failed = skipped = 0
    for ranks in sizes:
        # With a device id, torch connects at once and splits subgroups from the world. Without one,
        # it connects at the first call and creates an id for each group.
        for eager in (True, False):
            world = f"{ranks} ranks, {'eager' if eager else 'lazy'}"
            left = list(names)
            while left:
                has_failed = False
                for name, verdict, text in run_world(options, ranks, gpus, eager, left[:]):
                    if name != ENDING:
                        left.remove(name)
                    print(f"{verdict:4} {world}: {name}{': ' + text if text else ''}", flush=True)
                    passed += verdict == "ok"
                    failed += verdict == "FAIL"
                    skipped += verdict == "skip"
                    has_failed |= verdict == "FAIL"
                assert has_failed or not left
        if ranks > 1:
            verdict, text = killed_rank(options, ranks, gpus)
            print(f"{verdict:4} {ranks} ranks: a killed rank ends the others: {text}", flush=True)
            passed += verdict == "ok"
            failed += verdict == "FAIL"
        else:
            print("skip 1 ranks: a killed rank ends the others: there are no others", flush=True)
            skipped += 1
    return end(passed, failed, skipped)


def end(passed, failed, skipped, why=""):
    if why:
        print(f"{'FAIL' if failed else 'skip'} {why}")
    print(f"{passed} passed, {failed} failed, {skipped} skipped")
    return int(failed > 0)


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def library_environment(options, folder):
    """Variables by which ranks find the library under test: a preloaded libnccl, or the package's libcinch."""
    if options.backend == "nccl":
        return {"LD_PRELOAD": str(options.library.resolve())}
    link = folder / "libcinch.so.0"
    if not link.exists():
        link.symlink_to(options.library.resolve())
    package = Path(__file__).resolve().parents[2] / "python"
    return {"LD_LIBRARY_PATH": str(folder), "PYTHONPATH": str(package)}


def start_ranks(options, ranks, gpus, work, folder):
    """Processes of all ranks, with the library under test and no codec."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("CINCH_CODEC")}
    shared = {
        **clean,
        **library_environment(options, folder),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(ranks),
        "CUDA_DEVICE_MAX_CONNECTIONS": clean.get("CUDA_DEVICE_MAX_CONNECTIONS", "32"),
        # All ranks compute expected results on the host at one time, so each gets a share of the
        # cores.
        "OMP_NUM_THREADS": clean.get("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // ranks))),
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    }
    started = []
    for rank in range(ranks):
        mine = {**work, "rank": rank, "ranks": ranks, "gpu": rank % gpus if gpus else None,
                "backend": options.backend, "library": str(options.library.resolve()),
                "verdicts": str(folder / f"verdicts.{rank}")}
        command = [sys.executable, str(Path(__file__).resolve()), "--rank-work", json.dumps(mine)]
        log = open(folder / f"log.{rank}", "w")
        started.append(subprocess.Popen(command, env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                                        stdout=log, stderr=subprocess.STDOUT, start_new_session=True))
    return started


def stop(started):
    for process in started:
        if process.poll() is None:
            # The process leads a session of its own, so the signal ends also every process that it
            # started.
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def tail(path, lines=6):
    text = path.read_text(errors="replace").strip().splitlines() if path.exists() else []
    return " | ".join(text[-lines:])


def run_world(options, ranks, gpus, eager, names):
    """Runs checks until one fails. Returns name, verdict and text of each, over all ranks. If ranks did
    not finish a check, its text states how they ended. After success, destroying the process groups and
    the exit of the processes must succeed, too."""
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        started = start_ranks(options, ranks, gpus, {"checks": names, "eager": eager}, folder)
        bad = None
        try:
            deadline, has_ended = time.monotonic() + QUIET_SECONDS, False
            while time.monotonic() < deadline and any(one.poll() is None for one in started):
                if not has_ended and any(one.poll() not in (None, 0) for one in started):
                    # After a failure the other ranks get 10 s to notice it and end; then they are
                    # killed.
                    deadline, has_ended = min(deadline, time.monotonic() + 10), True
                time.sleep(0.2)
                for name, verdict, text in read_verdicts(folder, ranks, names, False):
                    if not has_ended:
                        deadline = time.monotonic() + QUIET_SECONDS
                    names.remove(name)
                    bad = name if verdict == "FAIL" else bad
                    yield name, verdict, text
        finally:
            stop(started)
        for name, verdict, text in read_verdicts(folder, ranks, names, True):
            names.remove(name)
            bad = name if verdict == "FAIL" else bad
            yield name, verdict, text
        ended = [f"rank {rank} (code {one.returncode}): {tail(folder / f'log.{rank}')}"
                 for rank, one in enumerate(started) if one.returncode != 0]
        if names and not bad:
            yield names[0], "FAIL", "; ".join(ended) or f"none of its ends for {QUIET_SECONDS} s"
        elif ended and not bad:
            yield ENDING, "FAIL", "; ".join(ended)


def read_verdicts(folder, ranks, names, have_ended):
    """What is known of checks that all ranks have come through; at the end also of one that failed
    on some rank."""
    each = []
    for rank in range(ranks):
        path = folder / f"verdicts.{rank}"
        # Drops the last piece: a line that is still being written has no line end.
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        each.append({one["name"]: one for one in map(json.loads, lines)})
    verdicts = []
    for name in names:
        found = [(rank, one[name]) for rank, one in enumerate(each) if name in one]
        bad = [(rank, one) for rank, one in found if one["verdict"] == "FAIL"]
        if bad:
            if have_ended:
                verdicts.append((name, "FAIL", f"rank {bad[0][0]}: {bad[0][1]['text']}"))
            break
        if len(found) < ranks:
            break
        verdicts.append((name, found[0][1]["verdict"], found[0][1]["text"]))
    return verdicts


def killed_rank(options, ranks, gpus):
    """The last rank kills itself while the others wait for it: all must end, and not in good order."""
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        started = start_ranks(options, ranks, gpus, {"killed": ranks - 1, "eager": True}, folder)
        since = time.monotonic()
        deadline = since + WATCHDOG_SECONDS + 90
        while time.monotonic() < deadline and any(one.poll() is None for one in started):
            time.sleep(0.05)
        seconds = time.monotonic() - since
        hung = [rank for rank, one in enumerate(started) if one.poll() is None]
        stop(started)
        if hung:
            return "FAIL", f"ranks {hung} still ran after {seconds:.0f} s: {tail(folder / f'log.{hung[0]}')}"
        calm = [rank for rank, one in enumerate(started) if one.returncode == 0]
        if calm:
            return "FAIL", f"ranks {calm} ended as if nothing had happened"
        if started[-1].returncode != -signal.SIGKILL or "about to be killed" not in (
                folder / f"log.{ranks - 1}").read_text():
            return "FAIL", f"the rank did not come to be killed: {tail(folder / f'log.{ranks - 1}')}"
        return "ok", f"all ended within {seconds:.1f} s: {tail(folder / 'log.0', 1)[:200]}"


class Where(ctypes.Structure):
    _fields_ = [("file", ctypes.c_char_p), ("base", ctypes.c_void_p),
                ("symbol", ctypes.c_char_p), ("address", ctypes.c_void_p)]


def check_library(expected):
    """Every nccl name of this process must resolve to the library under test."""
    process, where = ctypes.CDLL(None), Where()
    address = ctypes.cast(process.ncclAllReduce, ctypes.c_void_p)
    assert process.dladdr(address, ctypes.byref(where))
    found = os.path.realpath(where.file.decode())
    assert found == expected, f"ncclAllReduce lies in {found}, not in {expected}"


def check_package(expected):
    """The Python package must have loaded the library under test; its import registers the backend."""
    import cinch._library
    import cinch.torch  # noqa: F401

    found = os.path.realpath(cinch._library.LIBRARY._name)
    if os.sep not in cinch._library.LIBRARY._name:
        with open("/proc/self/maps") as maps:
            found = next(line.split(None, 5)[5].strip() for line in maps if "libcinch" in line)
    assert found == expected, f"python/cinch uses {found}, not {expected}: remove python/cinch/lib"


def work(mine):
    """One rank."""
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    rank, ranks, backend = mine["rank"], mine["ranks"], mine["backend"]
    device = torch.device("cpu") if mine["gpu"] is None else torch.device("cuda", mine["gpu"])
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if backend == "nccl":
        check_library(mine["library"])
        import torch_direct  # noqa: F401
    else:
        check_package(mine["library"])
    store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), ranks, rank == 0,
                          timeout=timedelta(seconds=CHECK_SECONDS))
    killed = mine.get("killed")
    seconds = CHECK_SECONDS if killed is None else WATCHDOG_SECONDS
    dist.init_process_group(backend, store=dist.PrefixStore("torch", store), rank=rank, world_size=ranks,
                            timeout=timedelta(seconds=seconds),
                            device_id=device if mine["eager"] and device.type == "cuda" else None)
    if killed is not None:
        return be_killed(torch, dist, store, rank, killed, device)
    from torch_checks import CHECKS, Skip

    with open(mine["verdicts"], "w") as verdicts:
        for number, name in enumerate(mine["checks"]):
            verdict, text = "ok", ""
            try:
                text = CHECKS[name](rank, ranks, device) or ""
                if device.type == "cuda":
                    torch.cuda.synchronize()
            except Skip as why:
                verdict, text = "skip", str(why)
            except Exception as error:
                verdict = "FAIL"
                place = traceback.extract_tb(error.__traceback__)[-1]
                text = f"{type(error).__name__} in line {place.lineno}: {str(error)[:400]}"
            verdicts.write(json.dumps({"name": name, "verdict": verdict, "text": text}) + "\n")
            verdicts.flush()
            # Ranks exchange verdicts over the store, which does not depend on the library under
            # test.
            store.set(f"verdict/{number}/{rank}", verdict)
            all_verdicts = [store.get(f"verdict/{number}/{one}").decode() for one in range(ranks)]
            if "FAIL" in all_verdicts:
                # Ranks may be in different calls, so an orderly exit could hang.
                os._exit(1)
    dist.destroy_process_group()
    # Rank 0 serves the store, so it exits last.
    store.set(f"left/{rank}", "1")
    if rank == 0:
        for one in range(ranks):
            store.get(f"left/{one}")
    return 0


def be_killed(torch, dist, store, rank, killed, device):
    data = torch.ones(1 << 20, device=device)
    dist.all_reduce(data)
    finish = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    finish()
    if rank == killed:
        store.set("killed", "now")
        print("about to be killed", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    store.get("killed")
    for _ in range(1000):
        dist.all_reduce(data)
        finish()
    return 0


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    sys.exit(main())
