"""What all figures share: saving with stable bytes, smoothing, axes and lines.

Figures are made without pyplot, so that no window system and no global state is involved.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullFormatter, NullLocator

from results.jsonio import write_whole
from results.style import Look

FORMATS = ("png", "svg")
# Nothing that changes between two renderings: no date, no program version.
_METADATA = {"png": {"Software": None}, "svg": {"Date": None, "Creator": None}}
_NICE = (1.0, 1.2, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0)


def save(figure: Figure, path_stem: str | Path) -> list[Path]:
    """Write ``figure`` as ``<path_stem>.png`` and ``.svg``, each whole, and return the two paths."""
    FigureCanvasAgg(figure)
    paths = []
    for form in FORMATS:
        stream = io.BytesIO()
        figure.savefig(stream, format=form, metadata=_METADATA[form])
        # Not with_suffix: a stem such as "lr-0.001" would lose its end.
        target = Path(path_stem)
        paths.append(write_whole(target.with_name(f"{target.name}.{form}"), stream.getvalue()))
    return paths


def moving_average(values: Sequence[float], window: int) -> list[float]:
    """Return the centred moving average over an odd ``window``, narrowed at both ends."""
    if window < 1 or window % 2 == 0:
        raise ValueError(f"window is {window}, expected an odd positive number such as 9")
    result = []
    for i in range(len(values)):
        reach = min(window // 2, i, len(values) - 1 - i)
        part = values[i - reach : i + reach + 1]
        result.append(math.fsum(part) / len(part) if all(map(math.isfinite, part)) else math.nan)
    return result


def log_ticks(low: float, high: float, most: int = 7) -> list[float]:
    """Return round numbers between two positive limits, for a logarithmic axis with plain labels."""
    exponents = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 1)
    for numbers in (_NICE, (1.0, 1.5, 2.0, 3.0, 5.0), (1.0, 2.0, 5.0), (1.0,)):
        ticks = [n * 10.0**e for e in exponents for n in numbers if low <= n * 10.0**e <= high]
        if len(ticks) <= most:
            break
    return ticks


def scale_losses(axes: Axes, values: Sequence[float]) -> None:
    """Give losses that fall by more than half a logarithmic axis, others a plain one."""
    known = [value for value in values if math.isfinite(value)]
    if known and min(known) > 0 and max(known) / min(known) > 1.5:
        low, high = min(known) / 1.04, max(known) * 1.04
        axes.set_yscale("log")
        axes.set_ylim(low, high)
        axes.yaxis.set_major_locator(FixedLocator(log_ticks(low, high)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_minor_formatter(NullFormatter())


def wrapped(text: str, width: int) -> str:
    """Return a label broken into lines, after a space, slash or underscore, and inside a word never."""
    lines = [""]
    for part in re.findall(r"[^ /_]*[ /_]?", text):
        if lines[-1] and len((lines[-1] + part).rstrip()) > width:
            lines.append("")
        lines[-1] += part
    return "\n".join(line.rstrip() for line in lines)


def steps_axis(axes: Axes, last: int) -> None:
    """Let the horizontal axis be training steps from 0 to ``last``, whole numbers only."""
    axes.set_xlim(0, 1.04 * max(last, 1))
    axes.set_xlabel("training step")
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))


def draw_line(
    axes: Axes, steps: Sequence[int], values: Sequence[float], style: Look, width: float = 1.8
) -> None:
    """Draw one run's curve, with markers where points are few enough to be told apart."""
    few = len(steps) <= 30
    axes.plot(
        steps,
        values,
        color=style.colour,
        linestyle=style.line,
        marker=style.marker if few else None,
        markersize=4.0,
        linewidth=width,
    )
