"""Tell what a run takes before it is started: ./xsa plan EXPERIMENT --gpus N --gpu NAME [KEY=VALUE ...]

  ./xsa plan text/paper_1.3b --gpus 8 --gpu h100
  ./xsa plan text/paper_2.7b --gpus 64 --gpu a100 --utilisation 0.5 loop.micro_batch=2

Prints parameters, FLOPs per token, memory per GPU by part for DDP and FSDP, and tokens/s and days at the
stated utilisation. Nothing is built or downloaded.
"""

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Take an experiment, overrides and the machines."""
    parser.add_argument("experiment", help="for instance text/paper_1.3b; ./xsa config lists them")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="for instance loop.micro_batch=4")
    parser.add_argument("--gpus", type=int, default=8, help="over all hosts (default: 8)")
    parser.add_argument("--gpu", default="h100", help="h100, h200, a100, ... (default: h100)")
    parser.add_argument(
        "--utilisation",
        "--utilization",
        type=float,
        default=0.4,
        help="model FLOPs over peak FLOPs that is assumed (default: 0.4)",
    )
    parser.add_argument("--micro-batch", type=int, default=0, help="samples of a forward pass on a GPU")
    parser.add_argument("--vocabulary", type=int, default=0, help="its size (default: that of the data)")


def run(options: argparse.Namespace) -> int:
    """Print the plan."""
    from tasks.runner.config.compose import load_config
    from tasks.runner.plan import facts, make_plan, memory_table, warnings
    from tasks.runner.tables import make_console, print_table

    config = load_config(options.experiment, options.overrides)
    plan = make_plan(
        config,
        options.gpu,
        options.gpus,
        options.utilisation,
        micro_batch=options.micro_batch,
        vocabulary=options.vocabulary,
    )
    console = make_console()
    for line in facts(plan):
        console.print(line, markup=False, soft_wrap=True)
    print_table(console, memory_table(plan))
    for line in warnings(plan):
        console.print(line, markup=False, soft_wrap=True, style="yellow")
    return 0
