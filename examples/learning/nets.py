"""Small networks with gradients written out, for numpy arrays and torch tensors alike.

All runs and ranks compute at once. Weights have the shape (runs, elements), inputs (runs, ranks, samples, values).
`gradients` returns the loss of each run and rank, and one vector of gradients for each. All ranks have equal weights.

The operations are those that numpy and torch write alike. With `half` every product's operands and every result are
rounded to fp16, sums stay in fp32: the arithmetic of tensor cores, and overflow beyond 65,504 as there.
"""

import math
from typing import Any, List, NamedTuple, Tuple

import numpy


class Part(NamedTuple):
    """A tensor inside the vector of weights. `group` numbers layers; biases have `is_bias`."""

    begin: int
    shape: Tuple[int, ...]
    group: int
    is_bias: bool

    @property
    def end(self) -> int:
        """Index behind the last element."""
        return self.begin + math.prod(self.shape)


def float_of(values: Any) -> Any:
    """Returns values, such as a mask, as fp32."""
    return values.float() if hasattr(values, "float") else values.astype(numpy.float32)


def round_half(values: Any) -> Any:
    """Returns fp32 values rounded to fp16."""
    if hasattr(values, "half"):
        return values.half().float()
    with numpy.errstate(over="ignore"):
        return values.astype(numpy.float16).astype(numpy.float32)


def library(values: Any) -> Any:
    """Returns numpy or torch, whichever `values` belong to."""
    if isinstance(values, numpy.ndarray):
        return numpy
    import torch

    return torch


def one_hot(labels: Any, classes: int) -> Any:
    """Returns 1 at the label and 0 elsewhere, in a new last dimension."""
    numbers = library(labels).arange(classes)
    numbers = numbers.to(labels.device) if hasattr(labels, "device") and hasattr(numbers, "to") else numbers
    return float_of(labels[..., None] == numbers)


def cross_entropy(outputs: Any, labels: Any) -> Tuple[Any, Any]:
    """Returns the mean loss over samples, and its gradient with respect to the outputs."""
    xp = library(outputs)
    shifted = outputs - xp.amax(outputs, -1)[..., None]
    total = xp.log(xp.exp(shifted).sum(-1))
    target = one_hot(labels, outputs.shape[-1])
    loss = (total - (shifted * target).sum(-1)).mean(-1)
    return loss, (xp.exp(shifted - total[..., None]) - target) / outputs.shape[-2]


def squared_error(outputs: Any, labels: Any) -> Tuple[Any, Any]:
    """Returns half of the mean squared error over samples, and its gradient."""
    difference = outputs - labels
    return 0.5 * (difference * difference).mean((-2, -1)), difference / outputs.shape[-2]


def error_rate(outputs: Any, labels: Any) -> Any:
    """Returns the share of wrong labels of each run, in percent; NaN where an output is not finite."""
    xp = library(outputs)
    wrong = 100 * float_of(xp.argmax(outputs, -1) != labels).mean(-1)
    # A sum is finite if its terms are, unless they are huge.
    return wrong + 0 * outputs.sum((-2, -1))


def root_mean_square(outputs: Any, labels: Any) -> Any:
    """Returns the root mean square error of each run."""
    difference = outputs - labels
    return library(outputs).sqrt((difference * difference).mean((-2, -1)))


class Net:
    """Weights in one vector, and the loss behind the outputs. Subclasses have `forward` and `backward`."""

    #: Whether inputs are row numbers, which are not rounded.
    takes_numbers = False

    def __init__(self, shapes: List[Tuple[int, ...]], loss: Any, metric: Any) -> None:
        self.parts: List[Part] = []
        self.loss, self.metric = loss, metric
        for group, shape in enumerate(shapes):
            for form, is_bias in ((shape, False), (shape[-1:], True)):
                begin = self.parts[-1].end if self.parts else 0
                self.parts.append(Part(begin, form, group, is_bias))
        #: Number of weights.
        self.size = self.parts[-1].end

    def start(self, seed: int) -> numpy.ndarray:
        """Returns initial weights: normal with variance 2 / inputs (He et al. 2015), biases 0."""
        draws = numpy.random.default_rng([1, seed])
        weights = numpy.zeros(self.size, numpy.float32)
        for part in self.parts:
            if not part.is_bias:
                deviation = math.sqrt(2 / part.shape[0])
                weights[part.begin : part.end] = deviation * draws.standard_normal(math.prod(part.shape))
        return weights

    def tensor(self, weights: Any, index: int) -> Any:
        """Returns tensor `index` of all runs: shape (runs, *shape)."""
        part = self.parts[index]
        return weights[:, part.begin : part.end].reshape(-1, *part.shape)

    def gradients(
        self, weights: Any, inputs: Any, labels: Any, scale: Any = None, half: bool = False
    ) -> Tuple[Any, Any]:
        """Returns losses (runs, ranks) and gradients (runs, ranks, elements); `scale` multiplies the loss of a run."""
        cut = round_half if half else _same
        outputs, kept = self.forward(cut(weights), inputs if self.takes_numbers else cut(inputs), cut)
        losses, slope = self.loss(outputs, labels)
        if scale is not None:
            slope = slope * scale[:, None, None, None]
        tensors = self.backward(cut(weights), kept, cut(slope), cut)
        runs, ranks = inputs.shape[:2]
        flat = [tensor.reshape(runs, ranks, -1) for tensor in tensors]
        return losses, cut(library(weights).concatenate(flat, -1))

    def evaluate(self, weights: Any, inputs: Any, labels: Any) -> Any:
        """Returns the metric of each run on the test set, (samples, values)."""
        runs = len(weights)
        values = []
        for run in range(runs):
            outputs, _ = self.forward(weights[run : run + 1], inputs[None, None], _same)
            values.append(float(self.metric(outputs[:, 0], labels)[0]))
        return values

    def forward(self, weights: Any, inputs: Any, cut: Any) -> Tuple[Any, Any]:
        """Returns outputs (runs, ranks, samples, values), and what `backward` needs."""
        raise NotImplementedError

    def backward(self, weights: Any, kept: Any, slope: Any, cut: Any) -> List[Any]:
        """Returns the gradients of all tensors, each (runs, ranks, *shape), for the gradient of the outputs."""
        raise NotImplementedError


def _same(values: Any) -> Any:
    return values


def _times(inputs: Any, matrix: Any) -> Any:
    """Multiplies inputs (runs, ranks, samples, n) by matrices (runs, n, m)."""
    runs, ranks, samples, width = inputs.shape
    return (inputs.reshape(runs, ranks * samples, width) @ matrix).reshape(runs, ranks, samples, -1)


class Mlp(Net):
    """A perceptron with rectifiers between its layers."""

    def __init__(self, widths: Tuple[int, ...], loss: Any = cross_entropy, metric: Any = error_rate) -> None:
        super().__init__(list(zip(widths, widths[1:])), loss, metric)

    def forward(self, weights, inputs, cut):
        """See `Net.forward`; keeps the inputs of all layers."""
        kept = [inputs]
        layers = len(self.parts) // 2
        for layer in range(layers):
            matrix, bias = self.tensor(weights, 2 * layer), self.tensor(weights, 2 * layer + 1)
            values = cut(_times(kept[-1], matrix) + bias[:, None, None])
            kept.append(values if layer + 1 == layers else values * (values > 0))
        return kept[-1], kept

    def backward(self, weights, kept, slope, cut):
        """See `Net.backward`."""
        tensors = []
        for layer in reversed(range(len(self.parts) // 2)):
            inputs = kept[layer]
            tensors = [inputs.swapaxes(-1, -2) @ slope, slope.sum(-2)] + tensors
            if layer:
                slope = cut(_times(slope, self.tensor(weights, 2 * layer).swapaxes(-1, -2)) * (inputs > 0))
        return tensors


class Conv(Net):
    """Three convolutions of 3x3 with stride 2, rectifiers, and a layer for the classes, on square images."""

    def __init__(self, edge: int, channels: Tuple[int, ...], classes: int) -> None:
        self.edge = edge
        depths = (1, *channels)
        shapes = [(9 * before, after) for before, after in zip(depths, channels)]
        self.convolutions = len(channels)
        last = edge >> self.convolutions
        super().__init__([*shapes, (last * last * channels[-1], classes)], cross_entropy, error_rate)

    @staticmethod
    def _columns(images: Any) -> Any:
        """Returns the 9 neighbours of every second pixel: (n, edge, edge, c) to (n, edge/2, edge/2, 9 c)."""
        xp, (count, edge, _, depth) = library(images), images.shape
        shape = (count, edge + 2, edge + 2, depth)
        padded = xp.zeros(shape, dtype=images.dtype, **({} if xp is numpy else {"device": images.device}))
        padded[:, 1:-1, 1:-1] = images
        shifted = [padded[:, y : y + edge : 2, x : x + edge : 2] for y in range(3) for x in range(3)]
        return xp.concatenate(shifted, -1)

    @staticmethod
    def _images(columns: Any, edge: int) -> Any:
        """Adds the gradients of neighbours to their pixels: the transpose of `_columns`."""
        xp, (count, _, _, nine) = library(columns), columns.shape
        depth = nine // 9
        shape = (count, edge + 2, edge + 2, depth)
        padded = xp.zeros(shape, dtype=columns.dtype, **({} if xp is numpy else {"device": columns.device}))
        for place in range(9):
            y, x = divmod(place, 3)
            padded[:, y : y + edge : 2, x : x + edge : 2] += columns[..., place * depth : (place + 1) * depth]
        return padded[:, 1:-1, 1:-1]

    def forward(self, weights, inputs, cut):
        """See `Net.forward`; keeps the neighbours and outputs of each convolution."""
        runs, ranks, samples, _ = inputs.shape
        values, edge, kept = inputs.reshape(-1, self.edge, self.edge, 1), self.edge, []
        for layer in range(self.convolutions):
            columns = self._columns(values)
            edge //= 2
            columns = columns.reshape(runs, ranks, samples * edge * edge, -1)
            matrix, bias = self.tensor(weights, 2 * layer), self.tensor(weights, 2 * layer + 1)
            after = cut(_times(columns, matrix) + bias[:, None, None])
            after = after * (after > 0)
            kept.append((columns, after))
            values = after.reshape(runs * ranks * samples, edge, edge, -1)
        flat = values.reshape(runs, ranks, samples, -1)
        kept.append((flat, None))
        matrix, bias = self.tensor(weights, -2), self.tensor(weights, -1)
        return cut(_times(flat, matrix) + bias[:, None, None]), kept

    def backward(self, weights, kept, slope, cut):
        """See `Net.backward`."""
        flat, _ = kept[-1]
        runs, ranks, samples, _ = flat.shape
        tensors = [flat.swapaxes(-1, -2) @ slope, slope.sum(-2)]
        slope = _times(slope, self.tensor(weights, -2).swapaxes(-1, -2))
        for layer in reversed(range(self.convolutions)):
            columns, after = kept[layer]
            slope = cut(slope.reshape(after.shape) * (after > 0))
            tensors = [columns.swapaxes(-1, -2) @ slope, slope.sum(-2)] + tensors
            if layer:
                edge = self.edge >> layer
                slope = _times(slope, self.tensor(weights, 2 * layer).swapaxes(-1, -2))
                slope = self._images(slope.reshape(runs * ranks * samples, edge // 2, edge // 2, -1), edge)
        return tensors


class Factors(Net):
    """Predicts the value of a pair (user, item) by the product of their embeddings and a bias of each.

    A sample changes the embeddings of its user and its item alone: gradients are sparse.
    """

    takes_numbers = True

    def __init__(self, users: int, items: int, width: int) -> None:
        super().__init__([(users + items, width + 1)], squared_error, root_mean_square)
        self.users, self.rows, self.width = users, users + items, width
        # The table contains the biases.
        self.parts = self.parts[:1]
        self.size = self.parts[-1].end

    def start(self, seed):
        """Returns small embeddings and biases 0."""
        draws = numpy.random.default_rng([1, seed])
        table = numpy.zeros((self.rows, self.width + 1), numpy.float32)
        table[:, :-1] = 0.3 * draws.standard_normal((self.rows, self.width))
        return table.reshape(-1)

    def forward(self, weights, inputs, cut):
        """See `Net.forward`; inputs are pairs of numbers."""
        chosen = [inputs[..., 0], inputs[..., 1] + self.users]
        runs = library(weights).arange(len(weights)).reshape(-1, 1, 1)
        runs = runs.to(weights.device) if hasattr(runs, "to") else runs
        table = self.tensor(weights, 0)
        both = [cut(table[runs, rows]) for rows in chosen]
        product = (both[0][..., :-1] * both[1][..., :-1]).sum(-1)[..., None]
        return cut(product + both[0][..., -1:] + both[1][..., -1:]), (chosen, both)

    def backward(self, weights, kept, slope, cut):
        """See `Net.backward`."""
        chosen, both = kept
        total = 0
        for own, other in ((0, 1), (1, 0)):
            change = library(slope).concatenate([slope * both[other][..., :-1], slope], -1)
            total = total + self._added(chosen[own], cut(change))
        return [total]

    def _added(self, rows: Any, changes: Any) -> Any:
        """Returns a table for each run and rank with each sample's change added to its row."""
        if isinstance(changes, numpy.ndarray):
            tables = numpy.zeros((*rows.shape[:2], self.rows, self.width + 1), changes.dtype)
            runs, ranks = numpy.ogrid[: rows.shape[0], : rows.shape[1]]
            numpy.add.at(tables, (runs[..., None], ranks[..., None], rows), changes)
            return tables
        # A product with a mask adds in a fixed order; scattered additions on a GPU do not.
        return one_hot(rows, self.rows).swapaxes(-1, -2) @ changes
