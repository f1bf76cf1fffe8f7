"""Prepare text for training, and check what was prepared.

  ./xsa data prepare fineweb:sample-10BT --out data/fineweb10B --workers 16   from the hub, by streaming
  ./xsa data prepare 'texts/*.jsonl.zst' --out data/mine                      local files
  ./xsa data verify data/fineweb10B                                           every byte against the manifest

Sources: Parquet, JSON lines (also .gz, .zst) and plain text with the text in one column, as files, globs or
directories; or a data set on the hub (fineweb:sample-10BT, hub:OWNER/NAME/FOLDER). Killed at any moment, the
same command goes on, and the shards are those of an uninterrupted run. Train on the result with
  ./xsa run text/file data.source=shards data.path=data/mine
"""

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Take what to do, from what, to where, and how."""
    parser.add_argument("action", choices=["prepare", "verify"], help="what to do")
    parser.add_argument(
        "sources", nargs="*", help="prepare: files, globs, directories or a place on the hub; verify: DIR"
    )
    parser.add_argument(
        "--out", help="prepare: directory of the set; relative ones lie in the working directory"
    )
    parser.add_argument("--tokenizer", choices=["gpt2", "bytes"], default="gpt2", help="(default: gpt2)")
    parser.add_argument("--vocabulary", help="GPT-2's encoder.json, where its package is not installed")
    parser.add_argument("--column", default="text", help="column with the text (default: text)")
    parser.add_argument(
        "--documents",
        choices=["file", "paragraphs", "lines"],
        default="file",
        help="what is a document of a plain text file (default: the file)",
    )
    parser.add_argument(
        "--held-out", type=float, default=0.0005, help="share of documents for validation (default: 0.0005)"
    )
    parser.add_argument(
        "--shard-tokens", type=int, default=100_000_000, help="tokens of a shard (default: 100 million)"
    )
    parser.add_argument(
        "--max-document", type=int, default=64 << 20, help="bytes; longer ones are skipped (default: 64 MiB)"
    )
    parser.add_argument("--revision", help="of a data set on the hub (default: the newest)")
    parser.add_argument("--workers", type=int, default=0, help="processes; 0: one per core")
    parser.add_argument(
        "--skip-corrupt", action="store_true", help="count what cannot be read of a damaged file, and go on"
    )
    parser.add_argument("--fresh", action="store_true", help="start over, without what is in --out")
    parser.add_argument("--quick", action="store_true", help="verify: sizes and headers alone")


def run(options: argparse.Namespace) -> int:
    """Prepare or verify, and say what is there."""
    return prepare(options) if options.action == "prepare" else verify(options)


def prepare(options: argparse.Namespace) -> int:
    """Prepare a set and print what it holds."""
    import os
    import time
    from pathlib import Path

    from tasks.errors import UserError
    from tasks.runner.progress import duration, make_display
    from tasks.text.prepare.job import Settings, prepare
    from tasks.text.prepare.plan import Reading

    if not options.out:
        raise UserError("prepare: no --out; give the directory of the set, --out DIR")
    settings = Settings(
        sources=tuple(options.sources),
        revision=options.revision,
        tokenizer=options.tokenizer,
        vocabulary=options.vocabulary,
        held_out=options.held_out,
        shard_tokens=options.shard_tokens,
        reading=Reading(options.column, options.documents, options.max_document),
        skip_corrupt=options.skip_corrupt,
        workers=options.workers or len(os.sched_getaffinity(0)),
    )
    started = time.monotonic()
    with make_display("auto") as display:
        manifest = prepare(settings, Path(options.out).expanduser(), display, fresh=options.fresh)
    show(manifest)
    print(f"{options.out}: ready, {duration(time.monotonic() - started)}")
    return 0


def verify(options: argparse.Namespace) -> int:
    """Check a set; name every problem; exit with 1 where there is one."""
    from pathlib import Path

    from tasks.errors import UserError
    from tasks.text.prepare.verify import verify

    if len(options.sources) != 1:
        raise UserError("verify: expected one directory, ./xsa data verify DIR")
    manifest, checks = verify(Path(options.sources[0]).expanduser(), quick=options.quick)
    problems = [problem for check in checks for problem in check.problems]
    for problem in problems:
        print(problem)
    if problems:
        print(
            f"{len(problems)} problem{'s' if len(problems) > 1 else ''}; prepare the set again with --fresh"
        )
        return 1
    show(manifest)
    print("all sizes and headers are as stated" if options.quick else "every shard is what the manifest says")
    return 0


def show(manifest: dict) -> None:
    """Print the size of both splits, and what a user should know."""
    from results.tables import Column, Table
    from tasks.runner.tables import make_console, print_table

    columns = (
        Column("split", "split"),
        Column("documents", "documents"),
        Column("tokens", "tokens"),
        Column("text", "text MB", 1),
        Column("shards", "shards"),
    )
    rows = [
        {
            "split": split,
            "documents": row["documents"],
            "tokens": row["tokens"],
            "text": row["text_bytes"] / 1e6,
            "shards": len(row["shards"]),
        }
        for split, row in manifest["splits"].items()
    ]
    notes = (*manifest["notes"], *manifest["skipped"]["corrupt"], *manifest["skipped"]["examples"])
    title = f"Tokens of {manifest['tokenizer']['name']}"
    print_table(make_console(), Table("data", title, columns, tuple(rows), notes))
