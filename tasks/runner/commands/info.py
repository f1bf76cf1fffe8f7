"""Versions, devices, precision and attention backends of this machine; why some are missing.

./xsa info             the summary
./xsa info attention   what each attention backend supports
./xsa info adapters    which attention classes of other libraries convert() makes exclusive, and which not
"""

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Take a topic."""
    parser.add_argument("topic", nargs="?", choices=["attention", "adapters"], help="more about one topic")
    parser.add_argument("--find", default="", metavar="TEXT", help="adapters: only rows with this text")


def run(options: argparse.Namespace) -> int:
    """Print the summary, or one topic."""
    from tasks.runner.tables import make_console

    console = make_console()
    if options.topic == "attention":
        print_matrix(console)
    elif options.topic == "adapters":
        print_coverage(console, options.find)
    else:
        print_summary(console)
    return 0


def print_summary(console) -> None:
    """Print versions, device, precision, kernels and backends."""
    import platform
    import sys

    import torch

    from tasks.runner.config.schema import LoopConfig
    from tasks.runner.device import available_cores, choose_device, cpu_name
    from tasks.runner.recording import git_state, versions
    from tasks.text.files import cache_root
    from xsa_core import __version__

    commit, dirty = git_state()
    device = choose_device(LoopConfig(max_steps=1, global_batch=1))
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    rows = {
        "xsa": __version__ + (f", commit {commit[:12]}{' with changes' if dirty else ''}" if commit else ""),
        "Python": f"{platform.python_version()} ({sys.executable})",
        "system": f"{platform.system()} {platform.release()}, {platform.machine()}",
        "CPU": f"{cpu_name()}, {available_cores()} cores usable, {torch.backends.cpu.get_cpu_capability()}",
        "GPU": ", ".join(gpus) or f"none: {why_no_gpu()}",
        "device": f"{device.device}, {device.threads} threads",
        "precision": f"{device.precision}: {device.precision_reason}",
        "CPU kernel": cpu_kernel_state(),
        "cache": str(cache_root()),
    }
    print_pairs(console, rows)
    console.print("\n[bold]packages[/bold]")
    print_pairs(console, versions())
    console.print("\n[bold]attention backends[/bold]  (./xsa info attention: what each supports)")
    print_pairs(console, dict(map(backend_line, backends())))


def backends() -> list[dict]:
    """Return one row of facts for every attention backend."""
    from xsa_core.attention.backends import backend_matrix

    return backend_matrix()


def backend_line(row: dict) -> tuple[str, str]:
    """Return a backend's name and whether it can be used here."""
    return row["name"], "available" if row["available"] else f"not available: {row['reason']}"


def why_no_gpu() -> str:
    """Say why torch sees no CUDA device."""
    import torch

    if torch.version.cuda is None:
        return "this torch was built without CUDA"
    return f"torch (CUDA {torch.version.cuda}) finds no device"


def cpu_kernel_state() -> str:
    """Say whether the compiled CPU projection is in use, and if not why. Builds it on first use."""
    import os

    from xsa_core.attention import cpu_kernel

    if os.environ.get("XSA_CPU_KERNEL") == "0":
        return "off: XSA_CPU_KERNEL is 0"
    try:
        return f"compiled: {cpu_kernel.load()}"
    except cpu_kernel.BuildError as error:
        return f"not available, plain torch is used: {error}"


def print_pairs(console, rows: dict[str, str]) -> None:
    """Print names and values in two columns."""
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows.items():
        table.add_row(name, value)
    console.print(table)


def print_matrix(console) -> None:
    """Print what every attention backend supports, a column each."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    rows = backends()
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("")
    for row in rows:
        table.add_column(row["name"], overflow="fold")
    for key in rows[0]:
        if key not in {"name", "reason", "summary", "available"}:
            table.add_row(key.replace("_", " "), *(text_of(key, row[key]) for row in rows))
    console.print(table)
    for row in rows:
        console.print(f"[bold]{row['name']}[/bold]: {row['summary']}; {backend_line(row)[1]}")


def print_coverage(console, text: str) -> None:
    """Print a table per library of what its attention classes become; only rows with `text`, if any."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from xsa_core.adapters import coverage
    from xsa_core.adapters.hf.table import unbuilt

    rows = coverage()
    shown = [r for r in rows if text.lower() in f"{r.library} {r.cls} {r.how} {r.tested}".lower()]
    for library in dict.fromkeys(row.library for row in shown):
        mine = [row for row in shown if row.library == library]
        table = Table(
            title=library, title_justify="left", title_style="bold", box=SIMPLE_HEAD, pad_edge=False
        )
        for column in ("class", "how it is converted", "tested on"):
            table.add_column(column, overflow="fold")
        for row in mine:
            table.add_row(row.cls, row.how, row.tested)
        console.print(table)
        covered = sum(not row.how.startswith("not covered") for row in mine)
        console.print(f"{library}: {covered} classes converted, {len(mine) - covered} known and left alone\n")
    if not shown:
        console.print(f"no row with {text!r}; ./xsa info adapters shows all {len(rows)}")
    if not text:
        console.print(
            f"transformers: {len(unbuilt())} model types have no default config that builds here "
            f"({', '.join(sorted(unbuilt()))}): convert() decides when it sees the model"
        )


def text_of(key: str, value) -> str:
    """Return one fact as text."""
    if key == "head_sizes":
        largest, multiple = value
        return (f"to {largest}" if largest else "any") + (
            f", multiples of {multiple}" if multiple > 1 else ""
        )
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ", ".join(value) if isinstance(value, tuple) else str(value)
