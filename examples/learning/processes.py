#!/usr/bin/env python3
"""Proves the shortcut of one process: real processes with torch.distributed end with the weights of the batched form.

    python3 examples/learning/processes.py [--tool FILE]

Starts two processes, which train the task digits of the short run with the backend `cinch` of torch.distributed on CPU
tensors, or with cinch's package where a codec keeps feedback. Then trains three seeds at once in this process, with two
ranks, and compares the weights of the second seed bit for bit. Ends with the counts.
"""

import argparse
import os
import pathlib
import socket
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
PYTHON = HERE.parent.parent / "python"
sys.path[:0] = [str(HERE), str(PYTHON)]

import numpy  # noqa: E402 - behind the path

RANKS, SEEDS, COMPARED, STEPS = 2, (1, 2, 3), 1, 40
#: Codec and feedback; feedback is a setting of a call, which torch.distributed has not.
CASES = (("raw", False), ("dynamic8", False), ("linear8", False), ("onebit", True), ("minmax4", True))


def own_part(codec: str, feedback: bool, out: str) -> None:
    """Trains as one process of two, and saves the weights."""
    import cases
    import loops
    from ranks import BLOCK

    task = cases.small_tasks()["digits"]
    seed = SEEDS[COMPARED]
    if feedback:
        import cinch

        comm = cinch.init(timeout=120)
        rank = comm.rank

        def average(values: numpy.ndarray) -> numpy.ndarray:
            return comm.all_reduce(values, op="avg", codec=codec, algorithm="direct", feedback=1)
    else:
        import cinch.torch  # noqa: F401 - registers the backend
        import torch
        import torch.distributed as dist

        dist.init_process_group("cinch")
        rank = dist.get_rank()

        def average(values: numpy.ndarray) -> numpy.ndarray:
            tensor = torch.from_numpy(values)
            dist.all_reduce(tensor, op=dist.ReduceOp.AVG)
            return tensor.numpy()

    net, size = task.net, task.net.size
    width = -(-size // (RANKS * BLOCK)) * BLOCK * RANKS
    master = net.start(seed)[None]
    speed = master * 0
    steps = task.steps(RANKS)
    for step, (inputs, labels) in enumerate(loops.batches(task, [seed], RANKS)):
        if step == STEPS:
            break
        _, gradients = net.gradients(master, inputs[:, rank : rank + 1], labels[:, rank : rank + 1])
        padded = numpy.zeros(width, numpy.float32)
        padded[:size] = gradients[0, 0]
        speed = loops.MOMENTUM * speed + average(padded)[None, :size]
        master = master - loops.rate_at(step, steps, task.rate) * speed
    if rank == 0:
        numpy.save(out, master[0])
    if feedback:
        comm.finalize()
    else:
        dist.destroy_process_group()


def batched(ranks, codec: str, feedback: bool) -> numpy.ndarray:
    """Returns the compared seed's weights of the form that trains all seeds and ranks in one process."""
    import cases
    import loops
    from ranks import Exchange

    task, exchange = cases.small_tasks()["digits"], Exchange(ranks, codec, feedback)
    master = numpy.stack([task.net.start(seed) for seed in SEEDS])
    speed = master * 0
    steps = task.steps(RANKS)
    for step, (inputs, labels) in enumerate(loops.batches(task, SEEDS, RANKS)):
        if step == STEPS:
            break
        _, gradients = task.net.gradients(master, inputs, labels)
        speed = loops.MOMENTUM * speed + exchange.mean(gradients)
        master = master - loops.rate_at(step, steps, task.rate) * speed
    return master[COMPARED]


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def main() -> int:
    """Compares all cases."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--tool", default=PYTHON / "cinch" / "bin" / "cinch", help="cinch's tool, which starts ranks")
    parser.add_argument("--part", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        own_part(options.part[0], options.part[1] == "True", options.part[2])
        return 0
    from ranks import Ranks

    ranks, failed = Ranks(RANKS), 0
    for codec, feedback in CASES:
        with tempfile.TemporaryDirectory() as folder:
            out = os.path.join(folder, "weights.npy")
            environment = {
                **os.environ,
                "PYTHONPATH": str(PYTHON),
                "CINCH_CODEC": codec,
                "CINCH_CODEC_MIN_BYTES": "1",
                "CINCH_ALGO": "direct",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(_free_port()),
            }
            command = [options.tool, "run", "-n", str(RANKS), "--", sys.executable, __file__]
            ran = subprocess.run(
                [*command, "--part", codec, str(feedback), out], env=environment, timeout=300, check=False
            )
            is_equal = ran.returncode == 0 and batched(ranks, codec, feedback).tobytes() == numpy.load(out).tobytes()
        print(f"{'passed' if is_equal else 'FAILED'} {codec}{', with feedback' if feedback else ''}", flush=True)
        failed += not is_equal
    ranks.close()
    print(f"{len(CASES) - failed} passed, {failed} failed")
    return failed


if __name__ == "__main__":
    sys.exit(main())
