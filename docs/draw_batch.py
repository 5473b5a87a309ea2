"""Draws docs/batch.svg: one step's tracked conv windows, and what each pass of a graph sees.

Usage: python docs/draw_batch.py [OUT.svg]
"""

import sys
from pathlib import Path

import matplotlib
import torch
from inkling_sconv.ops.track_conv_indices import track_conv_indices_ref
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Rectangle

CHUNK, WINDOW = 64, 3
# Cached tokens, new tokens, and whether the request is tracked; one padded row comes after these.
BATCH = [(128, 150, True), (64, 212, True), (512, 60, False), (0, 90, True)]

WIDTH, HEIGHT = 900, 690  # in points: pixels where the picture is 900 wide
LEFT, RIGHT, PADDED, TOP, BOTTOM = 166, 806, 847, 126, 162
INK, MUTED, RULE, TRACKED = "#1f2328", "#59636e", "#d1d9e0", "#c2410c"
FILLS = ["#bcd7f5", "#c5e6c8", "#dfe3e8", "#dccff2"]
MONO = "monospace"

FIELDS = ["extend_prefix_lens", "mamba_track_seqlens", "tracked → floor to C"]
FIELDS += ["mamba_track_mask", "track_conv_indices"]
NOTES = f"""\
tracked window: the last W = {WINDOW} rows before the last complete chunk boundary of the step
index[r, w] = clamp(query_start_loc[r] + floor(tracked / C) * C - W + w, 0, query_start_loc[-1] - 1)
Request 2 completes no chunk: indices clamped into the buffer, scatter masked off. Row 4: zeros."""
COLUMNS = {"pass": 24, "mamba_track_mask": 162, "extend_prefix_lens": 354, "the refresh": 534}
# One paragraph a pass, one cell a column; a slash breaks the line.
PASSES = """\
draft-extend/capture | None: the batch is left alone | not read
| no indices: the draft's convolutions find/their slots in mamba_track_indices

full prefill/warm-up | None → inert buffers are/put into the batch (all False) | None → zeros
| fills the static index buffer, in bounds;/the scatter that reads it is masked off

full prefill/capture, same batch | the inert mask, as warm-up/left it: no longer None
| still None → zeros/(mask not inert → raise)
| the same again, at the same addresses:/its kernels and the scatter are recorded

full prefill/replay | live mask | live lengths
| Python runs before the graph: real windows/in the same buffer, for the recorded scatter

eager/no graph | live mask/(None → no indices, return) | live lengths/(None → raise)
| real windows in a new tensor; a missing/prefix is never made up"""


def text(ax: Axes, x: float, y: float, words: str, **style: object) -> None:
    """Put ``words`` at a point, vertically centred."""
    # Matplotlib centres the ink, so that neighbours with and without descenders would not line up.
    lines = words.split("\n")
    for i, line in enumerate(lines):
        baseline = y + 4 + 15 * (i - (len(lines) - 1) / 2)
        ax.text(x, baseline, line, **{"size": 11, "color": INK, "va": "baseline", **style})


def draw_column(ax: Axes, x: float, values: list[object], color: str) -> None:
    """Draw one row of the batch as a column of ``FIELDS``, its indices in ``color``."""
    for line, value in enumerate(values):
        own = color if line == len(FIELDS) - 1 else INK
        text(ax, x, 214 + 21 * line, str(value), color=own, ha="center", family=MONO, size=10.5)


def draw_batch(ax: Axes) -> None:
    """Draw the token buffer, with the windows that ``track_conv_indices_ref`` gives for it."""
    starts = [sum(new for _, new, _ in BATCH[:r]) for r in (*range(len(BATCH) + 1), None)]
    seqlens = [prefix + new if tracks else -1 for prefix, new, tracks in BATCH]
    prefix_lens = [prefix for prefix, _, _ in BATCH]
    indices = track_conv_indices_ref(
        *(torch.tensor(values) for values in (starts, seqlens, prefix_lens)),
        rows=len(BATCH) + 1,
        chunk_size=CHUNK,
        window=WINDOW,
    ).tolist()
    scale = (RIGHT - LEFT) / starts[-1]

    text(ax, 24, 31, "One step's token buffer, and the rows that become checkpoints", size=15)
    constants = f"C = mamba_cache_chunk_size = {CHUNK}    W = conv_kernel - 1 = {WINDOW}"
    text(ax, 24, 54, f"{constants}    tracked = mamba_track_seqlens - extend_prefix_lens")
    for label, y in (
        ("cached + new tokens", 94),
        ("sequence position", 110),
        ("token buffer", 144),
    ):
        text(ax, 24, y, label, color=MUTED)
    text(ax, 24, 180, "query_start_loc", family=MONO, size=10.5)
    for line, label in enumerate(FIELDS):
        text(ax, 24, 214 + 21 * line, label, family=MONO, size=10.5)
        ax.plot([24, 876], [224.5 + 21 * line] * 2, color=RULE, lw=0.6)

    for r, (prefix, new, tracks) in enumerate(BATCH):
        x0, x1 = (LEFT + scale * start for start in starts[r : r + 2])
        center, tracked = (x0 + x1) / 2, seqlens[r] - prefix
        ax.add_patch(Rectangle((x0, TOP), x1 - x0, BOTTOM - TOP, fc=FILLS[r], ec="white"))
        text(ax, center, 80, f"request {r}", ha="center", weight="bold")
        text(ax, center, 94, f"{prefix} + {new}", ha="center", color=MUTED)
        text(ax, x0 + 2, 110, str(prefix), color=MUTED, size=10)
        for position in range((prefix // CHUNK + 1) * CHUNK, prefix + new + 1, CHUNK):
            x = x0 + scale * (position - prefix)
            ax.plot([x, x], [TOP - 7, BOTTOM], color=INK, lw=1)
            text(ax, x, 110, str(position), ha="center", size=10)
        if tracks:
            corner = (LEFT + scale * indices[r][0], TOP)
            ax.add_patch(Rectangle(corner, scale * WINDOW, BOTTOM - TOP + 5, fc=TRACKED, lw=0))
        steps = f"{tracked} → {tracked // CHUNK * CHUNK}"
        values = [prefix, seqlens[r], steps, tracks, indices[r]]
        draw_column(ax, center, values, TRACKED if tracks else MUTED)
        text(ax, x0, 180, str(starts[r]), ha="center", family=MONO)
    text(ax, PADDED, 80, f"row {len(BATCH)}", ha="center", weight="bold")
    text(ax, PADDED, 144, "padded\n0 tokens", ha="center", color=MUTED)
    for x in (RIGHT, PADDED):
        text(ax, x, 180, str(starts[-1]), ha="center", family=MONO)
    draw_column(ax, PADDED, ["-", "-", "-", False, indices[-1]], MUTED)
    ax.add_patch(Rectangle((24, 325), 5, 14, fc=TRACKED, lw=0))
    for line, note in enumerate(NOTES.splitlines()):
        text(ax, 38, 332 + 18 * line, note)


def draw_passes(ax: Axes) -> None:
    """Draw the table of what each pass sees."""
    text(ax, 24, 408, "What each pass sees", size=15)
    for name, x in COLUMNS.items():
        text(ax, x, 440, name, family=MONO if "_" in name else None, color=MUTED)
    for row, cells in enumerate(paragraph.split("|") for paragraph in PASSES.split("\n\n")):
        ax.plot([24, 876], [452 + 45 * row] * 2, color=RULE, lw=0.6)
        for x, cell in zip(COLUMNS.values(), cells, strict=True):
            weight = "bold" if cell is cells[0] else "normal"
            text(ax, x, 474 + 45 * row, cell.strip().replace("/", "\n"), weight=weight)


def main() -> None:
    """Write the picture to the path that the command line names."""
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_name("batch.svg")
    matplotlib.rcParams.update({"svg.hashsalt": "inkling_sconv", "svg.fonttype": "none"})
    figure = Figure(figsize=(WIDTH / 72, HEIGHT / 72))
    ax = figure.add_axes((0, 0, 1, 1), xlim=(0, WIDTH), ylim=(HEIGHT, 0))
    ax.set_axis_off()
    panel = {"boxstyle": "round,pad=0,rounding_size=10", "fc": "white", "ec": RULE}
    ax.add_patch(FancyBboxPatch((2, 2), WIDTH - 4, HEIGHT - 4, **panel))
    draw_batch(ax)
    draw_passes(ax)
    figure.savefig(out, format="svg", transparent=True, metadata={"Date": None})


if __name__ == "__main__":
    main()
