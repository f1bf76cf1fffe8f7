"""A timm Vision Transformer as a classifier, with roles for its parameters and our attention in it.

Axis legend: B images, C colour channels, S pixels of a side, K classes.
"""

import pickle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tasks.vision.config import VisionModelConfig
from xsa_core.adapters import convert
from xsa_core.initialization import seed_buffers
from xsa_core.roles import ParameterRole, Role

# Our names of sizes -> timm's
ARGUMENTS = {
    "patch_size": "patch_size",
    "width": "embed_dim",
    "depth": "depth",
    "n_heads": "num_heads",
    "mlp_ratio": "mlp_ratio",
    "pooling": "global_pool",
    "class_token": "class_token",
    "registers": "reg_tokens",
    "qk_norm": "qk_norm",
}
# Learned tokens and positions, by the last part of their name
TOKENS = {"cls_token", "reg_token", "pos_embed", "dist_token", "latent"}
SCALES = {"gamma"}  # LayerScale


class ImageClassifier(nn.Module):
    """`B C S S -> B K`. Its `vit` is timm's model with timm's parameter names.

    Args:
        vit: the model.
    """

    def __init__(self, vit: nn.Module) -> None:
        super().__init__()
        self.vit = vit

    def forward(self, images: Tensor) -> Tensor:
        """Return logits."""
        return self.vit(images)

    def declared_roles(self) -> dict[str, ParameterRole]:
        """Roles that the classes of the parameters' owners do not tell."""
        found: dict[str, ParameterRole] = {}
        head = self.vit.get_classifier()
        for name, parameter in self.vit.named_parameters():
            owner, _, leaf = name.rpartition(".")
            module = self.vit.get_submodule(owner)
            if leaf in TOKENS:
                found[f"vit.{name}"] = ParameterRole(Role.EMBEDDING)
            elif leaf in SCALES:
                found[f"vit.{name}"] = ParameterRole(Role.NORM)
            elif module is head and leaf == "weight":
                found[f"vit.{name}"] = ParameterRole(Role.HEAD)
            elif owner.endswith(".qkv") and leaf == "weight":
                rows = parameter.shape[0] // 3  # one matrix each for queries, keys and values
                found[f"vit.{name}"] = ParameterRole(Role.HIDDEN_MATRIX, splits=(rows,) * 3)
        return found


def build_classifier(
    model: VisionModelConfig, attention, *, image_size: int, channels: int, classes: int, seed: int
) -> ImageClassifier:
    """Return the classifier with timm's own initialisation, drawn from the seed alone.

    The attention is exchanged after the weights are drawn, so every variant starts from the same ones.

    Raises:
        ValueError: an architecture timm does not have or that is no plain Vision Transformer, sizes that do
            not fit together, weights that cannot be loaded, or an unknown variant.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        vit = create_vit(model, image_size, channels, classes)
    convert(vit, **attention.model_dump())
    classifier = ImageClassifier(vit)
    seed_buffers(classifier, seed)
    return classifier


def create_vit(model: VisionModelConfig, image_size: int, channels: int, classes: int) -> nn.Module:
    """Return timm's model with timm's weights. Raises ValueError as `build_classifier`."""
    import timm
    from timm.models.vision_transformer import VisionTransformer

    known = timm.list_models(module="vision_transformer")
    if model.architecture.partition(".")[0] not in known:
        raise ValueError(
            f"model.architecture: '{model.architecture}' is none of timm's {len(known)} plain Vision "
            "Transformers, such as vit_tiny_patch16_224"
        )
    sizes = {theirs: getattr(model, ours) for ours, theirs in ARGUMENTS.items()}
    given = {name: value for name, value in sizes.items() if value is not None}
    try:
        vit = timm.create_model(
            model.architecture,
            pretrained=bool(model.weights),
            pretrained_cfg_overlay=read_weights(model.weights) if model.weights else None,
            num_classes=classes,
            in_chans=channels,
            img_size=image_size,
            drop_rate=model.dropout,
            drop_path_rate=model.drop_path,
            **given,
        )
    except (AssertionError, TypeError, RuntimeError, ValueError, KeyError) as error:
        reason = str(error).splitlines()[0] if str(error) else "its sizes do not fit together"
        raise ValueError(f"model: timm cannot build {model.architecture}: {reason}") from error
    if not isinstance(vit, VisionTransformer):
        raise ValueError(
            f"model.architecture: '{model.architecture}' is a {type(vit).__name__}, no VisionTransformer"
        )
    return vit


def read_weights(path: str) -> dict[str, Any]:
    """Return a checkpoint as timm's loader wants it; it resizes positions and drops a head of other classes.

    Raises:
        ValueError: no such file, or not a checkpoint of tensors.
    """
    from timm.models import load_state_dict

    file = Path(path).expanduser()
    if not file.is_file():
        raise ValueError(f"model.weights: {path} is no file; give a checkpoint of timm")
    try:
        state = load_state_dict(str(file))
        stem = state["patch_embed.proj.weight"]
    except (OSError, RuntimeError, ValueError, KeyError, pickle.UnpicklingError) as error:
        raise ValueError(f"model.weights: {path} is no checkpoint of a Vision Transformer of timm") from error
    head = state.get("head.weight")
    return {
        "state_dict": state,
        "num_classes": 0 if head is None else len(head),
        "input_size": (stem.shape[1], *stem.shape[2:]),
    }
