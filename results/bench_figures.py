"""Figures of benchmarks: the ratio of each candidate to plain attention, measured side by side."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedFormatter, FixedLocator, FuncFormatter, NullLocator

from results.drawing import save
from results.record import BenchRecord
from results.style import INK, Look, styled

CANDIDATES: dict[str, Look] = {
    "torch": Look("#7f7f7f", ":", "*"),
    "two lines": Look("#009e73", "--", "^"),
    "two lines, compiled": Look("#e69f00", "--", "v"),
    "xformers": Look("#cc79a7", "-.", "D"),
    "fused": Look("#d55e00", "-", "s"),
}
# panel -> (field on the horizontal axis, its label)
SWEEPS = {
    "fixed tokens": ("length", "sequence length, tokens in all fixed"),
    "fixed batch": ("length", "sequence length, batch fixed"),
    "width": ("heads", "heads of 64 channels"),
}

Row = dict[str, Any]


def bench_figure(record: BenchRecord, path_stem: str | Path) -> list[Path]:
    """Draw a benchmark of attention or of a training step as PNG and SVG; return the paths.

    A benchmark without rows of either kind gives no figure and an empty list.
    """
    rows = [row for row in record.rows if row.get("attention") in CANDIDATES]
    panels = [name for name in SWEEPS if any(row.get("sweep") == name for row in rows)]
    if not panels and not any("model" in row for row in rows):
        return []
    with styled():
        figure = Figure(figsize=(max(6.6, 4.2 * len(panels)), 3.6), layout="constrained")
        if panels:
            axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
            for place, name in zip(axes, panels, strict=True):
                _sweep_panel(place, name, [row for row in rows if row["sweep"] == name])
            axes[0].set_ylabel("time over plain attention")
        else:
            _step_panel(figure.subplots(), rows)
        figure.suptitle(_title(record), x=0.01, ha="left", fontsize=10.5)
        names = [name for name in CANDIDATES if any(row["attention"] == name for row in rows)]
        handles = [_handle(name) for name in names]
        figure.legend(handles=handles, loc="outside lower center", ncols=len(handles))
        return save(figure, path_stem)


def _title(record: BenchRecord) -> str:
    machine = record.environment.device_name or record.environment.cpu
    what = "attention, forward and backward" if record.name == "attention" else "training step"
    return f"{what}: {machine}, {record.environment.threads} CPU threads; median and its 95% interval"


def _handle(name: str) -> Line2D:
    look = CANDIDATES[name]
    return Line2D(
        [], [], color=look.colour, linestyle=look.line, marker=look.marker, markersize=5, label=name
    )


def _series(axes: Axes, name: str, places: Sequence[float], rows: Sequence[Row]) -> None:
    look = CANDIDATES[name]
    ratios = [row["ratio"] for row in rows]
    below = [max(0.0, row["ratio"] - row["ratio_low"]) for row in rows]
    above = [max(0.0, row["ratio_high"] - row["ratio"]) for row in rows]
    axes.errorbar(
        places,
        ratios,
        yerr=[below, above],
        color=look.colour,
        linestyle=look.line,
        marker=look.marker,
        markersize=5,
        capsize=2,
        linewidth=1.6,
        elinewidth=0.9,
    )


def _finish(axes: Axes, ticks: Sequence[float], labels: Sequence[str]) -> None:
    axes.axhline(1.0, color=INK, linewidth=1.0)
    axes.xaxis.set_major_locator(FixedLocator(list(ticks)))
    axes.xaxis.set_major_formatter(FixedFormatter(list(labels)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.2f}"))


def _sweep_panel(axes: Axes, name: str, rows: Sequence[Row]) -> None:
    field, label = SWEEPS[name]
    values = sorted({row[field] for row in rows})
    axes.set_xscale("log", base=2)
    for candidate in CANDIDATES:
        own = sorted((row for row in rows if row["attention"] == candidate), key=lambda row: row[field])
        if own:
            _series(axes, candidate, [row[field] for row in own], own)
    axes.set_title(name)
    axes.set_xlabel(label)
    _finish(axes, values, [f"{value:,}" for value in values])


def _step_panel(axes: Axes, rows: Sequence[Row]) -> None:
    cells = list(dict.fromkeys((row["model"], row["length"], row["precision"]) for row in rows))
    present = [name for name in CANDIDATES if any(row["attention"] == name for row in rows)]
    for index, name in enumerate(present):
        own = {
            (row["model"], row["length"], row["precision"]): row for row in rows if row["attention"] == name
        }
        places = [
            place + 0.12 * (index - (len(present) - 1) / 2) for place, cell in enumerate(cells) if cell in own
        ]
        for place, cell in zip(places, (cell for cell in cells if cell in own), strict=True):
            _series(axes, name, [place], [own[cell]])
    axes.set_xlim(-0.5, len(cells) - 0.5)
    axes.set_ylabel("time over plain attention")
    _finish(
        axes, range(len(cells)), [f"{model}\nT {length}\n{precision}" for model, length, precision in cells]
    )
