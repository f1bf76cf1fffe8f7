"""Which tasks, and where their documents come from: the hub, or local files under the harness's definitions.

A definition is never rewritten: of a local task only the path of its data set is another. Names, prompts,
splits and metrics are those that the installed lm-evaluation-harness has.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.errors import UserError
from tasks.text.files import cache_root


@dataclass(frozen=True)
class LocalTask:
    """Where a task's definition and its local documents are.

    Attributes:
        package: folder of the definition below the harness's own `tasks`.
        folder: folder of the documents below the user's directory.
        split: the split the definition evaluates on, and so the name of the file.
        primary: the metric shown first. The paper does not say which of two it shows; where the harness has a
            length-normalised accuracy, tables of base models usually show that one, so it is taken.
    """

    package: str
    folder: str
    split: str
    primary: str


# The eight tasks of the paper's Table 2, by the harness's names.
PAPER8: dict[str, LocalTask] = {
    "arc_easy": LocalTask("arc", "arc_easy", "test", "acc_norm"),
    "boolq": LocalTask("super_glue/boolq", "boolq_super_glue", "validation", "acc"),
    "hellaswag": LocalTask("hellaswag", "hellaswag", "validation", "acc_norm"),
    "lambada_openai": LocalTask("lambada", "lambada_openai", "test", "acc"),
    "openbookqa": LocalTask("openbookqa", "openbookqa", "test", "acc_norm"),
    "piqa": LocalTask("piqa", "piqa", "validation", "acc_norm"),
    "social_iqa": LocalTask("siqa", "social_i_qa", "validation", "acc"),
    "winogrande": LocalTask("winogrande", "winogrande", "validation", "acc"),
}
SUITES: dict[str, tuple[str, ...]] = {"paper8": tuple(PAPER8)}
SPLITS = ("train", "validation", "test")
READERS = {"parquet": "{split}*.parquet", "json": "{split}*.jsonl"}  # reader of `datasets` -> its files


def task_names(wanted: str) -> tuple[str, list[str]]:
    """Return a name for the choice and its tasks: a suite, or names with commas.

    Raises:
        UserError: an empty choice or the same task twice.
    """
    if wanted in SUITES:
        return wanted, list(SUITES[wanted])
    names = [name.strip() for name in wanted.split(",")]
    if not all(names) or len(set(names)) != len(names):
        raise UserError(
            f"--tasks: expected {', '.join(SUITES)} or task names such as piqa,boolq, got '{wanted}'"
        )
    return names[0] if len(names) == 1 else "tasks", names


def primary_metric(task: str, metrics: Sequence[str]) -> str:
    """Return the metric shown first: of the paper's tasks theirs, else acc_norm, acc, or the first."""
    chosen = [PAPER8[task].primary] if task in PAPER8 else ["acc_norm", "acc"]
    return next((name for name in chosen if name in metrics), metrics[0])


def offline() -> None:
    """Keep the hub's client from asking the network, whether or not it is imported already."""
    os.environ["HF_HUB_OFFLINE"] = os.environ["HF_DATASETS_OFFLINE"] = "1"
    import datasets
    import huggingface_hub.constants

    huggingface_hub.constants.HF_HUB_OFFLINE = True
    datasets.config.HF_HUB_OFFLINE = True


def load_tasks(names: Sequence[str], data_dir: str | None) -> dict[str, Any]:
    """Return the harness's task objects, as its `TaskManager.load` does.

    Args:
        names: the harness's names.
        data_dir: local documents, a folder per task with a `.parquet` or `.jsonl` file of its split; then
            nothing is asked of the network. Without it `datasets` takes the hub's, from its cache if there.

    Raises:
        UserError: an unknown task, or one without local documents, by name.
    """
    if data_dir is None:
        return _hub_tasks(names)
    unknown = [name for name in names if name not in PAPER8]
    if unknown:
        raise UserError(
            f"--data-dir: no layout known for {', '.join(unknown)}; leave it out to take the hub's data, or "
            f"choose from {', '.join(PAPER8)}"
        )
    specs = [_local_spec(name, Path(data_dir).expanduser()) for name in names]
    offline()
    from lm_eval.tasks import TaskManager

    definitions = Path(_harness_root()) / "tasks"
    folders = [str(definitions / PAPER8[name].package) for name in names]
    manager = TaskManager(include_defaults=False, include_path=folders)
    try:
        # In a group a name is looked up and the rest laid over its definition; alone, it would be all.
        loaded = manager.load([{"group": "local", "task": specs}])
        return {"tasks": loaded["tasks"]}
    except Exception as error:  # `datasets` raises many kinds for files that it cannot read
        raise UserError(f"--data-dir: {data_dir}: not readable as task data ({_line(error)})") from error


def _local_spec(name: str, root: Path) -> dict[str, Any]:
    """What is laid over a definition: the reader and its files.

    Definitions name other splits too, which the harness opens though only few-shot prompts read them; these
    tasks are zero-shot. Where such a split has no file, the evaluated one stands in its place, unread.
    """
    task = PAPER8[name]
    folder = root / task.folder
    for reader, pattern in READERS.items():
        files = {
            split: sorted(str(path) for path in folder.glob(pattern.format(split=split))) for split in SPLITS
        }
        evaluated = files[task.split]
        if evaluated:
            return {
                "task": name,
                "dataset_path": reader,
                "dataset_name": None,
                "dataset_kwargs": {
                    "data_files": {split: found or evaluated for split, found in files.items()},
                    "cache_dir": str(cache_root() / "datasets"),
                },
                "num_fewshot": 0,
            }
    raise UserError(
        f"--data-dir: no documents of {name}; expected {folder}/{task.split}.jsonl or "
        f"{task.split}-*.parquet in the columns of its data set on the hub"
    )


def _hub_tasks(names: Sequence[str]) -> dict[str, Any]:
    from lm_eval.tasks import TaskManager

    manager = TaskManager()
    unknown = [name for name in names if name not in manager.all_tasks]
    if unknown:
        raise UserError(
            f"--tasks: lm-evaluation-harness knows no {', '.join(unknown)}; expected paper8 or its task names"
        )
    try:
        return manager.load(list(names))
    except Exception as error:  # no network, a gated data set, a full disk: all kinds of exceptions
        raise UserError(
            f"--tasks: data could not be loaded ({_line(error)}); give local files with --data-dir"
        ) from error


def _harness_root() -> str:
    spec = importlib.util.find_spec("lm_eval")
    if spec is None or spec.origin is None:
        raise UserError("the package lm-eval is not installed; install requirements.lock")
    return str(Path(spec.origin).parent)


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]
