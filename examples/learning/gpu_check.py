#!/usr/bin/env python3
"""Compares averages of ranks that share a GPU with those on host memory, bit for bit. Exits with 1 if one differs."""

import pathlib
import sys

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent.parent / "python")]

import cases  # noqa: E402 - behind the path
import cinch  # noqa: E402
import numpy  # noqa: E402
import torch  # noqa: E402
from ranks import Exchange, Ranks  # noqa: E402


def compare(case: cases.Case, steps, host: Ranks, gpu: Ranks) -> bool:
    """Returns whether both give equal bits in each step."""
    pair = [Exchange(ranks, case.codec, case.feedback, case.harm) for ranks in (host, gpu)]
    is_equal = True
    for values in steps:
        expected, found = pair[0].mean(values), pair[1].mean(torch.tensor(values).cuda())
        is_equal &= expected.tobytes() == found.cpu().numpy().tobytes()
    return is_equal


def main() -> int:
    """Compares each codec over three steps, so that feedback and kept scales count."""
    draws = numpy.random.default_rng(9)
    steps = [draws.standard_normal((3, cases.RANKS, 20_000)).astype(numpy.float32) for _ in range(3)]
    host, gpu, differ = Ranks(cases.RANKS), Ranks(cases.RANKS, on_gpu=True), 0
    for case in [cases.EXACT, *cases.ALL[:12]]:
        try:
            is_equal = compare(case, steps, host, gpu)
        except cinch.UnsupportedError as error:
            print(f"not on GPUs: {case.name}: {error}", flush=True)
            continue
        print(f"{'equal' if is_equal else 'DIFFER'} {case.name}", flush=True)
        differ += not is_equal
    print(f"{differ} codecs differ", flush=True)
    gpu.close()
    host.close()
    return int(differ > 0)


if __name__ == "__main__":
    sys.exit(main())
