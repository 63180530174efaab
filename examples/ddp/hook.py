#!/usr/bin/env python3
"""Trains with DistributedDataParallel on CPUs: gloo, backend cinch, and cinch's compression hook.

    torchrun --nproc-per-node 2 examples/ddp/hook.py --variant hook
    examples/ddp/hook.py --measure [--rate 100mbit] [--result FILE]

--measure starts 2 ranks in network namespaces whose link has the rate, once for each variant, and prints steps a second
of a model with 10 million parameters. It needs root, iproute2, and torch in this Python. Each variant starts from equal
weights and data; the last loss shows that compressed gradients train as well.
"""

import argparse
import contextlib
import json
import pathlib
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
VARIANTS = ("gloo", "cinch", "hook")
#: Steps before the measured ones, in which DDP rebuilds its buckets.
WARM_UP = 2
#: Samples of each rank and step.
BATCH = 4


def model():
    """Returns a perceptron of 10 million parameters."""
    import torch

    torch.manual_seed(1)
    sizes = (512, 2560, 2560, 818)
    layers = []
    for inputs, outputs in zip(sizes, sizes[1:]):
        layers += [torch.nn.Linear(inputs, outputs), torch.nn.ReLU()]
    return torch.nn.Sequential(*layers[:-1])


def train(variant, steps):
    """Trains as one rank; prints the result on rank 0."""
    import torch
    import torch.distributed as dist

    import cinch.torch

    torch.set_num_threads(1)
    dist.init_process_group("gloo" if variant == "gloo" else "cinch")
    network = torch.nn.parallel.DistributedDataParallel(model())
    state = None
    if variant == "hook":
        state = cinch.torch.CompressionState(codec="linear8", feedback=True)
        network.register_comm_hook(state, cinch.torch.ddp_hook)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.2)
    generator = torch.Generator().manual_seed(dist.get_rank())
    # Small batches, so that the link decides and not the cores.
    inputs = torch.randn(BATCH, 512, generator=generator)
    labels = torch.randint(0, 818, (BATCH,), generator=generator)
    began = 0.0
    for step in range(WARM_UP + steps):
        if step == WARM_UP:
            dist.barrier()
            began = time.monotonic()
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(network(inputs), labels)
        loss.backward()
        optimizer.step()
    rate = steps / (time.monotonic() - began)
    if dist.get_rank() == 0:
        parameters = sum(one.numel() for one in network.parameters())
        result = {"variant": variant, "parameters": parameters, "steps_per_second": rate, "loss": loss.item()}
        if state is not None:
            result["bytes_saved"] = state.stats()["raw_bytes"] - state.stats()["wire_bytes"]
        print(json.dumps(result), flush=True)
    dist.destroy_process_group()


def one_run(net, variant, steps):
    """Runs two ranks of a variant in two namespaces; returns the result of rank 0."""
    command = [sys.executable, __file__, "--variant", variant, "--steps", steps]
    environment = {
        "GLOO_SOCKET_IFNAME": "eth0", "TP_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT / "python"),
    }
    done = net.ranks([0, 1], command, seconds=300, environment=environment)
    if any(code for code, _ in done):
        sys.exit("\n".join(output for _, output in done))
    lines = [line for line in done[0][1].splitlines() if line.startswith("{")]
    return json.loads(lines[-1])


def measure(rate, steps, result):
    """Measures all variants and prints a table. Returns whether the hook is 3 times as fast as both others."""
    sys.path.insert(0, str(ROOT / "benches"))
    import netns

    if why := netns.missing():
        print(f"SKIPPED: {why}")
        return True
    runs = []
    with contextlib.ExitStack() as stack:
        net = stack.enter_context(netns.Net(2, rate))
        for variant in VARIANTS:
            runs.append(one_run(net, variant, steps))
            run = runs[-1]
            print(f"{variant:6} {run['steps_per_second']:7.3f} steps/s, loss {run['loss']:.4f}", flush=True)
    speed = {run["variant"]: run["steps_per_second"] for run in runs}
    ratios = {other: speed["hook"] / speed[other] for other in ("gloo", "cinch")}
    print(f"{runs[0]['parameters']} parameters, 2 ranks, {rate}: the hook makes "
          f"{ratios['gloo']:.2f} times the steps of gloo, {ratios['cinch']:.2f} times those of raw cinch")
    if result:
        pathlib.Path(result).write_text(json.dumps({"rate": rate, "runs": runs}, indent=1) + "\n", encoding="utf-8")
    return min(ratios.values()) >= 3


def main():
    """Trains as one rank, or measures."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--variant", choices=VARIANTS, default="hook")
    parser.add_argument("--steps", type=int, default=10, help="measured steps of each variant")
    parser.add_argument("--measure", action="store_true", help="compare all variants; fails below 3 times")
    parser.add_argument("--rate", default="100mbit", help="rate of the link, in tc's words")
    parser.add_argument("--result", help="file for the results, as JSON")
    options = parser.parse_args()
    if options.measure:
        sys.exit(not measure(options.rate, options.steps, options.result))
    train(options.variant, options.steps)


if __name__ == "__main__":
    main()
