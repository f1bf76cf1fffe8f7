"""timm: every file of its models and layers is walked, so that no attention class is overlooked."""

from __future__ import annotations

import ast
import functools
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from zoo import TIMM, VIT

from xsa_core.adapters import SELF, convert, converted_layers, describe, set_strength
from xsa_core.adapters.timm import ADAPTER

timm = pytest.importorskip("timm")

# Models that the zoo makes by name.
ZOO = [name for case in TIMM if timm.is_model(name := case.name.removeprefix("timm-"))]

NAME = re.compile(r"attention|attn|msa$|mhsa|xca|mla$", re.IGNORECASE)
BODY = re.compile(
    r"self\.(qkv|qk|q|kv|q_proj|wq|query|to_q|to_qkv|in_proj|qkvs|queries|pwise)\s*="
    r"|scaled_dot_product|softmax\("
)
# Modules that hold one of the classes of the tables and compute no attention themselves, or none at all.
AROUND = {
    "models._efficientnet_blocks.MobileAttention",
    "models.byobnet.SelfAttnBlock",
    "models.cait.LayerScaleBlockClassAttn",
    "models.crossvit.CrossAttentionBlock",
    "models.csatv2.SpatialAttention",
    "models.efficientvim.EfficientViM",
    "models.efficientvim.EfficientViMDistilled",
    "models.efficientvit_msra.LocalWindowAttention",
    "models.fastvit.AttentionBlock",
    "models.maxxvit.ParallelPartitionAttention",
    "models.maxxvit.PartitionAttention2d",
    "models.maxxvit.PartitionAttentionCl",
    "models.xcit.ClassAttentionBlock",
    "models.xcit.XCABlock",
    "layers.split_attn.RadixSoftmax",
}
# The smallest model of each file with attention, where the name of the file does not give one.
SMALL = {
    "byoanet": "botnet26t_256",
    "crossvit": "crossvit_tiny_240",
    "levit": "levit_128s",
    "maxxvit": "coatnet_nano_rw_224",
    "metaformer": "caformer_s18",
    "mobilevit": "mobilevit_xxs",
    "vision_transformer_hybrid": "vit_tiny_r_s16_p8_224",
}


def files() -> Iterator[tuple[str, str]]:
    """Name below timm and text of every file of its models and layers; old names of moved files left out."""
    for package in ("timm.models", "timm.layers"):
        (directory,) = importlib.import_module(package).__path__
        for path in sorted(Path(directory).glob("*.py")):
            text = path.read_text(encoding="utf-8")
            if "is deprecated, please import via" not in text:
                yield f"{package}.{path.stem}".removeprefix("timm."), text


@functools.cache
def modules() -> dict[str, str]:
    """Every module class that a file of timm defines, by its name below timm -> its source."""
    found = {}
    for name, text in files():
        defined = vars(importlib.import_module(f"timm.{name}"))
        lines = text.splitlines()
        for node in ast.parse(text).body:
            cls = defined.get(node.name) if isinstance(node, ast.ClassDef) else None
            if isinstance(cls, type) and issubclass(cls, nn.Module):
                found[f"{name}.{node.name}"] = "\n".join(lines[node.lineno - 1 : node.end_lineno])
    return found


def test_every_attention_class_of_every_file_is_converted_or_named() -> None:
    known = {name.removeprefix("timm.") for name in (*ADAPTER.layers, *ADAPTER.others)}
    found = {
        name
        for name, source in modules().items()
        if NAME.search(name.rpartition(".")[2]) or BODY.search(source)
    }
    assert len(found) > 90
    assert found - known - AROUND == set()
    assert AROUND - found == set()


def test_every_class_of_the_tables_is_there() -> None:
    tables = {name.removeprefix("timm.") for name in (*ADAPTER.layers, *ADAPTER.others)}
    assert tables - set(modules()) == set()
    assert not set(ADAPTER.layers) & set(ADAPTER.others)


def attention_files() -> list[str]:
    """Files of models that speak of attention and that no model of the zoo stands for."""
    built = {timm.models.model_entrypoint(name).__module__ for name in ZOO}
    return [
        name.removeprefix("models.")
        for name, text in files()
        if name.startswith("models.")
        and f"timm.{name}" not in built
        and re.search("Attention|Attn|SHMA|SHSA|LiteMLA|HSMSSD", text)
        and timm.list_models(module=name.removeprefix("models."))
    ]


@pytest.mark.parametrize("file", attention_files())
def test_a_model_of_every_file_with_attention_converts_or_says_why_not(file: str) -> None:
    """On the meta device: what is converted or left alone is one of the tables', and none is a stranger."""
    names = sorted(timm.list_models(module=file), key=len)
    model = timm.create_model(SMALL.get(file, names[0]), device="meta")
    kinds = {row.kind for row in describe(model)}
    if SELF in kinds:
        assert converted_layers(convert(model))
    else:
        with pytest.raises(ValueError, match=r"has no self attention to convert|cannot be converted"):
            convert(model)


@pytest.mark.parametrize(
    ("name", "kind"),
    [("xcit_nano_12_p16_224", "channel"), ("coat_tiny", "linear"), ("halonet26t", "halo")],
)
def test_models_without_token_self_attention_are_refused_with_the_reason(name: str, kind: str) -> None:
    model = timm.create_model(name, device="meta")
    with pytest.raises(ValueError, match=kind):
        convert(model)


def small_vit(**options: object) -> nn.Module:
    torch.manual_seed(0)
    return timm.create_model("vit_tiny_patch16_224", num_classes=3, **(VIT | options)).eval()


@pytest.mark.parametrize("option", ["bool", "float", "causal"])
def test_attention_masks_mean_what_they_mean_in_timm(option: str) -> None:
    attention = small_vit().blocks[0].attn.double()
    x = torch.randn(2, 5, 32, dtype=torch.float64)
    visible = torch.eye(5, dtype=torch.bool) | (torch.rand(5, 5) < 0.5)
    call = {
        "bool": {"attn_mask": visible},
        "float": {"attn_mask": torch.randn(2, 2, 5, 5, dtype=torch.float64)},
        "causal": {"is_causal": True},
    }[option]
    expected = attention(x, **call)
    got = convert(attention, strength=1e-200)(x, **call)
    assert (got - expected).abs().max() <= 64 * torch.finfo(torch.float64).eps * expected.abs().max()


def test_dropout_of_attention_acts_in_training_alone() -> None:
    model = convert(small_vit(attn_drop_rate=0.5))
    x = torch.randn(1, 3, 32, 32)
    assert torch.equal(model(x), model(x))
    model.train()
    assert not torch.equal(model(x), model(x))


def test_features_and_resized_heads_work_on_a_converted_model() -> None:
    """What people do with a backbone: intermediate features, another number of classes."""
    model = convert(small_vit())
    plain = small_vit()
    x = torch.randn(2, 3, 32, 32)
    ours, theirs = (m.forward_intermediates(x, intermediates_only=True) for m in (model, plain))
    assert [f.shape for f in ours] == [f.shape for f in theirs]
    assert not torch.equal(ours[-1], theirs[-1])
    set_strength(model, 0.0)
    assert torch.equal(model.forward_features(x), plain.forward_features(x))
    model.reset_classifier(7)
    assert model(x).shape == (2, 7)


def test_a_fine_tuned_model_learns_with_the_strength_raised_step_by_step() -> None:
    """The schedule of the fine-tuning example: loss falls while exclusion comes in."""
    torch.manual_seed(0)
    model = convert(small_vit(), strength=0.0).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    x, labels = torch.randn(12, 3, 32, 32), torch.arange(12) % 3
    losses = []
    for step in range(25):
        set_strength(model, min(1.0, step / 15))
        loss = nn.functional.cross_entropy(model(x), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert {layer.strength for layer in converted_layers(model).values()} == {1.0}
    assert losses[-1] < 0.5 * losses[0]


def test_padded_patches_have_no_influence() -> None:
    torch.manual_seed(0)
    model = timm.create_model(
        "naflexvit_base_patch16_gap", embed_dim=32, depth=2, num_heads=2, num_classes=4, init_values=None
    )
    model = convert(model.double().eval())
    patches = torch.randn(2, 9, 3 * 16 * 16, dtype=torch.float64)
    rows, columns = torch.meshgrid(torch.arange(3), torch.arange(3), indexing="ij")
    options = {
        "patch_coord": torch.stack((rows, columns), dim=-1).reshape(1, 9, 2).expand(2, -1, -1),
        "patch_valid": torch.arange(9) < torch.tensor([[9], [6]]),
    }
    noisy = torch.where(options["patch_valid"][..., None], patches, 7.0)
    with torch.no_grad():
        assert torch.equal(model(patches, **options), model(noisy, **options))
        assert bool(torch.isfinite(model(patches, **options)).all())
