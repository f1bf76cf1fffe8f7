"""Conversion as a whole: which layers, what is refused, converting again and in part, saved weights."""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import xsa_core
from xsa_core.adapters import ADAPTERS, Settings, convert, converted_layers, coverage, describe, revert
from xsa_core.adapters import registry as registry_module
from xsa_core.adapters.recognize import looks_like_attention
from xsa_core.adapters.registry import set_strength

LAYERS = 4


def encoder() -> nn.TransformerEncoder:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False).eval()


def strengths(model: nn.Module) -> list[float | None]:
    """Strength of each layer in order, None for a plain one."""
    return [row.strength for row in describe(model)]


def classes(model: nn.Module) -> list[type]:
    return [type(module) for module in model.modules()]


X = torch.randn(2, 5, 8)


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        ("all", [0, 1, 2, 3]),
        ("first:1", [0]),
        ("last:3", [1, 2, 3]),
        ([0, 2], [0, 2]),
        ([-1], [3]),
        (range(1, 3), [1, 2]),
        (lambda path: path.startswith(("layers.1.", "layers.3.")), [1, 3]),
    ],
)
def test_layers_are_chosen_in_the_order_of_the_model(layers: Any, expected: Sequence[int]) -> None:
    model = convert(encoder(), layers=layers)
    assert [i for i, s in enumerate(strengths(model)) if s is not None] == list(expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layers": "first:9"}, "asks for 9 of 4 layers"),
        ({"layers": [4]}, "layers 0 to 3"),
        ({"layers": "some"}, "not understood"),
        ({"layers": lambda path: False}, "gets the module path"),
        ({"strength": math.nan}, "finite"),
        ({"strength": "1"}, "finite"),
        ({"variant": "xs"}, "unknown attention variant"),
        ({"variant": "xsa_learned", "strength": 0.5}, "no fixed strength"),
        ({"backend": "fast"}, "unknown attention backend"),
    ],
)
def test_wrong_settings_are_refused_and_change_nothing(options: dict, message: str) -> None:
    model = encoder()
    before = classes(model)
    with pytest.raises(ValueError, match=message) as caught:
        convert(model, **options)
    assert "\n" not in str(caught.value)
    assert classes(model) == before


def test_converting_again_sets_the_strength_of_the_chosen_layers_alone() -> None:
    model = convert(encoder(), strength=0.25)
    convert(model, layers="last:2", strength=0.75)
    assert strengths(model) == [0.25, 0.25, 0.75, 0.75]
    held = converted_layers(model)
    convert(model, strength=1.0)
    assert strengths(model) == [1.0] * LAYERS
    assert converted_layers(model) == held
    once = convert(encoder())
    assert torch.equal(model(X), once(X))


def test_converting_again_keeps_what_was_learned_and_another_variant_replaces_it() -> None:
    model = convert(encoder(), variant="xsa_learned")
    parameter = model.get_parameter("layers.0.self_attn.exclusion.variant.raw_strength")
    with torch.no_grad():
        parameter.fill_(0.5)
    convert(model, variant="xsa_learned")
    assert model.get_parameter("layers.0.self_attn.exclusion.variant.raw_strength") is parameter
    convert(model, variant="xsa")
    assert torch.equal(model(X), convert(encoder())(X))


def test_learned_parameters_have_the_one_stated_name() -> None:
    model = convert(encoder(), variant="xsa_learned")
    added = {name for name, _ in model.named_parameters()} - {n for n, _ in encoder().named_parameters()}
    assert added == {f"layers.{i}.self_attn.exclusion.variant.raw_strength" for i in range(LAYERS)}
    roles = xsa_core.parameter_roles(model)
    assert {roles[name].role for name in added} == {xsa_core.Role.STRENGTH}
    model(X).sum().backward()
    assert all(model.get_parameter(name).grad.any() for name in added)


def test_reverting_a_part_leaves_the_rest() -> None:
    plain, model = encoder(), convert(encoder(), strength=0.5)
    revert(model, layers="first:2")
    assert strengths(model) == [None, None, 0.5, 0.5]
    assert torch.equal(model(X), convert(encoder(), layers="last:2", strength=0.5)(X))
    revert(model)
    assert torch.equal(model(X), plain(X))
    assert classes(model) == classes(plain)
    assert not model._load_state_dict_pre_hooks
    assert classes(revert(model)) == classes(plain)  # nothing left to revert


def test_the_strength_moves_the_output_from_the_original_to_the_exclusive_one() -> None:
    model = convert(encoder())
    ends = encoder()(X), model(X)
    distances = []
    for s in (0.0, 0.25, 0.5, 0.75, 1.0):
        set_strength(model, s)
        distances.append(float((model(X) - ends[0]).detach().norm()))
    assert distances == sorted(distances)
    assert distances[0] == 0
    assert torch.equal(model(X), ends[1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_casting_the_model_does_not_round_the_strength(dtype: torch.dtype) -> None:
    model = convert(encoder(), strength=0.3).to(dtype)
    values = {float(layer.variant.strength) for layer in converted_layers(model).values()}
    assert values == {0.3}
    x = X.to(dtype)
    assert torch.equal(model(x), convert(encoder().to(dtype), strength=0.3)(x))


def test_strengths_nobody_can_set_are_refused() -> None:
    with pytest.raises(ValueError, match="convert"):
        set_strength(encoder(), 0.5)
    with pytest.raises(ValueError, match="no fixed strength"):
        set_strength(convert(encoder(), variant="xsa_learned"), 0.5)
    with pytest.raises(ValueError, match="convert the model to one of xsa"):
        set_strength(convert(encoder(), variant="xsa_learned"), 1.0)
    with pytest.raises(ValueError, match="finite"):
        set_strength(convert(encoder()), math.inf)


class MyAttention(nn.Module):
    """Attention that no adapter can know."""

    def __init__(self) -> None:
        super().__init__()
        self.to_qkv = nn.Linear(8, 24)


class Renamed(nn.Module):
    """The same without the word."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj = nn.Linear(8, 8), nn.Linear(8, 8)


class OwnForward(nn.MultiheadAttention):
    """A known class made into another."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


@pytest.mark.parametrize(
    "stranger", [MyAttention, Renamed, lambda: OwnForward(8, 2)], ids=["name", "projections", "own forward"]
)
def test_an_unknown_attention_stops_conversion_before_anything_is_touched(stranger: Any) -> None:
    model = nn.ModuleDict({"known": encoder(), "mine": nn.Sequential(nn.Linear(8, 8), stranger())})
    before = classes(model)
    with pytest.raises(ValueError, match=r"mine\.1 \(") as caught:
        convert(model)
    assert type(model["mine"][1]).__name__ in str(caught.value)
    assert classes(model) == before
    (row,) = [row for row in describe(model) if row.path.startswith("mine")]
    assert row.kind in ("unknown", "unsupported")
    assert row.reason
    convert(model, layers=lambda path: not path.startswith("mine"))
    assert sum(row.variant is not None for row in describe(model)) == LAYERS


def test_blocks_around_attention_and_other_layers_are_not_taken_for_attention() -> None:
    class AttentionBlock(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn, self.mlp = nn.MultiheadAttention(8, 2), nn.Linear(8, 8)
            self.output, self.bias = SomeAttentionOutput(8, 8), RelativeAttentionBias(8, 8)

    class SomeAttentionOutput(nn.Linear):
        pass

    class RelativeAttentionBias(nn.Embedding):
        pass

    convert(AttentionBlock())
    for harmless in (nn.Linear(8, 8), nn.LSTM(8, 8), nn.Conv2d(3, 3, 1), nn.Embedding(4, 4)):
        assert not looks_like_attention(harmless)
        with pytest.raises(ValueError, match="no self attention"):
            convert(nn.Sequential(harmless))
    with pytest.raises(ValueError, match="variant="):
        convert(xsa_core.SelfAttention(8, 2))


def test_a_failure_while_checking_leaves_the_model_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last of the layers cannot be converted: neither are those before it."""
    adapter = ADAPTERS["torch.nn"]

    def refuse(model: nn.Module, found: Sequence[Any], settings: Settings) -> None:
        raise ValueError(f"{found[-1].path} cannot")

    monkeypatch.setattr(adapter, "check", refuse)
    model = encoder()
    before = classes(model)
    with pytest.raises(ValueError, match="cannot"):
        convert(model)
    assert classes(model) == before


def test_models_wrapped_for_training_are_refused() -> None:
    class DistributedDataParallel(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

    wrapped = DistributedDataParallel(encoder())
    with pytest.raises(ValueError, match="convert the model first"):
        convert(wrapped, variant="xsa_learned")
    assert strengths(convert(wrapped)) == [1.0] * LAYERS  # adds no parameters


def test_weights_converted_in_other_layers_or_to_another_variant_are_refused() -> None:
    state = convert(encoder()).state_dict()
    part = convert(encoder(), layers="last:2")
    for strict in (True, False):
        with pytest.raises(RuntimeError, match="exclusive in 4 layers and the model in 2"):
            part.load_state_dict(state, strict=strict)
    with pytest.raises(ValueError, match="'xsa', the model was converted to 'head_norm'"):
        convert(encoder(), variant="head_norm").load_state_dict(state, strict=False)
    with pytest.raises(RuntimeError, match="exclusion"):
        encoder().load_state_dict(state)
    whole = nn.Sequential(nn.Identity(), convert(encoder()))
    with pytest.raises(RuntimeError, match="exclusive in 2 layers and the model in 4"):
        whole.load_state_dict({f"1.{key}": value for key, value in part.state_dict().items()})


@pytest.mark.parametrize("variant", ["xsa", "xsa_learned", "random_direction", "head_norm"])
def test_saved_weights_come_back_whole_and_plain_ones_load_strictly(variant: str) -> None:
    model = convert(encoder(), variant=variant)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.is_floating_point() and tensor.dim():
                tensor.mul_(1.25)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    state = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    assert all(isinstance(value, torch.Tensor) for value in state.values())
    twin = convert(encoder(), variant=variant)
    twin.load_state_dict(state)
    assert torch.equal(twin(X), model(X))
    held = copy.deepcopy(dict(twin.state_dict()))
    twin.load_state_dict(encoder().state_dict(), strict=True)
    for name, value in twin.state_dict().items():
        if "exclusion" in name:
            assert torch.equal(torch.nan_to_num(value), torch.nan_to_num(held[name])), name


def test_a_model_without_memory_can_be_converted_and_filled_later() -> None:
    with torch.device("meta"):
        model = convert(encoder(), strength=0.5)
    model.to_empty(device="cpu").load_state_dict(encoder().state_dict())
    assert torch.equal(model.eval()(X), convert(encoder(), strength=0.5)(X))


def test_the_first_adapter_that_knows_a_module_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    model = encoder()
    (whole,) = [replace(row, kind="cross", reason="r") for row in ADAPTERS["torch.nn"].find(model)][:1]

    class Greedy:
        name = "greedy"

        def find(self, model: nn.Module) -> list:
            return [replace(whole, path="layers.0", module=model.get_submodule("layers.0"), adapter="greedy")]

    monkeypatch.setattr(registry_module, "ADAPTERS", {"greedy": Greedy(), **ADAPTERS})
    rows = describe(model)
    assert [(r.adapter, r.path) for r in rows[:2]] == [
        ("greedy", "layers.0"),
        ("torch.nn", "layers.1.self_attn"),
    ]


def test_the_coverage_table_says_how_or_why_not() -> None:
    rows = coverage()
    assert {row.library for row in rows} >= {"torch.nn", "timm", "torchaudio"}
    assert len({(row.library, row.cls) for row in rows}) == len(rows)
    for row in rows:
        assert not (row.how.startswith("not covered: ") and row.tested), row
        assert len(row.how.split(": ")[-1]) > 5, row
