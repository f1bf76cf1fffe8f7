"""Turn the records of runs into tables and figures: ./xsa report

A pure function of the records: run twice, it writes the same bytes. The defaults read results/runs and
write results/tables, results/figures and results/README.md.
"""

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Take where records lie and where to write."""
    parser.add_argument(
        "--records", default="results/runs", help="directory of records (default: results/runs)"
    )
    parser.add_argument("--out", default="results", help="directory to write into (default: results)")
    parser.add_argument(
        "--check",
        action="store_true",
        help="write nothing; exit with 1 where a file is not what the records give",
    )


def run(options: argparse.Namespace) -> int:
    """Write the report and name its files."""
    from results.report import report
    from tasks.errors import UserError
    from tasks.runner.paths import shown, under_root

    records, out = under_root(options.records), under_root(options.out)
    if options.check:
        return check(records, out)
    try:
        paths = report(records, out, suites=suites_of(records))
    except ValueError as error:
        raise UserError(str(error)) from error
    except OSError as error:
        raise UserError(f"{error.filename}: {error.strerror}; give another --out") from error
    for path in paths:
        print(shown(path))
    return 0


def suites_of(records):
    """Return the suites that have records there; ValueError where a record cannot be read."""
    from results.store import load_records
    from tasks.runner.suite_views import views_of

    return views_of(load_records(records), str(records))


def check(records, out) -> int:
    """Compare what is there with what the records give; name every difference."""
    import tempfile
    from pathlib import Path

    from results.report import report
    from tasks.errors import UserError
    from tasks.runner.paths import shown

    with tempfile.TemporaryDirectory() as temporary:
        fresh = Path(temporary)
        try:
            paths = report(records, fresh, suites=suites_of(records))
            wanted = {path.relative_to(fresh): path.read_bytes() for path in paths}
        except ValueError as error:
            raise UserError(str(error)) from error
    stale = [name for name, content in wanted.items() if not same(out / name, content)]
    present = {path.relative_to(out) for part in ("tables", "figures") for path in (out / part).glob("*")}
    extra = sorted(name for name in present - wanted.keys() if not name.name.startswith("."))
    for name in sorted(stale):
        print(f"{shown(out / name)}: not what the records give")
    for name in extra:
        print(f"{shown(out / name)}: no record gives it")
    if stale or extra:
        print("run ./xsa report and commit what it writes")
        return 1
    print(f"{len(wanted)} files are what the records give")
    return 0


def same(path, content: bytes) -> bool:
    """Tell whether a file has this content."""
    return path.is_file() and path.read_bytes() == content
