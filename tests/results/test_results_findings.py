"""The sentences at the top of the results carry what intervals and seeds carry, and no more."""

import pytest

from results.effects import effects
from results.findings import Difference, effect_findings, pooled, sentence, suite_findings, word
from results.metrics import Metric
from results.record import BenchRecord
from results.report import report
from results.stats import summarize
from results.store import write_record
from results.suites.view import CellView, Point, SuiteView

LOSS = Metric("loss", 3, "lower")


def difference(*values: float, holm_p: float | None = None) -> Difference:
    """One place with a difference per seed, seeds from 0."""
    return Difference(dict(enumerate(values)), summarize(list(values)) if values else None, holm_p)


def test_words_follow_the_interval_the_direction_and_the_correction() -> None:
    sure, unsure = (-0.10, -0.11, -0.12), (-0.10, 0.11, -0.12)
    assert word(difference(*sure), "lower") == "better"
    assert word(difference(*sure), "higher") == "worse"
    assert word(difference(*sure), None) == "lower"
    assert word(difference(*sure, holm_p=0.2), "lower") == "no difference shown"
    assert word(difference(*unsure), "lower") == "no difference shown"
    assert word(difference(-0.1), "lower") == "better on one seed"
    assert word(difference(), "lower") == "missing"


def test_seeds_and_not_places_are_the_units_of_a_mean_over_places() -> None:
    places = [difference(-0.1, -0.3, 0.1), difference(-0.3, -0.1, 0.3), difference()]
    together = pooled(places)
    assert together is not None
    assert together.n == 3
    assert together.mean == pytest.approx((-0.2 - 0.2 + 0.2) / 3)
    assert together == summarize([-0.2, -0.2, 0.2])
    uneven = pooled([difference(-0.1, -0.3), difference(-0.3)])
    assert uneven is not None
    assert (uneven.n, uneven.mean) == (1, pytest.approx(-0.2))  # only seed 0 is everywhere
    assert pooled([difference()]) is None


def test_one_seed_is_called_a_direction_and_has_no_interval() -> None:
    text = sentence("xsa", LOSS, [difference(-0.2)], "cell")
    assert "-0.200 (1 seed, no interval): better on one seed" in text
    assert "95%" not in text
    assert text.endswith("one seed gives a direction, not a finding.")


def test_several_places_are_told_together_and_each_alone() -> None:
    places = [difference(-0.1, -0.11, -0.12), difference(0.3, -0.2, 0.1), difference()]
    text = sentence("xsa", LOSS, places, "place")
    assert "mean over 2 places" in text
    assert "place by place -0.110 to +0.067, lower in 4 of 6 pairs" in text
    assert "of 3 places each alone 1 better, 1 no difference shown, 1 missing" in text
    assert sentence("xsa", LOSS, [difference()], "place").endswith("nothing to compare yet.")


def test_places_of_a_suite_are_corrected_together() -> None:
    values = {1.0: (-0.10, -0.15, -0.09), 2.0: (0.2, -0.3, 0.1), 3.0: (0.3, -0.2, 0.1)}
    found = [
        Point({"x": x}, "xsa", 3, {}, dict(enumerate(seeds)), {}, summarize(list(seeds)))
        for x, seeds in values.items()
    ]
    view = SuiteView("name", "cpu", "A title", "a source", "a note", "axis", "x", ())
    alone = suite_findings(view, found[:1], LOSS)
    assert "better" in alone[0]
    p = found[0].summary.p
    assert 0.05 / 3 < p < 0.05  # what a correction over three places undoes
    assert "of 3 places each alone 3 no difference shown" in suite_findings(view, found, LOSS)[0]


def test_what_a_suite_tells_is_not_told_again(make_run) -> None:
    runs = [make_run(arm, seed) for arm in ("sa", "xsa") for seed in range(2)]
    by_task = {("text", "validation_bits_per_byte"): effects(runs)}
    (line,) = effect_findings(by_task, frozenset())
    assert line.startswith(f"**{runs[0].experiment}**: xsa minus sa")
    assert effect_findings(by_task, frozenset({runs[0].config_hash})) == []


def probe_of(run, **changes) -> BenchRecord:
    row = {
        "layer": 0,
        "cosine_output_value": 0.25,
        "diagonal_weight": 0.125,
        "cosine_values": 0.5,
    }
    return BenchRecord(
        run_id=f"probe-{run.run_id}",
        name="probe",
        config={"config_hash": run.config_hash, "seed": run.seed} | changes,
        environment=run.environment,
        rows=[row],
        started_at=run.started_at,
        finished_at=run.started_at,
    )


def test_a_probe_belongs_to_its_figure_and_is_no_benchmark(make_run, tmp_path) -> None:
    runs = [make_run("sa", 0), make_run("xsa", 0)]
    for record in (*runs, *map(probe_of, runs)):
        write_record(record, tmp_path / "runs")
    view = SuiteView(
        "fig", "cpu", "A title", "a source", "a note", "probe", None,
        (CellView({}, "sa", 0, runs[0].config_hash),),
    )  # fmt: skip
    report(tmp_path / "runs", tmp_path / "out", suites=[view])
    page = (tmp_path / "out" / "README.md").read_text()
    assert "## Benchmarks" not in page
    assert "0 benchmark records, 2 probed models" in page
    assert "cosine of output and own value 0.250 in the first layer" in page
    others = page.partition("## Other probed models")[2].partition("##")[0]
    assert f"probe-{runs[1].run_id}" in others  # in no figure
    assert f"probe-{runs[0].run_id}" not in others
    assert page.index("## What is known, and how sure") < page.index("### A title")
