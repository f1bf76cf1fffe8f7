"""Where a run's numbers go while it runs: JSON lines always, TensorBoard and W&B as asked."""

import json
import os
from pathlib import Path
from typing import Any, Protocol

from tasks.errors import UserError
from tasks.runner.config.schema import RunConfig
from xsa_core.files import whole


class Sink(Protocol):
    """A place numbers go to."""

    def write(self, step: int, kind: str, values: dict[str, float]) -> None:
        """Write the values of one step; `kind` is train or validation."""

    def close(self) -> None:
        """Flush and close."""


class JsonLines:
    """`metrics.jsonl`: one object a line. On resume, lines after the checkpoint's step are dropped."""

    def __init__(self, path: Path, resumed_step: int) -> None:
        self.path = path
        kept = [line for line in lines(path) if line["step"] <= resumed_step] if resumed_step else []
        with whole(path) as temporary:
            temporary.write_text("".join(json.dumps(line) + "\n" for line in kept))
        self.handle = path.open("a")

    def write(self, step: int, kind: str, values: dict[str, float]) -> None:
        """Append one line and hand it to the system, so that a killed run keeps it."""
        self.handle.write(json.dumps({"step": step, "kind": kind, **values}) + "\n")
        self.handle.flush()

    def close(self) -> None:
        """Close the file, synced."""
        os.fsync(self.handle.fileno())
        self.handle.close()


def lines(path: Path) -> list[dict[str, Any]]:
    """Return the complete lines of a metrics file; a last line that was cut short is left out."""
    if not path.exists():
        return []
    result = []
    for text in path.read_text().splitlines():
        try:
            result.append(json.loads(text))
        except ValueError:
            break
    return result


class TensorBoard:
    """Event files for `tensorboard --logdir`."""

    def __init__(self, directory: Path, resumed_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(directory), purge_step=resumed_step + 1)

    def write(self, step: int, kind: str, values: dict[str, float]) -> None:
        """Add one scalar for every value."""
        for name, value in values.items():
            self.writer.add_scalar(f"{kind}/{name}", value, step)

    def close(self) -> None:
        """Flush and close."""
        self.writer.close()


class WeightsAndBiases:
    """A W&B run of the same name; it resumes where the run does."""

    def __init__(self, project: str, config: RunConfig, directory: Path) -> None:
        try:
            import wandb
        except ImportError as error:
            raise UserError("output.wandb: the package wandb is not installed; pip install wandb") from error
        name = config.run_id()
        self.run = wandb.init(
            project=project, id=name, name=name, dir=directory, config=config.resolved(), resume="allow"
        )

    def write(self, step: int, kind: str, values: dict[str, float]) -> None:
        """Log the values of one step."""
        self.run.log({f"{kind}/{name}": value for name, value in values.items()}, step=step)

    def close(self) -> None:
        """Finish the W&B run."""
        self.run.finish()


def open_sinks(config: RunConfig, directory: Path, resumed_step: int) -> list[Sink]:
    """Open the sinks a config asks for, in the run's directory."""
    sinks: list[Sink] = [JsonLines(directory / "metrics.jsonl", resumed_step)]
    if config.output.tensorboard:
        sinks.append(TensorBoard(directory / "tensorboard", resumed_step))
    if config.output.wandb:
        sinks.append(WeightsAndBiases(config.output.wandb, config, directory))
    return sinks
