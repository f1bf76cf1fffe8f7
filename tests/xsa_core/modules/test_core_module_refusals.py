"""What SelfAttention refuses, each in one clear line, and which layers a selection means."""

import pytest
import torch
from small_layers import make_layer

from xsa_core.attention.module import SelfAttention, select_layers


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        ("all", {0, 1, 2, 3}),
        ("none", set()),
        ("first:2", {0, 1}),
        ("last:1", {3}),
        ("first:0", set()),
        ([0, -1], {0, 3}),
        ((), set()),
    ],
)
def test_layer_selection(layers, expected):
    assert select_layers(layers, 4) == expected


@pytest.mark.parametrize("layers", ["half", "first:", "first:5", "last:-1", [4], [-5], ["all"], [True]])
def test_wrong_layer_selection_is_one_clear_line(layers):
    with pytest.raises(ValueError, match="layers") as caught:
        select_layers(layers, 4)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "options",
    [
        {"d_model": 10},
        {"n_kv_heads": 3},
        {"rope_base": 10.0, "rotary_dim": 3},
        {"variant": "xxa"},
        {"variant": "sa", "strength": 0.5},
        {"strength": float("nan")},
    ],
)
def test_wrong_options_are_one_clear_line(options):
    with pytest.raises(ValueError, match=r"\w+") as caught:
        SelfAttention(**({"d_model": 12, "n_heads": 4} | options))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backend": "flash"}, "unknown attention backend 'flash'; use 'auto' or one of reference"),
        ({"backend": None}, "unknown attention backend None"),
        ({"dropout": 1.5}, r"dropout must be in \[0, 1\), got 1.5"),
        ({"dropout": -1}, r"dropout must be in \[0, 1\), got -1"),
        ({"dropout": 0.1, "n_sinks": 1}, "dropout cannot be combined with n_sinks: set one of them to 0"),
        ({"n_sinks": -1}, "n_sinks must be an integer of 0 or more, got -1"),
        ({"n_sinks": 1.0}, "n_sinks must be an integer"),
        ({"rope_base": 0.0}, "rope_base must be a positive number"),
        ({"rope_base": -1.0}, "rope_base must be a positive number"),
        ({"rope_base": float("nan")}, "rope_base must be a positive number"),
        ({"rotary_dim": 2}, "rotary_dim needs rope_base"),
        ({"n_heads": 0}, "n_heads must be a positive integer, got 0"),
        ({"n_kv_heads": 0}, "n_kv_heads must be a positive integer, got 0"),
        ({"head_dim": 0}, "head_dim must be a positive integer, got 0"),
        ({"head_dim": -8}, "head_dim must be a positive integer, got -8"),
        ({"head_dim": 8.0}, "head_dim must be a positive integer, got 8.0"),
        ({"d_model": 0}, "d_model must be a positive integer, got 0"),
    ],
    ids=str,
)
def test_a_size_or_option_that_cannot_be_is_refused_when_the_layer_is_made(options, message):
    with pytest.raises(ValueError, match=message):
        SelfAttention(**({"d_model": 12, "n_heads": 4} | options))


@pytest.mark.parametrize("layers", [None, 3, 0.5])
def test_layers_of_another_kind_are_one_clear_line(layers):
    with pytest.raises(ValueError, match=r"layers .* not understood: expected"):
        select_layers(layers, 4)


@pytest.mark.parametrize(
    ("x", "options", "message"),
    [
        (torch.ones(7, 16), {}, r"expected x \(B, T, C\) = \(B, T, 16\), got \(7, 16\)"),
        (torch.ones(2, 7, 15), {}, "expected x"),
        (torch.ones(2, 7, 16), {"positions": torch.arange(5)}, r"positions must be .* = \(2, 7\), got"),
        (torch.ones(2, 7, 16), {"positions": torch.zeros(2, 7)}, "positions must be integers"),
        (torch.ones(2, 7, 16), {"positions": [0, 1]}, "positions must be integers"),
        (torch.ones(2, 7, 16), {"value_embedding": torch.ones(2, 7, 3, 4)}, "value_embedding must be"),
        (torch.ones(2, 7, 16), {"value_embedding": torch.ones(1, 2, 7, 2, 4)}, "value_embedding must be"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_inputs_of_another_shape_are_one_clear_line(x, options, message):
    layer = make_layer(n_kv_heads=2, rope_base=10.0, dtype=torch.float32)
    with pytest.raises(ValueError, match=message):
        layer(x, **options)
