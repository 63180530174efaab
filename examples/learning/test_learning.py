"""Tests of networks, data and averages beside independent oracles. Needs numpy and cinch's library.

python3 examples/learning/test_learning.py
"""

import math
import pathlib
import sys
import unittest

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent.parent / "python")]

import cases  # noqa: E402 - behind the path
import data  # noqa: E402
import loops  # noqa: E402
import nets  # noqa: E402
import numpy  # noqa: E402
import ranks  # noqa: E402

DRAWS = numpy.random.default_rng(8)


def _samples(width, label):
    return DRAWS.standard_normal((2, 3, 5, width)), label


class Networks(unittest.TestCase):
    def test_gradients_equal_differences_of_the_loss(self):
        classes = DRAWS.integers(0, 16, (2, 3, 5))
        numbers = DRAWS.standard_normal((2, 3, 5, 1))
        pairs = numpy.stack([DRAWS.integers(0, 20, (2, 3, 5)), DRAWS.integers(0, 7, (2, 3, 5))], -1)
        for net, inputs, labels in [
            (nets.Mlp((64, 32, 16)), *_samples(64, classes)),
            (nets.Conv(8, (4, 6, 8), 16), *_samples(64, classes)),
            (cases.regression(8), *_samples(10, numbers)),
            (nets.Factors(20, 7, 4), pairs, numbers),
        ]:
            weights = numpy.stack([net.start(seed) for seed in (1, 2)]).astype(numpy.float64)
            _, found = net.gradients(weights, inputs, labels)
            for index in DRAWS.integers(0, net.size, 60):
                step = numpy.zeros_like(weights)
                step[:, index] = 1e-6
                above, below = (net.gradients(weights + sign * step, inputs, labels)[0] for sign in (1, -1))
                expected = (above - below) / 2e-6
                self.assertLess(numpy.abs(expected - found[:, :, index]).max(), 1e-7, (type(net), index))

    def test_scale_multiplies_gradients_and_half_overflows(self):
        net = nets.Mlp((64, 32, 16))
        weights = numpy.stack([net.start(1)])
        inputs = DRAWS.standard_normal((1, 1, 5, 64)).astype(numpy.float32)
        labels = DRAWS.integers(0, 16, (1, 1, 5))
        _, plain = net.gradients(weights, inputs, labels)
        _, scaled = net.gradients(weights, inputs, labels, numpy.array([8.0], numpy.float32))
        self.assertTrue((scaled == 8 * plain).all())
        with numpy.errstate(all="ignore"):
            _, huge = net.gradients(weights, inputs, labels, numpy.array([2.0**30], numpy.float32), half=True)
        self.assertFalse(numpy.isfinite(huge).all())


class Averages(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.ranks = ranks.Ranks(4)

    @classmethod
    def tearDownClass(cls):
        cls.ranks.close()

    def test_raw_average_is_the_mean(self):
        values = DRAWS.integers(-50, 50, (3, 4, 1500)).astype(numpy.float32)
        exchange = ranks.Exchange(self.ranks)
        self.assertTrue((exchange.mean(values) == values.mean(1)).all())
        self.assertTrue(exchange.replicas_equal)

    def test_run_in_a_batch_gets_the_bits_of_a_run_alone(self):
        steps = [DRAWS.standard_normal((3, 4, 3000)).astype(numpy.float32) for _ in range(3)]
        for codec, feedback in [("dynamic8", False), ("onebit", True), ("minmax4", True), ("linear8:tensor=2", False)]:
            batch = ranks.Exchange(self.ranks, codec, feedback)
            together = [batch.mean(values) for values in steps]
            for run in range(3):
                alone = ranks.Exchange(self.ranks, codec, feedback)
                if "tensor" in codec:
                    # Scales belong to tensors by their number, so a run alone has the number of its own.
                    continue
                for values, expected in zip(steps, together):
                    found = alone.mean(values[run : run + 1])[0]
                    self.assertEqual(found.tobytes(), expected[run].tobytes(), (codec, run))

    def test_half_scale_keeps_half_of_the_largest(self):
        exchange = ranks.Exchange(self.ranks, "raw", harm="half scale")
        values = numpy.zeros((1, 4, 256), numpy.float32)
        values[..., :3] = (8.0, 3.0, -6.0)
        self.assertEqual(exchange.mean(values)[0, :4].tolist(), [4.0, 3.0, -4.0, 0.0])


class Loops(unittest.TestCase):
    def test_all_cases_share_weights_and_order(self):
        task = cases.small_tasks()["digits"]
        first, second = (next(iter(loops.batches(task, [5, 6], 4))) for _ in range(2))
        self.assertTrue((first[0] == second[0]).all())
        self.assertFalse((first[0][0] == first[0][1]).all())
        self.assertTrue((task.net.start(5) == task.net.start(5)).all())

    def test_rate_grows_then_falls_to_zero(self):
        rates = [loops.rate_at(step, 200, 0.1) for step in range(200)]
        self.assertEqual(max(rates), 0.1)
        self.assertLess(rates[-1], 1e-4)
        self.assertLess(rates[0], 0.011)


class Cases(unittest.TestCase):
    def test_report_can_tell_all_cases_of_a_task_apart(self):
        for task in cases.small_tasks():
            names = [(case.name, case.rate) for case in cases.of(task, "all")]
            self.assertEqual(len(names), len(set(names)), task)

    def test_calm_cases_differ_from_close_ones_in_the_rate_alone(self):
        calm = [(case.codec, case.feedback, case.harm) for case in cases.of("textures-conv", "calm")]
        self.assertEqual(calm, [(case.codec, case.feedback, case.harm) for case in [*cases.CLOSE, cases.HARM[0]]])
        self.assertEqual({case.rate for case in cases.CALM}, {cases.SLOW})


class Data(unittest.TestCase):
    def test_changed_data_are_refused(self):
        import tempfile

        arrays = dict(data.load(data.SMALL))
        stated = arrays.pop("sha256")
        self.assertEqual(data.digest(arrays), stated)
        arrays["diabetes"] = arrays["diabetes"] + 1
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "changed.npz"
            numpy.savez(path, sha256=numpy.bytes_(stated), **arrays)
            with self.assertRaisesRegex(ValueError, "hash"):
                data.load(path)

    def test_no_training_patch_touches_a_held_back_region(self):
        # Each pixel of the image has its region's number, so a patch shows where it was cut.
        image = numpy.add.outer(numpy.arange(96) // 24, numpy.arange(96) // 24)
        train, test = data.patches(image, 24, 8, (200, 100), numpy.random.default_rng(1))
        self.assertFalse((train % 4 == 3).any())
        self.assertTrue((test % 4 == 3).all())


class NGrams(unittest.TestCase):
    def test_loss_equals_a_count_by_hand(self):
        try:
            from characters import n_gram_loss
        except ImportError:
            self.skipTest("torch is not installed")
        train, test = numpy.array([0, 1, 0, 1, 0, 0]), numpy.array([0, 1, 1])
        # Orders 1 and 2 by Witten and Bell: p1(1) = (2 + 2/3) / (6 + 2) = 1/3 for an alphabet of 3. After 0 came 1
        # twice and 0 once: p(1|0) = (2 + 2/3) / 5. After 1 came 0 twice: p(1|1) = (0 + 1/3) / 3.
        expected = -(math.log((2 + 2 / 3) / 5) + math.log(1 / 9)) / 2
        self.assertAlmostEqual(n_gram_loss(train, test, 3, order=2), expected, places=12)


if __name__ == "__main__":
    unittest.main()
