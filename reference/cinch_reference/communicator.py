"""Simulation of all ranks of a communicator: section "Collectives", notation."""

from dataclasses import dataclass, field, replace

import numpy as np

from . import averages, chunk, kept_scales, random_numbers, raw
from .chunks import SLOT_BYTES, Division, divide, slot_bytes
from .elements import Element, narrow, widen
from .feedback import OWNER, WORKER, Feedback, damp, kind
from .reports import RankReport, saturated
from .spec import RAW, Codec

COLLECTIVES = {
    "all_reduce": 0,
    "all_gather": 1,
    "reduce_scatter": 2,
    "broadcast": 3,
    "reduce": 4,
    "gather": 5,
    "scatter": 6,
    "all_to_all": 7,
    "send_recv": 8,
}
ALGORITHMS = ["ring", "tree", "oneshot", "direct", "hierarchical", "flat_tree"]
REDUCING = ("all_reduce", "reduce_scatter", "reduce")


@dataclass(frozen=True)
class Arguments:
    """Arguments of a call, equal on all ranks except for the factors.

    `count` is that of the message, or of one rank's block. `inside` is the codec inside hosts.
    """

    collective: str
    element: Element
    count: int
    algorithm: str
    op: str = "sum"
    codec: Codec = RAW
    inside: Codec | None = None
    root: int = 0
    factors: tuple | None = None
    tensor: int = 0
    feedback: int = 0

    @property
    def codecs(self) -> tuple[Codec, Codec]:
        """Returns the codecs of messages between and inside hosts. Section "Chunks", flat algorithms."""
        inside = self.inside if self.algorithm == "hierarchical" else None
        return self.codec, inside or self.codec


@dataclass(frozen=True)
class Groups:
    """Ranks of each group, the number of rails, and the algorithm between groups."""

    ranks: tuple[tuple[int, ...], ...]
    rails: int
    between: str

    def at(self, group: int, rail: int) -> int:
        """Returns the rank of a group on a rail. Section "Hierarchical"."""
        ranks = self.ranks[group % len(self.ranks)]
        return ranks[rail % len(ranks)]


@dataclass
class Message:
    """Encoded numbers of n elements, or elements without a codec."""

    codec: Codec
    data: np.ndarray
    n: int


class Communicator:
    """State of all ranks between calls."""

    def __init__(self, nranks: int, slot: int = SLOT_BYTES, groups: Groups | None = None):
        self.size = nranks
        self.slot = slot_bytes(nranks, slot)
        self.groups = groups
        self.sequence = 0
        self.pairs: dict[tuple[int, int], int] = {}
        self.feedback = [Feedback(rank, nranks) for rank in range(nranks)]
        self.scales = [kept_scales.KeptScales() for _ in range(nranks)]
        self.reports: list[RankReport] = []

    def next_sequence(self) -> int:
        """Returns the sequence number of a collective. Section "Random numbers"."""
        number = self.sequence
        self.sequence += 1
        return number

    def next_of_pair(self, sender: int, receiver: int) -> int:
        """Returns the sequence number of a send. Section "Random numbers"."""
        number = self.pairs.get((sender, receiver), 0)
        self.pairs[sender, receiver] = number + 1
        return number


@dataclass
class Run:
    """One call on all ranks: the notation of section "Collectives"."""

    comm: Communicator
    arguments: Arguments
    inputs: list[np.ndarray | None]
    operation: int
    kept: list[kept_scales.Scales] | None = None
    division: Division | None = None
    reports: list[RankReport] = field(default_factory=list)
    shift: int = 0

    def __post_init__(self) -> None:
        """Prepares the reports of all ranks, and s of an average."""
        self.reports = [RankReport() for _ in range(self.comm.size)]
        if self.is_average:
            arguments = self.arguments
            self.shift = averages.shift(
                self.element, arguments.codecs, arguments.algorithm, self.size
            )

    @property
    def is_average(self) -> bool:
        """Returns whether the call averages."""
        return self.arguments.op == "avg"

    @property
    def size(self) -> int:
        """Returns N, the number of ranks."""
        return self.comm.size

    @property
    def element(self) -> Element:
        """Returns the element type."""
        return self.arguments.element

    def divide(self, parts: int) -> Division:
        """Returns the division of the call into chunks."""
        arguments = self.arguments
        self.division = divide(self.element, arguments.codecs, parts, arguments.count, self.comm.slot)
        return self.division

    def begin_state(self, blocks: int) -> None:
        """Begins the state of feedback and of kept scales; `blocks` is C / P."""
        arguments, division = self.arguments, self.division
        for rank in range(self.size) if arguments.feedback else ():
            collective, operator = COLLECTIVES[arguments.collective], raw.OPERATORS[arguments.op]
            word = kind(
                collective, operator, self.element.number, arguments.root,
                ALGORITHMS.index(arguments.algorithm), *(codec.number for codec in arguments.codecs),
            )  # fmt: skip
            chunks = division.passes * division.parts * blocks
            shape = (word, arguments.count, division.chunk, chunks)
            self.comm.feedback[rank].begin(arguments.feedback, shape)
        if arguments.codec.tensor or (arguments.inside and arguments.inside.tensor):
            same = replace(arguments, factors=None, feedback=0)
            k = arguments.codec.tensor or arguments.inside.tensor
            self.kept = []
            for rank in range(self.size):
                factor = None
                if arguments.factors is not None:
                    factor = arguments.factors[rank].tobytes()
                self.kept.append(self.comm.scales[rank].begin((same, factor), k))

    def commit(self) -> None:
        """Ends the call successfully."""
        if self.arguments.feedback:
            for rank in range(self.size):
                feedback = self.comm.feedback[rank]
                feedback.commit(self.arguments.feedback)
                self.reports[rank].residual_l2_norm = feedback.l2_norm(self.arguments.feedback)

    def x(self, rank: int, at: int, n: int) -> np.ndarray:
        """Returns `x[r]`: widened elements of the input, times the rank's factor or 2^-s."""
        acc = widen(self.element, self.inputs[rank][at : at + n])
        if self.arguments.factors is not None:
            acc = raw.multiply(self.element, acc, self.arguments.factors[rank])
        if not self.arguments.codec.is_raw:
            self.reports[rank].count_input(acc, at)
        return averages.contribution(acc, self.shift) if self.shift else acc

    def copy(self, rank: int, at: int, n: int) -> np.ndarray:
        """Returns elements of the input that the rank copies to its own output."""
        self.x(rank, at, n)
        return self.inputs[rank][at : at + n].copy()

    def encode(
        self,
        rank: int,
        number: int,
        at: int,
        v: np.ndarray,
        is_sum: bool = False,
        role: int = WORKER,
        codec: Codec | None = None,
    ) -> Message:
        """Returns `E(v)` of a rank.

        `number` is that of the chunk, `at` the position in the rank's input buffer.
        """
        codec = codec or self.arguments.codec
        if codec.is_raw:
            if self.is_average:
                v = averages.limit_to_element(self.element, v)
            return Message(codec, narrow(self.element, v), v.size)
        key = random_numbers.key(codec.seed, self.operation, 2 * rank + is_sum)

        def encode(w: np.ndarray) -> np.ndarray:
            scale = None
            if codec.tensor:
                scale = kept_scales.scale_of(self.kept[rank], number, w)
            self.reports[rank].saturated += saturated(codec, w, scale)
            return chunk.encode(codec, w, key, at, scale, self.element)

        if self.arguments.feedback:
            data = self.comm.feedback[rank].encode(
                self.arguments.feedback,
                (number, role),
                v,
                lambda w: damp(codec, encode(w), w.size),
                lambda message: chunk.decode(codec, message, v.size),
                self.element,
            )
        else:
            data = encode(v)
        return Message(codec, data, v.size)

    def encode_result(self, rank: int, number: int, at: int, acc: np.ndarray) -> Message:
        """Returns `E(fin(acc))`, which all ranks decode."""
        return self.encode(rank, number, at, self.fin(acc), True, OWNER)

    def decode(self, m: Message) -> np.ndarray:
        """Returns `D(m)`."""
        if m.codec.is_raw:
            return widen(self.element, m.data)
        return chunk.decode(m.codec, m.data, m.n)

    def add(self, acc: np.ndarray | None, m: Message) -> np.ndarray:
        """Returns `acc + m`; None begins a sum."""
        if acc is None:
            return self.decode(m)
        if m.codec.is_raw:
            return raw.combine(self.arguments.op, acc, self.decode(m))
        return chunk.decode_add(m.codec, m.data, acc)

    def add_own(self, acc: np.ndarray | None, x: np.ndarray) -> np.ndarray:
        """Returns `acc + x[r]`; None begins a sum."""
        return x if acc is None else raw.combine(self.arguments.op, acc, x)

    def fin(self, acc: np.ndarray) -> np.ndarray:
        """Returns `fin(acc)`."""
        if not self.is_average:
            return acc
        return averages.final_sum(self.element, acc, self.size, self.shift)

    def out(self, v: np.ndarray) -> np.ndarray:
        """Returns v as elements."""
        return narrow(self.element, v)
