"""From records to the grid: cells (what is repeated over seeds) and arms (which attention).

A cell is a config without its attention group, its seed and where it writes. An arm is the attention group
without the kernel that computes it, since kernels compute the same function. Both get labels that name only
what differs.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from results.jsonio import dumps, plain
from results.record import RunRecord

NOT_A_CELL = ("attention", "seed", "output", "experiment")
NOT_AN_ARM = ("backend",)


@dataclass(frozen=True)
class Cell:
    """Runs that differ in seed and attention alone, under one label."""

    key: str
    label: str
    task: str
    experiment: str
    optimizer: str
    records: tuple[RunRecord, ...]


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested mappings as one, with dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _without(config: Any, names: Sequence[str]) -> dict[str, Any]:
    if not isinstance(config, Mapping):
        return {}
    return {key: value for key, value in config.items() if key not in names}


def cell_key(record: RunRecord) -> str:
    """Return what identifies the cell of a run, whatever its seed and attention."""
    what = record.cell_hash or dumps(plain(_without(record.config, NOT_A_CELL)))
    return dumps([record.task, record.experiment, record.optimizer, what, _machine(record)])


def _machine(record: RunRecord) -> dict[str, Any]:
    # Arithmetic is part of a cell: the same config on a CPU in float32 and on a GPU in bfloat16 are two.
    device = record.environment.device.partition(":")[0]
    return {"device": device, "precision": record.environment.precision}


def arm_key(record: RunRecord) -> str:
    """Return what identifies the attention of a run."""
    return dumps([record.variant, plain(_without(record.config.get("attention"), NOT_AN_ARM))])


def _show(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    return ("on" if value else "off") if isinstance(value, bool) else str(value)


def label_all(names: Mapping[str, str], settings: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Return a label per key: its name, and the settings in which keys of the same name differ."""
    groups: dict[str, list[str]] = defaultdict(list)
    for key, name in names.items():
        groups[name].append(key)
    labels: dict[str, str] = {}
    for name, keys in groups.items():
        flats = {key: flatten(settings[key]) for key in keys}
        known = sorted({setting for flat in flats.values() for setting in flat})
        differing = [
            setting
            for setting in known
            if len({dumps(plain(flat.get(setting, "missing"))) for flat in flats.values()}) > 1
        ]
        for key, flat in flats.items():
            # The last part of a dotted name is enough where it is not ambiguous.
            short = {s: s.rpartition(".")[2] for s in differing}
            unique = {s: v if list(short.values()).count(v) == 1 else s for s, v in short.items()}
            parts = [f"{unique[s]}={_show(flat.get(s, 'missing'))}" for s in differing]
            labels[key] = " ".join([name, *parts])
    return labels


def group_cells(records: Sequence[RunRecord]) -> list[Cell]:
    """Return the cells of the grid, ordered by task, experiment, optimizer and label."""
    groups: dict[str, list[RunRecord]] = defaultdict(list)
    for record in records:
        groups[cell_key(record)].append(record)
    names = {key: f"{group[0].experiment} {group[0].optimizer}" for key, group in groups.items()}
    settings = {
        key: _without(group[0].config, NOT_A_CELL) | {"environment": _machine(group[0])}
        for key, group in groups.items()
    }
    labels = label_all(names, settings)
    cells = [
        Cell(
            key,
            labels[key],
            group[0].task,
            group[0].experiment,
            group[0].optimizer,
            tuple(sorted(group, key=lambda record: (record.variant, record.seed, record.run_id))),
        )
        for key, group in groups.items()
    ]
    return sorted(
        cells, key=lambda cell: (cell.task, cell.experiment, cell.optimizer, _natural(cell.label), cell.key)
    )


def _natural(label: str) -> list[tuple[int, float, str]]:
    """Return a key by which 64 comes before 128: numbers by their size, all else as text."""
    parts = re.split(r"(\d+\.?\d*(?:e-?\d+)?)", label)
    return [(1, float(part), "") if i % 2 else (0, 0.0, part) for i, part in enumerate(parts)]


def arm_labels(records: Sequence[RunRecord]) -> dict[str, str]:
    """Return the label of every arm among ``records``, by :func:`arm_key`."""
    names = {arm_key(record): record.variant for record in records}
    settings = {
        arm_key(record): _without(record.config.get("attention"), (*NOT_AN_ARM, "variant"))
        for record in records
    }
    return label_all(names, settings)
