"""Milliseconds to average gradients over the number of parameters, with 1, 8 and 32 bits, from rows of benches/baselines.

`scripts/bench-net --transfer` writes the rows of TCP. Rows of pinned memory, over which two ranks that share a GPU send
every byte through PCIe twice, come from a machine with a GPU:

    CINCH_P2P_DISABLE=1 cinch bench all_reduce --device gpu --gpus 1 --ranks-per-gpu 2 -o avg -b 40000 -e 40960000 -f 2 \\
        --codec onebit,dynamic8,raw -n 20 -w 5 -N 5 --json benches/baselines/gpu-transfer.jsonl
"""

import json
import math
import pathlib
import statistics
import sys

BASELINES = pathlib.Path(__file__).resolve().parent / "baselines"
#: Files of rows. One that does not exist has no line in the table and no panel in the drawing.
FILES = ("host-tcp-transfer.jsonl", "gpu-transfer.jsonl")
#: Bits by codec, and pairs of bits whose lines may cross.
BITS = {"onebit": 1, "dynamic8": 8, "raw": 32}
PAIRS = ((8, 32), (1, 32), (1, 8))
#: Parameters at which the source's lines cross (Dettmers 2016, two GPUs on PCIe).
SOURCE = (50_000, 250_000, 300_000)
#: Parameters whose milliseconds the table has: about 10 thousand, 600 thousand and 10 million.
SHOWN = (10_000, 640_000, 10_240_000)


def link(row):
    """Returns the name of the link of a row."""
    if "rate" in row:
        return f"TCP at {row['rate'].removesuffix('gbit')} Gbit/s"
    if row["run"]["settings"].get("CINCH_P2P_DISABLE") != "1":
        raise ValueError("rows of a GPU must come from ranks over pinned memory: CINCH_P2P_DISABLE=1")
    return f"pinned PCIe, {row['run']['gpu'].removeprefix('NVIDIA ')}"


def load(folder=BASELINES):
    """Returns milliseconds by link, bits and parameters: the median where several rows have them."""
    found = {}
    for name in FILES:
        if (folder / name).exists():
            for line in (folder / name).read_text(encoding="utf-8").splitlines():
                row = json.loads(line)
                bits = BITS[row["codec"].split(":")[0]]
                times = found.setdefault(link(row), {}).setdefault(bits, {})
                times.setdefault(row["count"], []).append(row["out_of_place"]["time_us"] / 1e3)
    return {
        name: {
            bits: {count: statistics.median(values) for count, values in sorted(times.items())}
            for bits, times in sorted(lines.items())
        }
        for name, lines in found.items()
    }


def crossover(fewer, more):
    """Returns the number of parameters from which `fewer` bits are faster at every larger size of both lines.

    Between two sizes the ratio of times is a power of the number of parameters. The result is 0 if fewer bits are
    faster at every size, and infinite if they are not at the largest.
    """
    ratios = [(count, math.log(fewer[count] / more[count])) for count in sorted(fewer.keys() & more.keys())]
    slower = [place for place, (_, ratio) in enumerate(ratios) if ratio >= 0]
    if not slower:
        return 0
    if slower[-1] == len(ratios) - 1:
        return math.inf
    (low, above), (high, below) = ratios[slower[-1] : slower[-1] + 2]
    return low * (high / low) ** (above / (above - below))


def words(count):
    """Returns a number of parameters with two digits, in words."""
    digits = float(f"{count:.2g}")
    unit, name = (1e6, "million") if digits >= 1e6 else (1e3, "thousand")
    return f"{digits / unit:g} {name}"


def table(lines):
    """Returns the table of links in Markdown."""
    heads = [f"ms at {words(count)}: 1, 8, 32 bits" for count in SHOWN]
    heads += [f"{fewer} {'bit' if fewer == 1 else 'bits'} faster than {more} from" for fewer, more in PAIRS]
    rows = []
    for name, by_bits in lines.items():
        cells = [", ".join(f"{times[count]:.3g}" for times in by_bits.values()) for count in SHOWN]
        smallest, largest = (words(choose(by_bits[32])) for choose in (min, max))
        for fewer, more in PAIRS:
            at = crossover(by_bits[fewer], by_bits[more])
            cells.append(f"{smallest} or fewer" if at == 0 else f"not by {largest}" if at == math.inf else words(at))
        rows.append([name, *cells])
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [["link", *heads], ["---"] * (len(heads) + 1), *rows])


if __name__ == "__main__":
    sys.exit(f"{pathlib.Path(__file__).name} is a module for scripts")
