"""Figures of the results: curves of training, and effects with their intervals.

Both are drawn from records alone and give the same bytes for the same records.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MaxNLocator

from results.cells import arm_key, arm_labels
from results.drawing import draw_line, moving_average, save, scale_losses, steps_axis, wrapped
from results.effects import Effect
from results.metrics import metric as metric_facts
from results.metrics import primary_metric
from results.pairing import BASELINE, pair_records
from results.record import RunRecord
from results.stats import summarize
from results.style import GRID, INK, MUTED, Look, arm_looks, styled

_LABEL_WIDTH = 34


# What the curve panels draw: differences by arm, one step -> difference mapping per pair.
Lines = dict[str, list[dict[int, float]]]


def _last_step(records: Sequence[RunRecord]) -> int:
    return max(
        (curve.step[-1] for record in records for curve in record.curves.values() if curve.step), default=1
    )


def _width(records: Sequence[RunRecord]) -> float:
    """Return a line width: thinner when several seeds lie on each other."""
    return 1.8 if len({record.seed for record in records}) == 1 else 1.0


def _training_panel(axes: Axes, runs: Sequence[RunRecord], looks: dict[str, Look]) -> None:
    shown: list[float] = []
    window = 1
    for record in runs:
        curve = record.curves["train"]
        values = list(map(float, curve["loss"]))
        style = looks[arm_key(record)]
        window = max(1, len(values) // 25) | 1
        if window > 1:
            axes.plot(curve.step, values, color=style.colour, linewidth=0.7, alpha=0.25)
        draw_line(axes, curve.step, moving_average(values, window), style, _width(runs))
        shown += values
    scale_losses(axes, shown)
    axes.set_title("training loss" + (f", mean of {window} points" if window > 1 else ""))
    axes.set_ylabel("nats per target")


def _validation_panel(axes: Axes, runs: Sequence[RunRecord], name: str, looks: dict[str, Look]) -> None:
    shown: list[float] = []
    for record in runs:
        curve = record.curves["validation"]
        values = list(map(float, curve[name]))
        draw_line(axes, curve.step, values, looks[arm_key(record)], _width(runs))
        shown += values
    scale_losses(axes, shown)
    axes.set_title("validation")
    axes.set_ylabel(name.replace("_", " "))


def _pair_lines(runs: Sequence[RunRecord], name: str) -> Lines:
    """Return other minus baseline at every common evaluation, by arm, one line per pair."""
    lines: Lines = defaultdict(list)
    for pair in pair_records(runs).pairs:
        first, second = pair.baseline.curves["validation"], pair.other.curves["validation"]
        base = dict(zip(first.step, first[name], strict=True))
        line = {
            step: value - base[step]
            for step, value in zip(second.step, second[name], strict=True)
            if step in base and math.isfinite(value) and math.isfinite(base[step])
        }
        if line:
            lines[arm_key(pair.other)].append(line)
    return dict(sorted(lines.items()))


def _difference_panel(axes: Axes, arms: Lines, name: str, looks: dict[str, Look], last: int) -> None:
    """Draw differences along training: thin lines per seed, thick the mean, shaded its 95% interval."""
    ends = [0.0]
    for key, lines in arms.items():
        style = looks[key]
        for line in lines if len(lines) > 1 else []:
            axes.plot(list(line), list(line.values()), color=style.colour, linewidth=0.7, alpha=0.4)
        steps = sorted(set.intersection(*(set(line) for line in lines)))
        means = [summarize([line[step] for line in lines]) for step in steps]
        draw_line(axes, steps, [mean.mean for mean in means], style)
        bounds = [(mean.mean, mean.mean) if mean.low is None else (mean.low, mean.high) for mean in means]
        if len(lines) > 1:
            low, high = [bound[0] for bound in bounds], [bound[1] for bound in bounds]
            axes.fill_between(steps, low, high, color=style.colour, alpha=0.15, linewidth=0)
        # The first tenth is left out of the scale: there, curves fall so steeply that it would hide the rest.
        ends += [end for step, bound in zip(steps, bounds, strict=True) if step > 0.1 * last for end in bound]
        ends += [value for line in lines for step, value in line.items() if step > 0.1 * last]
    margin = 0.08 * (max(ends) - min(ends)) or 0.01
    axes.set_ylim(min(ends) - margin, max(ends) + margin)
    axes.axhline(0.0, color=INK, linewidth=1.0, zorder=1.5)
    axes.yaxis.set_major_locator(MaxNLocator(6))
    counts = sorted({len(lines) for lines in arms.values()})
    many = "1 seed" if counts == [1] else f"{counts[0]} seeds"
    if len(counts) > 1:
        many = f"{counts[0]} to {counts[-1]} seeds"
    axes.set_title(f"difference to sa ({many}{', 95% band' if counts[-1] > 1 else ''})")
    axes.set_ylabel(name.replace("_", " "))


def _usable(records: Sequence[RunRecord], curve: str, name: str) -> list[RunRecord]:
    found = [record for record in records if curve in record.curves and name in record.curves[curve]]
    return [record for record in found if record.curves[curve].step]


def loss_curves(records: Sequence[RunRecord], path_stem: str | Path, title: str | None = None) -> list[Path]:
    """Draw training loss, validation and the paired difference of runs; return the PNG and SVG paths.

    Runs without curves are left out, panels in which nothing can be drawn too. Raises ``ValueError`` when no
    run has any curve.
    """
    training = _usable(records, "train", "loss")
    name = (primary_metric(records) or "validation_loss").removeprefix("validation_")
    validated = _usable(records, "validation", name)
    if not training and not validated:
        raise ValueError("no run has a training or validation curve; draw after the first evaluation")
    labels = arm_labels(records)
    by_label = arm_looks({labels[arm_key(record)]: record.variant for record in records})
    looks = {key: by_label[label] for key, label in labels.items()}
    last = _last_step([*training, *validated])
    arms = _pair_lines(validated, name)
    with styled():
        count = sum(map(bool, (training, validated, arms)))
        figure = Figure(figsize=(0.6 + 3.7 * count, 3.7), layout="constrained")
        panels = list(figure.subplots(1, count, squeeze=False)[0])
        for axes in panels:
            steps_axis(axes, last)
        if training:
            _training_panel(panels.pop(0), training, looks)
        if validated:
            _validation_panel(panels.pop(0), validated, name, looks)
        if arms:
            _difference_panel(panels.pop(0), arms, name, looks, last)
        _legend(figure, by_label)
        if title:
            figure.suptitle(wrapped(title, 32 * count), x=0.01, ha="left", fontsize=11.5, weight="bold")
        return save(figure, path_stem)


def _legend(figure: Figure, looks: dict[str, Look]) -> None:
    order = sorted(looks, key=lambda label: (label != BASELINE, label))
    handles = [
        Line2D(
            [],
            [],
            color=looks[label].colour,
            linestyle=looks[label].line,
            marker=looks[label].marker,
            label=label,
        )
        for label in order
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=min(len(handles), 4))


def effect_figure(effects: Sequence[Effect], path_stem: str | Path, title: str | None = None) -> list[Path]:
    """Draw one row per effect: every seed's difference, the mean and its 95% interval; return both paths.

    All effects must be about one metric. Missing ones keep their row, marked ``missing``. Raises
    ``ValueError`` when there are none or the metrics differ.
    """
    names = {effect.metric for effect in effects}
    if len(names) != 1:
        raise ValueError(f"expected effects on one metric, got {sorted(names) or 'none'}; draw one each")
    facts = metric_facts(names.pop())
    labels = [wrapped(f"{e.cell.label}: {e.arm}", _LABEL_WIDTH) for e in effects]
    looks = arm_looks({effect.arm: effect.variant for effect in effects})
    heights = [max(1.0, 0.55 * (label.count("\n") + 1)) for label in labels]
    with styled():
        figure = Figure(figsize=(7.6, 1.5 + 0.42 * sum(heights)), layout="constrained")
        axes = figure.subplots()
        places = [-(sum(heights[:i]) + 0.5 * heights[i]) for i in range(len(heights))]
        for place, effect in zip(places, effects, strict=True):
            _effect_row(axes, place, effect, looks[effect.arm])
        axes.axvline(0.0, color=INK, linewidth=1.0, zorder=1.5)
        axes.set_yticks(places, labels)
        axes.tick_params(axis="y", length=0)
        axes.set_ylim(-sum(heights) - 0.2, 0.2)
        axes.grid(visible=False, axis="y")
        _symmetric(axes, effects)
        better = {"lower": " (left of zero is better)", "higher": " (right of zero is better)", None: ""}
        axes.set_xlabel(f"{facts.title}: difference to sa{better[facts.better]}")
        several = any(effect.summary is not None and effect.summary.n > 1 for effect in effects)
        what = "mean and 95% interval; small dots: seeds; hollow: one seed"
        axes.set_title(what if several else "one seed each: no interval", fontsize=9.5, color=MUTED)
        if title:
            figure.suptitle(wrapped(title, 70), x=0.01, ha="left", fontsize=11.5, weight="bold")
        return save(figure, path_stem)


def _signed(value: float) -> str:
    return "0" if value == 0 else f"{value:+g}".replace("-", "\N{MINUS SIGN}")


def _symmetric(axes: Axes, effects: Sequence[Effect]) -> None:
    """Show zero in the middle, and every point and interval inside."""
    ends = [0.0]
    for effect in effects:
        ends += [abs(value) for value in effect.differences.values()]
        if effect.summary is not None and effect.summary.low is not None and effect.summary.high is not None:
            ends += [abs(effect.summary.low), abs(effect.summary.high)]
    reach = 1.12 * max(ends) or 1.0
    axes.set_xlim(-reach, reach)
    axes.xaxis.set_major_locator(MaxNLocator(7, symmetric=True))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _signed(value)))


def _effect_row(axes: Axes, place: float, effect: Effect, style: Look) -> None:
    summary = effect.summary
    if summary is None:
        axes.axhline(place, color=GRID, linewidth=0.8, linestyle=":")
        axes.annotate(
            "missing",
            (0.02, place),
            xycoords=axes.get_yaxis_transform(),
            va="center",
            color=MUTED,
            fontsize=9,
        )
        return
    axes.annotate(
        f"{summary.n} seed{'' if summary.n == 1 else 's'}",
        (1.01, place),
        xycoords=axes.get_yaxis_transform(),
        va="center",
        color=MUTED,
        fontsize=8.5,
        annotation_clip=False,
    )
    if summary.n > 1:
        values = list(effect.differences.values())
        axes.scatter(values, [place - 0.22] * summary.n, s=14, color=style.colour, alpha=0.55, linewidths=0)
    if summary.low is not None and summary.high is not None:
        axes.plot([summary.low, summary.high], [place, place], color=style.colour, linewidth=2.4)
    hollow = summary.n == 1
    axes.plot(
        [summary.mean],
        [place],
        marker=style.marker,
        markersize=7,
        color=style.colour,
        markerfacecolor="none" if hollow else style.colour,
    )
