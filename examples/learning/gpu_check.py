#!/usr/bin/env python3
"""Compares averages of ranks that share a GPU with those on host memory. Exits with 1 if they differ.

Chunks differ between GPUs and host memory, and with them the rank that reduces an element and does not encode its own
contribution. So not the bits are compared, but the errors of 180,000 averages beside exact ones.
"""

import pathlib
import sys

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent.parent / "python")]

import cases  # noqa: E402 - behind the path
import numpy  # noqa: E402
import torch  # noqa: E402
from ranks import Exchange, Ranks  # noqa: E402


#: Largest relative difference of the errors of equal codecs.
SHARE = 0.05


def error(case: cases.Case, steps, ranks: Ranks) -> float:
    """Returns the root mean square error of the averages; NaN if ranks received different bits."""
    exchange, squares = Exchange(ranks, case.codec, case.feedback), []
    for values in steps:
        found = exchange.mean(torch.tensor(values).cuda() if ranks.on_gpu else values)
        found = found.cpu().numpy() if ranks.on_gpu else found
        squares.append(((found - values.mean(1)) ** 2).mean())
    return float(numpy.sqrt(numpy.mean(squares))) if exchange.replicas_equal else float("nan")


def main() -> int:
    """Compares each codec over three steps, so that feedback counts."""
    draws = numpy.random.default_rng(9)
    steps = [draws.standard_normal((3, cases.RANKS, 20_000)).astype(numpy.float32) for _ in range(3)]
    host, gpu, differ = Ranks(cases.RANKS), Ranks(cases.RANKS, on_gpu=True), 0
    for case in [cases.EXACT, *cases.CLOSE, *cases.FEW_BITS[:5]]:
        expected, found = error(case, steps, host), error(case, steps, gpu)
        is_equal = abs(found - expected) <= SHARE * expected + 1e-6
        print(f"{'equal' if is_equal else 'DIFFER'} {case.name}: error {found:.6f} beside {expected:.6f}", flush=True)
        differ += not is_equal
    print(f"{differ} codecs differ", flush=True)
    gpu.close()
    host.close()
    return int(differ > 0)


if __name__ == "__main__":
    sys.exit(main())
