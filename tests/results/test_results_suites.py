"""Suites in a report: every cell that was to be run is there, with its value or with why it has none."""

import statistics

import pytest

from results.report import report
from results.store import write_record
from results.suites import figures
from results.suites.figures import axis_figure, probe_figure
from results.suites.tables import probe_table, suite_table
from results.suites.view import CellView, SuiteView, points, suite_probes, suite_runs, suite_values
from results.tables import markdown

RATES = (1e-3, 2e-3, 4e-3)


def suite_of(make_run, view="axis", **changes):
    """A suite of three rates, two arms and two seeds, and the records of all its runs."""
    runs, cells = {}, []
    for rate in RATES:
        for arm in ("sa", "xsa"):
            for seed in range(2):
                run = make_run(arm, seed, loss=1.4 + 10 * rate, loop={"rate": rate}, points=20, evaluations=4)
                runs[rate, arm, seed] = run
                cells.append(CellView({"rate": rate}, arm, seed, run.config_hash))
    fields = {"name": "a_suite", "scale": "cpu", "title": "A title", "source": "a source", "note": "a note"}
    return SuiteView(**fields, view=view, x="rate", cells=tuple(cells), **changes), runs


def found(view, records):
    runs = suite_runs(view, records)
    values = suite_values(view, runs, records)
    return points(view, runs, values), values


def test_means_and_differences_are_those_of_the_records(make_run):
    view, runs = suite_of(make_run)
    known, values = found(view, list(runs.values()))
    assert len(known) == 6
    for point in known:
        rate = point.place["rate"]
        own = [runs[rate, point.arm, s].metrics["validation_bits_per_byte"] for s in range(2)]
        assert point.mean == pytest.approx(statistics.fmean(own))
        if point.arm == "xsa":
            base = [runs[rate, "sa", s].metrics["validation_bits_per_byte"] for s in range(2)]
            assert point.summary.mean == pytest.approx(statistics.fmean(own) - statistics.fmean(base))
    assert values.facts.title == "validation bits per byte"


def test_missing_and_failed_cells_keep_their_row_and_their_reason(make_run):
    view, runs = suite_of(make_run)
    records = [run for key, run in runs.items() if key[0] != 2e-3]
    records.append(runs[2e-3, "xsa", 1].updated(status="failed", reason="step 7: loss nan"))
    known, values = found(view, records)
    text = markdown(suite_table(view, known, values))
    (row,) = [line for line in text.splitlines() if line.startswith("| 0.002 | xsa")]
    assert "| missing | 0 of 2 |" in row
    assert "seed 0 missing; seed 1 failed: step 7: loss nan" in row
    assert text.count("| 0.00") == 6


def test_a_cell_without_its_partner_has_a_mean_but_no_difference(make_run):
    view, runs = suite_of(make_run)
    known, _ = found(view, [run for key, run in runs.items() if key != (1e-3, "sa", 0)])
    (point,) = [p for p in known if p.arm == "xsa" and p.place["rate"] == 1e-3]
    assert set(point.values) == {0, 1}
    assert set(point.differences) == {1}


def test_records_of_other_configs_do_not_enter(make_run):
    view, runs = suite_of(make_run)
    other = make_run("sa", 0, loss=9.0, loop={"rate": 1e-3, "max_steps": 1})
    known, _ = found(view, [*runs.values(), other])
    assert max(point.mean for point in known) < 4.0


def test_figures_are_drawn_with_gaps_and_without(make_run, tmp_path):
    view, runs = suite_of(make_run)
    for name, records in {"all": list(runs.values()), "one": [runs[1e-3, "sa", 0]]}.items():
        known, values = found(view, records)
        paths = axis_figure(view, known, values.facts, tmp_path / name)
        assert [path.suffix for path in paths] == [".png", ".svg"]
        assert all(path.stat().st_size > 1000 for path in paths)


def test_the_report_shows_a_suite_and_gives_the_same_bytes_again(make_run, tmp_path):
    view, runs = suite_of(make_run, rate="learning rate: chosen")
    for run in list(runs.values())[1:]:
        write_record(run, tmp_path / "runs")
    contents = []
    for name in ("one", "two"):
        paths = report(tmp_path / "runs", tmp_path / name, suites=[view])
        contents.append({path.relative_to(tmp_path / name): path.read_bytes() for path in paths})
    assert contents[0] == contents[1]
    names = {path.as_posix() for path in contents[0]}
    assert {"tables/suite-a-suite-cpu.md", "tables/suite-a-suite-cpu.csv"} <= names
    assert "figures/suite-a-suite-cpu.svg" in names
    page = (tmp_path / "one" / "README.md").read_text()
    assert "### A title (a source), scale cpu" in page
    assert "11 of 12 runs completed; a note." in page
    assert "Learning rate: chosen." in page


def test_a_suite_without_any_record_is_left_out(make_run, tmp_path):
    view, _ = suite_of(make_run)
    write_record(make_run("sa", 0, loop={"rate": 5.0}), tmp_path / "runs")
    report(tmp_path / "runs", tmp_path / "out", suites=[view])
    assert "A title" not in (tmp_path / "out" / "README.md").read_text()


def test_an_evaluated_suite_says_which_runs_have_no_score(make_run):
    view, runs = suite_of(make_run, view="evaluation")
    known, values = found(view, list(runs.values()))
    assert all(not point.values for point in known)
    text = markdown(suite_table(view, known, values))
    assert text.count("seeds 0, 1 not evaluated") == 6


def probe_of(make_bench, run, values):
    rows = [
        {"layer": i, "cosine_output_value": v, "diagonal_weight": v / 2, "cosine_values": -v}
        for i, v in enumerate(values)
    ]
    config = {"config_hash": run.config_hash, "seed": run.seed}
    return make_bench(name="probe", run_id=f"probe-{run.run_id}", config=config, rows=rows, summary={})


def test_probes_are_averaged_layer_by_layer_with_their_range(make_run, make_bench, tmp_path):
    view, runs = suite_of(make_run, view="probe")
    probes = [
        probe_of(make_bench, runs[1e-3, "sa", 0], (0.2, 0.4)),
        probe_of(make_bench, runs[1e-3, "sa", 1], (0.4, 0.4)),
    ]
    stranger = probe_of(make_bench, make_run("sa", 5, loop={"rate": 9.0}), (0.9, 0.9))
    kept = suite_probes(view, [*probes, stranger])
    assert kept == probes
    table = probe_table(view, kept)
    assert table.rows[0]["cosine_output_value"] == pytest.approx(0.3)
    assert table.rows[0]["cosine_output_value_range"] == "0.200 to 0.400"
    assert "2 of 12 models are probed" in table.notes
    assert len(probe_figure(view, kept, tmp_path / "probe")) == 2
    with pytest.raises(ValueError, match="no model is probed yet"):
        probe_figure(view, [], tmp_path / "none")


def test_a_drawn_mean_is_over_the_seeds_that_all_arms_have(make_run):
    view, runs = suite_of(make_run)
    known, _ = found(view, [run for key, run in runs.items() if key != (1e-3, "sa", 0)])
    means = figures._means(known)
    for i, point in enumerate(known):
        seeds = [1] if point.place["rate"] == 1e-3 else [0, 1]
        wanted = [runs[point.place["rate"], point.arm, s].metrics["validation_bits_per_byte"] for s in seeds]
        assert means[i] == pytest.approx(statistics.fmean(wanted))
    alone, _ = found(view, [run for key, run in runs.items() if key[1] == "sa"])
    drawn = [i for i, point in enumerate(alone) if point.arm == "sa"]
    assert sorted(figures._means(alone)) == drawn  # an arm that is missing takes nothing from the other


def test_a_suite_about_curves_shows_those_of_its_places(make_run, tmp_path):
    view, runs = suite_of(make_run, view="curves")
    for key, run in runs.items():
        if key[0] != 4e-3:
            write_record(run, tmp_path / "runs")
    report(tmp_path / "runs", tmp_path / "out", suites=[view])
    page = (tmp_path / "out" / "README.md").read_text()
    shown = [line for line in page.splitlines() if line.startswith("![A title, ")]
    assert len(shown) == 2  # the third place has no run
    for line in shown:
        assert (tmp_path / "out" / line.partition("](")[2].rstrip(")")).is_file()
