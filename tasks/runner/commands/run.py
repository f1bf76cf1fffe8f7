"""Train one experiment: ./xsa run EXPERIMENT [KEY=VALUE ...]

  ./xsa run text/quick attention=sa optimizer=adamw seed=3 loop.max_steps=200

  ./xsa run text/small --nproc 8 loop.strategy=fsdp

A run that was stopped goes on from its last checkpoint when the same command is given again. A run
that has completed is not repeated, unless with --fresh.
"""

import argparse
import os
import sys


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Take an experiment and overrides."""
    parser.add_argument("experiment", help="for instance text/quick; ./xsa config lists them")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="for instance attention=sa seed=3")
    parser.add_argument(
        "--explain",
        choices=["optimizer"],
        help="train nothing; print how each parameter would be updated (opens the data: models depend on it)",
    )
    parser.add_argument(
        "--nproc",
        type=int,
        default=None,
        metavar="N",
        help="processes on this machine: one for each GPU, or on a CPU shares of its cores",
    )
    parser.add_argument("--fresh", action="store_true", help="start over, also where there is a checkpoint")


def run(options: argparse.Namespace) -> int:
    """Train, and say where everything lies."""
    from tasks.runner.config.compose import load_config

    config = load_config(options.experiment, options.overrides)

    if options.explain:
        return explain(config)
    if options.nproc is not None and options.nproc != 1:
        from tasks.runner.processes import launch

        words = ["run", options.experiment, *options.overrides, *(["--fresh"] if options.fresh else [])]
        return launch(words, config, options.nproc)
    return train_here(config, options.fresh)


def train_here(config, fresh: bool) -> int:
    """Train in this process, alone or one of several; only the first of them speaks."""
    from tasks.errors import UserError
    from tasks.runner.distributed import LAUNCHED, LOST, LostContact, environment_rank
    from tasks.runner.paths import shown
    from tasks.runner.progress import make_display
    from tasks.runner.training import finished_run, train

    rank = environment_rank()
    try:
        with make_display("none" if rank else config.output.progress) as display:
            done = None if fresh else finished_run(config, display)
            if done is None:
                outcome = train(config, display, fresh=fresh)
    except UserError as error:
        if rank:
            raise UserError(f"rank {rank}: {error}") from error
        raise
    except LostContact as error:
        if LAUNCHED not in os.environ:
            print(f"xsa: error: rank {rank}: {error}", file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(LOST)  # the threads of the broken connections may abort an orderly exit
    if rank:
        return outcome.exit_status if done is None else 0
    if done is not None:
        print(f"already done: {shown(done)}; --fresh runs it again")
        return 0
    record = outcome.record
    print(f"{record.run_id}: {record.status}" + (f", {record.reason}" if record.reason else ""))
    for name, value in record.metrics.items():
        print(f"  {name.replace('_', ' ')}: {value:.4f}")
    print(f"record: {shown(outcome.record_path)}")
    print(f"run directory: {shown(outcome.run_directory)}")
    return outcome.exit_status


def explain(config) -> int:
    """Print name, shape, role, optimizer, learning rate and weight decay of every parameter."""
    from optimizers.groups import assign
    from tasks.errors import UserError
    from tasks.runner.progress import make_display
    from tasks.runner.tables import make_console
    from tasks.runner.training import open_task

    with make_display(config.output.progress) as display:
        task = open_task(config, display)
    try:
        assignments = assign(task.build_model(), config.optimizer)
    except ValueError as error:
        raise UserError(str(error)) from error
    make_console().print(assignment_table(assignments))
    return 0


def totals(assignments) -> list[str]:
    """Return a line for each optimizer and one for all: tensors, parameters, how many of them decay."""
    lines = []
    for name in (*dict.fromkeys(each.algorithm for each in assignments), None):
        chosen = [each for each in assignments if name in {None, each.algorithm}]
        size = sum(each.parameter.numel() for each in chosen)
        decayed = sum(each.parameter.numel() for each in chosen if each.weight_decay)
        lines.append(
            f"{name or 'all'}: {len(chosen)} tensors, {size:,} parameters, {decayed:,} with weight decay"
        )
    return lines


def assignment_table(assignments):
    """Return the table of how each parameter is updated, with totals as its caption."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    caption = "\n".join(totals(assignments))
    table = Table(box=SIMPLE_HEAD, pad_edge=False, caption=caption, caption_justify="left")
    for title in ("parameter", "shape", "role", "optimizer", "lr", "decay"):
        table.add_column(title, no_wrap=title != "parameter", overflow="fold")
    for each in assignments:
        shape = " x ".join(map(str, each.parameter.shape))
        blocks = f", {len(each.role.splits)} blocks" if each.role.splits else ""
        rates = (f"{each.lr:g}", f"{each.weight_decay:g}")
        table.add_row(each.name, shape, f"{each.role.role}{blocks}", each.algorithm, *rates)
    return table
