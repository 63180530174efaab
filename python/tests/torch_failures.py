"""How process groups of backend `cinch` fail and end, on CPU tensors. Takes a minute.

python -m cinch run -n 4 python/tests/torch_failures.py [CHECK]   all checks, or one
python python/tests/torch_failures.py killed   ends a rank while the others wait for it in backward(): they get an error
                                               that names it, in plain DDP and with the hook
"""

import datetime
import os
import pathlib
import subprocess
import sys
import tempfile
import threading
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import cinch
import cinch.torch
from cinch.torch import calls
from torch_backend import join


def require(condition, text):
    """Ends the process unless a condition holds."""
    if not condition:
        raise SystemExit(f"rank {dist.get_rank()}: {text}")


def raises(kind, part, function, *arguments):
    """Requires an error of a kind, with a part of its text; returns the seconds until it came."""
    started = time.monotonic()
    try:
        function(*arguments)
    except kind as error:
        require(part in str(error), f"the text lacks {part!r}: {error}")
        return time.monotonic() - started
    require(False, f"{function} raised no {kind}")


def new_group():
    """Returns a group of all ranks whose communicators no other check uses."""
    return dist.new_group(timeout=datetime.timedelta(seconds=60))


def timeouts():
    """The positional timeout of a call, and one that the group got later, end calls."""
    rank = dist.get_rank()
    for function in ("allreduce", "broadcast"):
        group = new_group()
        dist.all_reduce(torch.ones(1), group=group)
        if rank == 0:
            operator = dist.ReduceOp.SUM if function == "allreduce" else 1
            work = getattr(group, function)([torch.ones(1)], operator, datetime.timedelta(seconds=0.3))
            spent = raises(cinch.TimeoutError, "did not end within 0.3 s", work.wait)
            require(0.2 < spent < 10, f"{function} ended after {spent} s")
        dist.barrier()
        started = time.monotonic()
        dist.destroy_process_group(group)
        spent = time.monotonic() - started
        require(spent < 5, f"the end of a group that has failed took {spent} s")
    group = new_group()
    dist.all_reduce(torch.ones(1), group=group)
    group.set_timeout(datetime.timedelta(seconds=0.4))
    if rank == 0:
        work = group.allreduce([torch.ones(1)])
        spent = raises(cinch.TimeoutError, "did not end within 0.4 s", work.wait)
        require(0.3 < spent < 10, f"the call ended after {spent} s")
        # A longer timeout of one call does not exceed the group's.
        work = new_group_alone().allreduce([torch.ones(1)], dist.ReduceOp.SUM, datetime.timedelta(seconds=50))
        raises(cinch.TimeoutError, "within 0.5 s", work.wait)
    dist.barrier()


def new_group_alone():
    """Returns rank 1 of a group whose rank 0 never comes, with a timeout that was made shorter."""
    group = cinch.torch.CinchProcessGroup(dist.HashStore(), 1, 2, 60.0)
    group.set_timeout(datetime.timedelta(seconds=0.5))
    return group


def queued_calls_end_at_shutdown():
    """A first call that is queued when its rank destroys the group ends, although other ranks come later."""
    group, rank = new_group(), dist.get_rank()
    tensor = torch.ones(3)
    if rank == 0:
        time.sleep(1)
        dist.all_reduce(tensor, group=group)
        work = None
    else:
        work = dist.all_reduce(tensor, group=group, async_op=True)
    dist.destroy_process_group(group)
    if work is not None:
        work.wait()
    require(tensor.tolist() == [dist.get_world_size()] * 3, f"{tensor}")


def queued_sends_end_at_shutdown():
    """A first send that is queued when its rank destroys the group arrives at a later receive."""
    group, rank = new_group(), dist.get_rank()
    if rank == 1:
        dist.isend(torch.full((3,), 7.0), 0, group=group)
    if rank == 0:
        time.sleep(1)
        received = torch.zeros(3)
        dist.recv(received, 1, group=group)
        require(received.tolist() == [7.0] * 3, f"{received}")
    dist.destroy_process_group(group)
    dist.barrier()


def late_ranks_get_what_was_sent():
    """A rank that comes after the others have destroyed the group gets the data that they gave."""
    group, rank = new_group(), dist.get_rank()
    tensor = torch.full((1000,), float(rank))
    dist.all_reduce(torch.ones(1), group=group)
    calls.SHUTDOWN_TIMEOUT, before = 0.5, calls.SHUTDOWN_TIMEOUT
    is_late = rank == dist.get_world_size() - 1
    if is_late:
        time.sleep(3)
    started = time.monotonic()
    dist.broadcast(tensor, 0, group=group)
    dist.destroy_process_group(group)
    spent = time.monotonic() - started
    calls.SHUTDOWN_TIMEOUT = before
    require(tensor.count_nonzero() == 0, f"{tensor}")
    require(is_late or spent < 2.5, f"the group's end took {spent} s")
    dist.barrier()


def receives_from_any_source_end():
    """After a receive from any source was served, no thread looks for the other sources."""
    group, rank = new_group(), dist.get_rank()
    if rank == 1:
        dist.send(torch.full((2,), 5.0), 0, group=group)
    if rank == 0:
        received = torch.zeros(2)
        require(dist.recv(received, group=group) == 1, "the message came from another rank")
        time.sleep(0.5)
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        frames = {names.get(thread, ""): frame for thread, frame in sys._current_frames().items()}
        busy = [name for name, frame in frames.items() if name.startswith("cinch host") and is_searching(frame)]
        require(not busy, f"threads still search: {busy}")
    dist.barrier()
    if rank > 1:
        dist.send(torch.full((2,), float(rank)), 0, group=group)
    if rank == 0:
        # Links that gave up their search serve later receives.
        sources = {dist.recv(torch.zeros(2), group=group) for _ in range(2, dist.get_world_size())}
        require(sources == set(range(2, dist.get_world_size())), f"{sources}")
    dist.barrier()
    dist.destroy_process_group(group)


def is_searching(frame):
    """Whether a thread waits for a key of the store."""
    while frame is not None:
        if frame.f_code.co_name == "wait_for":
            return True
        frame = frame.f_back
    return False


CHECKS = (
    queued_calls_end_at_shutdown,
    queued_sends_end_at_shutdown,
    late_ranks_get_what_was_sent,
    receives_from_any_source_end,
    timeouts,
)


def survivor(hook):
    """Trains until an error comes, and prints it."""
    model = torch.nn.Sequential(torch.nn.Linear(100, 100), torch.nn.Linear(100, 100))
    network = DistributedDataParallel(model)
    if hook == "hook":
        network.register_comm_hook(cinch.torch.CompressionState(min_bytes=1), cinch.torch.ddp_hook)
    for _ in range(2):
        # The second step rebuilds DDP's buckets, which communicates before backward().
        network(torch.ones(4, 100)).sum().backward()
    print(f"connected {os.getpid()}", flush=True)
    if dist.get_rank() == 0:
        time.sleep(600)
    loss = network(torch.ones(4, 100)).sum()
    try:
        loss.backward()
    except RuntimeError as error:
        print(f"{type(error).__name__} in backward: {error!s}".replace("\n", " "), flush=True)
        os._exit(0)
    os._exit(1)


def killed():
    """Ends rank 0 of 3 while the others wait for it in backward(): their errors name its rank and process."""
    store = pathlib.Path(tempfile.gettempdir()) / f"cinch-store-{os.getpid()}"
    environment = {**os.environ, "WORLD_SIZE": "3", "CINCH_TEST_STORE": str(store)}
    for hook in ("plain", "hook"):
        command = [sys.executable, __file__, "survivor", hook]
        ranks = [
            subprocess.Popen(command, env={**environment, "RANK": str(rank)}, stdout=subprocess.PIPE, text=True)
            for rank in range(3)
        ]
        try:
            pids = [process.stdout.readline().split()[1] for process in ranks]
            time.sleep(1)
            ranks[0].kill()
            texts = [process.communicate(timeout=40)[0] for process in ranks[1:]]
        finally:
            for process in ranks:
                process.kill()
            store.unlink(missing_ok=True)
        for text in texts:
            assert "in backward: " in text and "rank 0 (host " in text and f"pid {pids[0]})" in text, text
        print(f"{hook}: {texts[0].strip()}")


def main():
    """Runs the part that is named, or all checks in one job."""
    part = sys.argv[1] if len(sys.argv) > 1 else "checks"
    if part == "killed":
        killed()
        return
    join()
    if part == "survivor":
        survivor(sys.argv[2])
    for check in CHECKS:
        if part in ("checks", check.__name__):
            check()
    print(f"rank {dist.get_rank()} of {dist.get_world_size()}: all failure checks passed", file=sys.stderr)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
