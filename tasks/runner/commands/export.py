"""Make a trained model usable without the suite: ./xsa export RUN_DIRECTORY DIR

DIR gets config.json and model.safetensors, which xsa_core.GPT.from_pretrained(DIR) reads (same logits bit for
bit), and xsa.json with the tokenizer's name and the run the weights come from. ./xsa sample and ./xsa eval
take DIR as they take a run directory.
"""

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Take a checkpoint and a directory."""
    parser.add_argument(
        "checkpoint", help="a run directory or its id (its last checkpoint), or a file step-N.pt"
    )
    parser.add_argument("directory", help="where to write; made if it is not there")
    parser.add_argument("--tokenizer", default=None, help="bytes or gpt2 (default: by the vocabulary)")


def run(options: argparse.Namespace) -> int:
    """Write the directory and say what is in it."""
    from pathlib import Path

    from tasks.runner.paths import shown
    from tasks.runner.trained import load_trained
    from tasks.text.trained import export_model

    trained = load_trained(options.checkpoint, options.tokenizer)
    directory = Path(options.directory).expanduser()
    export_model(trained, directory)
    million = trained.model.num_parameters() / 1e6
    print(
        f"{shown(directory)}: {million:.1f} M parameters, tokenizer {trained.tokenizer.name}, "
        f"weights {trained.weights_sha256()[:12]}"
    )
    print(f"use: xsa_core.GPT.from_pretrained({str(directory)!r}), or ./xsa sample {shown(directory)}")
    return 0
