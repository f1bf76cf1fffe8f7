"""Score a trained model downstream: ./xsa eval RUN_DIRECTORY --tasks paper8 --data-dir DIR

Runs lm-evaluation-harness, zero-shot, and keeps a record: every metric with its standard error, row counts,
and which documents were right, so that models can be compared document by document. paper8 are the paper's
eight tasks: ARC-Easy, BoolQ, HellaSwag, LAMBADA, OpenBookQA, PIQA, SocialIQA, WinoGrande. Stopped or killed,
the same command goes on where it was.

The paper does not say which of two accuracies its table shows. Assumed here is acc_norm, the choice whose
log-probability per character is highest, where the harness offers it (ARC-Easy, HellaSwag, OpenBookQA,
PIQA), and acc elsewhere; the record keeps both.

With --data-dir nothing is asked of the network: DIR has a folder per task with SPLIT.jsonl or SPLIT-*.parquet
in the columns of the data set on the Hugging Face hub (arc_easy/test, boolq_super_glue/validation,
hellaswag/validation, lambada_openai/test, openbookqa/test, piqa/validation, social_i_qa/validation,
winogrande/validation). Without it the hub's data are taken, downloaded where need be.
"""

import argparse
import os


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Take a checkpoint, tasks, their data and how to compute."""
    parser.add_argument(
        "checkpoint", help="a run directory or its id, a file step-N.pt, or an exported directory"
    )
    parser.add_argument(
        "--tasks", default="paper8", help="paper8, or task names: piqa,boolq (default: paper8)"
    )
    parser.add_argument("--limit", type=int, default=None, help="first documents of each task only")
    parser.add_argument("--data-dir", default=None, help="directory of local documents; no network then")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N (default: auto)")
    parser.add_argument(
        "--precision",
        choices=["float32", "bfloat16", "float64"],
        default="float32",
        help="of matrix products (default: float32, since answers may differ by less than bfloat16 tells)",
    )
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0: one per core")
    parser.add_argument(
        "--batch-tokens", type=int, default=None, help="positions of a batch (default: by device)"
    )
    parser.add_argument("--tokenizer", default=None, help="bytes or gpt2 (default: the model's own)")
    parser.add_argument("--seed", type=int, default=0, help="of tasks that draw their answers")
    parser.add_argument(
        "--records", default="results/runs", help="directory of records (default: results/runs)"
    )


def run(options: argparse.Namespace) -> int:
    """Evaluate, print the table, write the record."""
    os.environ.setdefault("TQDM_DISABLE", "1")  # read when torch imports it: the harness's own bars
    from tasks.errors import UserError

    for name in ("limit", "batch_tokens"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise UserError(f"--{name.replace('_', '-')}: expected at least 1, got {value}")

    from tasks.runner.evaluation import evaluate, score_table
    from tasks.runner.paths import shown, under_root
    from tasks.runner.tables import make_console, print_table

    record, path = evaluate(options, under_root(options.records))
    print_table(make_console(), score_table(record))
    print(f"record: {shown(path)}")
    return 0
