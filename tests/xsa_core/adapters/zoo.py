"""Small models of real classes with random weights, one or more for each class that adapters convert."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Case:
    """A model and its input.

    Attributes:
        name: of the case. build: makes the model. inputs: makes its arguments.
        converted: classes that conversion must reach, and no others.
    """

    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[], tuple[Any, ...]]
    converted: frozenset[str]

    def model(self, dtype: torch.dtype = torch.float32) -> nn.Module:
        """The model in evaluation; the same weights at every call."""
        return copy.deepcopy(_prototype(self.name)).to(dtype)

    def arguments(self, dtype: torch.dtype = torch.float32) -> tuple[Any, ...]:
        """Arguments of the model."""
        torch.manual_seed(1)
        return tuple(
            x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x for x in self.inputs()
        )


@functools.cache
def _prototype(name: str) -> nn.Module:
    """A case's model with no parameter that stands still: zeros would hide the attention."""
    torch.manual_seed(0)
    model = CASES[name].build()
    model.eval()  # some layers of timm return nothing here
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.numel() > 1 and not parameter.var() > 1e-6:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def outputs(model: nn.Module, case: Case, dtype: torch.dtype = torch.float32) -> Tensor:
    """The model's first output, without gradients."""
    with torch.no_grad():
        return first(model(*case.arguments(dtype)))


def first(out: Any) -> Tensor:
    """The first tensor of an output."""
    while not isinstance(out, Tensor):
        out = out[0] if isinstance(out, tuple | list) else next(iter(out.values()))
    return out


def image(size: int, batch: int = 2) -> Callable[[], tuple[Tensor]]:
    return lambda: (torch.randn(batch, 3, size, size),)


VIT = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2}
SWIN = {"img_size": 32, "embed_dim": 16, "depths": (2, 2), "num_heads": (1, 2), "window_size": 4}


def timm_case(name: str, size: int, classes: str, label: str = "", **options: Any) -> Case:
    def build() -> nn.Module:
        timm = pytest.importorskip("timm")
        return timm.create_model(name, num_classes=5, **options)

    return Case(f"timm-{label or name}", build, image(size), frozenset(classes.split()))


def timm_class(path: str, inputs: Callable[[], tuple[Any, ...]], classes: str, **options: Any) -> Case:
    """A class below timm.models or timm.layers, for models whose options create_model does not pass on."""

    def build() -> nn.Module:
        pytest.importorskip("timm")
        module, _, name = path.rpartition(".")
        found = __import__(f"timm.{module}", fromlist=[name])
        return getattr(found, name)(**options)

    return Case(f"timm-{path}", build, inputs, frozenset(classes.split()))


def tokens(*shape: int) -> Callable[[], tuple[Tensor]]:
    return lambda: (torch.randn(*shape),)


def gemma4_inputs() -> tuple[Any, ...]:
    angles = torch.rand(2, 6, 8)
    return torch.randn(2, 6, 32), angles.cos(), angles.sin()


TIMM = (
    timm_case("vit_tiny_patch16_224", 32, "Attention", **VIT),
    timm_case(
        "vit_tiny_patch16_224",
        32,
        "Attention",
        "map",
        **VIT,
        qk_norm=True,
        scale_attn_norm=True,
        class_token=False,
        global_pool="map",
    ),
    timm_case("vit_small_patch16_rope_224", 32, "AttentionRope", **VIT),
    timm_case("vit_dlittle_patch16_reg1_gap_256", 32, "DiffAttention", **VIT),
    timm_case("deit3_small_patch16_224", 32, "Attention", **VIT),
    timm_case("naflexvit_base_patch16_gap", 32, "Attention", embed_dim=32, depth=2, num_heads=2),
    timm_case("beit_base_patch16_224", 32, "Attention", **VIT),
    timm_case("cait_xxs24_224", 32, "TalkingHeadAttn", **VIT),
    timm_case("convit_tiny", 32, "GPSA MHSA", **VIT, local_up_to_layer=1),
    timm_case("eva02_tiny_patch14_224", 32, "EvaAttention", **VIT),
    timm_case("eva02_base_patch16_clip_224", 32, "EvaAttention", **VIT),
    timm_case("vit_relpos_small_patch16_224", 32, "RelPosAttention", **VIT),
    timm_case(
        "samvit_base_patch16", 32, "Attention", **VIT, global_attn_indexes=(1,), window_size=3, neck_chans=16
    ),
    timm_case(
        "tnt_s_legacy_patch16_224",
        32,
        "Attention",
        img_size=32,
        embed_dim=32,
        inner_dim=16,
        depth=2,
        num_heads_inner=2,
        num_heads_outer=2,
    ),
    timm_case(
        "davit_tiny",
        32,
        "WindowAttention",
        depths=(1, 1),
        embed_dims=(16, 32),
        num_heads=(2, 4),
        window_size=4,
    ),
    timm_case(
        "fastvit_sa12",
        64,
        "Attention",
        layers=(1, 1, 1, 1),
        embed_dims=(8, 8, 16, 32),
        stem_use_scale_branch=False,
    ),
    timm_case("hiera_tiny_224", 64, "MaskUnitAttention", img_size=64, embed_dim=16, stages=(1, 2, 2, 1)),
    timm_case(
        "pvt_v2_b0", 64, "Attention", depths=(1, 1, 1, 1), embed_dims=(8, 16, 16, 32), num_heads=(1, 1, 2, 2)
    ),
    timm_case("swin_tiny_patch4_window7_224", 32, "WindowAttention", **SWIN),
    timm_case("swinv2_tiny_window8_256", 32, "WindowAttention", "swinv2", **SWIN),
    timm_case("swinv2_cr_tiny_224", 32, "WindowMultiHeadAttention", **SWIN),
    timm_case(
        "twins_svt_small",
        64,
        "LocallyGroupedAttn GlobalSubSampleAttn",
        img_size=64,
        embed_dims=(8, 8, 16, 32),
        num_heads=(1, 1, 2, 2),
        depths=(2, 2, 2, 2),
        wss=(3, 3, 3, 3),
    ),
    timm_case(
        "visformer_tiny",
        64,
        "Attention",
        img_size=64,
        init_channels=8,
        embed_dim=32,
        depth=(1, 1, 1),
        num_heads=2,
    ),
    timm_class(
        "models.efficientformer_v2.EfficientFormerV2",
        image(64),
        "Attention2d",
        depths=(1, 1, 2, 2),
        img_size=64,
        embed_dims=(8, 8, 16, 16),
        num_vit=1,
        num_classes=5,
    ),
    timm_class(
        "models.nest.Nest",
        image(32),
        "Attention",
        img_size=32,
        patch_size=2,
        num_levels=2,
        embed_dims=(16, 32),
        num_heads=(2, 2),
        depths=(1, 1),
        num_classes=5,
    ),
    timm_class(
        "models.volo.VOLO",
        image(64),
        "Attention",
        layers=(1, 1),
        img_size=64,
        embed_dims=(16, 32),
        num_heads=(2, 2),
        downsamples=(True, False),
        outlook_attention=(True, False),
        mlp_ratio=2.0,
        post_layers=("ca",),
        stem_hidden_dim=8,
        num_classes=5,
    ),
    timm_class(
        "models.gcvit.GlobalContextVit",
        image(64),
        "WindowAttentionGlobal",
        img_size=64,
        embed_dim=16,
        depths=(2, 2),
        num_heads=(2, 2),
        window_size=(4, 4),
        num_classes=5,
    ),
    timm_class(
        "models.levit.Levit",
        image(64),
        "Attention",
        img_size=64,
        embed_dim=(16, 16),
        key_dim=8,
        depth=(1, 1),
        num_heads=(2, 2),
        num_classes=5,
    ),
    timm_class(
        "models.hieradet_sam2.HieraDet",
        image(64),
        "MultiScaleAttention",
        embed_dim=16,
        stages=(1, 1, 2, 1),
        window_spec=(4, 4, 4, 4),
        global_att_blocks=(3,),
        num_classes=5,
    ),
    timm_class("layers.attention2d.Attention2d", tokens(2, 16, 3, 5), "Attention2d", dim=16, num_heads=2),
    timm_class(
        "layers.attention2d.MultiQueryAttention2d",
        tokens(2, 16, 3, 5),
        "MultiQueryAttention2d",
        dim=16,
        num_heads=2,
    ),
    timm_class(
        "layers.bottleneck_attn.BottleneckAttn",
        tokens(2, 16, 4, 4),
        "BottleneckAttn",
        dim=16,
        feat_size=(4, 4),
        num_heads=2,
    ),
    timm_class("models.maxxvit.Attention2d", tokens(2, 16, 3, 5), "Attention2d", dim=16, dim_head=8),
    timm_class(
        "models.maxxvit.AttentionCl", tokens(2, 3, 5, 16), "AttentionCl", dim=16, dim_head=8, head_first=False
    ),
    timm_class("models.metaformer.Attention", tokens(2, 7, 16), "Attention", dim=16, head_dim=8),
    timm_class(
        "models.nextvit.EfficientAttention", tokens(2, 7, 16), "EfficientAttention", dim=16, head_dim=8
    ),
    timm_class(
        "models.lowformer.ConvAttention", tokens(2, 64, 9, 10), "ConvAttention", input_dim=64, att_stride=2
    ),
    timm_class(
        "models.cpubone.ConvAttention",
        tokens(2, 64, 9, 11),
        "ConvAttention",
        input_dim=64,
        att_stride=2,
        small_kernels=True,
    ),
    timm_class("models.shvit.SHSA", tokens(2, 16, 3, 5), "SHSA", dim=16, qk_dim=4, pdim=8),
    timm_class("models.iformer.SHMA", tokens(2, 16, 5, 6), "SHMA", dim=16, window_size=4),
    timm_class(
        "models.tiny_vit.Attention",
        tokens(2, 12, 16),
        "Attention",
        dim=16,
        key_dim=4,
        num_heads=2,
        resolution=(3, 4),
    ),
    timm_class(
        "models.efficientformer.Attention",
        tokens(2, 9, 16),
        "Attention",
        dim=16,
        key_dim=4,
        num_heads=2,
        resolution=3,
    ),
    timm_class(
        "models.efficientvit_msra.CascadedGroupAttention",
        tokens(2, 16, 4, 4),
        "CascadedGroupAttention",
        dim=16,
        key_dim=4,
        num_heads=2,
        attn_ratio=2,
        resolution=4,
        kernels=(3, 3),
    ),
    timm_class(
        "models.gemma4_vit.Gemma4Attention",
        gemma4_inputs,
        "Gemma4Attention",
        dim=32,
        num_heads=4,
        head_dim=8,
        num_kv_heads=2,
    ),
    timm_class(
        "models.vision_transformer.ParallelScalingBlock",
        tokens(2, 7, 16),
        "ParallelScalingBlock",
        dim=16,
        num_heads=2,
    ),
    timm_class(
        "models.vision_transformer.DiffParallelScalingBlock",
        tokens(2, 7, 16),
        "DiffParallelScalingBlock",
        dim=16,
        num_heads=2,
    ),
)


class CrossAndSelf(nn.Module):
    """`nn.Transformer` as a function of one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.core = nn.Transformer(16, 2, 1, 2, 24, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.core(x, x.flip(1) + 1)


def encoder(**options: Any) -> nn.Module:
    layer = nn.TransformerEncoderLayer(16, 2, 24, dropout=0.0, **options)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


TORCH = (
    Case(
        "torch-encoder",
        functools.partial(encoder, batch_first=True),
        tokens(2, 7, 16),
        frozenset({"MultiheadAttention"}),
    ),
    Case(
        "torch-encoder-sequence-first",
        functools.partial(encoder, norm_first=True),
        tokens(7, 2, 16),
        frozenset({"MultiheadAttention"}),
    ),
    Case("torch-transformer", CrossAndSelf, tokens(2, 7, 16), frozenset({"MultiheadAttention"})),
)

WAV2VEC2 = {
    "extractor_mode": "group_norm",
    "extractor_conv_layer_config": [(8, 10, 5), (8, 3, 2)],
    "extractor_conv_bias": False,
    "encoder_embed_dim": 16,
    "encoder_projection_dropout": 0.0,
    "encoder_pos_conv_kernel": 8,
    "encoder_pos_conv_groups": 4,
    "encoder_num_layers": 2,
    "encoder_num_heads": 2,
    "encoder_attention_dropout": 0.0,
    "encoder_ff_interm_features": 24,
    "encoder_ff_interm_dropout": 0.0,
    "encoder_dropout": 0.0,
    "encoder_layer_norm_first": False,
    "encoder_layer_drop": 0.0,
    "aux_num_out": None,
}


def audio(name: str, **options: Any) -> nn.Module:
    models = pytest.importorskip("torchaudio").models
    return getattr(models, name)(**options)


def waves() -> tuple[Tensor]:
    return (torch.randn(2, 300),)


def frames_and_lengths() -> tuple[Tensor, Tensor]:
    return torch.randn(2, 11, 16), torch.tensor([11, 8])


TORCHAUDIO = (
    Case(
        "audio-wav2vec2",
        functools.partial(audio, "wav2vec2_model", **WAV2VEC2),
        waves,
        frozenset({"SelfAttention"}),
    ),
    Case(
        "audio-wav2vec2-lengths",
        functools.partial(audio, "wav2vec2_model", **WAV2VEC2),
        lambda: (torch.randn(2, 300), torch.tensor([300, 200])),
        frozenset({"SelfAttention"}),
    ),
    Case(
        "audio-wavlm",
        functools.partial(audio, "wavlm_model", **WAV2VEC2, encoder_num_buckets=16, encoder_max_distance=20),
        waves,
        frozenset({"WavLMSelfAttention"}),
    ),
    Case(
        "audio-conformer",
        functools.partial(
            audio,
            "Conformer",
            input_dim=16,
            num_heads=2,
            ffn_dim=24,
            num_layers=2,
            depthwise_conv_kernel_size=3,
        ),
        frames_and_lengths,
        frozenset({"MultiheadAttention"}),
    ),
)

CASES = {case.name: case for case in (*TORCH, *TIMM, *TORCHAUDIO)}
assert len(CASES) == len(TORCH) + len(TIMM) + len(TORCHAUDIO)
