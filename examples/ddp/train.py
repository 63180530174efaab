#!/usr/bin/env python3
"""Trains one model with DistributedDataParallel, from several seeds; started by torchrun.

    torchrun --standalone --nproc-per-node 4 examples/ddp/train.py --task digits --seeds 5

The script does not use cinch: preload cinch's libnccl.so.2 (LD_PRELOAD, or `cinch run --preload`), and
select a codec by CINCH_CODEC. With fewer GPUs than ranks the ranks share GPUs, which NCCL rejects.
Rank 0 writes results as JSON to --result. The run fails if replicas ever differ.
"""

import argparse
import ctypes
import hashlib
import json
import os
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tasks import TASKS


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--task", choices=TASKS, default="digits")
    parser.add_argument("--seeds", type=int, default=5, help="number of seeds, from 1")
    parser.add_argument("--epochs", type=int, help="default: the task's")
    parser.add_argument("--digits", help="a file like examples/train/digits.bin, or `sklearn`")
    parser.add_argument("--backend", choices=["nccl", "gloo"], default="nccl",
                        help="gloo tries this script without a GPU and without cinch")
    parser.add_argument("--result", help="file for the results")
    options = parser.parse_args()
    device = place(options.backend)
    dist.init_process_group(options.backend, device_id=device if device.type == "cuda" else None)
    task = TASKS[options.task](options.digits)
    epochs = options.epochs or task.epochs
    runs = []
    for seed in range(1, options.seeds + 1):
        runs.append(train(task, seed, epochs, device))
        if dist.get_rank() == 0:
            last = runs[-1]
            print(f"{options.task} seed {seed}: test error {100 * last['error']:.2f} %, loss "
                  f"{last['loss']:.4f}, {last['steps_per_second']:.1f} steps/s, replicas "
                  f"{last['hashes'][-1][:12]}", flush=True)
    library = nccl_file() if options.backend == "nccl" else "none"
    dist.destroy_process_group()
    if options.result and int(os.environ["RANK"]) == 0:
        with open(options.result, "w") as file:
            json.dump({"task": options.task, "data": task.source, "ranks": int(os.environ["WORLD_SIZE"]),
                       "library": library, "runs": runs}, file)
    return 0


def place(backend):
    if backend == "gloo":
        torch.set_num_threads(1)
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def train(task, seed, epochs, device):
    """Trains once. Data, order and initial weights depend on the seed only, not on the NCCL library."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(seed)
    inner = task.model().to(device)
    model = DistributedDataParallel(inner, device_ids=[device.index] if device.type == "cuda" else None)
    optimizer = task.optimizer(model.parameters())
    generator = torch.Generator().manual_seed(seed)
    training, testing = task.split(generator)
    share = task.batch // ranks
    assert share * ranks == task.batch, f"{ranks} ranks cannot share a batch of {task.batch}"
    hashes, steps, since = [], 0, time.monotonic()
    for _ in range(epochs):
        order = training[torch.randperm(len(training), generator=generator)]
        for start in range(0, len(order) - task.batch + 1, task.batch):
            mine = order[start + rank * share:start + (rank + 1) * share]
            inputs, target = (one.to(device) for one in task.batch_of(mine))
            optimizer.zero_grad()
            loss = task.loss(model(inputs), target)
            loss.backward()
            optimizer.step()
            steps += 1
        hashes.append(same_everywhere(inner))
    seconds = time.monotonic() - since
    return {"seed": seed, "error": error_of(inner, task, testing, device), "loss": loss.item(),
            "hashes": hashes, "steps": steps, "steps_per_second": steps / seconds}


def same_everywhere(model):
    """Returns the hash of the weights, which must be equal on all ranks."""
    raw = b"".join(one.detach().cpu().contiguous().numpy().tobytes() for one in model.parameters())
    mine = hashlib.sha256(raw).hexdigest()
    everybody = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, mine)
    if len(set(everybody)) != 1:
        sys.exit(f"replicas differ: {[one[:12] for one in everybody]}")
    return mine


@torch.no_grad()
def error_of(model, task, indices, device):
    model.eval()
    wrong = total = 0
    for part in indices.split(256):
        inputs, target = (one.to(device) for one in task.batch_of(part))
        wrong += (model(inputs).argmax(-1) != target).sum().item()
        total += target.numel()
    return wrong / total


def nccl_file():
    """Returns the file from which this process loaded the functions of NCCL."""

    class Where(ctypes.Structure):
        _fields_ = [("file", ctypes.c_char_p), ("base", ctypes.c_void_p),
                    ("symbol", ctypes.c_char_p), ("address", ctypes.c_void_p)]

    process, where = ctypes.CDLL(None), Where()
    try:
        address = ctypes.cast(process.ncclAllReduce, ctypes.c_void_p)
    except AttributeError:
        return "libtorch itself"
    process.dladdr(address, ctypes.byref(where))
    return os.path.realpath(where.file.decode())


if __name__ == "__main__":
    sys.exit(main())
