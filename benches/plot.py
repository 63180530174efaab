#!/usr/bin/env python3
"""Draws all-reduce-h200x2.svg, transfer.svg, collectives-vs-mpi.svg and many-ranks.svg of docs/images from the
rows of benches/baselines. The last two are drawn if their rows exist.

benches/plot.py           writes the files
benches/plot.py --check   fails if a file differs from a drawing of the rows
"""

import json
import math
import pathlib
import sys

sys.dont_write_bytecode = True
import mpi_plots  # noqa: E402
import transfer  # noqa: E402

BENCHES = pathlib.Path(__file__).resolve().parent
IMAGES = BENCHES.parent / "docs/images"
# Each series has a file, a codec, a label and a colour.
SERIES = [
    ("gpu-h200x2-coded.jsonl", "raw", "raw (exact)", "#1f6feb"),
    ("gpu-h200x2-coded.jsonl", "linear8:block=256", "linear8, 8 bits", "#d1571c"),
]
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 760, 340, 60, 20, 48, 52
MAX_RATIO = 4


def points(file, codec):
    """Returns (bytes, NCCL's time / cinch's time) of the fp32 all_reduces in graph replays."""
    with open(BENCHES / "baselines" / file, encoding="utf-8") as rows:
        rows = [json.loads(row) for row in rows]
    wanted = {"collective": "all_reduce", "mode": "graph", "type": "f32", "codec": codec}
    rows = [row for row in rows if all(row[key] == value for key, value in wanted.items())]
    return sorted((row["size"], row["vs"]["ratio"]) for row in rows)


def size_label(size):
    for unit, shift in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if size >= 1 << shift:
            return f"{size >> shift} {unit}"
    return f"{size} B"


def draw():
    series = [(points(file, codec), label, colour) for file, codec, label, colour in SERIES]
    sizes = [size for line, _, _ in series for size, _ in line]
    low, high = math.log2(min(sizes)), math.log2(max(sizes))

    def x(size):
        return LEFT + (math.log2(size) - low) / (high - low) * (WIDTH - LEFT - RIGHT)

    def y(ratio):
        return HEIGHT - BOTTOM - ratio / MAX_RATIO * (HEIGHT - TOP - BOTTOM)

    svg = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="12" fill="#24292f">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        f'<text x="{LEFT}" y="20" font-size="15">all_reduce, fp32, 2 H200: speed relative to '
        "NCCL 2.28.9 in the same run</text>",
    ]
    for ratio in range(MAX_RATIO + 1):
        width = 1.5 if ratio == 1 else 0.5
        svg.append(
            f'<path d="M{LEFT} {y(ratio):.1f}H{WIDTH - RIGHT}" stroke="#8c959f" '
            f'stroke-width="{width}"/>'
            f'<text x="{LEFT - 8}" y="{y(ratio) + 4:.1f}" text-anchor="end">{ratio}x</text>'
        )
    for size in (8, 512, 32 << 10, 2 << 20, 32 << 20, 512 << 20):
        svg.append(
            f'<text x="{x(size):.1f}" y="{HEIGHT - BOTTOM + 20}" text-anchor="middle">'
            f"{size_label(size)}</text>"
        )
    for index, (line, label, colour) in enumerate(series):
        path = "L".join(f"{x(size):.1f} {y(ratio):.1f}" for size, ratio in line)
        svg.append(f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="2.5"/>')
        svg += [
            f'<circle cx="{x(size):.1f}" cy="{y(ratio):.1f}" r="3" fill="{colour}"/>'
            for size, ratio in line
        ]
        at = LEFT + 10 + 150 * index
        svg.append(
            f'<rect x="{at}" y="30" width="14" height="4" fill="{colour}"/>'
            f'<text x="{at + 20}" y="37">{label}</text>'
        )
    svg.append(
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 10}" text-anchor="middle">'
        "message size</text></svg>"
    )
    return "\n".join(svg) + "\n"


# Colours and labels of the lines of transfer.svg by their bits, and the height of a panel.
LINES = {1: ("onebit, 1 bit", "#1f6feb"), 8: ("dynamic8, 8 bits", "#d1571c"), 32: ("raw, 32 bits", "#57606a")}
PANEL = 250


def draw_transfer():
    """Draws a panel for each link: milliseconds over parameters, both logarithmic."""
    links = transfer.load()
    height = TOP + PANEL * len(links) + 20
    svg = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        'font-family="sans-serif" font-size="12" fill="#24292f">',
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        f'<text x="{LEFT}" y="20" font-size="15">Milliseconds to average fp32 gradients of 2 ranks; '
        "dashed: crossovers in the source</text>",
    ]
    for index, (label, colour) in enumerate(LINES.values()):
        at = LEFT + 10 + 150 * index
        svg.append(
            f'<rect x="{at}" y="30" width="14" height="4" fill="{colour}"/><text x="{at + 20}" y="37">{label}</text>'
        )
    for index, (name, lines) in enumerate(links.items()):
        svg += transfer_panel(name, lines, TOP + PANEL * index)
    svg.append(
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{height - 8}" text-anchor="middle">parameters</text></svg>'
    )
    return "\n".join(svg) + "\n"


def transfer_panel(name, lines, top):
    """Returns the elements of a link's panel, whose upper edge is at `top`."""
    counts = sorted({count for times in lines.values() for count in times})
    times = [value for series in lines.values() for value in series.values()]
    decades = range(math.floor(math.log10(min(times))), math.ceil(math.log10(max(times))) + 1)
    upper, lower = top + 30, top + PANEL - 30

    def x(count):
        return LEFT + math.log(count / counts[0]) / math.log(counts[-1] / counts[0]) * (WIDTH - LEFT - RIGHT)

    def y(value):
        share = (math.log10(value) - decades[0]) / (decades[-1] - decades[0])
        return lower - share * (lower - upper)

    svg = [f'<text x="{LEFT}" y="{top + 18}" font-weight="bold">{name}: ms</text>']
    for decade in decades:
        svg.append(
            f'<path d="M{LEFT} {y(10.0**decade):.1f}H{WIDTH - RIGHT}" stroke="#8c959f" stroke-width="0.5"/>'
            f'<text x="{LEFT - 8}" y="{y(10.0**decade) + 4:.1f}" text-anchor="end">{10.0**decade:g}</text>'
        )
    for count in (10_000, 100_000, 1_000_000, 10_000_000):
        # The last label would leave the picture in the middle of its position.
        anchor = "end" if count == 10_000_000 else "middle"
        svg.append(
            f'<text x="{x(count):.1f}" y="{lower + 16}" text-anchor="{anchor}">{transfer.words(count)}</text>'
        )
    for count in transfer.SOURCE:
        svg.append(
            f'<path d="M{x(count):.1f} {upper}V{lower}" stroke="#57606a" stroke-dasharray="3 4"/>'
        )
    for bits, series in lines.items():
        colour = LINES[bits][1]
        path = "L".join(f"{x(count):.1f} {y(value):.1f}" for count, value in series.items())
        svg.append(f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        svg += [
            f'<circle cx="{x(count):.1f}" cy="{y(value):.1f}" r="2.5" fill="{colour}"/>'
            for count, value in series.items()
        ]
    return svg


def main():
    pictures = {IMAGES / "all-reduce-h200x2.svg": draw(), IMAGES / "transfer.svg": draw_transfer()}
    pictures |= {IMAGES / name: picture for name, picture in mpi_plots.pictures().items()}
    for path, picture in pictures.items():
        if sys.argv[1:] != ["--check"]:
            path.write_text(picture, encoding="utf-8")
        elif not path.exists() or path.read_text(encoding="utf-8") != picture:
            sys.exit(f"{path} differs from the rows; run benches/plot.py")


if __name__ == "__main__":
    main()
