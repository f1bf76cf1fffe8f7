"""Suites meet their records: the learning rate's choice, and the views a report draws."""

from collections.abc import Callable
from pathlib import Path

import pytest

from results.record import RunRecord
from results.store import load_records, write_record
from results.suites.view import suite_runs
from tasks.runner import suite as suites
from tasks.runner.suite_views import experiments_of, views_of
from tasks.runner.sweep_rate import check_rate

GRID = suites.load_suite("fig4_lr").scales["cpu"]
BEST = 0.004


@pytest.fixture(scope="module")
def template(make_lab: Callable, tmp_path_factory: pytest.TempPathFactory) -> RunRecord:
    """The record of one real, very small run."""
    return make_lab(tmp_path_factory.mktemp("template")).train("loop.max_steps=2").record


@pytest.fixture
def searched(template: RunRecord, tmp_path: Path) -> Callable[..., Path]:
    """Write a record for every baseline run of fig4_lr, with a loss that is least at `best`."""

    def write(best: float = BEST, leave_out: int = 0) -> Path:
        # Signs that an override would have to quote.
        directory = tmp_path / "records, of [this] place"
        cells = [cell for cell in suites.expand(GRID) if cell.config.attention.variant == "sa"]
        for cell in cells[leave_out:]:
            config = cell.config
            loss = 2 + abs(config.optimizer.lr - best) + 0.001 * config.seed
            changes = {"metrics": {"validation_bits_per_byte": loss}, "experiment": config.experiment}
            hashes = {name: getattr(config, name)() for name in ("config_hash", "pair_hash", "cell_hash")}
            record = template.updated(
                run_id=config.run_id(), variant="sa", seed=config.seed, **hashes, **changes
            )
            write_record(record, directory)
        return directory

    return write


def check(name: str, directory: Path, *overrides: str):
    suite = suites.load_suite(name)
    cells = suites.recorded_in(suites.expand(suite.scales["cpu"], overrides), str(directory))
    return check_rate(name, suite, "cpu", cells)


def test_a_best_rate_inside_the_range_is_good_for_the_suites_that_use_it(searched):
    directory = searched()
    for name in ("fig4_lr", "fig5_length", "fig6_sinks", "fig3_loss", "fig1_bias", "table2_downstream"):
        found = check(name, directory)
        assert found.good, found.line
        assert "0.004 is the plain baseline's best of 5 from 0.001 to 0.012 (3 seeds)" in found.line


def test_a_suite_at_another_rate_is_told(searched):
    found = check("fig6_sinks", searched(best=0.002))
    assert not found.good
    assert "this suite runs at 0.004" in found.line


def test_a_best_rate_at_the_edge_is_not_good(searched):
    found = check("fig4_lr", searched(best=0.012))
    assert not found.good
    assert "at the edge of the searched range" in found.line


def test_nothing_is_chosen_on_a_part_of_the_runs(searched):
    found = check("fig5_length", searched(leave_out=1))
    assert not found.good
    assert "14 of 15 baseline runs of fig4_lr" in found.line


def test_a_report_gets_the_suites_that_have_records_with_their_cells(searched):
    directory = searched()
    records = load_records(directory)
    views = {view.stem: view for view in views_of(records, str(directory))}
    assert {"fig4-lr-cpu", "fig6-sinks-cpu", "fig1-bias-cpu"} <= views.keys()
    assert not any(stem.endswith("-paper") for stem in views)
    view = views["fig4-lr-cpu"]
    assert len(view.cells) == 30
    assert len(suite_runs(view, records)) == 15
    assert view.places[0] == {"learning rate": 0.001}
    assert view.arms == ["sa", "xsa"]
    assert "inside the searched range" in view.rate


def test_no_records_no_suites(tmp_path):
    assert views_of([], str(tmp_path)) == []


def test_experiments_are_those_of_the_base_and_of_the_axes():
    sizes = suites.load_suite("fig3_loss").scales
    assert experiments_of(sizes["cpu"]) == {"text/paper_cpu"}
    assert experiments_of(sizes["paper"]) == {f"text/paper_{size}b" for size in ("0.7", "1.3", "2.7")}
