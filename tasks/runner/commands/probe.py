"""Measure how far a trained model's attention points along the own values: ./xsa probe RUN_DIRECTORY

The statistics of the paper's Figure 1, for every layer, on whole validation samples of the run's own data:
the cosine of a token's attention output (before anything is removed) and its own value, the weight it gives
itself, and the cosine of two tokens' values. Prints a table and keeps a record.
"""

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Take a checkpoint and how much to look at."""
    parser.add_argument("checkpoint", help="a run directory (its last checkpoint), or a file step-N.pt")
    parser.add_argument("--samples", type=int, default=64, help="validation samples (default: 64)")
    parser.add_argument("--batch", type=int, default=8, help="samples of a forward pass (default: 8)")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N (default: auto)")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0: one per core")
    parser.add_argument(
        "--records", default="results/runs", help="directory of records (default: results/runs)"
    )


def run(options: argparse.Namespace) -> int:
    """Probe, print a table, write the record."""
    from tasks.errors import UserError

    if options.samples < 1 or options.batch < 1:
        raise UserError("--samples and --batch: expected at least 1")

    from results.store import write_record
    from results.summaries import bench_table
    from tasks.runner.paths import shown, under_root
    from tasks.runner.probing import probe_checkpoint
    from tasks.runner.progress import make_display
    from tasks.runner.tables import make_console, print_table

    with make_display("auto") as display:
        record = probe_checkpoint(
            options.checkpoint,
            display,
            samples=options.samples,
            batch=options.batch,
            device=options.device,
            threads=options.threads,
        )
    print_table(make_console(), bench_table(record))
    print(f"record: {shown(write_record(record, under_root(options.records)))}")
    return 0
