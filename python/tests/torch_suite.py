"""Runs PyTorch's own tests of torch.distributed, which its wheel contains, with one backend.

    python python/tests/torch_suite.py [--as-gloo] BACKEND RESULT.json [TEST...]

Each test starts 4 ranks, by fork, so that torch is imported once. The result has for each test `passed`, `skipped` or
`failed`, and the reason. Tests that need GPUs skip themselves. With --as-gloo tests find the name gloo where they look
for it, and each group is of BACKEND: so tests that are written for gloo alone run too.
"""

import argparse
import json
import os
import sys
import time
import unittest

RANKS = 4
#: Seconds after which a test counts as hanging.
LIMIT = 60


class Recorder(unittest.TestResult):
    """Collects results, and prints each."""

    def __init__(self, results, path):
        super().__init__()
        self.results, self.path = results, path
        self.started = 0.0

    def startTest(self, test):  # noqa: N802 - unittest's name
        super().startTest(test)
        self.started = time.monotonic()

    def record(self, test, outcome, reason=""):
        """Stores one result."""
        name = test.id().split(".")[-1]
        self.results[name] = {"outcome": outcome, "reason": reason}
        print(f"{outcome:8} {time.monotonic() - self.started:6.1f} s {name}", flush=True)
        with open(self.path, "w", encoding="utf-8") as file:
            json.dump(self.results, file, indent=1, sort_keys=True)

    def addSuccess(self, test):  # noqa: N802 - unittest's name
        self.record(test, "passed")

    def addSkip(self, test, reason):  # noqa: N802 - unittest's name
        self.record(test, "skipped", reason)

    def addFailure(self, test, error):  # noqa: N802 - unittest's name
        self.record(test, "failed", self._exc_info_to_string(error, test))

    addError = addFailure  # noqa: N815 - unittest's name


def as_gloo(backend):
    """Makes groups that are created as gloo's groups of `backend`."""
    import torch.distributed as dist

    world = dist.distributed_c10d
    create = world._new_process_group_helper

    def create_renamed(size, rank, ranks, name, *rest, **options):
        renamed = world.Backend(backend) if str(name) == "gloo" else name
        return create(size, rank, ranks, renamed, *rest, **options)

    world._new_process_group_helper = create_renamed


def test_class(backend, is_renamed):
    """Returns torch's tests for one backend."""
    import torch
    from torch.testing._internal import common_distributed

    common_distributed.initialize_temp_directories()
    if backend not in ("gloo", "nccl", "mpi", "ucc"):
        import cinch.torch  # noqa: F401 - registers the backend

        for feature in ("gpu", "cuda", "ddp", "subgroup", "plugin"):
            common_distributed.DistTestCases.backend_feature[feature].add(backend)
    from torch.testing._internal.distributed import distributed_test

    if is_renamed:
        as_gloo(backend)

    class TorchTests(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):
        def setUp(self):  # noqa: N802 - unittest's name
            super().setUp()
            self._start_processes(torch.multiprocessing.get_context("fork").Process)

    return TorchTests


def main():
    """Runs the tests that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("backend")
    parser.add_argument("result")
    parser.add_argument("--as-gloo", action="store_true")
    parser.add_argument("tests", nargs="*")
    options = parser.parse_args()
    os.environ.update(
        BACKEND="gloo" if options.as_gloo else options.backend,
        WORLD_SIZE=str(RANKS),
        DISTRIBUTED_TESTS_DEFAULT_TIMEOUT=str(LIMIT),
        OMP_NUM_THREADS="1",
        MASTER_PORT=os.environ.get("MASTER_PORT", "29581"),
    )
    tests = test_class(options.backend, options.as_gloo)
    names = options.tests or unittest.TestLoader().getTestCaseNames(tests)
    results = {}
    if os.path.exists(options.result):
        with open(options.result, encoding="utf-8") as file:
            results = json.load(file)
    unittest.TestSuite(tests(name) for name in names if name not in results).run(Recorder(results, options.result))
    count = {kind: sum(one["outcome"] == kind for one in results.values()) for kind in ("passed", "failed", "skipped")}
    print(f"{count['passed']} passed, {count['failed']} failed, {count['skipped']} skipped")
    sys.exit(count["failed"] > 0)


if __name__ == "__main__":
    main()
