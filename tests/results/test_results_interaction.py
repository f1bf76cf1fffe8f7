"""The difference of differences: whether the gain of a variant depends on the optimizer."""

import itertools
import math
import statistics

import pytest

from results.report import report
from results.store import write_record
from results.suites.interaction import interaction_table
from results.suites.view import CellView, SuiteView, suite_runs, suite_values
from results.tables import markdown

T_95_TWO_DEGREES = 4.302652729911275  # of Student's t, from printed tables
OPTIMIZERS, ARMS, SEEDS = ("adamw", "muon"), ("sa", "xsa"), (0, 1, 2)


def value_of(optimizer, arm, seed):
    """Bits per byte of a made-up run: the gain of xsa is larger under muon, and differs from seed to seed."""
    gain = {"adamw": 0.010, "muon": 0.025}[optimizer] + (0.001 * seed * seed if optimizer == "muon" else 0.0)
    return 2.0 + 0.1 * seed - (0.05 if optimizer == "muon" else 0.0) - (gain if arm == "xsa" else 0.0)


@pytest.fixture
def grid(make_run):
    """A suite of two optimizers, two arms and three seeds, and the records of its runs."""
    cells, runs = [], {}
    for optimizer, arm, seed in itertools.product(OPTIMIZERS, ARMS, SEEDS):
        run = make_run(arm, seed, optimizer=optimizer, points=20, evaluations=4)
        run = run.updated(metrics={"validation_bits_per_byte": value_of(optimizer, arm, seed)})
        runs[optimizer, arm, seed] = run
        cells.append(CellView({"optimizer": optimizer}, arm, seed, run.config_hash))
    fields = {"name": "a_suite", "scale": "cpu", "title": "A title", "source": "a source", "note": "a note"}
    view = SuiteView(**fields, view="axis", x="optimizer", cells=tuple(cells), interaction="optimizer")
    return view, runs


def table_of(view, records):
    runs = suite_runs(view, records)
    return interaction_table(view, runs, suite_values(view, runs, records))


def test_the_gain_is_compared_seed_by_seed_with_a_t_interval(grid):
    view, runs = grid
    rows = {row["what"]: row for row in table_of(view, list(runs.values())).rows}
    assert list(rows) == ["sa", "xsa", "gain of xsa"]
    differences = [
        (value_of("muon", "xsa", s) - value_of("muon", "sa", s))
        - (value_of("adamw", "xsa", s) - value_of("adamw", "sa", s))
        for s in SEEDS
    ]
    row = rows["gain of xsa"]
    mean, half = (
        statistics.fmean(differences),
        T_95_TWO_DEGREES * statistics.stdev(differences) / math.sqrt(3),
    )
    assert row["mean"] == pytest.approx(mean, abs=1e-12)
    assert (row["low"], row["high"]) == pytest.approx((mean - half, mean + half), abs=1e-12)
    assert (row["seeds"], row["signs"], row["says"]) == ("3 of 3", "3, 0", "lower")
    assert rows["sa"]["mean"] == pytest.approx(-0.05, abs=1e-12)
    assert row["compared"] == "muon minus adamw"


def test_a_seed_without_all_four_runs_is_left_out_and_named(grid):
    view, runs = grid
    records = [run for key, run in runs.items() if key != ("adamw", "xsa", 1)]
    rows = {row["what"]: row for row in table_of(view, records).rows}
    assert rows["sa"]["seeds"] == "3 of 3"
    assert rows["gain of xsa"]["seeds"] == "2 of 3"
    assert rows["gain of xsa"]["absent"] == "seed 1 missing"


@pytest.mark.parametrize(
    ("part", "change", "said"),
    [
        ("data", {"fingerprint": "other"}, "different data fingerprint"),
        ("data", {"batches_sha256": "other"}, "different order of batches"),
        ("model", {"initial_weights_sha256": "other"}, "different initial weights"),
    ],
)
def test_runs_that_did_not_begin_alike_are_not_compared(grid, part, change, said):
    view, runs = grid
    for arm in ARMS:  # both arms, so that the pair under muon stays a pair
        run = runs["muon", arm, 2]
        runs["muon", arm, 2] = run.updated(**{part: {**getattr(run, part).model_dump(), **change}})
    for row in table_of(view, list(runs.values())).rows:
        assert row["seeds"] == "2 of 3"
        assert said in row["absent"]


def test_a_failed_run_is_a_reason_and_one_seed_has_no_interval(grid):
    view, runs = grid
    runs["muon", "xsa", 0] = runs["muon", "xsa", 0].updated(status="failed", reason="loss nan")
    records = [run for key, run in runs.items() if key[2] != 2]
    (row,) = [row for row in table_of(view, records).rows if row["what"] == "gain of xsa"]
    assert row["absent"] == "seed 0 xsa muon failed; seed 2 missing"
    assert (row["says"], row["low"]) == ("one seed, no interval", None)


def test_an_axis_that_is_not_there_is_refused(grid):
    view, runs = grid
    with pytest.raises(ValueError, match="no axis size to compare along; it has optimizer"):
        table_of(SuiteView(**{**view.__dict__, "interaction": "size"}), list(runs.values()))


def test_the_report_shows_the_interaction_below_the_grid(grid, tmp_path):
    view, runs = grid
    for run in runs.values():
        write_record(run, tmp_path / "runs")
    names = {p.name for p in report(tmp_path / "runs", tmp_path / "out", suites=[view])}
    assert {"suite-a-suite-cpu.md", "suite-a-suite-cpu-interaction.md"} <= names
    page = (tmp_path / "out" / "README.md").read_text()
    table = table_of(view, list(runs.values()))
    assert markdown(table, heading=False).rstrip("\n") in page
    assert "| gain of xsa | muon minus adamw |" in page
