"""What the runner needs to know of the text task before it is used; imports no torch."""

from tasks.base import TaskSpec
from tasks.text.config import TextDataConfig, TextModelConfig


def open_text(config, display):
    """Open the data of a run; see `tasks.text.task.TextTask.open`."""
    from tasks.text.task import TextTask

    return TextTask.open(config, display)


TASK = TaskSpec(TextModelConfig, TextDataConfig, open_text, metric="validation_bits_per_byte")
