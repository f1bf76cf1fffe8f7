"""Attention that no adapter knows is seen by the names of its projections, by its code, or by its name."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from xsa_core.adapters import convert, converted_layers
from xsa_core.adapters.recognize import looks_like_attention

C = 8


class Mixer(nn.Module):
    """Projections of any names; its code says nothing."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        for name in names:
            setattr(self, name, nn.Linear(C, C))


@pytest.mark.parametrize(
    "names",
    [
        "query_proj key_proj value_proj",
        "W_Q W_K W_V",
        "Wq Wk Wv",
        "queries keys values",
        "fc_q fc_k fc_v",
        "q_linear k_linear v_linear",
        "to_queries to_keys to_values",
        "lin_q lin_k lin_v",
        "Q K V",
        "query_layer key_layer value_layer",
        "w_qs w_ks w_vs",
        "proj_q proj_k proj_v",
        "q_net k_net v_net",
        "q_a_proj k_a_proj v",
        "q kv",
        "query_projection key_value_projection",
        "to_qkv out",
        "qkv_linear out",
    ],
)
def test_projections_are_seen_under_the_names_people_give_them(names: str) -> None:
    assert looks_like_attention(Mixer(*names.split()))


@pytest.mark.parametrize(
    "names",
    ["quantizer kernel", "encoder_q encoder_k", "q_norm k_norm", "in_proj out_proj", "fc1 fc2", "query"],
)
def test_other_names_are_not_taken_for_projections(names: str) -> None:
    assert not looks_like_attention(Mixer(*names.split()))


class Fused(Mixer):
    def __init__(self) -> None:
        super().__init__("theta", "phi", "g")

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(self.theta(x), self.phi(x), self.g(x))


class Explicit(Mixer):
    def __init__(self) -> None:
        super().__init__("theta", "phi", "g")

    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(self.theta(x) @ self.phi(x).mT / math.sqrt(C), dim=-1) @ self.g(x)


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.in_proj = nn.Linear(C, 3 * C)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.in_proj(x).chunk(3, dim=-1)
        return torch.einsum("bts,bsc->btc", torch.einsum("btc,bsc->bts", q, k).softmax(-1), v)


def weighted_mean(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.bmm(torch.bmm(q, k.transpose(1, 2)).softmax(dim=-1), v)


class ByHelper(Mixer):
    def __init__(self) -> None:
        super().__init__("a1", "a2", "a3")

    def forward(self, x: Tensor) -> Tensor:
        return weighted_mean(self.a1(x), self.a2(x), self.a3(x))


class Inherited(Explicit):
    """Its code lies in its base."""


@pytest.mark.parametrize("stranger", [Fused, Explicit, Packed, ByHelper, Inherited])
def test_code_that_attends_stops_conversion_whatever_its_names(stranger: type[nn.Module]) -> None:
    model = nn.Sequential(nn.TransformerEncoderLayer(C, 2, C, batch_first=True), stranger())
    with pytest.raises(ValueError, match="looks like attention and no adapter knows it") as caught:
        convert(model)
    assert stranger.__name__ in str(caught.value)
    assert not converted_layers(model)


class Router(nn.Module):
    """A mixture of experts: a softmax and products, one projection."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(C, 4), nn.Linear(C, 2 * C), nn.Linear(2 * C, C)

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("bte,btc->btc", self.gate(x).softmax(-1), self.down(self.up(x)))


class Gated(Mixer):
    """Three projections of one input and no softmax."""

    def __init__(self) -> None:
        super().__init__("a1", "a2", "a3")

    def forward(self, x: Tensor) -> Tensor:
        return (self.a1(x) @ self.a2(x).mT) @ self.a3(x)


class Classifier(nn.Module):
    """A model around known attention, with a softmax and a product of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.TransformerEncoderLayer(C, 2, C, batch_first=True)
        self.pool, self.head = nn.Linear(C, 1), nn.Linear(C, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.pool(x).softmax(1).mT @ self.body(x))


@pytest.mark.parametrize("harmless", [Router, Gated, Classifier])
def test_a_softmax_or_products_alone_are_not_taken_for_attention(harmless: type[nn.Module]) -> None:
    model = nn.Sequential(nn.TransformerEncoderLayer(C, 2, C, batch_first=True), harmless())
    convert(model)
    assert "0.self_attn" in converted_layers(model)
