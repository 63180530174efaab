"""A character transformer of 5.6 million parameters, and a 5-gram model beside it. Needs torch, and in practice a GPU.

All seeds and ranks compute at once: weights have a first dimension of seeds x ranks, products are batched. The sum of
all losses has gradients that belong to one seed and rank each, so one backward pass gives them all. (torch.func's vmap
gives the same; a plain first dimension also lets attention use its fused kernels.)
"""

import math
import time
from typing import Any, Dict, List, Sequence, Tuple

import numpy
from loops import Curve, Outcome, rate_at
from ranks import Exchange

#: Characters in a window.
LENGTH = 256
#: Windows of each rank in a step, and of the test that compute at once.
WINDOWS, TEST_WINDOWS = 8, 64
#: Largest learning rate, and Adam's constants.
RATE, BETAS, EPSILON = 1.5e-3, (0.9, 0.95), 1e-8


class Transformer:
    """Causal self-attention with the norms before (Radford 2019), without dropout."""

    def __init__(
        self, characters: int, width: int = 256, layers: int = 7, heads: int = 4, length: int = LENGTH
    ) -> None:
        self.heads, self.layers, self.width, self.length, self.characters = heads, layers, width, length, characters
        shapes: List[Tuple[str, Tuple[int, ...]]] = [("embed", (characters, width)), ("position", (length, width))]
        for layer in range(layers):
            for name, shape in [
                ("norm1", (width,)),
                ("shift1", (width,)),
                ("qkv", (width, 3 * width)),
                ("out", (width, width)),
                ("norm2", (width,)),
                ("shift2", (width,)),
                ("up", (width, 4 * width)),
                ("up_bias", (4 * width,)),
                ("down", (4 * width, width)),
                ("down_bias", (width,)),
            ]:
                shapes.append((f"{name}.{layer}", shape))
        shapes += [("norm", (width,)), ("shift", (width,)), ("head", (width, characters))]
        self.shapes = shapes
        #: Number of weights.
        self.size = sum(math.prod(shape) for _, shape in shapes)

    def start(self, seed: int) -> numpy.ndarray:
        """Returns initial weights: normal with deviation 0.02, smaller before sums of layers; norms 1, biases 0."""
        draws = numpy.random.default_rng([3, seed])
        parts = []
        for name, shape in self.shapes:
            if name.startswith("norm"):
                parts.append(numpy.ones(shape))
            elif len(shape) == 1:
                parts.append(numpy.zeros(shape))
            else:
                before_sum = name.startswith(("out", "down"))
                deviation = 0.02 / math.sqrt(2 * self.layers) if before_sum else 0.02
                parts.append(deviation * draws.standard_normal(shape))
        return numpy.concatenate([part.reshape(-1) for part in parts]).astype(numpy.float32)

    def outputs(self, weights: Any, codes: Any) -> Any:
        """Returns outputs (models, windows, characters of a window, alphabet) for codes (models, windows, length)."""
        import torch
        from torch.nn import functional

        models, windows, length = codes.shape
        sizes = [math.prod(shape) for _, shape in self.shapes]
        w = {
            name: part.reshape(models, *shape)
            for (name, shape), part in zip(self.shapes, torch.split(weights, sizes, 1))
        }

        def norm(x: Any, scale: Any, shift: Any) -> Any:
            return functional.layer_norm(x, x.shape[-1:]) * scale[:, None] + shift[:, None]

        offsets = torch.arange(models, device=codes.device)[:, None, None] * self.characters
        x = functional.embedding(codes + offsets, w["embed"].reshape(-1, self.width))
        x = (x + w["position"][:, None, :length]).reshape(models, windows * length, self.width)
        for layer in range(self.layers):
            y = norm(x, w[f"norm1.{layer}"], w[f"shift1.{layer}"])
            joined = torch.bmm(y, w[f"qkv.{layer}"])
            joined = joined.view(models * windows, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
            y = functional.scaled_dot_product_attention(joined[0], joined[1], joined[2], is_causal=True)
            y = y.transpose(1, 2).reshape(models, windows * length, self.width)
            x = x + torch.bmm(y, w[f"out.{layer}"])
            y = norm(x, w[f"norm2.{layer}"], w[f"shift2.{layer}"])
            y = functional.gelu(torch.bmm(y, w[f"up.{layer}"]) + w[f"up_bias.{layer}"][:, None])
            x = x + torch.bmm(y, w[f"down.{layer}"]) + w[f"down_bias.{layer}"][:, None]
        x = torch.bmm(norm(x, w["norm"], w["shift"]), w["head"])
        return x.view(models, windows, length, -1)

    def losses(self, weights: Any, codes: Any) -> Any:
        """Returns each model's mean loss of the next character, for codes (models, windows, length + 1)."""
        import torch
        from torch.nn import functional

        with torch.autocast(codes.device.type, torch.bfloat16):
            outputs = self.outputs(weights, codes[..., :-1])
        found = functional.cross_entropy(outputs.float().flatten(0, 2), codes[..., 1:].flatten(), reduction="none")
        return found.view(len(codes), -1).mean(1)

    def gradients(self, weights: Any, codes: Any) -> Tuple[Any, Any]:
        """Returns losses (runs, ranks) and gradients (runs, ranks, elements) of windows of length + 1 codes."""
        runs, ranks = codes.shape[:2]
        each = weights[:, None].expand(runs, ranks, -1).reshape(runs * ranks, -1).detach().requires_grad_()
        losses = self.losses(each, codes.flatten(0, 1))
        losses.sum().backward()
        return losses.detach().view(runs, ranks), each.grad.view(runs, ranks, -1)

    def evaluate(self, weights: Any, codes: Any) -> List[float]:
        """Returns each run's mean loss over all windows of the test text."""
        import torch

        count = (len(codes) - 1) // self.length
        inside = torch.arange(self.length + 1, device=codes.device)
        sums = 0.0
        with torch.no_grad():
            for begin in range(0, count, TEST_WINDOWS):
                starts = torch.arange(begin, min(count, begin + TEST_WINDOWS), device=codes.device) * self.length
                windows = codes[starts[:, None] + inside][None].expand(len(weights), -1, -1)
                sums = sums + self.losses(weights, windows) * len(starts)
        return [float(value) for value in sums / count]


def train(
    net: Transformer,
    texts: Dict[str, Any],
    seeds: Sequence[int],
    exchange: Exchange,
    steps: int,
    windows: int = WINDOWS,
    rate: float = 1.0,
) -> Outcome:
    """Trains all seeds data parallel with Adam; returns the test losses in nats a character."""
    import torch

    codes, size = texts["train"], exchange.ranks.size
    master = torch.tensor(numpy.stack([net.start(seed) for seed in seeds]), device=codes.device)
    first, second = torch.zeros_like(master), torch.zeros_like(master)
    inside = torch.arange(net.length + 1, device=codes.device)
    shape = (size, windows)
    generators = [numpy.random.default_rng([4, seed]) for seed in seeds]
    most = len(codes) - net.length - 1
    curve, began = Curve(steps), time.perf_counter()
    for step in range(steps):
        starts = torch.tensor(numpy.stack([one.integers(0, most, shape) for one in generators]), device=codes.device)
        losses, gradients = net.gradients(master, codes[starts[..., None] + inside])
        averages = exchange.mean(gradients)
        curve.add(step, losses)
        first.mul_(BETAS[0]).add_(averages, alpha=1 - BETAS[0])
        second.mul_(BETAS[1]).addcmul_(averages, averages, value=1 - BETAS[1])
        corrected = [1 - beta ** (step + 1) for beta in BETAS]
        change = first / corrected[0] / ((second / corrected[1]).sqrt() + EPSILON)
        master.sub_(change, alpha=rate_at(step, steps, rate * RATE))
    metrics = net.evaluate(master, texts["test"])
    return Outcome(metrics, curve.means(), time.perf_counter() - began, steps, exchange.replicas_equal)


def n_gram_loss(train_codes: numpy.ndarray, test_codes: numpy.ndarray, alphabet: int, order: int = 5) -> float:
    """Returns the loss in nats a character of an n-gram model with Witten and Bell's smoothing (1991)."""
    probability = numpy.full(len(test_codes) - order + 1, 1.0 / alphabet)
    for n in range(1, order + 1):
        train_keys, test_keys = _keys(train_codes, alphabet, n), _keys(test_codes, alphabet, n)
        # Position k of every order predicts character order - 1 + k of the test.
        test_keys = test_keys[order - n :]
        grams, counts = numpy.unique(train_keys, return_counts=True)
        contexts, first, followers = numpy.unique(grams // alphabet, return_index=True, return_counts=True)
        totals = numpy.add.reduceat(counts, first)
        own = _found(grams, counts, test_keys)
        total, kinds = (_found(contexts, values, test_keys // alphabet) for values in (totals, followers))
        known = total > 0
        mixed = (own + kinds * probability) / numpy.maximum(total + kinds, 1)
        probability = numpy.where(known, mixed, probability)
    return float(-numpy.log(probability).mean())


def _keys(codes: numpy.ndarray, alphabet: int, n: int) -> numpy.ndarray:
    """Returns each run of n characters as one number, its first character in the highest digit."""
    keys = numpy.zeros(len(codes) - n + 1, numpy.int64)
    for place in range(n):
        keys = keys * alphabet + codes[place : place + len(keys)]
    return keys


def _found(sorted_keys: numpy.ndarray, values: numpy.ndarray, keys: numpy.ndarray) -> numpy.ndarray:
    """Returns the values of keys in a sorted table, 0 where a key is absent."""
    places = numpy.minimum(numpy.searchsorted(sorted_keys, keys), len(sorted_keys) - 1)
    return numpy.where(sorted_keys[places] == keys, values[places], 0)
