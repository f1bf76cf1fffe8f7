"""Run the cells of a suite that have no record yet: ./xsa sweep SUITE [--scale cpu|paper] [KEY=VALUE ...]

  ./xsa sweep fig4_lr                             at the scale of a CPU
  ./xsa sweep fig4_lr --dry-run                   its cells, what is missing, and what it would cost
  ./xsa sweep fig6_sinks seed=0,1,2,3,4           with other seeds
  ./xsa sweep fig6_sinks --jobs 4                 four cells at a time, each on a quarter of the cores
  ./xsa sweep fig3_loss --scale paper --launcher slurm --slurm partition=gpu --slurm gpus=8 --slurm time=1-0
                                                  a SLURM job for each cell, queued again when preempted
  ./xsa sweep experiment=text/quick attention=sa,xsa optimizer=adamw,muon seed=0,1,2

A value with commas is an axis. Cells with a completed record are skipped. Stopped or killed, the same
command goes on; started twice at once, the two share the cells. A cell that fails is recorded with its
reason, and the others go on.
"""

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Take a suite or an experiment, and overrides."""
    parser.add_argument("words", nargs="*", metavar="SUITE | KEY=VALUE", help="a suite, and overrides")
    parser.add_argument("--scale", default="cpu", help="cpu or paper (default: cpu)")
    parser.add_argument("--dry-run", action="store_true", help="show cells and cost, run nothing")
    parser.add_argument(
        "--check",
        action="store_true",
        help="only say whether the learning rate is the baseline's best, inside the searched range",
    )
    parser.add_argument("--retry-failed", action="store_true", help="run cells again that failed")
    parser.add_argument("--data-dir", default=None, help="of suites that evaluate: see ./xsa eval --help")
    parser.add_argument("--limit", type=int, default=None, help="of suites that evaluate: documents a task")
    parser.add_argument(
        "--launcher", choices=["local", "slurm"], default="local", help="here, or one SLURM job for each cell"
    )
    parser.add_argument(
        "--slurm",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="partition, account, qos, time, gpus, cpus, mem, parallel, signal, setup, ... or sbatch.OPTION",
    )
    parser.add_argument(
        "--jobs", type=int, default=1, help="cells at a time, each on cores (and a GPU) of its own"
    )


def run(options: argparse.Namespace) -> int:
    """Expand, then show or run."""
    from tasks.errors import UserError
    from tasks.runner.sweep_slots import divide

    works, check = gather(options)
    if options.launcher == "slurm" and not options.check:
        return run_on_slurm(options, works, check)
    if options.slurm:
        raise UserError("--slurm: for --launcher slurm; add that, or leave it out")
    slots = divide(options.jobs, [work.config for work in works if work.config is not None])
    if any(work.config is None for work in works):
        slots = slots[:1]  # benchmarks measure time: two at once would measure each other
    if options.check:
        if check() is None:
            raise UserError(
                "--check: nothing chooses a learning rate for these cells; name a suite that has one"
            )
        print(check().line)
        return 0 if check().good else 1
    if options.dry_run:
        return dry_run(works, options.retry_failed, len(slots), check)

    from tasks.runner.paths import shown
    from tasks.runner.sweep import Sweep
    from tasks.runner.sweep_display import make_table, summary
    from tasks.runner.sweep_rows import State

    with make_table() as display:
        sweep = Sweep(works, display, slots=slots, retry_failed=options.retry_failed)
        status = sweep.run()
    print(summary(sweep.rows))
    for row in sweep.rows:
        if row.state is State.FAILED:
            print(
                f"failed: {row.work.label}: {row.detail}; its log: {shown(row.work.directory / 'sweep.log')}"
            )
    found = check()
    if found is not None:
        print(found.line)
    return status


def run_on_slurm(options: argparse.Namespace, works, check) -> int:
    """Submit a job for every cell that is to be run and is not queued, or show the script."""
    from tasks.errors import UserError
    from tasks.runner import sweep_cluster as cluster
    from tasks.runner.paths import shown
    from tasks.runner.sweep_rows import State, state_of

    if options.jobs != 1:
        raise UserError("--jobs: of --launcher local; for SLURM give --slurm parallel=N")
    parameters = cluster.parse(options.slurm)
    chosen, there = [], []
    for work in works:
        if state_of(work, options.retry_failed)[0] is State.WAITING:
            (there if cluster.queued(work) else chosen).append(work)
    if options.dry_run:
        dry_run(works, options.retry_failed, 1, check)
        if chosen:
            print(f"\nthe script of {len(chosen)} jobs:\n\n{cluster.script(chosen, parameters)}")
        return 0
    if there:
        print(f"{len(there)} cells are queued already")
    if not chosen:
        print("nothing to submit")
        return 0
    ids = cluster.submit(chosen, words_of(options), parameters)
    print(f"{len(ids)} cells submitted, jobs {ids[0]} to {ids[-1]}" if len(ids) > 1 else f"job {ids[0]}")
    print(f"logs: {shown(cluster.folder_of(chosen).parent)}; the same command with --dry-run shows the cells")
    return 0


def words_of(options: argparse.Namespace) -> list[str]:
    """Return the words that give the same cells again, in a job of its own."""
    words = [*options.words, "--scale", options.scale]
    words += ["--retry-failed"] if options.retry_failed else []
    return [*words, *pair("--data-dir", options.data_dir), *pair("--limit", options.limit)]


def gather(options: argparse.Namespace):
    """Return the work that the words mean, and a function that checks its learning rate."""
    from tasks.errors import UserError
    from tasks.runner import suite as suites
    from tasks.runner.sweep_jobs import work_of_cell, work_of_command
    from tasks.runner.sweep_rate import check_rate

    names = [word for word in options.words if "=" not in word]
    overrides = [word for word in options.words if "=" in word]
    if len(names) > 1 or not options.words:
        raise UserError(
            f"expected one suite or experiment=NAME, got {' '.join(options.words) or 'nothing'}; "
            f"the suites are {', '.join(suites.suites())}"
        )
    if not names:
        return [work_of_cell(cell) for cell in suites.expand(suites.FREE, overrides)], lambda: None
    (name,) = names
    suite = suites.load_suite(name)
    grid = suites.scale_of(suite, name, options.scale)
    if grid.commands:
        places = dict(map(suites.split_override, overrides))
        if places.keys() - {"output.records", "output.runs"}:
            raise UserError(f"suite {name} runs commands; of overrides it takes output.records, output.runs")
        records = places.get("output.records", ["results/runs"])[0]
        runs = places.get("output.runs", ["runs"])[0]
        return [work_of_command(command, records, runs) for command in grid.commands], lambda: None
    cells = suites.expand(grid, overrides)
    more = {"eval": [*pair("--data-dir", options.data_dir), *pair("--limit", options.limit)]}
    works = [work_of_cell(cell, suite.then, more) for cell in cells]
    return works, lambda: check_rate(name, suite, options.scale, cells)


def pair(name: str, value) -> list[str]:
    """Return an option and its value as words, none where it was not given."""
    return [] if value is None else [name, str(value)]


def dry_run(works, retry_failed: bool, jobs: int, check) -> int:
    """Print every cell with its state, the cost of what is missing, and the check of the learning rate."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from tasks.runner.sweep_cost import estimate
    from tasks.runner.sweep_display import summary
    from tasks.runner.sweep_rows import row_of
    from tasks.runner.tables import make_console

    console = make_console()
    rows = [row_of(work, retry_failed) for work in works]
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for title in ("cell", "state", "run", "detail"):
        table.add_column(title, no_wrap=title != "detail")
    for row in rows:
        run_id = row.work.config.run_id() if row.work.config is not None else row.work.directory.name
        table.add_row(row.work.label, row.state, run_id, row.detail)
    console.print(table)
    console.print(summary(rows), markup=False)
    for line in estimate(rows, jobs):
        console.print(line, markup=False, soft_wrap=True)
    for line in missing_data([row.work for row in rows]):
        console.print(line, markup=False, soft_wrap=True)
    found = check()
    if found is not None:
        console.print(found.line, markup=False, soft_wrap=True)
    return 0


def missing_data(works) -> list[str]:
    """Return a line for every data path of cells to be run that is not on this machine."""
    from pathlib import Path

    paths = [
        getattr(work.config.data, "path", None)
        for work in works
        if work.config is not None and not work.is_done()
    ]
    return [
        f"data: {path} is not here, {paths.count(path)} cells need it; see ./xsa data --help"
        for path in dict.fromkeys(paths)
        if path and not Path(path).expanduser().exists()
    ]
