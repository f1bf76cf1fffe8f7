"""The tasks the runner knows, each imported when it is used."""

import importlib

from tasks.base import TaskSpec

# name -> module and name of a TaskSpec in it
TASKS = {
    "text": "tasks.text.spec:TASK",
    "vision": "tasks.vision.spec:TASK",
    "keywords": "tasks.speech.spec:KEYWORDS",
    "transcription": "tasks.speech.spec:TRANSCRIPTION",
    "contrastive": "tasks.multimodal.spec:CONTRASTIVE",
    "captioning": "tasks.multimodal.spec:CAPTIONING",
    "fusion": "tasks.multimodal.spec:FUSION",
}


def load_task(name: str) -> TaskSpec:
    """Import a task and return its spec. Raises KeyError for a name that is not in TASKS."""
    module, _, spec = TASKS[name].partition(":")
    return getattr(importlib.import_module(module), spec)
