"""The tasks the runner knows, each imported when it is used."""

import importlib

from tasks.base import TaskSpec

# name -> module with a TaskSpec called TASK
TASKS = {
    "text": "tasks.text.spec",
    "vision": "tasks.vision.spec",
}


def load_task(name: str) -> TaskSpec:
    """Import a task and return its spec. Raises KeyError for a name that is not in TASKS."""
    return importlib.import_module(TASKS[name]).TASK
