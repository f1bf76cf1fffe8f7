"""Suites: what they expand to, and that every one of the paper is a fair grid of pairs."""

from collections import defaultdict

import pytest

from tasks.errors import UserError
from tasks.runner import suite as suites
from tasks.runner.plan import samples_per_step
from tasks.runner.suite import FREE, ScaleConfig, expand, load_suite, split_override
from tasks.runner.sweep_cost import CORE_RATE, START_SECONDS, operations
from tasks.text.plan import flops_per_token, sizes_of

PAPER = (
    "fig1_bias", "fig2_overhead", "fig3_loss", "fig4_lr", "fig5_length", "fig6_sinks", "table2_downstream"
)  # fmt: skip
GRIDS = [
    (name, scale)
    for name in PAPER
    for scale in ("cpu", "paper")
    if not load_suite(name).scales[scale].commands
]
PAIRED = [(name, scale) for name, scale in GRIDS if name != "fig1_bias"]


@pytest.fixture(scope="module")
def grids():
    """Every grid of the paper, expanded once."""
    return {(name, scale): expand(load_suite(name).scales[scale]) for name, scale in GRIDS}


def test_every_figure_and_table_of_the_paper_has_a_suite_at_both_scales():
    assert set(PAPER) <= set(suites.suites())
    for name in PAPER:
        assert load_suite(name).scales.keys() == {"cpu", "paper"}


@pytest.mark.parametrize("grid", PAIRED, ids="-".join)
def test_every_exclusive_run_has_a_plain_one_that_differs_in_attention_alone(grids, grid):
    variants = defaultdict(set)
    for cell in grids[grid]:
        variants[cell.config.pair_hash()].add(cell.config.attention.variant)
    assert variants
    assert all(found == {"sa", "xsa"} for found in variants.values())


def test_the_grids_are_those_of_the_paper(grids):
    def values(grid, get):
        return sorted({get(cell.config) for cell in grids[grid]})

    assert values(("fig4_lr", "paper"), lambda c: c.optimizer.lr) == [1e-4, 2e-4, 4e-4, 6e-4]
    lengths = values(("fig5_length", "paper"), lambda c: c.data.seq_len)
    assert lengths == [512, 1024, 2048, 4096, 8192, 16384]
    for scale in ("cpu", "paper"):
        assert values(("fig6_sinks", scale), lambda c: c.model.n_sinks) == [0, 1, 4]
        assert (
            len({(c.config.model.n_layers, c.config.model.d_model) for c in grids["fig3_loss", scale]}) == 3
        )
    assert {cell.config.attention.variant for cell in grids["fig1_bias", "paper"]} == {"sa"}


@pytest.mark.parametrize("scale", ["cpu", "paper"])
def test_lengths_share_the_tokens_of_a_batch_and_of_the_validation(grids, scale):
    configs = [cell.config for cell in grids["fig5_length", scale]]
    assert len({samples_per_step(c, c.data.seq_len) * c.data.seq_len for c in configs}) == 1
    assert len({c.loop.eval_samples * c.data.seq_len for c in configs}) == 1


@pytest.mark.parametrize("grid", [grid for grid in GRIDS if grid[1] == "cpu"], ids="-".join)
def test_cells_for_a_cpu_take_at_most_five_minutes_by_the_stated_premise_and_can_be_resumed(grids, grid):
    cells = grids[grid]
    assert {cell.config.seed for cell in cells} >= {0, 1, 2}
    for cell in cells:
        assert operations(cell.config) / (2 * CORE_RATE) + START_SECONDS <= 300
        assert 0 < cell.config.loop.checkpoint_every <= cell.config.loop.max_steps / 4


def test_runs_that_two_suites_share_are_the_same_run(grids):
    trained = {cell.config.config_hash() for cell in grids["fig3_loss", "cpu"]}
    assert {cell.config.config_hash() for cell in grids["table2_downstream", "cpu"]} == trained
    probed = {cell.config.config_hash() for cell in grids["fig1_bias", "cpu"]}
    for name in ("fig3_loss", "fig4_lr", "fig5_length", "fig6_sinks"):
        assert probed < {cell.config.config_hash() for cell in grids[name, "cpu"]}


def test_operations_of_a_run_are_tokens_times_operations_of_a_token(grids):
    config = grids["fig4_lr", "cpu"][0].config
    tokens = 400 * 4096
    assert operations(config) == pytest.approx(tokens * sum(flops_per_token(sizes_of(config, 256))))


def test_free_overrides_expand_to_the_product_with_pairs_as_neighbours():
    words = ["experiment=text/tiny", "attention=sa,xsa", "optimizer=adamw,muon", "seed=0,1,2"]
    cells = expand(FREE, words)
    told = [(c.config.seed, c.config.optimizer.name, c.config.attention.variant) for c in cells]
    assert told == [(s, o, v) for s in (0, 1, 2) for o in ("adamw", "muon") for v in ("sa", "xsa")]
    assert len({c.config.config_hash() for c in cells}) == 12
    assert cells[0].label == "optimizer adamw, sa, seed 0"


def test_an_override_replaces_the_axis_that_sets_its_key():
    grid = load_suite("fig4_lr").scales["cpu"]
    cells = expand(grid, ["optimizer.lr=0.5,0.25", "seed=7"])
    assert {(c.config.optimizer.lr, c.config.seed) for c in cells} == {(0.5, 7), (0.25, 7)}
    assert len(cells) == 4


def test_the_arguments_of_a_cell_give_its_config_again():
    from tasks.runner.config.compose import load_config

    for cell in expand(load_suite("fig5_length").scales["cpu"], ["seed=3"]):
        command, experiment, *overrides = cell.arguments
        assert command == "run"
        assert load_config(experiment, overrides).config_hash() == cell.config.config_hash()


def test_commas_inside_brackets_and_quotes_do_not_divide():
    assert split_override("attention.layers=[0,1],first:2") == ("attention.layers", ["[0,1]", "first:2"])
    assert split_override("data.path='a,b',c") == ("data.path", ["'a,b'", "c"])
    assert split_override("seed=1,1,2") == ("seed", ["1", "2"])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["attention=sa,xsa"], "no experiment; add experiment=NAME"),
        (["experiment=text/tiny", "seed=0,x"], "seed: expected whole numbers such as 0,1,2, got 'x'"),
        (["experiment=text/tiny", "seed=0,,1"], "an empty value between commas"),
        (["experiment=text/tiny", "attention=sa,xsaa"], "did you mean 'xsa'"),
        (["experiment=text/tinny"], "did you mean 'text/tiny'"),
        (["experiment=text/tiny", "loop.max_step=3,4"], "loop.max_steps"),
    ],
)
def test_mistakes_in_overrides_are_one_line(words, said):
    with pytest.raises(UserError, match=said) as raised:
        expand(FREE, words)
    assert "\n" not in str(raised.value)


def test_an_unknown_suite_or_scale_names_those_there_are():
    with pytest.raises(UserError, match="did you mean 'fig4_lr'"):
        load_suite("fig4_lrr")
    with pytest.raises(UserError, match="it has cpu, paper"):
        suites.scale_of(load_suite("fig4_lr"), "fig4_lr", "gpu")


def test_a_grid_without_the_plain_baseline_is_refused():
    with pytest.raises(ValueError, match="cells come in pairs"):
        ScaleConfig(note="n", experiment="text/tiny", axes={"attention": ["xsa"]}, seeds=[0])
    with pytest.raises(ValueError, match="either seeds of runs, or commands"):
        ScaleConfig(note="n", experiment="text/tiny")
