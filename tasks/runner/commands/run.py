"""Train one experiment: ./xsa run EXPERIMENT [KEY=VALUE ...]

  ./xsa run text/quick attention=sa optimizer=adamw seed=3 loop.max_steps=200

A run that was stopped goes on from its last checkpoint when the same command is given again. A run
that has completed is not repeated, unless with --fresh.
"""

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Take an experiment and overrides."""
    parser.add_argument("experiment", help="for instance text/quick; ./xsa config lists them")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="for instance attention=sa seed=3")
    parser.add_argument("--fresh", action="store_true", help="start over, also where there is a checkpoint")


def run(options: argparse.Namespace) -> int:
    """Train, and say where everything lies."""
    from tasks.runner.config.compose import load_config

    config = load_config(options.experiment, options.overrides)

    from tasks.runner.paths import shown
    from tasks.runner.progress import make_display
    from tasks.runner.training import finished_record, train

    done = None if options.fresh else finished_record(config)
    if done is not None:
        print(f"already done: {shown(done)}; --fresh runs it again")
        return 0
    with make_display(config.output.progress) as display:
        outcome = train(config, display, fresh=options.fresh)
    record = outcome.record
    print(f"{record.run_id}: {record.status}" + (f", {record.reason}" if record.reason else ""))
    for name, value in record.metrics.items():
        print(f"  {name.replace('_', ' ')}: {value:.4f}")
    print(f"record: {shown(outcome.record_path)}")
    print(f"run directory: {shown(outcome.run_directory)}")
    return outcome.exit_status
