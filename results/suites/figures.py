"""The figures of suites: a metric along an axis with its paired difference, and the probe by layer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedFormatter, FixedLocator, NullLocator

from results.drawing import save, wrapped
from results.metrics import Metric
from results.pairing import BASELINE
from results.record import BenchRecord
from results.style import INK, MUTED, Look, arm_looks, styled
from results.suites.tables import STATISTICS
from results.suites.view import Coordinate, Point, SuiteView

_PROBE_LOOK = Look("#0072b2", "-", "o")


def axis_figure(view: SuiteView, found: Sequence[Point], facts: Metric, path_stem: str | Path) -> list[Path]:
    """Draw the metric of every arm along the suite's axis, and the differences to the baseline beside it.

    Means are joined, dots are seeds, bars are 95% intervals; a place without a value is marked on the axis.
    Returns the PNG and SVG paths. Raises ``ValueError`` when the suite has no axis.
    """
    axis = view.x or next(iter(view.axes), None)
    if axis is None:
        raise ValueError(f"{view.name}: no axis to draw along; a suite with one place is a table")
    looks = arm_looks({arm: arm for arm in view.arms})
    coordinates = list(dict.fromkeys(point.place[axis] for point in found if axis in point.place))
    others = [arm for arm in view.arms if arm != BASELINE]
    with styled():
        figure = Figure(figsize=(8.4 if others else 4.6, 3.9), layout="constrained")
        panels = list(figure.subplots(1, 2 if others else 1, squeeze=False)[0])
        for axes in panels:
            _axis(axes, axis, coordinates)
        means = _means(found)
        for shift, arm in enumerate(view.arms):
            own = [(point, means.get(i)) for i, point in enumerate(found) if point.arm == arm]
            _values(panels[0], own, axis, coordinates, looks[arm], shift)
        panels[0].set_ylabel(facts.title)
        panels[0].set_title(_seeds([len(point.values) for point in found]), fontsize=9.5)
        for shift, arm in enumerate(others):
            own = [point for point in found if point.arm == arm]
            _differences(panels[1], own, axis, coordinates, looks[arm], shift)
        if others:
            panels[1].axhline(0.0, color=INK, linewidth=1.0, zorder=1.5)
            better = {"lower": "below zero is better", "higher": "above zero is better", None: ""}
            pairs = [len(point.differences) for point in found if point.arm != BASELINE]
            interval = "95% interval" if max(pairs, default=0) > 1 else "no interval"
            panels[1].set_title(f"minus {BASELINE}, {_count(pairs)}, {interval}", fontsize=9.5)
            panels[1].set_ylabel(better[facts.better])
        handles = [_handle(arm, looks[arm]) for arm in view.arms]
        if any(not point.values for point in found):
            handles.append(Line2D([], [], color=MUTED, marker="x", linestyle="", label="missing or failed"))
        figure.legend(handles=handles, loc="outside lower center", ncols=len(handles))
        figure.suptitle(
            wrapped(f"{view.title} (scale {view.scale})", 70), x=0.01, ha="left", fontsize=11, weight="bold"
        )
        return save(figure, path_stem)


def _count(seeds: Sequence[int]) -> str:
    """Return how many seeds the places have: `3 seeds`, `1 to 3 seeds`."""
    known = sorted({count for count in seeds if count})
    if known in ([], [1]):
        return f"{len(known)} seed" if known else "no seed"
    return f"{known[0]} seeds" if len(known) == 1 else f"{known[0]} to {known[-1]} seeds"


def _seeds(seeds: Sequence[int]) -> str:
    """Return what the panel of values shows."""
    if max(seeds, default=0) < 2:
        return _count(seeds)
    shared = "" if len(set(filter(None, seeds))) == 1 else "shared "
    return f"mean of {_count(seeds).replace('seed', f'{shared}seed')}; dots are seeds"


def _means(found: Sequence[Point]) -> dict[int, float]:
    """Return the mean of every point that has one, by its number, over the seeds that all arms have there.

    A seed that one arm lacks would move the other's mean by what seeds differ, which is no effect.
    """
    means = {}
    for i, point in enumerate(found):
        here = [set(other.values) for other in found if other.place == point.place and other.values]
        seeds = set.intersection(*here) if here else set()
        values = [value for seed, value in point.values.items() if seed in seeds or not seeds]
        if values:
            means[i] = math.fsum(values) / len(values)
    return means


def _position(value: Coordinate, coordinates: Sequence[Coordinate]) -> float:
    return float(value) if _logarithmic(coordinates) else float(coordinates.index(value))


def _logarithmic(coordinates: Sequence[Coordinate]) -> bool:
    numbers = [value for value in coordinates if isinstance(value, float) and value > 0]
    return len(numbers) == len(coordinates) > 2


def _axis(axes: Axes, name: str, coordinates: Sequence[Coordinate]) -> None:
    places = [_position(value, coordinates) for value in coordinates]
    if _logarithmic(coordinates):
        axes.set_xscale("log")
        axes.set_xlim(min(places) / 1.3, max(places) * 1.3)
    else:
        axes.set_xlim(-0.5, len(coordinates) - 0.5)
    axes.xaxis.set_major_locator(FixedLocator(places))
    labels = [value if isinstance(value, str) else f"{value:g}" for value in coordinates]
    axes.xaxis.set_major_formatter(FixedFormatter(labels))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.tick_params(axis="x", labelsize=8.5)
    axes.set_xlabel(name)


def _values(
    axes: Axes,
    own: Sequence[tuple[Point, float | None]],
    axis: str,
    coordinates: Sequence[Coordinate],
    style: Look,
    shift: int,
) -> None:
    places = [_position(point.place[axis], coordinates) for point, _ in own]
    here = [(place, mean) for place, (_, mean) in zip(places, own, strict=True) if mean is not None]
    axes.plot(
        [place for place, _ in here],
        [mean for _, mean in here],
        color=style.colour,
        linestyle=style.line,
        marker=style.marker,
    )
    for place, (point, _) in zip(places, own, strict=True):
        if len(point.values) > 1:
            values = list(point.values.values())
            axes.scatter([place] * len(values), values, s=10, color=style.colour, alpha=0.5, linewidths=0)
        if not point.values:
            _missing(axes, _shifted(place, coordinates, shift), style)


def _shifted(place: float, coordinates: Sequence[Coordinate], shift: int) -> float:
    """Return a place a little to the right, so that two arms do not hide each other."""
    return place * 1.05**shift if _logarithmic(coordinates) else place + 0.08 * shift


def _differences(
    axes: Axes, own: Sequence[Point], axis: str, coordinates: Sequence[Coordinate], style: Look, shift: int
) -> None:
    for point in own:
        place = _shifted(_position(point.place[axis], coordinates), coordinates, shift)
        if point.summary is None:
            _missing(axes, place, style)
            continue
        beside = _shifted(place, coordinates, -1)  # or the interval hides them
        for value in point.differences.values() if point.summary.n > 1 else ():
            axes.scatter([beside], [value], s=10, color=style.colour, alpha=0.5, linewidths=0)
        if point.summary.low is not None and point.summary.high is not None:
            axes.plot(
                [place, place], [point.summary.low, point.summary.high], color=style.colour, linewidth=2
            )
        axes.plot(
            [place],
            [point.summary.mean],
            marker=style.marker,
            color=style.colour,
            markerfacecolor=style.colour if point.summary.n > 1 else "none",
        )


def _missing(axes: Axes, place: float, style: Look) -> None:
    axes.plot(
        [place],
        [0.02],
        marker="x",
        color=style.colour,
        alpha=0.7,
        transform=axes.get_xaxis_transform(),
        clip_on=False,
    )


def _handle(arm: str, style: Look) -> Line2D:
    return Line2D([], [], color=style.colour, linestyle=style.line, marker=style.marker, label=arm)


def probe_figure(view: SuiteView, probes: Sequence[BenchRecord], path_stem: str | Path) -> list[Path]:
    """Draw the three statistics of Figure 1 by layer: dots are models, the line is their mean.

    Returns the PNG and SVG paths. Raises ``ValueError`` without any probe.
    """
    if not probes:
        raise ValueError(f"{view.name}: no model is probed yet; run ./xsa probe on one")
    with styled():
        figure = Figure(figsize=(9.6, 3.4), layout="constrained")
        for axes, (name, title) in zip(figure.subplots(1, 3), STATISTICS.items(), strict=True):
            layers = sorted({row["layer"] for record in probes for row in record.rows})
            means = []
            for layer in layers:
                values = [row[name] for record in probes for row in record.rows if row["layer"] == layer]
                axes.scatter([layer] * len(values), values, s=12, color=_PROBE_LOOK.colour, alpha=0.5)
                means.append(sum(values) / len(values))
            axes.plot(layers, means, color=_PROBE_LOOK.colour, marker=_PROBE_LOOK.marker)
            axes.axhline(0.0, color=INK, linewidth=1.0, zorder=1.5)
            axes.set_title(title, fontsize=10)
            axes.set_xlabel("layer")
            axes.xaxis.set_major_locator(FixedLocator(layers[:: max(1, len(layers) // 8)]))
        count = f"{len(probes)} of {len(view.cells)} models"
        figure.suptitle(
            f"{view.title} (scale {view.scale}, {count})", x=0.01, ha="left", fontsize=11, weight="bold"
        )
        return save(figure, path_stem)
