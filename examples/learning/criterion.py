"""Decides whether a codec changed what training reaches: paired differences over seeds, two one-sided tests.

A difference is the metric with the codec minus the metric without it, for equal initial weights, data order and seed.
Larger metrics are worse: error in points, loss, root mean square error. The margin is stated before the run.

- equivalent: the two one-sided tests (Schuirmann 1987) reject differences beyond either margin, each at 5 %;
- worse by X: not equivalent, and the mean difference X is above 0 at 5 %; or runs with the codec diverged;
- better by X: not equivalent, and the mean difference is below 0 at 5 %;
- not decided: none of these; more seeds would decide.

The module needs no package, because training runs where scipy is not installed. `test_criterion.py` compares the
distributions with scipy's and statsmodels' values.
"""

import dataclasses
import functools
import math
from typing import Dict, Sequence

#: Level of each one-sided test.
LEVEL = 0.05
#: Power that a verdict "equivalent" should have had before the run.
POWER = 0.8
#: Largest number of terms of the continued fraction of the incomplete beta function.
FRACTION_TERMS = 400
#: Intervals of Simpson's rule for the power.
INTERVALS = 400


def _beta_fraction(a: float, b: float, x: float) -> float:
    """Returns the continued fraction of the incomplete beta function, by Lentz's method."""
    tiny = 1e-300
    c, d = 1.0, 1.0 - (a + b) * x / (a + 1)
    d = 1.0 / (d if abs(d) > tiny else tiny)
    value = d
    for m in range(1, FRACTION_TERMS):
        before = value
        for factor in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            d = 1.0 + factor * d
            c = 1.0 + factor / c
            d = 1.0 / (d if abs(d) > tiny else tiny)
            c = c if abs(c) > tiny else tiny
            value *= d * c
        if value == before:
            break
    return value


def _beta(a: float, b: float, x: float) -> float:
    """Returns the regularised incomplete beta function."""
    if x <= 0 or x >= 1:
        return float(x >= 1)
    front = math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x))
    if x < (a + 1) / (a + b + 2):
        return front * _beta_fraction(a, b, x) / a
    return 1 - front * _beta_fraction(b, a, 1 - x) / b


def student_cdf(t: float, freedom: float) -> float:
    """Returns the probability that Student's t with `freedom` degrees of freedom is at most `t`."""
    tail = 0.5 * _beta(freedom / 2, 0.5, freedom / (freedom + t * t))
    return 1 - tail if t > 0 else tail


@functools.lru_cache(maxsize=None)
def student_quantile(probability: float, freedom: float) -> float:
    """Returns the t below which Student's distribution has `probability`; 100 halvings of an interval."""
    low, high = -1e6, 1e6
    for _ in range(100):
        middle = (low + high) / 2
        if student_cdf(middle, freedom) < probability:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def _normal(z: float) -> float:
    return 0.5 * math.erfc(-z / math.sqrt(2))


def power(margin: float, deviation: float, count: int, difference: float = 0.0) -> float:
    """Returns the probability of the verdict "equivalent" if the differences have this mean and standard deviation.

    Integrates over the sample's standard deviation s, whose (n-1) s^2 / sigma^2 has a chi-squared distribution.
    """
    if count < 2:
        return 0.0
    if deviation == 0:
        return float(abs(difference) < margin)
    freedom = count - 1
    error = deviation / math.sqrt(count)
    # Beyond this sample deviation no mean lies between the two limits.
    most = margin / (student_quantile(1 - LEVEL, freedom) * error)
    # The density of u = s / sigma falls below 1e-12 beyond this bound.
    end = min(most, 1 + 8 / math.sqrt(2 * freedom) + 4 / freedom)
    constant = math.log(2) + freedom / 2 * math.log(freedom / 2) - math.lgamma(freedom / 2)
    quantile = student_quantile(1 - LEVEL, freedom)

    def value(u: float) -> float:
        if u <= 0:
            return 0.0
        density = math.exp(constant + (freedom - 1) * math.log(u) - freedom * u * u / 2)
        room = margin / error - quantile * u
        return density * (_normal(room - difference / error) - _normal(-room - difference / error))

    step = end / INTERVALS
    inner = sum((4 if k % 2 else 2) * value(k * step) for k in range(1, INTERVALS))
    return min(1.0, max(0.0, step / 3 * (value(0) + inner + value(end))))


def seeds_needed(margin: float, deviation: float, most: int = 1000) -> int:
    """Returns the smallest number of seeds with a power of 0.8 to find equal results equivalent; at most `most`."""
    return next((n for n in range(2, most) if power(margin, deviation, n) >= POWER), most)


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Results of the tests. Differences have the metric's unit."""

    verdict: str
    margin: float
    seeds: int
    diverged: int
    #: Mean difference, its interval that both tests use (90 %), and the standard deviation over seeds.
    difference: float
    low: float
    high: float
    deviation: float
    #: Mean over standard deviation of the differences (Cohen's d of pairs).
    effect: float
    #: Larger p value of the two one-sided tests.
    p: float
    #: Power to find equal results equivalent, at this deviation and number of seeds.
    power: float

    def row(self) -> Dict[str, object]:
        """Returns the fields for a row of results, floats with 6 digits."""
        fields = dataclasses.asdict(self)
        return {key: float(f"{value:.6g}") if isinstance(value, float) else value for key, value in fields.items()}


def judge(exact: Sequence[float], coded: Sequence[float], margin: float) -> Verdict:
    """Compares the metrics of runs without and with a codec, in the order of their seeds.

    A metric that is not finite belongs to a run that diverged. Raises ValueError for fewer than 2 pairs, a margin that
    is not positive, or a run without the codec that diverged: no comparison is possible then.
    """
    if len(exact) != len(coded) or len(exact) < 2:
        raise ValueError(f"{len(exact)} and {len(coded)} runs; two or more pairs are needed")
    if not margin > 0:
        raise ValueError(f"a margin of {margin}")
    if not all(math.isfinite(value) for value in exact):
        raise ValueError("a run without the codec diverged")
    count = len(exact)
    diverged = sum(not math.isfinite(value) for value in coded)
    if diverged:
        nothing = math.nan
        word = f"worse: {diverged} of {count} runs diverged"
        return Verdict(word, margin, count, diverged, nothing, nothing, nothing, nothing, nothing, 1.0, 0.0)
    differences = [with_it - without for without, with_it in zip(exact, coded)]
    mean = math.fsum(differences) / count
    deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in differences) / (count - 1))
    error = deviation / math.sqrt(count)
    half = student_quantile(1 - LEVEL, count - 1) * error
    low, high = mean - half, mean + half
    if error > 0:
        p = max(
            1 - student_cdf((margin - mean) / error, count - 1), 1 - student_cdf((mean + margin) / error, count - 1)
        )
    else:
        p = float(abs(mean) >= margin)
    if -margin < low and high < margin:
        word = "equivalent"
    elif low > 0:
        word = f"worse by {mean:.3g}"
    elif high < 0:
        word = f"better by {-mean:.3g}"
    else:
        word = "not decided"
    effect = mean / deviation if deviation > 0 else math.copysign(math.inf, mean) if mean else 0.0
    return Verdict(word, margin, count, 0, mean, low, high, deviation, effect, p, power(margin, deviation, count))
