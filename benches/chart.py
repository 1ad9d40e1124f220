#!/usr/bin/env python3
"""The chart of the README: TFLOP/s by length for one head dim, of a report that benches/peers.py kept as Markdown.

    python3 benches/chart.py docs/measured/log/2026-11-22-h200-peers.md docs/speed.svg

A group of bars for each length, flashtune first; without a mask on the left, causal on the right. Needs nothing but
Python, so that the picture can be made again wherever the report lies.
"""

import argparse
from pathlib import Path

COLOURS = {"flashtune": "#D55E00", "cudnn": "#0072B2", "fa3": "#009E73", "fa4": "#999999"}
NAMES = {"flashtune": "flashtune", "cudnn": "cuDNN", "fa3": "FlashAttention-3", "fa4": "FlashAttention-4"}
WIDTH, HEIGHT, LEFT, TOP, BOTTOM = 860, 300, 44, 46, 44
PANEL = (WIDTH - LEFT - 12) // 2
STEP = 200  # TFLOP/s between two lines


def rows(text, problem):
    """The lengths of a problem in the table `forward`, each with the rates of the contenders."""
    table = text.split("## forward, TFLOP/s")[1].split("\n## ")[0]
    lines = [line.strip("|").split("|") for line in table.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line] for line in lines]
    head, found = cells[0], {}
    for row in cells[2:]:
        row = dict(zip(head, row))
        if row["problem"] == problem:
            found[row["length"]] = {name: float(row[name]) for name in COLOURS}
    if not found:
        raise SystemExit(f"error: the report has no `{problem}` in its table `forward`; look there for its names")
    return found


def draw(text, dtype, head_dim):
    masks = {"no mask": "full", "causal": "causal"}
    panels = [(title, rows(text, f"{dtype} {head_dim} {mask}")) for title, mask in masks.items()]
    most = max(rate for _, lengths in panels for rates in lengths.values() for rate in rates.values())
    scale = (HEIGHT - TOP - BOTTOM) / most
    at = lambda rate: HEIGHT - BOTTOM - rate * scale
    device = text.splitlines()[0].removeprefix("# ").split(":")[0]
    out = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" xmlns="http://www.w3.org/2000/svg" font-family="sans-serif" '
        'font-size="11">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
        f'<text x="8" y="18" font-size="14" font-weight="bold">{device}, {dtype}, head dim {head_dim}: TFLOP/s</text>',
    ]
    for nth, (name, colour) in enumerate(COLOURS.items()):
        x = LEFT + nth * 150
        out.append(f'<rect x="{x}" y="27" width="10" height="10" fill="{colour}"/>')
        out.append(f'<text x="{x + 15}" y="36">{NAMES[name]}</text>')
    for rate in range(0, int(most) + 1, STEP):
        y = at(rate)
        out.append(f'<path d="M{LEFT} {y:.1f}H{WIDTH - 6}" stroke="#ddd"/>')
        out.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{rate}</text>')
    for panel, (title, lengths) in enumerate(panels):
        first = LEFT + panel * (PANEL + 6)
        group = PANEL / len(lengths)
        bar = group * 0.8 / len(COLOURS)
        for nth, (length, rates) in enumerate(lengths.items()):
            x = first + nth * group + group * 0.1
            for (name, colour), offset in zip(COLOURS.items(), range(len(COLOURS))):
                rate = rates[name]
                place = f'x="{x + offset * bar:.1f}" y="{at(rate):.1f}" width="{bar - 1:.1f}"'
                what = f"<title>{NAMES[name]}, {length}: {rate}</title>"
                out.append(f'<rect {place} height="{rate * scale:.1f}" fill="{colour}">{what}</rect>')
            out.append(f'<text x="{x + group * 0.4:.1f}" y="{HEIGHT - 28}" text-anchor="middle">{length}</text>')
        middle = f'x="{first + PANEL / 2:.1f}" y="{HEIGHT - 10}" text-anchor="middle"'
        out.append(f"<text {middle}>{title}, rows and keys</text>")
    return "\n".join(out) + "\n</svg>\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("report", type=Path, help="the Markdown that benches/peers.py wrote")
    parser.add_argument("svg", type=Path, help="where the chart goes")
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--dtype", default="bf16")
    args = parser.parse_args()
    args.svg.write_text(draw(args.report.read_text(), args.dtype, args.head_dim))


if __name__ == "__main__":
    main()
