"""The coverage table of transformers says what is so, and every model type is in it."""

import pytest

transformers = pytest.importorskip("transformers")

from xsa_core.adapters import coverage  # noqa: E402
from xsa_core.adapters.base import LEFT_ALONE, SELF, UNSUPPORTED  # noqa: E402
from xsa_core.adapters.hf import walk  # noqa: E402
from xsa_core.adapters.hf.table import rows, unbuilt  # noqa: E402
from xsa_core.adapters.hf.table import walk as written  # noqa: E402

# Model types that are walked over again here: decoders, encoders, speech, vision, both; with latents, shared
# values, states instead of attention; and some that are refused.
SAMPLES = ["llama", "qwen3", "gpt_neox", "gemma2", "deepseek_v3", "bert", "vit", "wav2vec2", "t5"]
SAMPLES += ["gemma3n_text", "mamba", "bloom", "xlnet", "segformer"]


@pytest.fixture(scope="module")
def table():
    """The table, where the installed version is the one it was written with."""
    found = written()
    if found["transformers"] != transformers.__version__:
        pytest.skip(f"the table is that of transformers {found['transformers']}")
    return found["types"]


def test_every_model_type_is_in_the_table(table):
    assert sorted(table) == sorted(walk.model_types())


def test_each_type_is_convertible_or_names_what_is_not_covered(table):
    for name, entry in table.items():
        if "not_built" in entry:
            assert entry["not_built"], name
            continue
        kinds = {c: what["kind"] for c, what in entry["classes"].items()}
        refused = [
            c for c, what in entry["classes"].items() if UNSUPPORTED in kinds[c] or "elsewhere" in what
        ]
        assert entry["convertible"] or refused or SELF not in kinds.values(), name
        for cls, what in entry["classes"].items():
            assert what["kind"] in {SELF, UNSUPPORTED, *LEFT_ALONE}, cls
            assert bool(what["reason"]) == (what["kind"] != SELF), cls


def test_no_class_that_was_run_lacked_its_own_values(table):
    failed = {
        name: e["not_run"]
        for name, e in table.items()
        if "is not known; leave this layer out" in e.get("not_run", "")
    }
    assert failed == {}


@pytest.mark.parametrize("name", SAMPLES)
def test_walking_again_finds_what_is_written(name, table):
    assert walk.visit(name, walk.model_types()[name]) == table[name]


def test_the_table_names_a_model_for_every_class_that_was_run(table):
    shown = {row.cls: row for row in rows()}
    assert shown["llama.modeling_llama.LlamaAttention"].how == "AttentionInterface"
    assert shown["llama.modeling_llama.LlamaAttention"].tested
    assert shown["bloom.modeling_bloom.BloomAttention"].how.startswith("not covered")
    assert not shown["bloom.modeling_bloom.BloomAttention"].tested
    assert all(row.how for row in coverage())
    assert not set(unbuilt()) & {"llama", "bert", "vit"}
