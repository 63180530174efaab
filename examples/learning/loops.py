"""Training loops that pass gradients, weights and activations through cinch, for many seeds at once.

- `train`: data parallel. Gradients are averaged by an `Exchange`. Options replace the weights that a step computes with
  (`AdaptiveWeights`: AWP and ADT), and the precision (`half`, with a loss scaler for each seed).
- `train_split`: the first layer is data parallel, the second model parallel with one sub-batch for each rank.

Runs of equal seeds have equal initial weights and data order, whatever the codec.
"""

import concurrent.futures
import dataclasses
import math
import time
from typing import Any, Callable, Dict, List, Optional, Sequence

import cinch
import numpy
from nets import Mlp, Net, library
from ranks import Exchange, Ranks

MOMENTUM = 0.9
#: Share of the steps in which the learning rate grows to its largest value.
WARM_UP = 0.05


@dataclasses.dataclass
class Task:
    """A network and its data, on the device where it is trained."""

    name: str
    net: Any
    train: Any
    train_labels: Any
    test: Any
    test_labels: Any
    #: Samples of each rank in a step, passes over the training set, and largest learning rate.
    samples: int
    epochs: int
    rate: float

    def on_gpu(self) -> "Task":
        """Returns the task with its data on the GPU."""
        import torch

        names = ("train", "train_labels", "test", "test_labels")
        return dataclasses.replace(self, **{name: torch.tensor(getattr(self, name)).cuda() for name in names})

    def steps(self, ranks: int) -> int:
        """Number of steps of a run."""
        return self.epochs * (len(self.train) // (self.samples * ranks))


@dataclasses.dataclass
class Outcome:
    """Results of the runs of all seeds."""

    #: Metric on the test set of each seed; NaN if the run diverged.
    metrics: List[float]
    #: Mean training loss over seeds and ranks in each tenth of the run.
    losses: List[float]
    seconds: float
    steps: int
    replicas_equal: bool
    extra: Dict[str, Any] = dataclasses.field(default_factory=dict)


def rate_at(step: int, steps: int, rate: float) -> float:
    """Returns the learning rate of a step: it grows, then falls to 0 like a cosine."""
    warm = max(1, math.ceil(WARM_UP * steps))
    if step < warm:
        return rate * (step + 1) / warm
    return rate * 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, steps - warm)))


def batches(task: Task, seeds: Sequence[int], ranks: int):
    """Yields inputs and labels of each step, (seeds, ranks, samples, ...), in the order that seed and epoch decide."""
    count = len(task.train)
    steps = count // (task.samples * ranks)
    for epoch in range(task.epochs):
        orders = [numpy.random.default_rng([2, seed, epoch]).permutation(count) for seed in seeds]
        order = numpy.stack(orders)[:, : steps * ranks * task.samples]
        order = order.reshape(len(seeds), steps, ranks, task.samples)
        if not isinstance(task.train, numpy.ndarray):
            import torch

            order = torch.tensor(order, device=task.train.device)
        for step in range(steps):
            chosen = order[:, step]
            yield task.train[chosen], task.train_labels[chosen]


def place(values: numpy.ndarray, like: Any) -> Any:
    """Returns `values` as an array of the library and on the device of `like`."""
    if isinstance(like, numpy.ndarray):
        return values
    import torch

    return torch.tensor(values, device=like.device)


class Curve:
    """Collects mean losses in tenths of a run, without waiting for a GPU in each step."""

    def __init__(self, steps: int) -> None:
        self._steps, self._sums = steps, {}

    def add(self, step: int, losses: Any) -> None:
        """Adds the losses of a step."""
        self._sums.setdefault(10 * step // self._steps, []).append(losses.mean())

    def means(self) -> List[float]:
        """Returns the mean of each tenth."""
        return [float(f"{sum(float(v) for v in values) / len(values):.6g}") for _, values in sorted(self._sums.items())]


class LossScaling:
    """A loss scaler for each seed. The verdict comes from the averaged gradients, which all ranks hold alike."""

    def __init__(self, seeds: int, **settings: Any) -> None:
        self.scalers = [cinch.LossScaler(**settings) for _ in range(seeds)]
        #: Smallest and largest scale of any step.
        self.range = [math.inf, 0.0]

    def scales(self) -> numpy.ndarray:
        """Returns the factor of each seed's loss."""
        return numpy.array([scaler.scale for scaler in self.scalers], numpy.float32)

    def verdicts(self, averages: Any) -> numpy.ndarray:
        """Returns whether to apply each seed's step, and sets the next scales."""
        if isinstance(averages, numpy.ndarray):
            found = [cinch.count_non_finite(numpy.ascontiguousarray(one)) for one in averages]
        else:
            found = (~averages.isfinite()).sum(-1).tolist()
        applied = numpy.array([scaler.update(bad) for scaler, bad in zip(self.scalers, found)])
        scales = self.scales()
        self.range = [min(self.range[0], float(scales.min())), max(self.range[1], float(scales.max()))]
        return applied

    def facts(self) -> Dict[str, Any]:
        """Returns what a row of results contains."""
        return {"skipped": [scaler.skipped for scaler in self.scalers], "scales": self.range}


class AdaptiveWeights:
    """Weights as ranks receive them: packed on the host with the bits that AWP chose for each layer, then unpacked.

    Biases are left out. AWP chooses up to `most_bits`. `bits` fixes the number for all layers instead; that is how the
    best fixed number is searched.
    On a GPU the master weights stay on the host and `cinch_copy` moves the packed bytes.
    """

    def __init__(
        self, net: Net, seeds: int, threshold: float = 0.0, interval: int = 0, bits: int = 0, most_bits: int = 32
    ) -> None:
        self.net, self.fixed = net, bits
        self.parts = [part for part in net.parts if not part.is_bias]
        if not bits:
            self.awp = [[cinch.Awp(threshold, interval, most_bits=most_bits) for _ in self.parts] for _ in range(seeds)]
        self.seconds, self.bytes, self.raw_bytes = 0.0, 0, 0

    def _codec(self, seed: int, layer: int) -> str:
        if self.fixed:
            return "raw" if self.fixed == 32 else f"trunc{self.fixed}"
        return self.awp[seed][layer].codec

    def received(self, master: numpy.ndarray, like: Any) -> Any:
        """Returns the weights of all seeds as the ranks hold them, and updates AWP by their norms."""
        out = place(master.copy(), like)
        began = time.perf_counter()
        for seed in range(len(master)):
            for layer, part in enumerate(self.parts):
                codec = self._codec(seed, layer)
                given, target = master[seed, part.begin : part.end], out[seed, part.begin : part.end]
                self.raw_bytes += given.nbytes
                self.bytes += cinch.wire_bytes(codec, given.size) if codec != "raw" else given.nbytes
                if codec == "raw":
                    continue
                if isinstance(target, numpy.ndarray):
                    cinch.decode(cinch.encode(given, codec), codec, out=target)
                else:
                    cinch.copy(given, target, codec)
        self.seconds += time.perf_counter() - began
        if not self.fixed:
            self._update(out)
        return out

    def _update(self, received: Any) -> None:
        for layer, part in enumerate(self.parts):
            values = received[:, part.begin : part.end]
            norms = library(values).sqrt((values * values).sum(-1)).tolist()
            for seed, norm in enumerate(norms):
                self.awp[seed][layer].update(norm)

    def facts(self) -> Dict[str, Any]:
        """Returns what a row of results contains."""
        found = {"weight_bytes_share": self.bytes / self.raw_bytes, "pack_and_unpack_seconds": self.seconds}
        if not self.fixed:
            found["final_bits"] = [[awp.bits for awp in layers] for layers in self.awp]
        return found


def train(
    task: Task,
    seeds: Sequence[int],
    exchange: Exchange,
    rate: float = 1.0,
    weights: Optional[AdaptiveWeights] = None,
    half: bool = False,
    scaling: Optional[LossScaling] = None,
    loss_factor: float = 1.0,
) -> Outcome:
    """Trains all seeds data parallel. `rate` multiplies the task's learning rate.

    `loss_factor` multiplies the loss and divides the learning rate, which changes nothing in exact arithmetic. With
    `half`, products and gradients are fp16 and master weights fp32.
    """
    net, size = task.net, exchange.ranks.size
    steps = task.steps(size)
    master = place(numpy.stack([net.start(seed) for seed in seeds]), task.train)
    speed = master * 0
    curve, began = Curve(steps), time.perf_counter()
    xp = library(master)
    for step, (inputs, labels) in enumerate(batches(task, seeds, size)):
        current = master
        if weights is not None:
            host = master if isinstance(master, numpy.ndarray) else master.cpu().numpy()
            current = weights.received(host, master)
        factors = numpy.full(len(seeds), loss_factor, numpy.float32)
        if scaling is not None:
            factors = factors * scaling.scales()
        scale = place(factors, task.train)
        losses, gradients = net.gradients(current, inputs, labels, scale, half)
        if half:
            gradients = _to_half(gradients)
        averages = exchange.mean(gradients)
        if half:
            averages = averages.astype(numpy.float32) if xp is numpy else averages.float()
        averages = averages / scale[:, None]
        curve.add(step, losses)
        if scaling is not None:
            applied = place(scaling.verdicts(averages)[:, None], task.train)
            averages = xp.where(applied, averages, xp.zeros_like(averages))
            # A skipped step does not change the momentum either.
            kept = xp.where(applied, MOMENTUM * speed, speed)
            speed = kept + averages
            master = master - rate_at(step, steps, rate * task.rate) * xp.where(applied, speed, xp.zeros_like(speed))
            continue
        speed = MOMENTUM * speed + averages
        master = master - rate_at(step, steps, rate * task.rate) * speed
    metrics = net.evaluate(master, task.test, task.test_labels)
    outcome = Outcome(metrics, curve.means(), time.perf_counter() - began, steps, exchange.replicas_equal)
    for source in (weights, scaling):
        outcome.extra.update(source.facts() if source is not None else {})
    return outcome


def _to_half(values: Any) -> Any:
    return values.half() if hasattr(values, "half") else values.astype(numpy.float16)


class SplitNet:
    """Three layers whose middle one is divided among the ranks by columns (Krizhevsky 2014, Dettmers 2016).

    Each rank computes the first layer of its samples, a sub-batch, and sends the activations to all ranks. Each rank
    computes its columns of the second layer and returns them. The rank computes the last layer and the loss. Gradients
    of activations go the opposite way. The sub-batches follow one another, so the transfer of one overlaps with the
    computing of another.
    """

    def __init__(self, net: Mlp, ranks: Ranks, codec: str, overlap: bool) -> None:
        if len(net.parts) != 6 or net.parts[2].shape[1] % ranks.size:
            raise ValueError("the network needs three layers, and a second layer that the ranks divide")
        self.net, self.ranks, self.codec = net, ranks, codec
        # A single thread makes all calls, because the ranks of a communicator must agree on their order.
        self.worker = concurrent.futures.ThreadPoolExecutor(1) if overlap else None
        self.replicas_equal = True

    def _start(self, call: Callable[..., Any], *arguments: Any, **options: Any) -> Callable[[], Any]:
        """Starts a collective; returns a function that returns its result."""
        if self.worker is None:
            result = call(*arguments, **options)
            return lambda: result
        return self.worker.submit(call, *arguments, **options).result

    def gradients(self, weights: Any, inputs: Any, labels: Any) -> Any:
        """Returns losses (seeds, ranks), gradients of the outer layers (seeds, ranks, elements) and of the middle."""
        net, ranks, xp = self.net, self.ranks, library(weights)
        seeds, size, samples = inputs.shape[:3]
        w1, b1, w2, b2, w3, b3 = (net.tensor(weights, index) for index in range(6))
        first = inputs.reshape(seeds, size * samples, -1) @ w1 + b1[:, None]
        first = (first * (first > 0)).reshape(seeds, size, samples, -1)
        columns = w2.shape[2] // size
        parts = [
            (w2[:, :, r * columns : (r + 1) * columns], b2[:, r * columns : (r + 1) * columns]) for r in range(size)
        ]
        arrived = []
        for k in range(size):
            values = xp.stack([first[:, k]] * size)
            arrived.append(self._start(ranks.broadcast, values, k, codec=self.codec))
        activations, masks, returned = [], [], []
        for k in range(size):
            received = arrived[k]()
            second = xp.stack([received[r] @ matrix + bias[:, None] for r, (matrix, bias) in enumerate(parts)])
            mask = second > 0
            activations.append(received)
            masks.append(mask)
            returned.append(self._start(ranks.gather, second * mask, k, codec=self.codec))
        losses, outer, slopes = [], [], []
        for k in range(size):
            shards = returned[k]()
            joined = xp.concatenate([shards[r] for r in range(size)], -1)
            outputs = joined @ w3 + b3[:, None]
            loss, slope = net.loss(outputs, labels[:, k])
            losses.append(loss)
            outer.append((joined.swapaxes(-1, -2) @ slope, slope.sum(-2)))
            back = slope @ w3.swapaxes(-1, -2)
            pieces = xp.stack([back[..., r * columns : (r + 1) * columns] for r in range(size)])
            slopes.append(self._start(ranks.scatter, pieces, k, codec=self.codec))
        middle, inner = None, []
        for k in range(size):
            slope = slopes[k]() * masks[k]
            change = [(activations[k][r].swapaxes(-1, -2) @ slope[r], slope[r].sum(-2)) for r in range(size)]
            middle = change if middle is None else [(a + c, b + d) for (a, b), (c, d) in zip(middle, change)]
            partial = xp.stack([slope[r] @ matrix.swapaxes(-1, -2) for r, (matrix, _) in enumerate(parts)])
            inner.append(self._start(ranks.reduce, partial, k, codec=self.codec))
        vectors = []
        for k in range(size):
            slope = inner[k]() * (first[:, k] > 0)
            w1_change = inputs[:, k].swapaxes(-1, -2) @ slope
            tensors = [w1_change, slope.sum(-2), *outer[k]]
            vectors.append(xp.concatenate([tensor.reshape(seeds, -1) for tensor in tensors], -1))
        w2_change = xp.concatenate([matrix for matrix, _ in middle], -1) / size
        b2_change = xp.concatenate([bias for _, bias in middle], -1) / size
        middle_vector = xp.concatenate([w2_change.reshape(seeds, -1), b2_change], -1)
        return xp.stack(losses, 1), xp.stack(vectors, 1), middle_vector


def train_split(
    task: Task, seeds: Sequence[int], exchange: Exchange, codec: str, overlap: bool = False, rate: float = 1.0
) -> Outcome:
    """Trains all seeds with a divided middle layer, whose activations and their gradients travel with `codec`."""
    net, size = task.net, exchange.ranks.size
    steps = task.steps(size)
    split = SplitNet(net, exchange.ranks, codec, overlap)
    master = place(numpy.stack([net.start(seed) for seed in seeds]), task.train)
    speed = master * 0
    xp, begin = library(master), net.parts[2].begin
    curve, began = Curve(steps), time.perf_counter()
    for step, (inputs, labels) in enumerate(batches(task, seeds, size)):
        losses, outer, middle = split.gradients(master, inputs, labels)
        averages = exchange.mean(outer)
        slope = xp.concatenate([averages[:, :begin], middle, averages[:, begin:]], -1)
        curve.add(step, losses)
        speed = MOMENTUM * speed + slope
        master = master - rate_at(step, steps, rate * task.rate) * speed
    metrics = net.evaluate(master, task.test, task.test_labels)
    return Outcome(metrics, curve.means(), time.perf_counter() - began, steps, exchange.replicas_equal)
