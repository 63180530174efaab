"""DDP's and FSDP2's compression hooks beside exact averages. Run as ranks of a launcher, with torch:

python -m cinch run -n 2 python/tests/torch_hook.py
"""

import copy
import datetime
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import cinch.torch
from cinch.torch import CompressionState, ddp_hook

STEPS = 8


def require(condition, text):
    """Ends the process unless a condition holds."""
    if not condition:
        raise SystemExit(f"rank {dist.get_rank()}: {text}")


def model():
    """Returns a small model, equal on all ranks, with gradients above and below the limit of compression."""
    torch.manual_seed(7)
    layers = [torch.nn.Linear(64, 300), torch.nn.ReLU(), torch.nn.Linear(300, 200), torch.nn.Linear(200, 10)]
    return torch.nn.Sequential(*layers)


def batch(step):
    """Returns this rank's inputs and targets of a step."""
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    return torch.randn(32, 64, generator=generator), torch.randn(32, 10, generator=generator)


def backward(network, step):
    """Computes the gradients of a step."""
    network.zero_grad()
    given, target = batch(step)
    torch.nn.functional.mse_loss(network(given), target).backward()


def hooked(state, **options):
    """Returns a DDP model with small buckets, so that it rebuilds them after the first step."""
    network = DistributedDataParallel(model(), bucket_cap_mb=0.1, **options)
    network.register_comm_hook(state, ddp_hook)
    return network


def gradients(network):
    """Returns the gradients as one vector for each parameter."""
    return [parameter.grad.detach().clone().reshape(-1) for parameter in network.parameters()]


def exact_average(network, step, gloo):
    """Returns, by gloo, the average of all ranks' gradients and the largest magnitude of any rank's."""
    alone = copy.deepcopy(network.module)
    backward(alone, step)
    averages, largest = [], []
    for gradient in gradients(alone):
        peak = gradient.abs().max().reshape(1)
        dist.all_reduce(gradient, group=gloo)
        dist.all_reduce(peak, dist.ReduceOp.MAX, group=gloo)
        averages.append(gradient / dist.get_world_size())
        largest.append(peak.item())
    return averages, largest


def same_on_all_ranks(tensors, gloo):
    """Requires equal bits on all ranks."""
    joined = torch.cat([one.detach().reshape(-1) for one in tensors]).view(torch.int32)
    least, most = joined.clone(), joined.clone()
    dist.all_reduce(least, dist.ReduceOp.MIN, group=gloo)
    dist.all_reduce(most, dist.ReduceOp.MAX, group=gloo)
    require(torch.equal(least, most), "ranks have different values")


def within_the_bound(gloo):
    """Compares each step's gradients with gloo's average: one rounding of each input and one of the sum."""
    network = hooked(CompressionState(feedback=False))
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    coded = 0
    for step in range(STEPS):
        averages, largest = exact_average(network, step, gloo)
        backward(network, step)
        for found, expected, peak in zip(gradients(network), averages, largest):
            error = (found - expected).abs().max().item()
            # linear8 has steps of 1/127 of the largest magnitude of a block.
            require(error <= 2 * peak / 127, f"step {step}: error {error}, largest gradient {peak}")
            coded += error > 1e-5 * peak
        same_on_all_ranks([parameter.grad for parameter in network.parameters()], gloo)
        optimizer.step()
    require(coded >= STEPS, f"{coded} gradients were compressed")
    same_on_all_ranks(network.parameters(), gloo)


def error_of_the_mean(feedback, gloo):
    """Returns the error of the mean of 16 equal steps' gradients."""
    network = hooked(CompressionState(feedback=feedback))
    averages, _ = exact_average(network, 0, gloo)
    total = [torch.zeros_like(one) for one in averages]
    for _ in range(16):
        backward(network, 0)
        total = [one + found for one, found in zip(total, gradients(network))]
    return sum(((one / 16 - expected) ** 2).sum().item() for one, expected in zip(total, averages)) ** 0.5


def train(network, state, optimizer, steps):
    """Trains for some steps."""
    for step in steps:
        backward(network, step)
        optimizer.step()


def continues_from_a_checkpoint():
    """Requires the bits of an uninterrupted run after saving and loading."""
    state = CompressionState()
    network = hooked(state)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
    train(network, state, optimizer, range(4))
    saved = copy.deepcopy([network.state_dict(), optimizer.state_dict(), state.state_dict()])
    require(saved[2]["residuals"].numel() > 4 * 300 * 200, "the checkpoint has no residuals")
    train(network, state, optimizer, range(4, 8))
    expected = [parameter.detach().clone() for parameter in network.parameters()]

    again = CompressionState()
    network = hooked(again)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
    network.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    again.load_state_dict(saved[2])
    train(network, again, optimizer, range(4, 8))
    for found, wanted in zip(network.parameters(), expected):
        require(torch.equal(found, wanted), "the continued run differs")
    wrong = {**saved[2], "rank": dist.get_rank() + 1}
    try:
        again.load_state_dict(wrong)
        require(False, "another rank's checkpoint was accepted")
    except ValueError:
        pass


def two_states_of_one_group():
    """Requires that saving and loading a state leaves the residuals of another state of the same group as they are."""
    one, other = CompressionState(), CompressionState()
    networks = [hooked(one), hooked(other)]
    optimizers = [torch.optim.SGD(network.parameters(), lr=0.1) for network in networks]
    train(networks[0], one, optimizers[0], range(2))
    train(networks[1], other, optimizers[1], range(2, 5))
    saved, kept = one.state_dict(), other.state_dict()
    for state in (saved, kept):
        # Number of tensors in the header: the two weights that are compressed.
        count = int.from_bytes(state["residuals"].numpy().tobytes()[16:24], "little")
        require(count == 2, f"the residuals of {count} tensors were saved")
    again = CompressionState()
    again.load_state_dict(saved)
    continued = hooked(again)
    continued.load_state_dict(networks[0].state_dict())
    train(continued, again, torch.optim.SGD(continued.parameters(), lr=0.1), range(5, 7))
    train(networks[0], one, optimizers[0], range(5, 7))
    for found, wanted in zip(continued.parameters(), networks[0].parameters()):
        require(torch.equal(found, wanted), "a state that was loaded beside its origin differs")
    require(torch.equal(other.state_dict()["residuals"], kept["residuals"]), "another state's residuals changed")
    one.load_state_dict(saved)
    require(torch.equal(one.state_dict()["residuals"], saved["residuals"]), "the state did not go back")
    require(torch.equal(other.state_dict()["residuals"], kept["residuals"]), "loading changed another state")


def on_another_backend():
    """Compresses gradients of a model whose own group is gloo's."""
    gloo = dist.new_group(backend="gloo")
    state = CompressionState(process_group=gloo)
    network = DistributedDataParallel(model(), process_group=gloo)
    network.register_comm_hook(state, ddp_hook)
    backward(network, 0)
    require(state.stats()["coded_calls"] == 2, f"{state.stats()}")


def fully_sharded(gloo):
    """Compresses FSDP2's gradients, and compares them with the exact average."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    network = model()
    plain = DistributedDataParallel(model(), process_group=gloo)
    averages, largest = exact_average(plain, 0, gloo)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in network:
        if isinstance(layer, torch.nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(network, mesh=mesh)
    state = CompressionState(process_group=mesh.get_group())
    cinch.torch.fsdp_hook(state, network)
    for step in (0, 0):
        backward(network, step)
    worst = 0.0
    for parameter, expected, peak in zip(network.parameters(), averages, largest):
        found = parameter.grad.full_tensor().reshape(-1)
        error = (found - expected).abs().max().item()
        # The second of two equal steps with feedback: at most twice the error of one. A block may span parameters.
        require(error <= 4 * max(largest) / 127, f"FSDP2: error {error}, largest gradient {peak}")
        worst = max(worst, error / peak)
    require(worst > 1e-5 and state.stats()["coded_calls"] > 0, "FSDP2's gradients were not compressed")
    elsewhere = CompressionState(process_group=dist.new_group())
    cinch.torch.fsdp_hook(elsewhere, network)
    try:
        backward(network, 0)
        require(False, "a state of another group was accepted")
    except ValueError as error:
        require("CompressionState(process_group=mesh.get_group())" in str(error), f"{error}")


def main():
    """Runs all checks in one job."""
    dist.init_process_group("cinch", init_method="cinch://", timeout=datetime.timedelta(seconds=120))
    gloo = dist.new_group(backend="gloo")
    within_the_bound(gloo)
    without, with_feedback = error_of_the_mean(False, gloo), error_of_the_mean(True, gloo)
    require(with_feedback < without / 4, f"error {with_feedback} with feedback, {without} without")
    continues_from_a_checkpoint()
    two_states_of_one_group()
    on_another_backend()
    fully_sharded(gloo)
    print(f"rank {dist.get_rank()} of {dist.get_world_size()}: all hook checks passed", file=sys.stderr)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
