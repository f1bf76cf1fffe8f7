"""What conversion is given: the forms that are read, those that are refused, and what stays as it was."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from xsa_core.adapters import convert, converted_layers, describe, revert, set_strength

LAYERS = 3


def encoder() -> nn.TransformerEncoder:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False).eval()


def converted(model: nn.Module) -> list[int]:
    return [i for i, row in enumerate(describe(model)) if row.variant is not None]


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        (np.array([0, 1]), [0, 1]),
        ([np.int64(1)], [1]),
        (torch.tensor([2]), [2]),
        ([torch.tensor(0), -1], [0, 2]),
        ({0, 2}, [0, 2]),
    ],
)
def test_indices_of_any_integral_type_choose_layers(layers: Any, expected: list[int]) -> None:
    assert converted(convert(encoder(), layers=layers)) == expected


@pytest.mark.parametrize(
    "layers",
    ["first:0", "none", [], None, 2, b"all", {0: 1}, [True, False, True], [0.0], torch.tensor(1), ["all"]],
)
def test_other_layers_are_refused_in_one_line_that_shows_them(layers: Any) -> None:
    model = encoder()
    for change in (convert, revert):
        with pytest.raises(ValueError, match=re.escape(repr(layers))) as caught:
            change(model, layers=layers)
        assert "\n" not in str(caught.value)
    assert not converted(model)


@pytest.mark.parametrize("strength", [np.float32(0.25), np.float64(0.25), torch.tensor(0.25), np.array(0.25)])
def test_a_strength_of_any_real_type_is_that_number(strength: Any) -> None:
    model = convert(encoder(), strength=strength)
    assert {e.strength for e in converted_layers(model).values()} == {0.25}
    other = set_strength(convert(encoder()), strength)
    assert {type(e.strength) for e in converted_layers(other).values()} == {float}
    assert torch.equal(model(torch.ones(1, 4, 8)), other(torch.ones(1, 4, 8)))


@pytest.mark.parametrize("strength", ["1", None, 1j, torch.tensor([0.5, 0.2]), torch.tensor(1j), torch.nan])
def test_other_strengths_are_refused(strength: Any) -> None:
    model = convert(encoder())
    for change in (lambda: convert(encoder(), strength=strength), lambda: set_strength(model, strength)):
        with pytest.raises(ValueError, match="strength must be a finite number"):
            change()
    assert {e.strength for e in converted_layers(model).values()} == {1.0}


def test_a_strength_that_one_layer_cannot_have_changes_none() -> None:
    model = convert(convert(encoder(), layers="first:2"), layers="last:1", variant="xsa_learned")
    with pytest.raises(ValueError, match="xsa_learned"):
        set_strength(model, 0.5)
    assert [e.strength for e in converted_layers(model).values()] == [1.0, 1.0, None]


@pytest.mark.parametrize(
    ("model", "message"), [("x", "got str"), (None, "got NoneType"), (nn.Linear, "the class Linear")]
)
def test_what_is_no_model_is_refused_by_every_call(model: Any, message: str) -> None:
    for call in (convert, revert, lambda model: set_strength(model, 0.5)):
        with pytest.raises(ValueError, match=message):
            call(model)


class Doubled(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return 2 * weight


def test_a_layer_whose_class_was_exchanged_since_is_not_reverted_into_a_broken_one() -> None:
    model, x = convert(encoder()), torch.ones(1, 4, 8)
    attention = model.layers[1].self_attn
    nn.utils.parametrize.register_parametrization(attention, "in_proj_weight", Doubled())
    before = model(x)
    for change in (revert, lambda model: convert(model, variant="sa")):
        with pytest.raises(ValueError, match="register_parametrization"):
            change(model)
        assert converted(model) == [0, 1, 2]
        assert torch.equal(model(x), before)
    nn.utils.parametrize.remove_parametrizations(attention, "in_proj_weight", leave_parametrized=False)
    assert torch.equal(revert(model)(x), encoder()(x))
