"""What the runner needs to know of the vision task before it is used; imports no torch."""

from tasks.base import TaskSpec
from tasks.vision.config import VisionDataConfig, VisionModelConfig


def open_vision(config, display):
    """Open the data of a run; see `tasks.vision.task.VisionTask.open`."""
    from tasks.vision.task import VisionTask

    return VisionTask.open(config, display)


TASK = TaskSpec(VisionModelConfig, VisionDataConfig, open_vision, metric="validation_accuracy")
