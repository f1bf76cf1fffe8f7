"""Measure how far a model's attention points along the own values: ./xsa probe RUN_DIRECTORY

The statistics of the paper's Figure 1, for every layer, on whole validation samples of the run's own data:
the cosine of a token's attention output (before anything is removed) and its own value, the weight it gives
itself, and the cosine of two tokens' values. Prints a table and keeps a record.

A model of another library, as it stands and converted, with a figure (and a record where --records is given):

    ./xsa probe --model timm:vit_tiny_patch16_224 --images DIRECTORY [--weights FILE | --pretrained]
    ./xsa probe --model hf:DIRECTORY --text FILE

Nothing is downloaded without --pretrained.
"""

import argparse

RECORDS = "results/runs"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Take a checkpoint or a foreign model, and how much to look at."""
    parser.add_argument(
        "checkpoint", nargs="?", help="a run directory (its last checkpoint), or a file step-N.pt"
    )
    parser.add_argument("--samples", type=int, default=64, help="samples to look at (default: 64)")
    parser.add_argument("--batch", type=int, default=8, help="samples of a forward pass (default: 8)")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N (default: auto)")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0: one per core")
    parser.add_argument("--records", help=f"directory of records (default of a run: {RECORDS})")
    foreign = parser.add_argument_group("a model of another library")
    foreign.add_argument("--model", help="timm:NAME, or hf:DIRECTORY as save_pretrained wrote it")
    foreign.add_argument("--images", metavar="DIRECTORY", help="images to look at, also in folders below it")
    foreign.add_argument("--text", metavar="FILE", help="text to look at, UTF-8")
    foreign.add_argument("--length", type=int, help="tokens of a sample of text (default: 256)")
    foreign.add_argument("--weights", metavar="FILE", help="weights of a timm model; random without")
    foreign.add_argument("--pretrained", action="store_true", help="weights may be downloaded from the hub")
    foreign.add_argument(
        "--figure", metavar="PATH", help="figure without its ending (default: runs/probe/NAME)"
    )


def run(options: argparse.Namespace) -> int:
    """Probe, print a table, write the record."""
    from tasks.errors import UserError

    if options.samples < 1 or options.batch < 1 or (options.length is not None and options.length < 2):
        raise UserError("--samples and --batch: expected at least 1; --length: at least 2")
    if (options.checkpoint is None) == (options.model is None):
        raise UserError("expected a run directory, or --model timm:NAME or hf:DIRECTORY")
    if options.model is not None:
        return run_foreign(options)
    for name in ("images", "text", "length", "weights", "figure"):
        if getattr(options, name) is not None:
            raise UserError(f"--{name} belongs to --model; a run is probed on its own data")

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
    print(f"record: {shown(write_record(record, under_root(options.records or RECORDS)))}")
    return 0


def run_foreign(options: argparse.Namespace) -> int:
    """Probe a model of another library, print a table, draw the figure; keep a record where asked to."""
    import re
    from pathlib import Path

    from results.store import write_record
    from tasks.runner.foreign import draw, probe_foreign, table
    from tasks.runner.paths import RUNS, shown, under_root
    from tasks.runner.tables import make_console, print_table

    outcome = probe_foreign(
        options.model,
        images=options.images,
        text=options.text,
        samples=options.samples,
        batch=options.batch,
        length=options.length,
        weights=options.weights,
        pretrained=options.pretrained,
        device=options.device,
        threads=options.threads,
    )
    print_table(make_console(), table(outcome))
    if outcome.converted is None:
        print("the model is exclusive already: there is nothing to convert")
    slug = re.sub(r"[^A-Za-z0-9._-]+", "-", options.model).strip("-.")[-80:]
    stem = Path(options.figure).expanduser() if options.figure else RUNS / "probe" / slug
    print(f"figure: {' and '.join(str(shown(path)) for path in draw(outcome, stem))}")
    if options.records:
        print(f"record: {shown(write_record(outcome.record, under_root(options.records)))}")
    return 0
