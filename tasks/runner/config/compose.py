"""From an experiment's name and overrides to a validated RunConfig.

Hydra composes the YAML groups; pydantic says what is allowed. Overrides are checked against the schema
first, so that a misspelt key is answered with the nearest valid one and never with a traceback.
"""

import difflib
import re
import types
from functools import cache
from pathlib import Path
from typing import Any, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError, create_model

from tasks.errors import UserError
from tasks.runner.config.schema import RunConfig
from tasks.runner.paths import CONFIGS
from tasks.runner.registry import TASKS, load_task

# ${name:...} calls a resolver, which may read the environment or the clock: a config must mean the same
# everywhere and always. ${loop.max_steps}, the value of another key, may stay.
RESOLVER = re.compile(r"\$\{\s*[\w.]+\s*:")


def experiments() -> list[str]:
    """Return the names of all experiments, sorted."""
    return options("experiment")


def options(group: str) -> list[str]:
    """Return the names a config group offers, sorted."""
    root = CONFIGS / group
    return sorted(path.relative_to(root).with_suffix("").as_posix() for path in root.rglob("*.yaml"))


def groups() -> list[str]:
    """Return the config groups that an override may choose from."""
    names = sorted(path.name for path in CONFIGS.iterdir() if path.is_dir())
    return [name for name in names if name not in {"experiment", "suite"}]


def nearest(name: str, names: list[str]) -> str:
    """Return a hint that names the nearest valid name, or nothing."""
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f"did you mean '{near[0]}'? " if near else ""


@cache
def schema_of(task: str) -> type[RunConfig]:
    """Return RunConfig with the task's own model and data sections.

    Raises:
        UserError: no such task.
    """
    if task not in TASKS:
        raise UserError(f"task: unknown task '{task}'; expected one of {', '.join(TASKS)}")
    spec = load_task(task)
    return create_model(
        "RunConfig", __base__=RunConfig, model=(spec.model_config, ...), data=(spec.data_config, ...)
    )


def valid_keys(schema: type[BaseModel], prefix: str = "") -> list[str]:
    """Return every dotted key of a schema, sections included."""
    keys = []
    for name, field in schema.model_fields.items():
        keys.append(prefix + name)
        section = section_of(field.annotation)
        if section is not None:
            keys += valid_keys(section, f"{prefix}{name}.")
    return keys


def section_of(annotation: Any) -> type[BaseModel] | None:
    """Return the section class behind an annotation, also behind `Section | None`."""
    if get_origin(annotation) in {Union, types.UnionType}:
        return next(filter(None, map(section_of, get_args(annotation))), None)
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None


def load_config(experiment: str, overrides: list[str] | tuple[str, ...] = ()) -> RunConfig:
    """Return the resolved, validated config of an experiment with overrides such as `seed=3`.

    Raises:
        UserError: an unknown experiment, group option or key, a value of the wrong type, or a bad file.
    """
    names = experiments()
    if experiment not in names:
        raise UserError(
            f"unknown experiment '{experiment}'; {nearest(experiment, names)}"
            f"the experiments are {', '.join(names)}"
        )
    task = experiment_task(experiment)
    schema = schema_of(task)
    content = compose([f"experiment={experiment}", *checked(overrides, schema)])
    content["experiment"] = experiment
    return validate(schema, content)


def experiment_task(experiment: str) -> str:
    """Return the task an experiment's file names."""
    path = CONFIGS / "experiment" / f"{experiment}.yaml"
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        line = " ".join(str(error).split())
        raise UserError(f"configs/experiment/{experiment}.yaml: not YAML ({line})") from error
    if not isinstance(content, dict) or "task" not in content:
        raise UserError(
            f"configs/experiment/{experiment}.yaml: no key 'task'; expected one of {', '.join(TASKS)}"
        )
    return content["task"]


def checked(overrides: list[str] | tuple[str, ...], schema: type[RunConfig]) -> list[str]:
    """Check overrides against groups and schema; return them in the form Hydra takes."""
    keys = valid_keys(schema)
    result = []
    for override in overrides:
        key, equals, value = override.partition("=")
        if not equals or not key:
            raise UserError(f"'{override}': expected KEY=VALUE, for instance seed=3 or attention=sa")
        if RESOLVER.search(value):
            raise UserError(f"'{override}': a config must not read the environment; write the value itself")
        if key in groups():
            if value not in options(key):
                raise UserError(
                    f"{key}: unknown option '{value}'; {nearest(value, options(key))}"
                    f"the options are {', '.join(options(key))}"
                )
            result.append(override)
            continue
        if any(valid.startswith(f"{key}.") for valid in keys):
            inside = [valid for valid in keys if valid.startswith(f"{key}.")]
            raise UserError(f"'{override}': {key} is a section; set its keys, for instance {inside[0]}=VALUE")
        if key in {"task", "experiment"}:
            raise UserError(f"'{override}': {key} cannot be overridden; name another experiment instead")
        if key not in keys:
            raise UserError(
                f"unknown key '{key}'; {nearest(key, keys)}./xsa config EXPERIMENT prints all keys"
            )
        override = understood(override)
        result.append(f"++{override}")
    return result


def understood(override: str) -> str:
    """Return the override in a form Hydra understands: as it is, else with its value as a quoted text.

    Raises:
        UserError: neither is understood, or there are several values where a run takes one.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    parser = OverridesParser.create()
    try:
        parsed = parser.parse_override(override)
    except HydraException as error:
        key, _, value = override.partition("=")
        if not set(value) & set("=[]{}'\"()\\$,"):  # a text with letters its grammar does not know
            return f"{key}='{value}'"
        reason = str(error).splitlines()[0]
        raise UserError(
            f"'{override}': not understood ({reason}); quote a value with special signs"
        ) from error
    if parsed.is_sweep_override():
        raise UserError(f"'{override}': several values, but a run takes one; a list is written [1,2]")
    return override


def compose(overrides: list[str]) -> dict[str, Any]:
    """Compose the YAML groups with Hydra; return plain Python values."""
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    refuse_environment_reads(CONFIGS)
    try:
        with initialize_config_dir(str(CONFIGS), version_base="1.3"):
            composed = hydra_compose("config", overrides=overrides)
        return OmegaConf.to_container(composed, resolve=True, throw_on_missing=False)
    except (HydraException, OmegaConfBaseException, yaml.YAMLError) as error:
        lines = [line for line in str(error).splitlines() if line.strip()]
        raise UserError(f"config: {' '.join(lines[:2])}") from error


def refuse_environment_reads(directory: Path) -> None:
    """Refuse YAML that reads the environment: the same config must mean the same everywhere."""
    for path in directory.rglob("*.yaml"):
        found = RESOLVER.search(path.read_text(encoding="utf-8"))
        if found:
            raise UserError(
                f"{path.relative_to(directory.parent)}: a config must not use {found[0]}…}}; write the value"
            )


def validate(schema: type[RunConfig], content: dict[str, Any]) -> RunConfig:
    """Validate composed values; the first problem becomes one line."""
    try:
        return schema.model_validate(content)
    except ValidationError as error:
        raise UserError(explain(error, valid_keys(schema))) from error


def explain(error: ValidationError, keys: list[str]) -> str:
    """Turn pydantic's errors into one line of key, what was expected and what came.

    A value that fits no member of a union gives an error for each: they become one, joined with "or".
    """
    expected: dict[tuple[str, str], list[str]] = {}
    for problem in error.errors():
        head, middle, tail = explain_one(problem, keys)
        expected.setdefault((head, tail), []).append(middle)
    return "; ".join(
        head + " or ".join(dict.fromkeys(middles)) + tail for (head, tail), middles in expected.items()
    )


def explain_one(problem: Any, keys: list[str]) -> tuple[str, str, str]:
    """Explain one validation problem in three parts; what was expected stands in the middle."""
    # Members of a union are named in the location after the key itself; a key is what the schema knows.
    location = [str(part) for part in problem["loc"]]
    while len(location) > 1 and ".".join(location) not in keys and problem["type"] != "extra_forbidden":
        location.pop()
    key, value = ".".join(location), problem["input"]
    if problem["type"] == "extra_forbidden":
        return f"unknown key '{key}'; {nearest(key, keys)}./xsa config EXPERIMENT prints all keys", "", ""
    if problem["type"] == "missing":
        return f"{key}: no value; set it with {key}=VALUE", "", ""
    if problem["type"] == "value_error":
        text = str(problem["ctx"]["error"])
        return (text if not key or "." in text.partition(":")[0] else f"{key}: {text}"), "", ""
    expected = problem["msg"].removeprefix("Input should be ").removeprefix("a valid ")
    return f"{key}: expected ", expected, f", got {value!r} ({type(value).__name__})"
