"""Suites: one file of configs/suite a figure or table, expanded to the cells that are to be run.

A cell is one run (a resolved config, identified by its hash) and what follows it (a probe, an evaluation),
or a command that keeps a record by itself (a benchmark). Cells come seed by seed and, within a seed, in the
order of the axes: the last one, attention, changes fastest, so that the two runs of a pair are neighbours.
"""

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

import yaml
from pydantic import Field, ValidationError, model_validator

from tasks.config import NonNegativeInt, Section
from tasks.errors import UserError
from tasks.runner.config.compose import explain, load_config, nearest, options
from tasks.runner.config.schema import RunConfig
from tasks.runner.paths import CONFIGS

Scale = Literal["cpu", "paper"]
Value = str | bool | int | float | dict[str, Any]

LABEL = "label"  # key of a linked axis value that names it
PAIRED_BASELINE = "sa"


class ScaleConfig(Section):
    """A suite at one scale: the grid of its runs, or the commands that make its records."""

    note: str = Field(description="what was scaled, and how")
    experiment: str | None = Field(None, description="base of every run, unless an axis names experiments")
    axes: dict[str, list[Value]] = Field(
        default_factory=dict,
        description="axis -> values: of the key it is named after, or mappings of keys that change together",
    )
    seeds: list[NonNegativeInt] = Field(default_factory=list)
    commands: list[str] = Field(default_factory=list, description="./xsa commands that keep a record")

    @model_validator(mode="after")
    def _is_a_grid_of_pairs(self) -> "ScaleConfig":
        if bool(self.seeds) == bool(self.commands):
            raise ValueError("scales: expected either seeds of runs, or commands")
        variants = self.axes.get("attention", [])
        if self.seeds and PAIRED_BASELINE not in variants:
            raise ValueError(f"axes: expected an axis attention with {PAIRED_BASELINE}: cells come in pairs")
        return self


class Suite(Section):
    """One figure or table."""

    title: str
    source: str
    view: Literal["axis", "curves", "probe", "bench", "evaluation"] = Field(description="how it is shown")
    x: str | None = Field(None, description="the axis drawn horizontally")
    then: list[Literal["probe", "eval"]] = Field(default_factory=list, description="after each run")
    tuned_by: str | dict[str, str] | None = Field(
        None, description="the suite that chose the learning rate, on sa alone, or one for each optimizer"
    )
    interaction: str | None = Field(
        None, description="the axis along which the gain of a variant is asked to differ"
    )
    scales: dict[Scale, ScaleConfig]


# What free overrides start from: no experiment, no axes, one seed.
FREE = ScaleConfig.model_construct(note="", experiment=None, axes={}, seeds=[], commands=[])


@dataclass(frozen=True)
class Cell:
    """One run of a suite. `coordinates` are its values on the axes, as shown."""

    config: RunConfig
    overrides: tuple[str, ...]
    coordinates: dict[str, str | float] = field(hash=False)

    @property
    def label(self) -> str:
        """Return a name for people: where the cell lies in the grid."""
        if not self.coordinates:
            return self.config.run_id()
        parts = [f"{axis} {shown(value)}" for axis, value in self.coordinates.items() if axis != "attention"]
        return ", ".join([*parts, self.config.attention.variant, f"seed {self.config.seed}"])

    @property
    def arguments(self) -> list[str]:
        """Return the words of the command that runs it."""
        return ["run", self.config.experiment, *self.overrides]


def suites() -> list[str]:
    """Return the names of all suites, sorted."""
    return options("suite")


def load_suite(name: str) -> Suite:
    """Return a suite of configs/suite.

    Raises:
        UserError: there is none of that name, or its file does not fit the schema.
    """
    if name not in suites():
        raise UserError(
            f"unknown suite '{name}'; {nearest(name, suites())}the suites are {', '.join(suites())}"
        )
    path = CONFIGS / "suite" / f"{name}.yaml"
    try:
        return Suite.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))
    except yaml.YAMLError as error:
        raise UserError(f"configs/suite/{name}.yaml: not YAML ({' '.join(str(error).split())})") from error
    except ValidationError as error:
        raise UserError(f"configs/suite/{name}.yaml: {explain(error, list(Suite.model_fields))}") from error


def scale_of(suite: Suite, name: str, scale: str) -> ScaleConfig:
    """Return one scale of a suite; UserError where it has none of that name."""
    if scale not in suite.scales:
        raise UserError(f"suite {name} has no scale '{scale}'; it has {', '.join(suite.scales)}")
    return suite.scales[scale]


def expand(grid: ScaleConfig, overrides: Sequence[str] = ()) -> list[Cell]:
    """Return the runs of a grid; an override `KEY=A,B` replaces an axis or adds one, `seed=0,1` the seeds.

    Raises:
        UserError: a key, value or experiment that is not valid, or no experiment at all.
    """
    axes, seeds = dict(grid.axes), list(grid.seeds)
    seen: set[str] = set()
    for override in overrides:
        key, values = split_override(override)
        if key in seen:
            raise UserError(f"{key} is given twice; give all its values at once, {key}=A,B")
        seen.add(key)
        if key == "seed":
            seeds = [whole_number(value) for value in values]
            continue
        for axis in [axis for axis, old in axes.items() if drives(axis, old, key)]:
            del axes[axis]  # what the user sets replaces the suite's own choice
        axes[key] = list(values)
    # Attention last: the runs of a pair are neighbours.
    axes |= {"attention": axes.pop("attention")} if "attention" in axes else {}
    points = [point(grid, axes, choice) for choice in itertools.product(*axes.values())]
    cells: dict[str, Cell] = {}
    for seed in seeds or [0]:
        for config, chosen, coordinates in points:
            seeded = type(config).model_validate({**config.resolved(), "seed": seed})
            cell = Cell(seeded, (*chosen, f"seed={seed}"), coordinates)
            cells.setdefault(seeded.config_hash(), cell)
    return list(cells.values())


def recorded_in(cells: Sequence[Cell], directory: str) -> list[Cell]:
    """Return the cells with their records in another directory, whatever signs its path has."""
    moved = []
    for cell in cells:
        output = cell.config.output.model_copy(update={"records": directory})
        config = cell.config.model_copy(update={"output": output})
        moved.append(Cell(config, cell.overrides, cell.coordinates))
    return moved


def drives(axis: str, values: Sequence[Value], key: str) -> bool:
    """Tell whether an axis sets a key, by its name or through linked values."""
    return axis == key or any(isinstance(value, dict) and key in value for value in values)


def point(
    grid: ScaleConfig, axes: dict[str, list[Value]], choice: tuple[Value, ...]
) -> tuple[RunConfig, tuple[str, ...], dict[str, str | float]]:
    """Return config, overrides and coordinates of one combination of axis values."""
    experiment, overrides, coordinates = grid.experiment, [], {}
    for (axis, values), value in zip(axes.items(), choice, strict=True):
        keys = value if isinstance(value, dict) else {axis: value}
        keys = {key: chosen for key, chosen in keys.items() if key != LABEL}
        experiment = keys.pop("experiment", experiment)
        overrides += [f"{key}={written(chosen)}" for key, chosen in keys.items()]
        if len(values) > 1:
            named = value.get(LABEL) if isinstance(value, dict) else None
            coordinates[axis] = number(named or next(iter(keys.values()), experiment))
    if experiment is None:
        raise UserError("no experiment; add experiment=NAME, for instance experiment=text/quick")
    return composed(experiment, tuple(overrides)), tuple(overrides), coordinates


@cache
def composed(experiment: str, overrides: tuple[str, ...]) -> RunConfig:
    """Return a config. Suites share many points, and composing one takes a tenth of a second."""
    return load_config(experiment, overrides)


def split_override(override: str) -> tuple[str, list[str]]:
    """Return key and values of `KEY=A,B`; commas inside brackets, braces or quotes do not divide."""
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise UserError(f"'{override}': expected KEY=VALUE or KEY=A,B, for instance seed=0,1,2")
    parts, depth, quote = [""], 0, ""
    for letter in text:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "'\"":
            quote = letter
        elif letter in "([{":
            depth += 1
        elif letter in ")]}":
            depth -= 1
        elif letter == "," and depth == 0:
            parts.append("")
            continue
        parts[-1] += letter
    if quote or depth:
        what = f"a quote {quote} that does not end" if quote else "brackets that do not match"
        raise UserError(f"'{override}': {what}; in a shell, quote the whole: 'KEY=[0,1],first:2'")
    values = [part.strip() for part in parts]
    if values == [""]:
        raise UserError(f"'{override}': no value; expected KEY=VALUE or KEY=A,B")
    if not all(values):
        raise UserError(f"'{override}': an empty value between commas; expected KEY=A,B")
    return key, list(dict.fromkeys(values))


def whole_number(text: str) -> int:
    """Return a seed; UserError for anything but a whole number."""
    if not text.isdigit():
        raise UserError(f"seed: expected whole numbers such as 0,1,2, got '{text}'")
    return int(text)


def written(value: Any) -> str:
    """Return a value as an override takes it."""
    return value if isinstance(value, str) else json.dumps(value)


def number(value: Any) -> str | float:
    """Return a value as a coordinate: a number where it is one, else text."""
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else written(value)


def shown(value: str | float) -> str:
    """Return a coordinate for people."""
    return value if isinstance(value, str) else f"{value:g}"
