"""Tests of the criterion: distributions beside scipy and statsmodels, and cases whose verdict is planted.

    python3 examples/learning/test_criterion.py [--against-scipy]

The recorded values come from scipy 1.17.1 and statsmodels 0.15.0; --against-scipy computes them again.
"""

import math
import random
import sys
import unittest

import criterion

#: Probability, degrees of freedom, scipy.stats.t.ppf.
QUANTILES = [
    (0.95, 1, 6.313751514675037),
    (0.95, 9, 1.833112932656237),
    (0.975, 19, 2.0930240544083087),
    (0.05, 4, -2.131846786326651),
    (0.9, 29, 1.311433647301551),
]
EXACT = [3.1, 2.9, 3.4, 3.0, 3.3, 2.8, 3.2, 3.1]
CODED = [3.2, 2.8, 3.5, 3.1, 3.2, 2.9, 3.2, 3.3]
#: statsmodels.stats.weightstats.ttost_paired(CODED, EXACT, -0.3, 0.3): p and the two statistics.
TOST = (0.0001501346802623519, 9.260129588726075, -6.61437827766148)


class Distributions(unittest.TestCase):
    def test_quantiles_equal_scipys(self):
        for probability, freedom, expected in QUANTILES:
            self.assertAlmostEqual(criterion.student_quantile(probability, freedom), expected, places=7)
            self.assertAlmostEqual(criterion.student_cdf(expected, freedom), probability, places=10)

    def test_paired_tests_equal_statsmodels(self):
        verdict = criterion.judge(EXACT, CODED, 0.3)
        self.assertAlmostEqual(verdict.p / TOST[0], 1, places=6)
        self.assertEqual(verdict.verdict, "equivalent")

    def test_power_equals_simulated_share(self):
        draws = random.Random(7)
        for margin, deviation, count, difference in [(0.3, 0.3, 10, 0.0), (0.3, 0.4, 20, 0.1), (1.0, 0.6, 5, 0.0)]:
            found = 0
            for _ in range(1000):
                coded = [draws.gauss(difference, deviation) for _ in range(count)]
                found += criterion.judge([0.0] * count, coded, margin).verdict == "equivalent"
            power = criterion.power(margin, deviation, count, difference)
            # Four standard errors of a share of 1,000.
            self.assertLess(abs(found / 1000 - power), 4 * math.sqrt(0.25 / 1000), (margin, deviation, count))

    def test_seeds_needed_is_the_first_with_power(self):
        count = criterion.seeds_needed(0.3, 0.35)
        self.assertGreaterEqual(criterion.power(0.3, 0.35, count), 0.8)
        self.assertLess(criterion.power(0.3, 0.35, count - 1), 0.8)


class Verdicts(unittest.TestCase):
    def judge(self, difference, deviation, count=10, margin=0.3):
        draws = random.Random(3)
        noise = [draws.gauss(0, 1) for _ in range(count)]
        mean = sum(noise) / count
        size = math.sqrt(sum((value - mean) ** 2 for value in noise) / (count - 1))
        exact = [3 + draws.gauss(0, 1) for _ in range(count)]
        coded = [base + difference + deviation * (value - mean) / size for base, value in zip(exact, noise)]
        return criterion.judge(exact, coded, margin)

    def test_planted_cases_are_found(self):
        for difference, deviation, expected in [
            (0.0, 0.1, "equivalent"),
            (0.05, 0.1, "equivalent"),
            (24.0, 5.0, "worse by 24"),
            (0.5, 0.1, "worse by 0.5"),
            (-0.5, 0.1, "better by 0.5"),
            (0.0, 2.0, "not decided"),
        ]:
            self.assertEqual(self.judge(difference, deviation).verdict, expected)

    def test_overlapping_intervals_do_not_hide_a_paired_harm(self):
        # The 95 % intervals of both rows contain both means, and each pair is worse.
        exact = [2.0, 10.0, 18.0, 26.0]
        coded = [4.0, 13.0, 20.5, 29.0]
        self.assertEqual(criterion.judge(exact, coded, 0.3).verdict, "worse by 2.62")

    def test_wide_spread_is_never_equivalent(self):
        for deviation in (0.6, 1.0, 10.0):
            self.assertNotEqual(self.judge(0.0, deviation).verdict, "equivalent")

    def test_diverged_runs_are_worse(self):
        verdict = criterion.judge([1.0, 1.0, 1.0], [1.0, math.nan, math.inf], 0.1)
        self.assertEqual((verdict.verdict, verdict.diverged), ("worse: 2 of 3 runs diverged", 2))

    def test_equal_runs_are_equivalent_with_power_one(self):
        verdict = criterion.judge([1.0, 2.0], [1.0, 2.0], 0.1)
        self.assertEqual((verdict.verdict, verdict.effect, verdict.power), ("equivalent", 0.0, 1.0))

    def test_bad_input_is_refused(self):
        for exact, coded, margin in [([1.0], [1.0], 0.1), ([1.0, 2.0], [1.0], 0.1), ([1.0, 2.0], [1.0, 2.0], 0.0)]:
            with self.assertRaises(ValueError):
                criterion.judge(exact, coded, margin)
        with self.assertRaises(ValueError):
            criterion.judge([1.0, math.nan], [1.0, 2.0], 0.1)


class AgainstScipy(unittest.TestCase):
    def test_recorded_values_are_those_of_the_packages(self):
        import numpy
        from scipy import stats
        from statsmodels.stats.weightstats import ttost_paired

        for probability, freedom, expected in QUANTILES:
            self.assertAlmostEqual(stats.t.ppf(probability, freedom), expected, places=9)
        found, lower, upper = ttost_paired(numpy.array(CODED), numpy.array(EXACT), -0.3, 0.3)
        for value, expected in zip((found, lower[0], upper[0]), TOST):
            self.assertAlmostEqual(value / expected, 1, places=9)


if __name__ == "__main__":
    if "--against-scipy" in sys.argv:
        sys.argv.remove("--against-scipy")
    else:
        del AgainstScipy
    unittest.main()
