"""Tests of the page's rows: blocks of seeds of one case count as one run of all seeds.

python3 examples/learning/test_report.py
"""

import json
import pathlib
import random
import tempfile
import unittest

import criterion
import report
from report import transfer

MARGIN = 0.3


def row(seeds, exact, metrics, **more):
    """Returns a row as run.py writes it."""
    finite = [float("nan") if value is None else value for value in metrics]
    verdict = criterion.judge(exact, finite, MARGIN).row()
    facts = {"task": "digits", "loop": "data", "case": "dynamic8", "rate": 1.0, "data": "d1", "steps": 800}
    return {**facts, **verdict, "seeds": seeds, "exact": exact, "metrics": metrics, **more}


def load(*rows):
    return report.load("\n".join(json.dumps(one) for one in rows))


class Merged(unittest.TestCase):
    def setUp(self):
        draws = random.Random(5)
        self.exact = [3 + draws.gauss(0, 1) for _ in range(60)]
        self.coded = [value + draws.gauss(0, 0.6) for value in self.exact]

    def block(self, first, last, **more):
        part = slice(first - 1, last)
        return row(list(range(first, last + 1)), self.exact[part], self.coded[part], **more)

    def test_blocks_of_seeds_are_judged_as_one_run(self):
        (found,) = load(self.block(41, 60), self.block(1, 20), self.block(21, 40))
        (whole,) = load(self.block(1, 60))
        self.assertEqual(found, whole)
        self.assertEqual(found["seeds"], list(range(1, 61)))
        self.assertGreater(found["power"], self.block(1, 20)["power"])

    def test_each_seed_keeps_the_exact_run_of_its_block(self):
        # Exact runs differ by 10 between blocks: only pairs within a block have a difference of 1.
        (found,) = load(
            row([1, 2, 3], [2.0, 3.0, 4.0], [3.0, 4.0, 5.0]), row([4, 5, 6], [12.0, 13.0, 14.0], [13.0, 14.0, 15.0])
        )
        self.assertEqual((found["difference"], found["deviation"], found["verdict"]), (1.0, 0.0, "worse by 1"))

    def test_repeated_seed_counts_once_as_the_later_row_has_it(self):
        (found,) = load(row([1, 2], [2.0, 2.0], [9.0, 2.5]), row([1, 3], [2.0, 2.0], [2.5, 2.5]))
        self.assertEqual((found["seeds"], found["metrics"]), ([1, 2, 3], [2.5, 2.5, 2.5]))

    def test_other_data_and_steps_are_not_mixed(self):
        latest = self.block(21, 40)
        for other in ({"steps": 100}, {"data": "d2"}):
            self.assertEqual(load(self.block(1, 20, **other), latest), [latest])

    def test_other_rates_and_cases_keep_rows_of_their_own(self):
        rows = load(self.block(1, 20), self.block(21, 40, rate=0.2), self.block(21, 40, case="linear8"))
        self.assertEqual([len(found["seeds"]) for found in rows], [20, 20, 20])

    def test_diverged_run_of_a_block_makes_the_case_worse(self):
        (found,) = load(row([1, 2], [2.0, 2.0], [None, 2.5]), row([3, 4], [2.0, 2.0], [2.5, 2.5]))
        self.assertEqual((found["verdict"], found["metrics"][0]), ("worse: 1 of 4 runs diverged", None))

    def test_margin_that_is_a_share_is_the_share_of_all_exact_runs(self):
        blocks = [
            row(seeds, exact, exact, margin=0.01 * sum(exact) / len(exact))
            for seeds, exact in [([1, 2], [1.0, 3.0]), ([3, 4, 5, 6], [5.0, 6.0, 7.0, 8.0])]
        ]
        (found,) = load(*blocks)
        self.assertAlmostEqual(found["margin"], 0.01 * 5.0, places=9)

    def test_rows_without_an_exact_run_are_replaced(self):
        first, second = ({"task": "profile", "loop": "time", "case": "encode", "encode_ns": ns} for ns in (1.0, 2.0))
        self.assertEqual(load(first, second), [second])


class Crossovers(unittest.TestCase):
    def test_lines_of_known_costs_cross_where_they_must(self):
        # 0.1 ms and 1 us a number, beside 1 ms and 0.1 us a number: equal at 1,000.
        counts = [10 * 2**power for power in range(15)]
        more = {count: 0.1 + 0.001 * count for count in counts}
        fewer = {count: 1.0 + 0.0001 * count for count in counts}
        self.assertAlmostEqual(transfer.crossover(fewer, more) / 1000, 1, delta=0.01)

    def test_power_laws_cross_exactly(self):
        counts = [10_000, 80_000, 640_000]
        more = {count: count**1.0 for count in counts}
        fewer = {count: 50_000**0.5 * count**0.5 for count in counts}
        self.assertAlmostEqual(transfer.crossover(fewer, more), 50_000, places=4)

    def test_last_crossing_counts_where_lines_cross_again(self):
        self.assertEqual(transfer.crossover({1: 1, 2: 4, 4: 4, 8: 4}, {1: 2, 2: 2, 4: 4, 8: 16}), 4)

    def test_lines_that_do_not_cross(self):
        slow, fast = {1: 2.0, 2: 4.0}, {1: 1.0, 2: 2.0}
        self.assertEqual(transfer.crossover(fast, slow), 0)
        self.assertEqual(transfer.crossover(slow, fast), float("inf"))
        self.assertEqual(transfer.crossover(fast, fast), float("inf"))

    def test_rows_of_a_gpu_with_peer_memory_are_refused(self):
        with self.assertRaisesRegex(ValueError, "CINCH_P2P_DISABLE=1"):
            transfer.link({"run": {"gpu": "NVIDIA H200", "settings": {}}})

    def test_pinned_rows_add_a_line_of_medians(self):
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder)
            self.assertEqual(transfer.load(path), {})
            run = {"gpu": "NVIDIA H200", "settings": {"CINCH_P2P_DISABLE": "1"}}
            rows = [
                {"run": run, "codec": codec, "count": count, "out_of_place": {"time_us": scale * count * turn}}
                for codec, scale in [("raw", 1.0), ("dynamic8:block=256", 0.5), ("onebit:block=256", 2.0)]
                for count in transfer.SHOWN
                for turn in (1, 2, 9)
            ]
            (path / transfer.FILES[1]).write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
            lines = transfer.load(path)
            self.assertEqual(lines["pinned PCIe, H200"][32][10_000], 20.0)
            found = transfer.table(lines).splitlines()[-1]
            self.assertTrue(found.startswith("| pinned PCIe, H200 | 40, 10, 20 |"), found)
            self.assertTrue(found.endswith("| 10 thousand or fewer | not by 10 million | not by 10 million |"), found)


if __name__ == "__main__":
    unittest.main()
