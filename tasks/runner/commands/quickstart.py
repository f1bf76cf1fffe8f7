"""Train a plain and an exclusive GPT from the same seed, weights and batches, and compare them.

  ./xsa quickstart                    about three minutes on two CPU cores
  ./xsa quickstart seed=1             the same with another seed
  ./xsa quickstart --records results/runs   keep the records among those of the project

Everything is written below runs/quickstart. Stopped half-way, the same command goes on; given again
after the end, or with --fresh, it runs anew.
"""

import argparse

EXPERIMENT = "text/quick"
VARIANTS = ("sa", "xsa")
WHERE = "runs/quickstart"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Take overrides and a place for the records."""
    parser.add_argument(
        "overrides", nargs="*", metavar="KEY=VALUE", help="for instance seed=1 loop.max_steps=100"
    )
    parser.add_argument("--records", default=f"{WHERE}/records", help="directory of the two records")
    parser.add_argument("--fresh", action="store_true", help="start over, also where there is a checkpoint")
    parser.add_argument("--experiment", default=EXPERIMENT, help=f"what to train (default: {EXPERIMENT})")


def run(options: argparse.Namespace) -> int:
    """Train both, then show table, figure, samples and paths."""
    from tasks.errors import UserError
    from tasks.runner.config.compose import load_config

    if any(word.startswith(("attention=", "attention.variant=")) for word in options.overrides):
        raise UserError("quickstart trains attention=sa and attention=xsa; ./xsa run trains any other")
    output = [f"output.runs={WHERE}", f"output.records={options.records}"]
    configs = [
        load_config(options.experiment, [*output, *options.overrides, f"attention={variant}"])
        for variant in VARIANTS
    ]

    from results.store import read_record
    from tasks.runner.progress import make_display
    from tasks.runner.training import finished_run, train

    records = []
    with make_display(configs[0].output.progress) as display:
        done = [None if options.fresh else finished_run(config, display) for config in configs]
        again = options.fresh or all(done)
        for config, path in zip(configs, done, strict=True):
            if path and not again:
                records.append(read_record(path))
                continue
            outcome = train(config, display, fresh=again)
            if outcome.exit_status:
                display.note(f"{outcome.record.run_id}: {outcome.record.status}, {outcome.record.reason}")
                return outcome.exit_status
            records.append(outcome.record)
    show(configs, records, options.records)
    return 0


def show(configs, records, records_directory: str) -> None:
    """Print the comparison, the samples and where everything lies."""
    from rich.panel import Panel
    from rich.text import Text

    from results.comparison import loss_curves, quick_comparison
    from tasks.runner.paths import shown, under_root
    from tasks.runner.tables import make_console, print_table

    console = make_console()
    print_table(console, quick_comparison(*records))
    for record in records:
        if record.sample:
            title = f"what the {record.variant} model writes after {record.curves['train'].step[-1]} steps"
            console.print(Panel(Text(record.sample.strip()), title=title, title_align="left"))
    stem = under_root(WHERE) / f"loss_seed{records[0].seed}"
    paths = {
        "loss curves": loss_curves(records, stem),
        "records": [under_root(records_directory) / record.file_name for record in records],
        "checkpoints, metrics, TensorBoard": [under_root(WHERE) / config.run_id() for config in configs],
    }
    for what, places in paths.items():
        console.print(f"[bold]{what}[/bold]")
        for place in places:
            # Never wrapped: a path is there to be copied.
            console.print(f"  {shown(place)}", soft_wrap=True, markup=False)
    console.print("\nNext: ./xsa run text/small attention=xsa, ./xsa config, ./xsa --help", markup=False)
