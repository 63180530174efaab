#!/usr/bin/env python3
"""Writes the tables and the drawing of docs/learning.md from the rows of results.

    python3 examples/learning/report.py            writes them
    python3 examples/learning/report.py --check    exits with 1 if page or drawing differ from what the rows give
    python3 examples/learning/report.py --add FILE...   adds rows of run.py to the results first

The page has a line `<!-- rows: NAME -->` before each table and `<!-- end -->` behind it.
"""

import argparse
import json
import math
import pathlib
import re
import sys
from typing import Any, Dict, List, Tuple

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "benches"))

import criterion  # noqa: E402 - behind the path
import transfer  # noqa: E402

RESULTS = ROOT / "benches" / "baselines" / "learning.jsonl"
PAGE = ROOT / "docs" / "learning.md"
DRAWING = ROOT / "docs" / "images" / "learning.svg"

TASKS = {
    "textures-conv": ("a, convolutions", "points of error"),
    "textures-mlp": ("a, perceptron", "points of error"),
    "digits": ("a, digits", "points of error"),
    "characters": ("b, characters", "nats"),
    "diabetes": ("c, regression", "RMS error"),
    "ratings": ("c, embeddings", "RMS error"),
}


def load(text: str) -> List[Dict[str, Any]]:
    """Returns the rows of results, one for each task, loop, case and rate: `merged` joins blocks of seeds."""
    rows: Dict[Any, List[Dict[str, Any]]] = {}
    for line in text.splitlines():
        row = json.loads(line)
        key = tuple(row.get(name) for name in ("task", "loop", "case", "rate", "overlap"))
        rows.setdefault(key, []).append(row)
    return [merged(same) for same in rows.values()]


def merged(rows: List[Dict[str, Any]]) -> Dict[str, Any]:
    """Returns the rows of one case, in the order of their runs, as one row, judged again over all seeds.

    Each seed keeps the exact run of its own row beside it. A seed that a later row repeats counts once, as the later
    row has it. Rows with other data or another number of steps than the last row are another experiment, and left out.
    Of rows without an exact run beside them, and of loops other than "data", the last one counts.
    """
    last = rows[-1]
    same = [row for row in rows if all(row.get(name) == last.get(name) for name in ("data", "steps"))]
    if len(same) == 1 or last["loop"] != "data" or "exact" not in last:
        return last
    runs: Dict[int, Tuple[float, float, float]] = {}
    for row in same:
        for seed, *metrics in zip(row["seeds"], row["exact"], row["metrics"]):
            exact, coded = (math.nan if value is None else value for value in metrics)
            runs[seed] = (exact, coded, row["margin"])
    seeds = sorted(runs)
    exact, coded, margins = ([runs[seed][place] for seed in seeds] for place in range(3))
    # A row's margin is a constant or a share of its exact mean, so the mean over seeds is the margin of all seeds.
    verdict = criterion.judge(exact, coded, _mean(margins)).row()
    metrics = [value if math.isfinite(value) else None for value in coded]
    return {**last, **verdict, "seeds": seeds, "exact": exact, "metrics": metrics}


def _mean(values: List[float]) -> float:
    return sum(values) / len(values)


def _verdict_line(row: Dict[str, Any]) -> str:
    task, unit = TASKS[row["task"]]
    if row["diverged"]:
        interval = "diverged"
    else:
        interval = f"{row['difference']:+.3g} ({row['low']:+.3g} to {row['high']:+.3g})"
    finite = [value for value in row["metrics"] if value is not None]
    reached = f"{_mean(finite):.4g}" if finite else "-"
    return (
        f"| {task} | {row['case']} | {row.get('rate', 1):g} | {_mean(row['exact']):.4g} | {reached} | "
        f"{interval} {unit} | "
        f"{row['margin']:.2g} | {len(row['seeds'])} | "
        f"{row['power']:.2f} | {row['verdict']} |"
    )


HEAD = (
    "| task | gradients | rate | exact | reached | difference (90 %) | margin | seeds | power | verdict |\n"
    "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |"
)


def codecs(rows: List[Dict[str, Any]]) -> str:
    """Returns the table of data-parallel training."""
    chosen = [
        row for name in TASKS for row in rows if row["task"] == name and row["loop"] == "data" and "verdict" in row
    ]
    return "\n".join([HEAD, *map(_verdict_line, chosen)])


def loop(rows: List[Dict[str, Any]], name: str) -> str:
    """Returns the table of another loop."""
    chosen = [row for row in rows if row["loop"] == name and "verdict" in row]
    lines = [HEAD.replace("gradients", "what")]
    for row in chosen:
        line = _verdict_line(row)
        facts = []
        if "weight_bytes_share" in row:
            facts.append(f"{row['weight_bytes_share']:.2f} of the bytes of weights")
        if "skipped" in row:
            facts.append(f"{_mean(row['skipped']):.1f} steps skipped")
        if "overlap" in row:
            facts.append(f"{row['seconds']:.1f} s{' with overlap' if row['overlap'] else ''}")
        lines.append("; ".join([line[:-1].rstrip(), *facts]) + " |")
    return "\n".join(lines)


def times(rows: List[Dict[str, Any]]) -> str:
    """Returns the table of nanoseconds a number."""
    lines = ["| measured | where | ns a number |", "| --- | --- | --- |"]
    for row in rows:
        if row["loop"] != "time":
            continue
        where = row["machine"].get("gpu", f"{row['machine']['cores']} cores")
        values = ", ".join(f"{key[:-3].replace('_', ' ')} {row[key]:g}" for key in row if key.endswith("_ns"))
        lines.append(f"| {row['case']} | {where} | {values} |")
    return "\n".join(lines)


def drawing(rows: List[Dict[str, Any]]) -> str:
    """Returns an SVG of each difference in margins with its interval; the band is the margin."""
    chosen = [
        row for name in TASKS for row in rows if row["task"] == name and row["loop"] == "data" and "verdict" in row
    ]
    left, width, line, top, most = 330, 860, 17, 50, 4.0
    height = top + line * (len(chosen) + 2)

    def at(value: float) -> float:
        return left + (max(-most, min(most, value)) + most) / (2 * most) * (width - left - 20)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="Helvetica, Arial, sans-serif">',
        "<title>Difference to exact training, in margins</title>",
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        '<text x="20" y="24" font-size="16" fill="#222222">Difference to exact training, in margins; '
        "band: equivalent</text>",
        f'<rect x="{at(-1):.1f}" y="{top - 10}" width="{at(1) - at(-1):.1f}" height="{line * len(chosen) + 6}" '
        'fill="#dce6f0"/>',
    ]
    for number, row in enumerate(chosen):
        y = top + line * number
        name = f"{TASKS[row['task']][0]}: {row['case']}" + (
            f" (rate {row['rate']:g})" if row.get("rate", 1) != 1 else ""
        )
        colour = {"e": "#228833", "w": "#cc3311", "b": "#4477aa"}.get(row["verdict"][0], "#888888")
        parts.append(f'<text x="{left - 8}" y="{y + 4}" text-anchor="end" font-size="11" fill="#222222">{name}</text>')
        if row["diverged"]:
            low = high = middle = most
        else:
            low, high, middle = (row[key] / row["margin"] for key in ("low", "high", "difference"))
        parts.append(
            f'<line x1="{at(low):.1f}" y1="{y}" x2="{at(high):.1f}" y2="{y}" stroke="{colour}" stroke-width="2"/>'
        )
        shape = f'<circle cx="{at(middle):.1f}" cy="{y}" r="3.5" fill="{colour}"/>'
        if middle >= most:
            shape = f'<path d="M{at(most):.1f} {y} l-9 -4 v8 z" fill="{colour}"/>'
        parts.append(shape)
    for tick in (-4, -2, -1, 0, 1, 2, 4):
        y = top + line * len(chosen) + 14
        parts.append(
            f'<text x="{at(tick):.1f}" y="{y}" text-anchor="middle" font-size="11" fill="#222222">{tick}</text>'
        )
    return "\n".join([*parts, "</svg>", ""])


def page(text: str, rows: List[Dict[str, Any]]) -> str:
    """Returns the page with its tables replaced."""
    tables = {
        "codecs": codecs(rows),
        "split": loop(rows, "split"),
        "weights": loop(rows, "weights"),
        "half": loop(rows, "half"),
        "times": times(rows),
        "transfer": transfer.table(transfer.load()),
    }

    def table(found: "re.Match[str]") -> str:
        return f"<!-- rows: {found[1]} -->\n{tables[found[1]]}\n<!-- end -->"

    return re.sub(r"<!-- rows: (\w+) -->\n.*?<!-- end -->", table, text, flags=re.DOTALL)


def main() -> int:
    """Writes or checks page and drawing."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--add", nargs="+", type=pathlib.Path, default=[])
    options = parser.parse_args()
    for file in options.add:
        with RESULTS.open("a", encoding="utf-8") as results:
            results.write(file.read_text(encoding="utf-8"))
    rows, text = load(RESULTS.read_text(encoding="utf-8")), PAGE.read_text(encoding="utf-8")
    wanted = {PAGE: page(text, rows), DRAWING: drawing(rows)}
    if options.check:
        stale = [path for path, new in wanted.items() if not path.exists() or path.read_text(encoding="utf-8") != new]
        for path in stale:
            print(f"{path.relative_to(ROOT)} is not what the rows give: run examples/learning/report.py")
        return bool(stale)
    for path, new in wanted.items():
        path.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
