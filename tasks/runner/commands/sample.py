"""Write text with a trained model: ./xsa sample RUN_DIRECTORY --prompt "Return the"

Takes a run directory (its last checkpoint) or a checkpoint file.
"""

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Take a checkpoint, a prompt and how to draw."""
    parser.add_argument("checkpoint", help="a run directory, or a file step-N.pt")
    parser.add_argument("--prompt", default="Return the ", help="text to continue")
    parser.add_argument("--tokens", type=int, default=300, help="how many tokens to write (default: 300)")
    parser.add_argument(
        "--temperature", type=float, default=0.8, help="0 takes the likeliest token (default: 0.8)"
    )
    parser.add_argument("--top-k", type=int, default=None, help="draw from the k likeliest tokens only")
    parser.add_argument("--seed", type=int, default=0, help="of the draw")


def run(options: argparse.Namespace) -> int:
    """Load the model and print what it writes."""
    from tasks.errors import UserError

    if options.tokens < 1 or options.temperature < 0 or (options.top_k is not None and options.top_k < 1):
        raise UserError("--tokens and --top-k must be at least 1, and --temperature at least 0")
    if not options.prompt:
        raise UserError("--prompt: empty; give at least one character to continue")

    from tasks.runner import checkpoint
    from tasks.runner.config.compose import schema_of, validate

    loaded = checkpoint.load(checkpoint.resolve(options.checkpoint))
    content = loaded.content["config"]
    config = validate(schema_of(content["task"]), content)
    if config.task != "text":
        raise UserError(
            f"{loaded.path}: a model of task {config.task}; sample writes with models of task text"
        )

    from tasks.text.generate import write

    text = write(
        config,
        loaded.content["model"],
        options.prompt,
        options.tokens,
        temperature=options.temperature,
        top_k=options.top_k,
        seed=options.seed,
    )
    print(text)
    return 0
