"""Figures of the results: curves of training, and effects with their intervals.

Both are drawn from records alone and give the same bytes for the same records.
"""

from __future__ import annotations

import math
import textwrap
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MaxNLocator

from results.cells import arm_key, arm_labels
from results.drawing import draw_line, moving_average, save, scale_losses, steps_axis
from results.effects import Effect
from results.metrics import metric as metric_facts
from results.metrics import primary_metric
from results.pairing import pair_records
from results.record import RunRecord
from results.stats import summarize
from results.style import GRID, INK, MUTED, look, styled

_LABEL_WIDTH = 34


def _training_panel(axes: Axes, runs: Sequence[RunRecord]) -> None:
    shown: list[float] = []
    window = 1
    for record in runs:
        curve = record.curves["train"]
        values = list(map(float, curve["loss"]))
        style = look(record.variant)
        window = max(1, len(values) // 25) | 1
        if window > 1:
            axes.plot(curve.step, values, color=style.colour, linewidth=0.7, alpha=0.25)
        draw_line(axes, curve.step, moving_average(values, window), style, None)
        shown += values
    scale_losses(axes, shown)
    axes.set_title("training loss" + (f", mean of {window} points" if window > 1 else ""))
    axes.set_ylabel("nats per target")
    steps_axis(axes)


def _validation_panel(axes: Axes, runs: Sequence[RunRecord], name: str, labels: dict[str, str]) -> None:
    shown: list[float] = []
    seen: set[str] = set()
    for record in runs:
        curve = record.curves["validation"]
        values = list(map(float, curve[name]))
        label = labels[arm_key(record)]
        draw_line(axes, curve.step, values, look(record.variant), None if label in seen else label)
        seen.add(label)
        shown += values
    scale_losses(axes, shown)
    axes.set_title("validation")
    axes.set_ylabel(name.replace("_", " "))
    steps_axis(axes)


def _difference_panel(axes: Axes, runs: Sequence[RunRecord], name: str) -> bool:
    """Draw other minus baseline along training: thin lines per seed, thick the mean, shaded its interval."""
    groups: dict[str, list[tuple[str, dict[int, float]]]] = defaultdict(list)
    for pair in pair_records(runs).pairs:
        first, second = pair.baseline.curves.get("validation"), pair.other.curves.get("validation")
        if first is None or second is None or name not in first or name not in second:
            continue
        base = dict(zip(first.step, first[name], strict=True))
        line = {
            step: value - base[step]
            for step, value in zip(second.step, second[name], strict=True)
            if step in base and math.isfinite(value) and math.isfinite(base[step])
        }
        if line:
            groups[arm_key(pair.other)].append((pair.other.variant, line))
    for key in sorted(groups):
        style = look(groups[key][0][0])
        lines = [line for _, line in groups[key]]
        for line in lines if len(lines) > 1 else []:
            axes.plot(list(line), list(line.values()), color=style.colour, linewidth=0.7, alpha=0.4)
        steps = sorted(set.intersection(*(set(line) for line in lines)))
        means = [summarize([line[step] for line in lines]) for step in steps]
        draw_line(axes, steps, [mean.mean for mean in means], style, None)
        if len(lines) > 1 and steps:
            axes.fill_between(
                steps,
                [mean.low for mean in means],
                [mean.high for mean in means],
                color=style.colour,
                alpha=0.15,
                linewidth=0,
            )
    axes.axhline(0.0, color=INK, linewidth=1.0, zorder=1.5)
    most = max((len(lines) for lines in groups.values()), default=0)
    axes.set_title("minus sa" + (f", {most} seeds" if most > 1 else ", one seed"))
    axes.set_ylabel(f"difference in {name.replace('_', ' ')}")
    _limit_to_late(axes, [line for group in groups.values() for _, line in group])
    steps_axis(axes)
    return bool(groups)


def _limit_to_late(axes: Axes, lines: Sequence[dict[int, float]]) -> None:
    """Scale a difference axis by what comes after the first, steep tenth of training."""
    last = max((max(line) for line in lines), default=0)
    late = [value for line in lines for step, value in line.items() if step > 0.1 * last]
    if late:
        low, high = min(0.0, *late), max(0.0, *late)
        margin = 0.25 * (high - low) or 0.01
        axes.set_ylim(low - margin, high + margin)


def loss_curves(records: Sequence[RunRecord], path_stem: str | Path, title: str | None = None) -> list[Path]:
    """Draw training loss, validation and the paired difference of runs; return the PNG and SVG paths.

    Runs without curves are left out; panels that nothing can be drawn in too. Raises ``ValueError`` when no
    run has any curve.
    """
    training = [record for record in records if "train" in record.curves and "loss" in record.curves["train"]]
    name = (primary_metric(records) or "validation_loss").removeprefix("validation_")
    validated = [
        record for record in records if "validation" in record.curves and name in record.curves["validation"]
    ]
    if not training and not validated:
        raise ValueError("no run has a training or validation curve; draw after the first evaluation")
    labels = arm_labels(records)
    with styled():
        probe = Figure().subplots()
        paired = bool(validated) and _difference_panel(probe, validated, name)
        panels = [bool(training), bool(validated), paired]
        figure = Figure(figsize=(0.6 + 3.7 * sum(panels), 3.7), layout="constrained")
        axes = list(figure.subplots(1, sum(panels), squeeze=False)[0])
        if training:
            _training_panel(axes.pop(0), training)
        if validated:
            _validation_panel(axes.pop(0), validated, name, labels)
        if paired:
            _difference_panel(axes.pop(0), validated, name)
        _legend(figure, records, labels)
        if title:
            figure.suptitle(
                "\n".join(textwrap.wrap(title, 90)), x=0.01, ha="left", fontsize=11.5, weight="bold"
            )
        return save(figure, path_stem)


def _legend(figure: Figure, records: Sequence[RunRecord], labels: dict[str, str]) -> None:
    arms = {labels[arm_key(record)]: look(record.variant) for record in records}
    order = sorted(arms, key=lambda label: (label != "sa", label))
    handles = [
        Line2D(
            [],
            [],
            color=arms[label].colour,
            linestyle=arms[label].line,
            marker=arms[label].marker,
            label=label,
        )
        for label in order
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=min(len(handles), 5))


def effect_figure(effects: Sequence[Effect], path_stem: str | Path, title: str | None = None) -> list[Path]:
    """Draw one row per effect: every seed's difference, the mean and its 95% interval; return both paths.

    All effects must be about one metric. Missing ones keep their row, marked ``missing``. Raises
    ``ValueError`` when there are none or the metrics differ.
    """
    names = {effect.metric for effect in effects}
    if len(names) != 1:
        raise ValueError(f"expected effects on one metric, got {sorted(names) or 'none'}; draw one each")
    facts = metric_facts(names.pop())
    labels = ["\n".join(textwrap.wrap(f"{e.cell.label}: {e.arm}", _LABEL_WIDTH)) for e in effects]
    heights = [max(1.0, 0.55 * (label.count("\n") + 1)) for label in labels]
    with styled():
        figure = Figure(figsize=(7.6, 1.5 + 0.42 * sum(heights)), layout="constrained")
        axes = figure.subplots()
        places = [-(sum(heights[:i]) + 0.5 * heights[i]) for i in range(len(heights))]
        for place, effect in zip(places, effects, strict=True):
            _effect_row(axes, place, effect)
        axes.axvline(0.0, color=INK, linewidth=1.0, zorder=1.5)
        axes.set_yticks(places, labels)
        axes.tick_params(axis="y", length=0)
        axes.set_ylim(-sum(heights) - 0.2, 0.2)
        axes.grid(visible=False, axis="y")
        _symmetric(axes, effects)
        better = {"lower": " (left of zero is better)", "higher": " (right of zero is better)", None: ""}
        axes.set_xlabel(f"{facts.title}: difference to sa{better[facts.better]}")
        axes.set_title("mean and 95% interval over seeds; small dots are seeds", fontsize=9.5, color=MUTED)
        if title:
            figure.suptitle(
                "\n".join(textwrap.wrap(title, 70)), x=0.01, ha="left", fontsize=11.5, weight="bold"
            )
        return save(figure, path_stem)


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
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: "0" if value == 0 else f"{value:+g}"))


def _effect_row(axes: Axes, place: float, effect: Effect) -> None:
    style = look(effect.variant)
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
    axes.scatter(
        list(effect.differences.values()),
        [place - 0.22] * summary.n,
        s=14,
        color=style.colour,
        alpha=0.55,
        linewidths=0,
    )
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
