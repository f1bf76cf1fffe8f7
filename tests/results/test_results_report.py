"""Tables, figures, report and comparison: stable bytes, visible gaps, nothing of the user's overwritten."""

import csv
import io
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from results.comparison import quick_comparison
from results.drawing import log_ticks, moving_average, wrapped
from results.effects import effects
from results.figures import effect_figure, loss_curves
from results.published import PAPER, load_published, published_table
from results.record import to_plain
from results.report import report, slug
from results.store import write_record
from results.style import VARIANT_LOOKS, arm_looks, look
from results.tables import Column, Table, markdown, show, to_csv

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


def test_published_numbers_have_sources_and_a_broken_entry_is_named(tmp_path):
    entries = load_published(PAPER)
    assert entries
    text = (PAPER / "published.yaml").read_text()
    (tmp_path / "a.yaml").write_text(text.replace("  work: karpathy/nanochat\n", "", 1))
    with pytest.raises(ValueError, match="nanochat-702-bits-per-byte: work: missing"):
        load_published(tmp_path)
    (tmp_path / "a.yaml").write_text(text + text)
    with pytest.raises(ValueError, match="stands there twice"):
        load_published(tmp_path)


def test_difference_of_published_values_is_marked_as_computed_here():
    table = published_table(load_published(PAPER))
    for row in table.rows:
        if row["origin"] == "computed here":
            assert row["change"] == pytest.approx(row["xsa"] - row["baseline"], abs=1e-6)
        else:
            assert row["change"] == row["difference"]


def test_csv_keeps_every_digit_and_marks_what_is_missing():
    value = 0.1 + 0.2
    columns = (Column("a", "A", 2), Column("b", "B"))
    table = Table("t", "T", columns, ({"a": value, "b": 'x,"y"'}, {"b": None}))
    rows = list(csv.DictReader(io.StringIO(to_csv(table))))
    assert float(rows[0]["a"]) == value
    assert rows[0]["b"] == 'x,"y"'
    assert (rows[1]["a"], rows[1]["b"]) == ("NA", "NA")


def test_markdown_cells_cannot_break_the_table():
    table = Table("t", "T", (Column("a", "A"), Column("b", "B")), ({"a": "x|y\nz <b>", "b": None},))
    row = markdown(table).splitlines()[-1]
    assert row == "| x\\|y z &lt;b> | missing |"


@pytest.mark.parametrize(
    ("value", "options", "text"),
    [
        (None, {}, "missing"),
        (3200000, {}, "3,200,000"),
        (0.0, {"signed": True}, "+0.0000"),
        (-0.01234, {"digits": 3}, "-0.012"),
        (1.5, {"digits": None}, "1.5"),
        (float("nan"), {}, "nan"),
        (True, {}, "yes"),
    ],
)
def test_values_are_shown_as_people_read_them(value, options, text):
    assert show(value, **options) == text


def test_tiny_probability_is_not_shown_as_zero():
    table = Table("t", "T", (Column("p", "p", probability=True),), ({"p": 1e-9},))
    assert table.text_rows() == [["<0.0001"]]


def test_comparison_shows_the_difference_of_a_pair(make_run):
    baseline, other = make_run("sa", 0, loss=1.40), make_run("xsa", 0, loss=1.39)
    table = quick_comparison(baseline, other)
    rows = {row[0]: row[1:] for row in table.text_rows()}
    name = "validation_bits_per_byte"
    difference = other.metrics[name] - baseline.metrics[name]
    assert rows["validation bits per byte"][2] == f"{difference:+.4f}"
    assert rows["parameters"] == ["3,200,000", "3,200,000", "+0"]
    assert rows["training tokens/s (own clock)"] == ["20,123", "20,123", "see note"]
    assert any("one pair, seed 0" in note for note in table.notes)


def test_comparison_of_runs_that_are_no_pair_shows_no_difference(make_run):
    table = quick_comparison(make_run("sa", 0), make_run("xsa", 1))
    assert table.text_rows()[0][3] == "not comparable"
    assert "different seed: 0 and 1" in table.notes[0]


def test_comparison_shows_what_a_failed_run_lacks(make_run):
    failed = make_run("xsa", status="failed", reason="nan", metrics={}, primary_metric=None, model=None)
    rows = quick_comparison(make_run("sa"), failed).text_rows()
    assert rows[0][2] == "missing"
    assert rows[-1][2:] == ["missing", "missing"]


@pytest.mark.parametrize("evaluations", [0, 1, 6])
def test_curves_are_drawn_however_few_evaluations_there_are(make_run, tmp_path, evaluations):
    runs = [make_run(variant, points=6, evaluations=evaluations) for variant in ("sa", "xsa")]
    paths = loss_curves(runs, tmp_path / "curves.v1", "a title")
    assert [path.name for path in paths] == ["curves.v1.png", "curves.v1.svg"]
    assert paths[0].read_bytes().startswith(b"\x89PNG")
    assert paths[1].read_bytes().rstrip().endswith(b"</svg>")


def test_curves_with_one_point_and_not_a_number_are_drawn(make_run, tmp_path):
    curves = {"train": {"step": [1], "loss": [float("nan")]}}
    failed = make_run("xsa", status="failed", reason="nan", curves=curves)
    assert len(loss_curves([failed], tmp_path / "one")) == 2


def test_runs_without_any_curve_are_an_error_that_says_so(make_run, tmp_path):
    with pytest.raises(ValueError, match="no run has a training or validation curve"):
        loss_curves([make_run(curves={})], tmp_path / "none")


def test_effects_on_different_metrics_do_not_share_an_axis(make_run, tmp_path):
    records = [make_run(variant) for variant in ("sa", "xsa")]
    (effect,) = effects(records)
    (other,) = effects([run.updated(primary_metric="validation_loss") for run in records])
    with pytest.raises(ValueError, match="expected effects on one metric"):
        effect_figure([effect, other], tmp_path / "mixed")
    with pytest.raises(ValueError, match="got none"):
        effect_figure([], tmp_path / "none")


def test_drawing_leaves_the_settings_of_the_caller_alone(make_run, tmp_path):
    import matplotlib

    with matplotlib.rc_context({"font.size": 23.0}):
        loss_curves([make_run(points=3, evaluations=1)], tmp_path / "a")
        assert matplotlib.rcParams["font.size"] == 23.0


def test_moving_average_is_the_mean_of_the_window_and_keeps_straight_lines():
    assert moving_average([1.0, 2.0, 6.0], 3) == [1.0, 3.0, 6.0]
    line = [0.5 * i for i in range(20)]
    assert moving_average(line, 7) == pytest.approx(line)
    with pytest.raises(ValueError, match="odd positive"):
        moving_average(line, 4)


@pytest.mark.parametrize(("low", "high"), [(1.4, 5.6), (0.001, 0.2), (90.0, 120.0), (1.0, 1e6)])
def test_log_ticks_lie_inside_and_are_few_but_not_none(low, high):
    ticks = log_ticks(low, high)
    assert ticks
    assert all(low <= tick <= high for tick in ticks)
    assert len(ticks) <= 7


def test_labels_wrap_between_words_and_lose_no_letter():
    text = "text/a_very_long_name_of_an_experiment adamw: xsa strength=0.5"
    lines = wrapped(text, 20).split("\n")
    assert all(len(line) <= 20 for line in lines)
    assert "".join(lines).replace(" ", "") == text.replace(" ", "")


def test_every_variant_has_a_look_of_its_own_and_keeps_it():
    assert len({style.colour for style in VARIANT_LOOKS.values()}) == len(VARIANT_LOOKS)
    assert arm_looks({"sa": "sa", "xsa": "xsa"}) == {"sa": look("sa"), "xsa": look("xsa")}
    shades = arm_looks({f"xsa strength={s}": "xsa" for s in (0.25, 0.5, 0.75, 1)})
    assert len({(style.colour, style.line, style.marker) for style in shades.values()}) == 4


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
        "print([name for name in ('torch', 'xsa_core', 'tasks', 'optimizers', 'matplotlib.pyplot') "
        "if name in sys.modules])"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, env=environment, capture_output=True, text=True
    )
    assert done.stdout.strip() == "[]"


def test_record_as_plain_data_is_what_the_file_holds(make_run):
    assert list(to_plain(make_run()))[:3] == ["schema_version", "kind", "run_id"]
