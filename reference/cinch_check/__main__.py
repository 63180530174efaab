"""Command line of `reference/check`."""

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from . import codecs, collectives, frames, hosts, planted_defects, state, vectors
from .compare import Result
from .library import Library

ROOT = Path(__file__).resolve().parents[2]

Check = Callable[[Library, int, np.random.Generator], Result]

PARTS: dict[str, tuple[Check, str, float]] = {
    "vectors": (vectors.check_vectors, "", 0),
    "codecs": (codecs.check_codecs, "elements", 1),
    "hostile": (codecs.check_hostile, "elements", 0.2),
    "published": (codecs.check_published, "elements", 0.1),
    "collectives": (collectives.check_collectives, "collective_elements", 1),
    "averages": (collectives.check_averages, "collective_elements", 0.2),
    "hosts": (hosts.check_hosts, "collective_elements", 0.1),
    "feedback": (state.check_feedback, "collective_elements", 0.2),
    "tensor": (state.check_tensors, "collective_elements", 0.1),
    "fused": (state.check_fused, "collective_elements", 0.1),
    "pairs": (state.check_pairs, "collective_elements", 0.05),
    "reports": (state.check_reports, "collective_elements", 0.1),
    "training": (state.check_training, "collective_elements", 0.001),
    "frames": (frames.check_frames, "", 0),
}
"""Check of each part, the option that sets its elements, and its share of them."""

NAMED_ONLY = ("frames",)
"""Parts that a run without `--part` leaves out."""


def parse_arguments() -> argparse.Namespace:
    """Returns the options."""
    parser = argparse.ArgumentParser(
        prog="reference/check", description="Compares libcinch with the reference, byte by byte."
    )
    number = lambda text: int(float(text))  # noqa: E731
    parser.add_argument("--library", default=str(ROOT / "target/release/libcinch.so"), metavar="PATH")
    parser.add_argument("--elements", type=number, default=2_000_000, metavar="N")
    parser.add_argument("--collective-elements", type=number, default=2_000_000, metavar="N")
    parser.add_argument("--seed", type=int, default=1, metavar="S")
    parser.add_argument("--part", action="append", choices=list(PARTS), help="may be repeated")
    parser.add_argument("--write-vectors", action="store_true", help="writes reference/vectors")
    parser.add_argument(
        "--planted-defects", action="store_true", help="checks that wrong roundings are found"
    )
    return parser.parse_args()


def run_part(library: Library, name: str, options: argparse.Namespace) -> Result:
    """Runs one part and prints its line."""
    check, option, share = PARTS[name]
    random = np.random.default_rng((options.seed, list(PARTS).index(name)))
    begin = time.monotonic()
    result = check(library, int(getattr(options, option, 0) * share), random)
    seconds = time.monotonic() - begin
    print(
        f"{name:12} {result.elements:>12,} elements {result.bytes:>14,} bytes compared"
        f" {result.differing:>6,} differing {seconds:7.1f} s",
        flush=True,
    )
    for example in result.examples:
        print(f"    {example}", flush=True)
    return result


def main() -> int:
    """Returns the exit status."""
    options = parse_arguments()
    if options.write_vectors:
        print(vectors.write())
        return 0
    if not Path(options.library).exists():
        print(f"{options.library} does not exist; run: cargo build --release --workspace", file=sys.stderr)
        return 2
    library = Library(options.library)
    if options.planted_defects:
        return planted_defects.run(library)
    print(f"libcinch {library.version()}, seed {options.seed}, numpy {np.__version__}", flush=True)
    chosen = options.part or [name for name in PARTS if name not in NAMED_ONLY]
    results = [run_part(library, name, options) for name in chosen]
    elements = sum(result.elements for result in results)
    differing = sum(result.differing for result in results)
    print(f"{'all':12} {elements:>12,} elements, {differing:,} bytes differ")
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
