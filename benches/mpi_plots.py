"""Drawings of the rows of `scripts/bench-mpi --all` and `--many`, for plot.py."""

import json
import math
import pathlib
import sys

import baseline

WIDTH, LEFT, RIGHT, PANEL = 760, 60, 20, 250
COLLECTIVES, MANY = "host-collectives-vs-mpi.jsonl", "host-many-ranks.jsonl"
#: A colour for each collective, in the order of the legend.
COLOURS = {
    "all_reduce": "#1f6feb", "all_gather": "#d1571c", "reduce_scatter": "#1a7f37", "broadcast": "#8250df",
    "reduce": "#bf3989", "gather": "#9a6700", "scatter": "#0598bc", "all_to_all": "#57606a",
    "send_recv": "#cf222e",
}
#: A colour for each library, and a dash pattern for each size in bytes.
LIBRARIES = {"cinch": "#1f6feb", "Open MPI": "#d1571c", "MPICH": "#1a7f37"}
DASHES = {1 << 10: "none", 1 << 20: "6 4"}


def load(path):
    """Returns the rows of a file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def legend(entries, top, columns):
    """Returns the elements of a legend of (label, colour, dash pattern), and the height of its lines."""
    svg = []
    for index, (label, colour, dash) in enumerate(entries):
        at, y = LEFT + (WIDTH - LEFT - RIGHT) / columns * (index % columns), top + 18 * (index // columns)
        svg.append(
            f'<path d="M{at:.1f} {y}h18" stroke="{colour}" stroke-width="3" stroke-dasharray="{dash}"/>'
            f'<text x="{at + 24:.1f}" y="{y + 4}">{label}</text>'
        )
    return svg, 18 * math.ceil(len(entries) / columns)


def power(value):
    """Formats a value of an axis: 0.25, 4, 1000, 20k."""
    if value >= 10_000:
        return f"{value / 1000:g}k"
    return f"{value:g}" if value >= 1 else f"{value:.2g}"


def panel(title, lines, top, base, x_label):
    """Returns the elements of a panel whose axes are both logarithmic.

    `lines` holds (points, colour, dash pattern), `base` is the factor from one horizontal line to the next, and
    `x_label` formats a position.
    """
    xs = sorted({x for points, _, _ in lines for x, _ in points})
    ys = [y for points, _, _ in lines for _, y in points]
    low, high = (math.floor(math.log(min(ys), base)), math.ceil(math.log(max(ys), base)))
    high = max(high, low + 1)
    upper, lower = top + 28, top + PANEL - 32

    def x(value):
        return LEFT + math.log(value / xs[0]) / math.log(xs[-1] / xs[0] * 1.0001) * (WIDTH - LEFT - RIGHT)

    def y(value):
        return lower - (math.log(value, base) - low) / (high - low) * (lower - upper)

    svg = [f'<text x="{LEFT}" y="{top + 16}" font-weight="bold">{title}</text>']
    for exponent in range(low, high + 1):
        at, width = y(base**exponent), 1.5 if exponent == 0 else 0.5
        svg.append(
            f'<path d="M{LEFT} {at:.1f}H{WIDTH - RIGHT}" stroke="#8c959f" stroke-width="{width}"/>'
            f'<text x="{LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{power(float(base) ** exponent)}</text>'
        )
    for value in xs:
        # The last label would leave the picture in the middle of its position.
        anchor = "end" if value == xs[-1] else "middle"
        svg.append(f'<text x="{x(value):.1f}" y="{lower + 18}" text-anchor="{anchor}">{x_label(value)}</text>')
    for points, colour, dash in lines:
        path = "L".join(f"{x(a):.1f} {y(b):.1f}" for a, b in points)
        svg.append(f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="2" stroke-dasharray="{dash}"/>')
        svg += [f'<circle cx="{x(a):.1f}" cy="{y(b):.1f}" r="2.5" fill="{colour}"/>' for a, b in points]
    return svg


def picture(title, entries, columns, panels, foot):
    """Returns a drawing with a legend in columns and panels, which are functions of their upper edge."""
    lines, height = legend(entries, 40, columns)
    top = 48 + height
    for draw in panels:
        lines += draw(top)
        top += PANEL
    total = top + 16
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {total}" '
        'font-family="sans-serif" font-size="12" fill="#24292f">',
        f'<rect width="{WIDTH}" height="{total}" fill="#ffffff"/>',
        f'<text x="{LEFT}" y="20" font-size="15">{title}</text>',
    ]
    end = f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{total - 8}" text-anchor="middle">{foot}</text></svg>'
    return "\n".join([*head, *lines, end]) + "\n"


def versions(rows):
    """Returns the names and versions of the peers in the rows."""
    return " and ".join(dict.fromkeys(peer["version"] for row in rows for peer in row["peers"].values()))


def draw_collectives(rows):
    """Draws a panel for each number of ranks: the better peer's time over cinch's, by size."""
    def draw(ranks):
        lines = []
        for name, colour in COLOURS.items():
            points = sorted((row["size"], row["ratio"]) for row in rows
                            if row["ranks"] == ranks and row["collective"] == name and "ratio" in row)
            if points:
                lines.append((points, colour, "none"))
        cores = rows[0]["machine"]["cores"]
        return lambda top: panel(f"{ranks} ranks on {cores} cores: times the speed of the better peer", lines,
                                 top, 2, baseline.size_name)

    numbers = sorted({row["ranks"] for row in rows if "ratio" in row})
    return picture(f"Raw fp32 collectives of cinch beside {versions(rows)}",
                   [(name, colour, "none") for name, colour in COLOURS.items()], 5,
                   [draw(ranks) for ranks in numbers], "bytes of the larger buffer")


def draw_many(rows):
    """Draws a panel of times and a panel of memory, by the number of ranks."""
    def of(row, name, key):
        return row.get(f"cinch_{key}") if name == "cinch" else row["peers"].get(name, {}).get(key)

    def draw(title, key, base):
        lines = []
        for name, colour in LIBRARIES.items():
            for size, dash in DASHES.items():
                points = sorted((row["ranks"], of(row, name, key)) for row in rows
                                if row["size"] == size and of(row, name, key))
                if points:
                    lines.append((points, colour, dash))
        return lambda top: panel(title, lines, top, base, str)

    entries = [(f"{name}, {baseline.size_name(size)}", colour, dash)
               for size, dash in DASHES.items() for name, colour in LIBRARIES.items()]
    cores = rows[0]["machine"]["cores"]
    title = f"Raw fp32 all_reduce of many ranks on {cores} cores, beside {versions(rows)}"
    return picture(title, entries, len(LIBRARIES),
                   [draw("us per call", "us", 10), draw("MiB of a rank (proportional set size)", "mib", 2)],
                   "ranks; a line ends where its library did not finish in time")


def pictures():
    """Returns drawings by file name, those whose rows exist."""
    kinds = {"collectives-vs-mpi.svg": (COLLECTIVES, draw_collectives), "many-ranks.svg": (MANY, draw_many)}
    return {name: draw(load(baseline.BASELINES / file)) for name, (file, draw) in kinds.items()
            if (baseline.BASELINES / file).exists()}


if __name__ == "__main__":
    sys.exit(f"{pathlib.Path(__file__).name} is a module for scripts")
