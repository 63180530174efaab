#!/usr/bin/env python3
"""Draws docs/images/all-reduce-h200x2.svg from the rows of benches/baselines.

benches/plot.py           writes the file
benches/plot.py --check   fails if the file differs from a drawing of the rows
"""

import json
import math
import pathlib
import sys

BENCHES = pathlib.Path(__file__).resolve().parent
OUTPUT = BENCHES.parent / "docs/images/all-reduce-h200x2.svg"
# Each series has a file, a codec, a label and a colour.
SERIES = [
    ("gpu-h200x2-suite.jsonl", "raw", "raw (exact)", "#1f6feb"),
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


def main():
    picture = draw()
    if sys.argv[1:] == ["--check"]:
        if OUTPUT.read_text(encoding="utf-8") != picture:
            sys.exit(f"{OUTPUT} differs from the rows; run benches/plot.py")
    else:
        OUTPUT.write_text(picture, encoding="utf-8")


if __name__ == "__main__":
    main()
