"""The module that every converted layer holds: the variant, and the mark in the state dict.

Axes: B batch, T queries, S keys, H query heads, Hkv key/value heads, D channels of a head.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from xsa_core.attention.masks import Mask
from xsa_core.attention.variants import VARIANTS, Call, build_variant, check_strength

CHILD = "exclusion"  # name of this module in a converted layer, and in parameter names
_MARK = "_extra_state"

# Called with (q, k, v, own_v, heads, call) in every forward; see Exclusion.observer.
Observer = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Call], None]


class Exclusion(nn.Module):
    """Attention of one converted layer, between its projections.

    The state dict of a converted model has one entry more per layer, ``<layer>.exclusion._extra_state`` (a
    float64 tensor: which variant, which strength), so that a plain model refuses it, and a converted one
    takes the strength over. Weights of the plain model load into a converted one as they are. Parameters of
    the learned variants are ``<layer>.exclusion.variant.*``.

    Args:
        n_heads: H. head_dim: D of the values.
        variant, strength, backend: as :func:`xsa_core.convert` takes them.

    Raises:
        ValueError: unknown variant, or a strength that it cannot use.
    """

    def __init__(
        self,
        n_heads: int,
        head_dim: int,
        variant: str = "xsa",
        strength: float = 1.0,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        self.n_heads, self.head_dim = n_heads, head_dim
        self.variant_name, self.backend = variant, backend
        self.variant = build_variant(variant, n_heads, head_dim, strength)
        # Fixed strength, None for a variant that has none; the variant's own may be a tensor.
        self.strength: float | None = getattr(self.variant, "strength", None)
        # Whether the layer is to compute what it did before: at strength 0, by its own code.
        self.idle = self.strength == 0.0
        self.level: Tensor
        self.register_buffer("level", torch.zeros((), dtype=torch.float64), persistent=False)
        self._write_strength()
        # Probes set it: it sees what the layer attends with and what the variant makes of it.
        self.observer: Observer | None = None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, own_v: Tensor, call: Call) -> Tensor:
        """Heads of the layer.

        Args:
            q: `B T H D`. k, v: `B S Hkv D`. own_v: `B T Hkv D`, values of the query tokens (`v` itself
                where S = T).
            call: how to attend, made by :meth:`call`.

        Returns:
            `B T H D`.
        """
        heads = self.variant(q, k, v, own_v, call)
        if self.observer is not None:
            self.observer(q, k, v, own_v, heads, self.variant.prepare(call))
        return heads

    def call(
        self,
        *,
        causal: bool = False,
        mask: Mask | None = None,
        bias: Tensor | None = None,
        scale: float | None = None,
        dropout_p: float = 0.0,
    ) -> Call:
        """A :class:`Call` with this layer's backend."""
        return Call(
            causal=causal, mask=mask, bias=bias, scale=scale, dropout_p=dropout_p, backend=self.backend
        )

    def set_strength(self, strength: float) -> None:
        """Change the strength.

        Raises:
            ValueError: not a finite number, or a variant without a fixed strength.
        """
        self.check_strength(strength)
        self.strength = float(strength)
        self.idle = self.strength == 0.0
        self._write_strength()

    def check_strength(self, strength: float) -> None:
        """Raise what :meth:`set_strength` raises, and change nothing."""
        check_strength(self.variant_name, strength)
        if self.strength is None:
            able = ", ".join(name for name, spec in VARIANTS.items() if spec.takes_strength)
            raise ValueError(
                f"variant {self.variant_name} has no strength to set: convert the model to one of {able}"
            )

    def _write_strength(self) -> None:
        """Hand the strength to the variant: a number at 0 and 1, in between the buffer.

        To a compiled model a number is a constant, and a schedule would compile it anew at every step. The
        buffer is not saved, and stays float64 where the model is cast.
        """
        if self.strength is None:
            return
        with torch.inference_mode(False), torch.no_grad():
            if self.level.dtype != torch.float64 or self.level.is_inference():
                self.level = torch.zeros((), dtype=torch.float64, device=self.level.device)
            self.level.fill_(self.strength)
        self.variant._buffers.pop("strength", None)
        self.variant.__dict__.pop("strength", None)
        if self.strength in (0.0, 1.0):
            self.variant.strength = self.strength
        else:
            self.variant.register_buffer("strength", self.level, persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Exclusion:
        super()._apply(fn, recurse)
        self._write_strength()
        return self

    def get_extra_state(self) -> Tensor:
        """The mark: which variant and which strength (NaN where the variant has none)."""
        strength = float("nan") if self.strength is None else self.strength
        return torch.tensor([_number(self.variant_name), strength], dtype=torch.float64, device="cpu")

    def set_extra_state(self, state: Any) -> None:
        """Take the strength over.

        Raises:
            ValueError: the state is that of another variant.
        """
        number, strength = torch.as_tensor(state).tolist()
        if number != _number(self.variant_name):
            names = [name for name in VARIANTS if _number(name) == number]
            raise ValueError(
                f"the weights are those of variant {names[0] if names else 'unknown'!r}, the model was "
                f"converted to {self.variant_name!r}: convert it to that variant first"
            )
        if self.strength is not None:
            self.set_strength(strength)

    def extra_repr(self) -> str:
        """Shown by print(model)."""
        return f"variant={self.variant_name}, backend={self.backend}"

    def _load_from_state_dict(self, state_dict, prefix, *args, **kwargs) -> None:
        if not any(key.startswith(prefix) for key in state_dict):
            # Weights of the plain model know nothing of this module: it stays as it is.
            state_dict.update(self.state_dict(prefix=prefix))
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


def _number(variant: str) -> float:
    """A variant's name as a number that float64 holds exactly and no reordering of the table changes."""
    return float(zlib.crc32(variant.encode()))


def refuse_other_layers(
    module: nn.Module, state_dict, prefix, local_metadata, strict, missing, unexpected, errors
) -> None:
    """Load hook of a converted model: weights of a converted model must be converted in the same layers.

    Weights without any mark are those of the plain model and pass.
    """
    tail = f".{CHILD}.{_MARK}"
    there = {key[len(prefix) :] for key in state_dict if key.startswith(prefix) and f".{key}".endswith(tail)}
    here = {f"{path}.{_MARK}".lstrip(".") for path, m in module.named_modules() if isinstance(m, Exclusion)}
    if there and there != here:
        odd = sorted(key.removesuffix(f".{_MARK}") for key in there ^ here)
        errors.append(
            f"the weights are exclusive in {len(there)} layers and the model in {len(here)}; they differ at "
            f"{', '.join(odd[:3])}{' ...' if len(odd) > 3 else ''}: convert the model in the same layers"
        )


def guard_loading(model: nn.Module) -> None:
    """Add :func:`refuse_other_layers` to the model, once; take it off where no converted layer is left."""
    hooks = model._load_state_dict_pre_hooks
    ours = [key for key, hook in hooks.items() if getattr(hook, "hook", hook) is refuse_other_layers]
    converted = any(isinstance(m, Exclusion) for m in model.modules())
    if converted and not ours:
        model.register_load_state_dict_pre_hook(refuse_other_layers)
    elif not converted:
        for key in ours:
            del hooks[key]
