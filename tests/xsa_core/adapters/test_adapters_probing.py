"""Figure 1 of models of other libraries: also of one that is converted in part."""

from __future__ import annotations

import torch
from torch import nn

from xsa_core.adapters import convert, converted_layers
from xsa_core.adapters.probing import probe_as_it_stands, probe_converted

LAYERS = 3


def encoder() -> nn.TransformerEncoder:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False).eval()


def test_a_model_converted_in_part_is_seen_whole_and_stays_as_it_was() -> None:
    x = torch.randn(2, 5, 8)
    model = convert(encoder(), layers=[1])
    before = model(x)
    rows = probe_as_it_stands(model, [x])
    assert [(row.layer, row.variant) for row in rows] == [(0, "sa"), (1, "xsa"), (2, "sa")]
    assert list(converted_layers(model)) == ["layers.1.self_attn"]
    assert torch.equal(model(x), before)
    first, plain = rows[0].means(), probe_as_it_stands(encoder(), [x])[0].means()
    assert first == plain  # nothing before the first layer differs


def test_layers_keep_the_numbers_they_have_in_the_model() -> None:
    rows = probe_converted(convert(encoder(), layers="last:2"), [torch.randn(2, 5, 8)])
    assert [row.layer for row in rows] == [1, 2]
    assert [row.name for row in rows] == ["layers.1.self_attn", "layers.2.self_attn"]
