"""How figures look, and what makes their bytes the same everywhere.

Colours are Okabe and Ito's, which people with any common colour blindness can tell apart; each variant
keeps its colour, line and marker in every figure, so that no figure depends on colour alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib import font_manager

INK = "#222222"
MUTED = "#666666"
GRID = "#e3e3e3"
BACKGROUND = "#ffffff"


@dataclass(frozen=True)
class Look:
    """Colour, line and marker of one variant."""

    colour: str
    line: str = "-"
    marker: str = "o"


VARIANT_LOOKS: dict[str, Look] = {
    "sa": Look("#0072b2", "-", "o"),
    "xsa": Look("#d55e00", "-", "s"),
    "xsa_learned": Look("#cc79a7", "-", "D"),
    "random_direction": Look("#009e73", "--", "^"),
    "mean_direction": Look("#e69f00", "--", "v"),
    "head_norm": Look("#56b4e9", "--", "P"),
    "diag_masked": Look("#000000", "--", "X"),
}
_OTHERS = (
    Look("#7f7f7f", ":", "*"),
    Look("#8c564b", ":", "h"),
    Look("#6a3d9a", ":", "<"),
    Look("#666600", ":", ">"),
)
_LINES = ("-", "--", "-.", ":")
_MARKERS = ("s", "o", "^", "D", "v", "P", "X", "h")

_FAMILY = "xsa-results-sans"
_RC: dict[str, Any] = {
    "font.family": _FAMILY,
    "font.size": 10.0,
    "axes.titlesize": 10.5,
    "axes.titlelocation": "left",
    "axes.labelsize": 10.0,
    "axes.labelcolor": INK,
    "axes.edgecolor": MUTED,
    "axes.facecolor": BACKGROUND,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.unicode_minus": True,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "text.color": INK,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "legend.frameon": False,
    "lines.linewidth": 1.8,
    "lines.markersize": 5.0,
    "figure.facecolor": BACKGROUND,
    "figure.dpi": 100.0,
    "savefig.dpi": 160.0,
    "savefig.facecolor": BACKGROUND,
    # Text as outlines: the SVG looks the same where the font is not installed.
    "svg.fonttype": "path",
    "svg.hashsalt": "xsa-results",
    "path.simplify": True,
    "agg.path.chunksize": 0,
}


def look(variant: str) -> Look:
    """Return how a variant is drawn; one without an entry gets a fixed look told from its name."""
    if variant in VARIANT_LOOKS:
        return VARIANT_LOOKS[variant]
    return _OTHERS[hashlib.sha256(variant.encode()).digest()[0] % len(_OTHERS)]


def arm_looks(arms: Mapping[str, str]) -> dict[str, Look]:
    """Return how each arm is drawn, given the variant of each: its variant's colour, a shade of it per arm.

    Arms of one variant (strengths, layer choices) also differ in line and marker.
    """
    groups: dict[str, list[str]] = {}
    for arm in sorted(arms):
        groups.setdefault(arms[arm], []).append(arm)
    looks: dict[str, Look] = {}
    for variant, members in groups.items():
        base = look(variant)
        for i, arm in enumerate(reversed(members)):
            light = 0.5 * i / max(1, len(members) - 1)
            looks[arm] = (
                base if i == 0 else Look(_lighter(base.colour, light), _LINES[i % 4], _MARKERS[i % 8])
            )
    return looks


def _lighter(colour: str, share: float) -> str:
    parts = [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
    return "#" + "".join(f"{round(part + share * (255 - part)):02x}" for part in parts)


def _register_fonts() -> None:
    # Matplotlib would take a DejaVu of the system, of whatever version, before its own. Its bundled files
    # get a name that no system font has.
    folder = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    known = {entry.name for entry in font_manager.fontManager.ttflist}
    if _FAMILY in known:
        return
    for file, weight in (("DejaVuSans.ttf", 400), ("DejaVuSans-Bold.ttf", 700)):
        font_manager.fontManager.ttflist.append(
            font_manager.FontEntry(
                fname=str(folder / file),
                name=_FAMILY,
                style="normal",
                variant="normal",
                weight=weight,
                stretch="normal",
                size="scalable",
            )
        )


@contextmanager
def styled() -> Iterator[None]:
    """Draw and save within this context: matplotlib's defaults and ours, none of the user's settings."""
    _register_fonts()
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_RC)
        yield
