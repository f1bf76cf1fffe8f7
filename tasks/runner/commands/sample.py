"""Write text with a trained model: ./xsa sample RUN_DIRECTORY --prompt "Return the"

Takes a run directory (its last checkpoint), a checkpoint file, or a directory that ./xsa export wrote.
"""

import argparse
import sys


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Take a checkpoint, a prompt and how to draw."""
    parser.add_argument(
        "checkpoint", help="a run directory or its id, a file step-N.pt, or an exported directory"
    )
    parser.add_argument("--prompt", default="Return the ", help="text to continue")
    parser.add_argument("--tokens", type=int, default=300, help="how many tokens to write (default: 300)")
    parser.add_argument(
        "--temperature", type=float, default=0.8, help="0 takes the likeliest token (default: 0.8)"
    )
    parser.add_argument("--top-k", type=int, default=None, help="draw from the k likeliest tokens only")
    parser.add_argument("--seed", type=int, default=0, help="of the draw")
    parser.add_argument("--tokenizer", default=None, help="bytes or gpt2 (default: the model's own)")


def run(options: argparse.Namespace) -> int:
    """Load the model and print what it writes."""
    from tasks.errors import UserError

    if (
        options.tokens < 1
        or not 0 <= options.temperature < float("inf")
        or (options.top_k is not None and options.top_k < 1)
    ):
        raise UserError("--tokens and --top-k must be at least 1, and --temperature at least 0")
    if not options.prompt:
        raise UserError("--prompt: empty; give at least one character to continue")

    from tasks.runner.trained import load_trained
    from tasks.text.generate import write

    text = write(
        load_trained(options.checkpoint, options.tokenizer),
        options.prompt,
        options.tokens,
        temperature=options.temperature,
        top_k=options.top_k,
        seed=options.seed,
    )
    print(printable(text) if sys.stdout.isatty() else text)
    return 0


def printable(text: str) -> str:
    """Return a text without the control characters that a terminal would obey."""
    return "".join(
        letter if letter.isprintable() or letter in "\n\t" else "\N{REPLACEMENT CHARACTER}" for letter in text
    )
