"""The learning rate of each optimizer is held against its own search, on the plain baseline alone."""

import pytest

from results.record import RunRecord
from results.store import write_record
from tasks.runner import suite as suites
from tasks.runner.sweep_rate import check_rate

RATE = {"adamw": 0.004, "muon": 0.004}  # what suite optimizers runs at
SEARCHES = {"adamw": "fig4_lr", "muon": "optimizers_lr"}


@pytest.fixture(scope="module")
def template(make_lab, tmp_path_factory) -> RunRecord:
    """The record of one real, very small run."""
    return make_lab(tmp_path_factory.mktemp("template")).train("loop.max_steps=2").record


@pytest.fixture
def searched(template, tmp_path):
    """Write the baseline's records of an optimizer's search, with a loss that is least at `best`."""

    def write(optimizer: str, best: float) -> None:
        for cell in suites.expand(suites.load_suite(SEARCHES[optimizer]).scales["cpu"]):
            config = cell.config
            if config.attention.variant != "sa":
                continue
            hashes = {name: getattr(config, name)() for name in ("config_hash", "pair_hash", "cell_hash")}
            loss = 2 + abs(config.optimizer.lr - best) + 0.001 * config.seed
            record = template.updated(
                run_id=config.run_id(),
                seed=config.seed,
                variant="sa",
                optimizer=optimizer,
                metrics={"validation_bits_per_byte": loss},
                **hashes,
            )
            write_record(record, tmp_path)

    return write


@pytest.fixture
def check(tmp_path):
    """Check a suite's rates against the records in the test's directory."""

    def run(name: str = "optimizers", *overrides: str):
        suite = suites.load_suite(name)
        cells = suites.recorded_in(suites.expand(suite.scales["cpu"], overrides), str(tmp_path))
        return check_rate(name, suite, "cpu", cells)

    return run


def test_every_optimizer_has_its_own_choice(searched, check):
    for optimizer, rate in RATE.items():
        searched(optimizer, rate)
    found = check()
    assert found.good, found.line
    assert (
        "learning rate of adamw: 0.004 is the plain baseline's best of 5 from 0.001 to 0.012 (3 seeds)"
        in (found.line)
    )
    assert "learning rate of muon: 0.004 is the plain baseline's best of 5 from 0.001 to 0.012 (2 seeds)" in (
        found.line
    )


def test_one_optimizer_off_its_best_rate_spoils_the_suite_and_is_named(searched, check):
    searched("adamw", RATE["adamw"])
    searched("muon", 0.002)
    found = check()
    assert not found.good
    assert "learning rate of muon: 0.002 is" in found.line
    assert found.line.endswith("but this suite runs at 0.004")


def test_an_optimizer_whose_search_is_not_run_is_missing(searched, check):
    searched("adamw", RATE["adamw"])
    found = check()
    assert not found.good
    assert (
        "learning rate of muon: has not been chosen yet, 0 of 10 baseline runs of optimizers_lr" in found.line
    )


def test_a_search_with_one_optimizer_says_nothing_about_another(searched, check):
    searched("adamw", RATE["adamw"])
    found = check("fig6_sinks", "optimizer=muon")
    assert not found.good
    assert (
        "fig4_lr does not search that of muon; run ./xsa sweep fig4_lr --scale cpu optimizer=muon"
        in found.line
    )


def test_an_optimizer_without_a_search_is_told():
    suite = suites.load_suite("optimizers").model_copy(update={"tuned_by": {"adamw": "fig4_lr"}})
    cells = suites.expand(suite.scales["cpu"])
    found = check_rate("optimizers", suite, "cpu", cells)
    assert not found.good
    assert "nothing searches that of muon; name its suite in tuned_by of optimizers" in found.line


def test_every_suite_is_tuned_by_suites_that_search_on_the_plain_baseline_at_its_scales():
    for name in suites.suites():
        suite = suites.load_suite(name)
        named = suite.tuned_by.values() if isinstance(suite.tuned_by, dict) else [suite.tuned_by]
        for source in filter(None, named):
            for scale in suite.scales:
                grid = suites.scale_of(suites.load_suite(source), source, scale)
                assert "sa" in grid.axes["attention"]


@pytest.mark.parametrize("scale", ["cpu", "paper"])
def test_optimizers_form_a_full_grid_and_muon_is_searched_without_xsa(scale):
    cells = suites.expand(suites.load_suite("optimizers").scales[scale])
    found = {(c.config.optimizer.name, c.config.attention.variant, c.config.seed) for c in cells}
    assert found == {(o, v, s) for o in ("adamw", "muon") for v in ("sa", "xsa") for s in (0, 1, 2)}
    search = suites.expand(suites.load_suite("optimizers_lr").scales[scale])
    assert {(c.config.optimizer.name, c.config.attention.variant) for c in search} == {("muon", "sa")}
    rates = {c.config.optimizer.lr for c in search}
    assert len(rates) == 5
    assert max(rates) / min(rates) >= 10


def test_the_runs_under_adamw_are_those_of_the_search():
    search = {c.config.config_hash() for c in suites.expand(suites.load_suite("fig4_lr").scales["cpu"])}
    own = suites.expand(suites.load_suite("optimizers").scales["cpu"])
    assert {c.config.config_hash() for c in own if c.config.optimizer.name == "adamw"} < search
