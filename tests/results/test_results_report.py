"""The report: stable bytes, visible gaps, nothing of the user's overwritten or removed."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from results.record import to_plain
from results.report import report, slug
from results.store import write_record

ROOT = Path(__file__).resolve().parents[2]


def write_made_up(make_run, make_bench, directory: Path) -> Path:
    """Write records of two seeds, a gap, a failure, and a benchmark."""
    records = [
        make_run(variant, seed, points=8, evaluations=4) for variant in ("sa", "xsa") for seed in (0, 1)
    ]
    records.append(make_run("sa", 0, optimizer="muon", points=8, evaluations=4))
    records.append(make_run("xsa", 7, status="failed", reason="loss is nan | step 12"))
    records.append(make_bench())
    for record in records:
        write_record(record, directory)
    return directory


@pytest.fixture
def records_dir(make_run, make_bench, tmp_path):
    """Return a directory of records that the test may change."""
    return write_made_up(make_run, make_bench, tmp_path / "runs")


@pytest.fixture(scope="module")
def reported(make_run, make_bench, tmp_path_factory):
    """Return (directory of records, directory of their report), both only to be read."""
    root = tmp_path_factory.mktemp("reported")
    write_made_up(make_run, make_bench, root / "runs")
    report(root / "runs", root / "out")
    return root / "runs", root / "out"


def contents(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()
    }


def test_report_run_twice_gives_the_same_bytes(reported, tmp_path):
    records_dir, once = reported
    first = contents(once)
    shutil.copytree(once, tmp_path / "out")
    paths = report(records_dir, tmp_path / "out")
    assert sorted(first) == sorted(path.relative_to(tmp_path / "out").as_posix() for path in paths)
    assert contents(tmp_path / "out") == first


def test_report_of_another_process_and_user_settings_gives_the_same_bytes(reported, tmp_path):
    records_dir, here = reported
    home = tmp_path / "home"
    home.mkdir()
    theirs = "font.size: 22", "axes.linewidth: 5", "xtick.major.size: 12", "svg.fonttype: none"
    (home / "matplotlibrc").write_text("\n".join(theirs))
    code = f"from results.report import report; report({str(records_dir)!r}, {str(tmp_path / 'there')!r})"
    environment = os.environ | {
        "MATPLOTLIBRC": str(home / "matplotlibrc"),
        "PYTHONHASHSEED": "123",
        "PYTHONPATH": str(ROOT),
        "TZ": "Asia/Tokyo",
    }
    subprocess.run([sys.executable, "-c", code], check=True, env=environment, cwd=home)
    assert contents(tmp_path / "there") == contents(here)


def test_report_removes_its_stale_files_and_nothing_else(reported, tmp_path):
    _, once = reported
    out = tmp_path / "out"
    shutil.copytree(once, out)
    mine = out / "tables" / "mine.md"
    mine.write_text("kept")
    (tmp_path / "runs").mkdir()
    report(tmp_path / "runs", out)
    assert not list((out / "tables").glob("bench-*"))
    assert not list((out / "figures").glob("*"))
    assert mine.read_text() == "kept"


def test_manifest_cannot_make_the_report_remove_a_foreign_file(tmp_path):
    (tmp_path / "runs").mkdir()
    out = tmp_path / "out"
    report(tmp_path / "runs", out, tmp_path / "no_paper")
    outside = tmp_path / "precious.md"
    outside.write_text("kept")
    own = out / "tables" / "old.md"
    own.write_text("stale")
    # A path through an existing folder, or the way up again would lead nowhere.
    (out / "tables" / "sub").mkdir()
    with (out / "generated.txt").open("a") as manifest:
        manifest.write(
            "../precious.md\ntables/../../precious.md\ntables/sub/../../../precious.md\ntables/..\ntables/old.md\n"
            + str(outside)
            + "\n"
        )
    report(tmp_path / "runs", out, tmp_path / "no_paper")
    assert outside.read_text() == "kept"
    assert not own.exists()


def test_readme_written_by_hand_is_not_replaced(records_dir, tmp_path):
    (tmp_path / "README.md").write_text("# Mine\n")
    with pytest.raises(ValueError, match="written by hand"):
        report(records_dir, tmp_path)
    assert (tmp_path / "README.md").read_text() == "# Mine\n"
    assert not (tmp_path / "tables").exists()


def test_corrupt_record_stops_the_report_before_anything_is_written(records_dir, tmp_path):
    (records_dir / "half.json").write_text('{"schema_version": 1')
    with pytest.raises(ValueError, match=r"half\.json"):
        report(records_dir, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_report_of_no_records_says_so_and_does_not_fail(tmp_path):
    (tmp_path / "runs").mkdir()
    report(tmp_path / "runs", tmp_path / "out")
    assert "0 completed training runs" in (tmp_path / "out" / "README.md").read_text()


def test_gaps_and_failures_are_visible_in_the_report(reported):
    _, out = reported
    readme = (out / "README.md").read_text()
    muon = next(line for line in readme.splitlines() if "muon | xsa" in line)
    assert muon.count("missing") >= 4
    failed = (out / "tables" / "unfinished.md").read_text()
    assert "loss is nan \\| step 12" in failed


def test_every_link_of_the_readme_leads_to_a_file(reported):
    _, out = reported
    links = [part.split(")")[0] for part in (out / "README.md").read_text().split("](")[1:]]
    assert links
    assert all((out / link).is_file() for link in links)


def test_files_tell_neither_time_nor_place(reported):
    _, out = reported
    for name, content in contents(out).items():
        for trace in (str(out.parent).encode(), b"matplotlib.org", b"dc:date", b"tIME", b"Software"):
            assert trace not in content, name


def test_published_and_measured_numbers_never_share_a_table(reported):
    _, out = reported
    for path in (out / "tables").glob("*.md"):
        assert ("published" in path.read_text().lower()) == (path.name == "published.md")


def test_labels_become_file_names_that_are_safe_and_distinct():
    assert slug("text/quick adamw lr=0.001") == "text-quick-adamw-lr=0.001"
    assert slug("../..") == "unnamed"
    long = ["x" * 200 + end for end in "ab"]
    assert len({slug(name) for name in long}) == 2
    assert all(len(slug(name)) <= 80 for name in long)


def test_results_import_neither_torch_nor_the_suite():
    modules = sorted(
        f"results.{path.stem}" for path in (ROOT / "results").glob("*.py") if path.stem != "__init__"
    )
    code = (
        f"import sys, importlib; [importlib.import_module(name) for name in {modules!r}]; "
        "print([name for name in ('torch', 'xsa_core.attention', 'tasks', 'optimizers', 'matplotlib.pyplot') "
        "if name in sys.modules])"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, env=environment, capture_output=True, text=True
    )
    assert done.stdout.strip() == "[]"


def test_record_as_plain_data_is_what_the_file_holds(make_run):
    assert list(to_plain(make_run()))[:3] == ["schema_version", "kind", "run_id"]
