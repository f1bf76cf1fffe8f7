"""Trained text models by what a user names: a run directory, a checkpoint file, an exported directory."""

from tasks.errors import UserError
from tasks.runner import checkpoint
from tasks.runner.averaging import trained_weights
from tasks.runner.config.compose import schema_of, validate
from tasks.runner.paths import trained_path
from tasks.text.trained import Trained, from_weights, import_model, is_exported


def load_trained(where: str, tokenizer: str | None = None) -> Trained:
    """Return the model with its tokenizer and history, on the CPU.

    Raises:
        UserError: nothing there, damaged, or a model of another task.
    """
    path = trained_path(where)
    if path.is_dir() and is_exported(path):
        return import_model(path, tokenizer)
    loaded = checkpoint.load(checkpoint.resolve(str(path)))
    content = loaded.content["config"]
    config = validate(schema_of(content["task"]), content)
    if config.task != "text":
        raise UserError(f"{loaded.path}: a model of task {config.task}; expected one of task text")
    history = {
        "run_id": config.run_id(),
        "experiment": config.experiment,
        "variant": config.attention.variant,
        "attention": config.attention.model_dump(mode="json"),
        "optimizer": config.optimizer.name,
        "seed": config.seed,
        "step": loaded.content["step"],
        "config_hash": config.config_hash(),
        "pair_hash": config.pair_hash(),
        "cell_hash": config.cell_hash(),
        "data_fingerprint": loaded.content["data_fingerprint"],
    }
    return from_weights(config, trained_weights(loaded.content), history, tokenizer or config.data.tokenizer)
