"""Configs: every mistake is answered in one line, and the hash says what a run computes."""

import hashlib
import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from pydantic import create_model

from tasks.errors import UserError
from tasks.runner import registry
from tasks.runner.config import compose as compose_module
from tasks.runner.config.compose import experiments, groups, load_config, options
from tasks.runner.config.schema import RunConfig

# override -> what the line must name: key, what was expected, what came or what is nearest
MISTAKES = {
    "sed=3": ["unknown key 'sed'", "did you mean 'seed'?"],
    "lop.max_steps=3": ["unknown key 'lop.max_steps'", "did you mean 'loop.max_steps'?"],
    "loop.max_step=3": ["unknown key 'loop.max_step'", "did you mean 'loop.max_steps'?"],
    "model.nlayers=2": ["unknown key 'model.nlayers'", "did you mean 'model.n_layers'?"],
    "data.seqlen=3": ["unknown key 'data.seqlen'", "did you mean 'data.seq_len'?"],
    "optimizer.lrr=1": ["unknown key 'optimizer.lrr'", "did you mean 'optimizer.lr'?"],
    "attention.varient=sa": ["unknown key 'attention.varient'", "did you mean 'attention.variant'?"],
    "output.run=x": ["unknown key 'output.run'", "did you mean 'output.runs'?"],
    "seed.x=3": ["unknown key 'seed.x'", "did you mean 'seed'?"],
    "hydra.run.dir=x": ["unknown key 'hydra.run.dir'", "./xsa config EXPERIMENT prints all keys"],
    "attention@x=sa": ["unknown key 'attention@x'"],
    "seed=abc": ["seed: expected integer, got 'abc' (str)"],
    "seed=1.5": ["seed: expected integer, got 1.5 (float)"],
    "seed=true": ["seed: expected integer, got True (bool)"],
    "seed=null": ["seed: expected integer, got None"],
    "seed=": ["seed: expected integer, got ''"],
    "model.bias=1": ["model.bias: expected boolean, got 1 (int)"],
    "model.bias=yes": ["model.bias: expected boolean, got 'yes' (str)"],
    "optimizer.lr=fast": ["optimizer.lr: expected number, got 'fast' (str)"],
    "data.path=7": ["data.path: expected string, got 7 (int)"],
    "data.path=[a]": ["data.path: expected string, got ['a'] (list)"],
    "attention.layers=1": ["attention.layers: expected", "string or", "list", "got 1 (int)"],
    "seed=-1": ["seed: expected greater than or equal to 0, got -1 (int)"],
    "seed=99999999999999999999": ["seed: expected less than or equal to", "got 99999999999999999999"],
    "loop.max_steps=0": ["loop.max_steps: expected greater than or equal to 1, got 0"],
    "loop.global_batch=0": ["loop.global_batch: expected greater than or equal to 1, got 0"],
    "loop.threads=1000000": ["loop.threads: expected less than or equal to 1024, got 1000000"],
    "loop.keep_checkpoints=0": ["loop.keep_checkpoints: expected greater than or equal to 1, got 0"],
    "model.dropout=2": ["model.dropout: expected less than or equal to 1, got 2"],
    "optimizer.lr=nan": ["optimizer.lr: expected a finite number, got nan"],
    "optimizer.weight_decay=inf": ["optimizer.weight_decay: expected a finite number, got inf"],
    "loop.precision=fp8": ["loop.precision: expected 'auto', 'float32', 'bfloat16' or 'float64', got 'fp8'"],
    "data.source=net": ["data.source: expected 'embedded', 'file' or 'shards', got 'net'"],
    "loop.warmup_steps=100": ["loop.warmup_steps: 100 is more than loop.max_steps 20"],
    "data.source=file": ["data.path: no value", "data.path=FILE"],
    "data.path=x.txt": ["data.path: given, but data.source is embedded", "data.source=file"],
    "output.runs=": ["output.runs: expected", "got ''"],
    "attention=xas": ["attention: unknown option 'xas'", "did you mean 'xsa'?", "xsa_learned"],
    "optimizer=sgd": ["optimizer: unknown option 'sgd'", "the options are adamw, muon"],
    "attention=sa,xsa": ["attention: unknown option 'sa,xsa'"],
    "attention=": ["attention: unknown option ''"],
    "loop=3": ["'loop=3': loop is a section", "loop.max_steps=VALUE"],
    "model=null": ["'model=null': model is a section", "model.n_layers=VALUE"],
    "data={seq_len:3}": ["data is a section", "VALUE"],
    "seed=1,2": ["'seed=1,2': several values, but a run takes one"],
    "seed=range(1,3)": ["several values, but a run takes one"],
    "seed=[1,2]": ["seed: expected integer, got [1, 2] (list)"],
    "data.path=${oc.env:HOME}": ["'data.path=${oc.env:HOME}'", "must not read the environment"],
    "data.path=${ oc.env:HOME}": ["must not read the environment"],
    "data.path=${now:%Y}": ["must not read the environment"],
    "data.path=${nothing.here}": ["nothing.here", "not found"],
    "data.path='a": ["'data.path='a': not understood", "quote a value"],
    'data.path="a b': ["not understood", "quote a value"],
    "seed==3": ["'seed==3': not understood"],
    "seed=3=4": ["'seed=3=4': not understood"],
    "task=text": ["'task=text': task cannot be overridden", "another experiment"],
    "experiment=text/quick": ["experiment cannot be overridden", "another experiment"],
    "seed": ["'seed': expected KEY=VALUE"],
    "=3": ["'=3': expected KEY=VALUE"],
    "~seed": ["'~seed': expected KEY=VALUE"],
    "+seed=3": ["unknown key '+seed'", "did you mean 'seed'?"],
}


@pytest.mark.parametrize("override", MISTAKES)
def test_a_mistaken_override_is_one_line_that_names_it(override: str) -> None:
    with pytest.raises(UserError) as raised:
        load_config("text/tiny", [override])
    line = str(raised.value)
    assert "\n" not in line
    assert [part for part in MISTAKES[override] if part not in line] == [], line


def test_an_unknown_experiment_lists_those_there_are() -> None:
    with pytest.raises(UserError) as raised:
        load_config("text/tinny")
    line = str(raised.value)
    assert "unknown experiment 'text/tinny'; did you mean 'text/tiny'?" in line
    assert all(name in line for name in experiments())
    assert "\n" not in line


def test_every_experiment_and_every_option_is_a_valid_config() -> None:
    for experiment in experiments():
        try:
            config = load_config(experiment)
        except UserError as error:
            # Data of the user's own: the line says what is missing, and nothing else is.
            if not str(error).startswith("data.path: no value"):
                raise
            config = load_config(experiment, ["data.path=x"])
        assert config.experiment == experiment
    for group in groups():
        for option in options(group):
            assert load_config("text/tiny", [f"{group}={option}"])


@pytest.fixture
def configs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Replace the folder of configs by a copy in which text/tiny has the given text."""
    copy = tmp_path / "configs"
    shutil.copytree(compose_module.CONFIGS, copy)
    monkeypatch.setattr(compose_module, "CONFIGS", copy)
    return (copy / "experiment" / "text" / "tiny.yaml").write_text


GOOD = """# @package _global_
task: text
model: {n_layers: 1, d_model: 8, n_heads: 1}
data: {seq_len: 8}
loop: {max_steps: 2, global_batch: 2}
"""


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (
            GOOD.replace("n_layers", "n_layer"),
            ["unknown key 'model.n_layer'", "did you mean 'model.n_layers'?"],
        ),
        (GOOD + "sede: 3\n", ["unknown key 'sede'", "did you mean 'seed'?"]),
        (GOOD.replace("max_steps: 2, ", ""), ["loop.max_steps: no value; set it with loop.max_steps=VALUE"]),
        (GOOD.replace("max_steps: 2", "max_steps: many"), ["loop.max_steps: expected integer, got 'many'"]),
        (GOOD.replace("task: text", "task: txet"), ["task: unknown task 'txet'", "text"]),
        (GOOD.replace("task: text\n", ""), ["text/tiny.yaml: no key 'task'"]),
        (GOOD + "seed: ${oc.env:SEED}\n", ["tiny.yaml", "must not use ${oc.env:"]),
        (GOOD.replace("{seq_len: 8}", "{seq_len: 8"), ["text/tiny.yaml: not YAML", "line 4"]),
        (GOOD.replace("{seq_len: 8}", "8"), ["data: expected", "got 8 (int)"]),
        ("- 1\n", ["text/tiny.yaml"]),
        ("", ["text/tiny.yaml: no key 'task'"]),
    ],
    ids=[
        "misspelt",
        "unknown",
        "missing",
        "type",
        "task",
        "no-task",
        "environment",
        "syntax",
        "section",
        "list",
        "empty",
    ],
)
def test_a_mistake_in_a_yaml_file_is_one_line(configs: Callable, text: str, parts: list[str]) -> None:
    configs(text)
    with pytest.raises(UserError) as raised:
        load_config("text/tiny")
    line = str(raised.value)
    assert "\n" not in line
    assert [part for part in parts if part not in line] == [], line


def test_an_override_wins_over_a_group_and_a_group_over_the_default() -> None:
    config = load_config("text/tiny", ["optimizer.lr=3e-4", "optimizer=muon", "attention=sa"])
    assert (config.optimizer.name, config.optimizer.lr, config.attention.variant) == ("muon", 3e-4, "sa")
    assert load_config("text/tiny").attention.variant == "xsa"


def test_a_value_may_refer_to_another_key() -> None:
    assert load_config("text/tiny", ["loop.warmup_steps=${loop.max_steps}"]).loop.warmup_steps == 20


@cache
def of(*overrides: str) -> RunConfig:
    return load_config("text/tiny", overrides)


def test_the_same_config_has_the_same_hash_however_it_is_written() -> None:
    assert of().config_hash() == of().config_hash()
    assert of("seed=3", "loop.max_steps=9").config_hash() == of("loop.max_steps=9", "seed=3").config_hash()
    assert of("optimizer.lr=1e-3").config_hash() == of("optimizer.lr=0.001").config_hash()
    assert of("attention=sa").config_hash() == of("attention.variant=sa").config_hash()


def test_where_a_run_writes_does_not_change_its_hash() -> None:
    changed = of("output.runs=a", "output.records=b", "output.tensorboard=false", "output.sample_bytes=9")
    assert changed.config_hash() == of().config_hash()
    assert changed.run_id() == of().run_id()


CHANGES = (
    "seed=1", "attention=sa", "attention=xsa_learned", "attention.strength=0.5", "attention.layers=[0]",
    "attention.backend=reference", "optimizer=muon", "optimizer.lr=0.002", "optimizer.weight_decay=0",
    "optimizer.beta2=0.99", "model.n_layers=3", "model.d_model=64", "model.dropout=0.1", "model.bias=true",
    "model.n_kv_heads=1", "data.seq_len=32", "data.validation_fraction=0.2", "loop.max_steps=21",
    "loop.global_batch=8", "loop.micro_batch=2", "loop.clip_norm=0", "loop.precision=float32",
    "loop.batch_unit=tokens", "loop.eval_samples=9",
)  # fmt: skip


def test_any_other_change_gives_another_hash() -> None:
    hashes = [of().config_hash(), *(of(change).config_hash() for change in CHANGES)]
    assert len(set(hashes)) == len(CHANGES) + 1


def test_a_key_at_its_default_leaves_the_hash_as_it_was() -> None:
    """So that a key which a later version adds does not give every old run a new identity."""
    assert (
        of("model.dropout=0.0", "loop.clip_norm=1.0", "attention.layers=all").config_hash()
        == of().config_hash()
    )
    config = of()
    explicit = type(config).model_validate(config.resolved())
    assert explicit.config_hash() == config.config_hash()


def test_a_new_key_at_its_default_gives_no_old_run_another_identity() -> None:
    config = of()

    class LaterLoop(type(config.loop)):
        novelty: int = 3

    later = create_model("Later", __base__=type(config), loop=(LaterLoop, ...))
    content = config.resolved()
    assert later.model_validate(content).config_hash() == config.config_hash()
    content["loop"]["novelty"] = 4
    assert later.model_validate(content).config_hash() != config.config_hash()


def test_pair_hash_is_shared_by_attention_variants_alone() -> None:
    variants = {of(f"attention={name}").pair_hash() for name in options("attention")}
    assert variants == {of().pair_hash()}
    assert of("attention.strength=0.5").pair_hash() == of().pair_hash()
    others = [change for change in CHANGES if not change.startswith("attention")]
    assert all(of(change).pair_hash() != of().pair_hash() for change in others)


def test_cell_hash_is_shared_by_variants_and_seeds_alone() -> None:
    assert of("seed=7", "attention=sa").cell_hash() == of().cell_hash()
    others = [change for change in CHANGES if not change.startswith(("attention", "seed"))]
    assert all(of(change).cell_hash() != of().cell_hash() for change in others)


def test_the_resolved_config_is_a_config_again() -> None:
    config = of("attention.layers=[0,1]", "optimizer=muon", "model.head_dim=8")
    again = type(config).model_validate(config.resolved())
    assert again == config
    assert again.config_hash() == config.config_hash()


def test_a_config_does_not_change_after_validation() -> None:
    with pytest.raises(ValueError, match="frozen"):
        of().loop.max_steps = 3


def test_every_registered_task_has_a_spec() -> None:
    for name in registry.TASKS:
        spec = registry.load_task(name)
        assert spec.metric.startswith("validation_")
        assert callable(spec.open)


def test_the_schema_names_the_variants_and_backends_that_the_library_has():
    from typing import get_args

    from tasks.runner.config import schema
    from xsa_core.attention.backends import BACKENDS
    from xsa_core.attention.variants import VARIANTS

    assert set(get_args(schema.Variant)) == set(VARIANTS)
    assert set(get_args(schema.Backend)) == {"auto", *BACKENDS}


@pytest.mark.parametrize("layers", ["first", "first:", "middle:2", "last:-1", "ALL"])
def test_layers_that_name_no_layers_are_refused_before_anything_is_built(layers):
    with pytest.raises(UserError, match=r"attention\.layers: expected all, first:k, last:k or a list"):
        load_config("text/quick", [f"attention.layers={layers}"])


@pytest.mark.parametrize("path", ["/x/é.txt", "/data/日本.txt", "a b.txt", "x%20y.txt"])
def test_a_path_with_any_letters_needs_no_quotes(path):
    config = load_config("text/quick", ["data.source=file", f"data.path={path}"])
    assert config.data.path == path


def test_a_record_names_no_directory_of_the_machine():
    from tasks.runner.paths import ROOT
    from tasks.runner.recording import portable

    content = {"data": {"path": str(ROOT / "x.txt")}, "layers": [0], "home": str(Path.home() / "y")}
    assert portable(content) == {"data": {"path": "./x.txt"}, "layers": [0], "home": "~/y"}


@pytest.mark.parametrize("strategy", ["auto", "ddp", "fsdp"])
def test_how_a_run_is_spread_is_no_part_of_what_it_is(strategy: str) -> None:
    """So a run may go on as shards that began as copies; and hashes from before there was a choice hold."""
    config, before = load_config("text/tiny", [f"loop.strategy={strategy}"]), load_config("text/tiny")
    for name in ("config_hash", "pair_hash", "cell_hash", "run_id"):
        assert getattr(config, name)() == getattr(before, name)()
    content = config.model_dump(mode="json", exclude={"output"}, exclude_defaults=True)
    content["loop"].pop("strategy", None)
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    assert config.config_hash() == hashlib.sha256(text.encode()).hexdigest()[:16]
