"""The attention functions registered with transformers, and the masks that go with them.

Axes: B batch, T queries, S keys, H query heads, Hkv key/value heads, D channels of a head. transformers
hands over `B H T D`, and takes `B T H D` back.

    xsa_eager   the model's own explicit attention, then exclusion: soft caps, sinks and attention weights
                stay what they are
    xsa_sdpa    the fused operator, with masks as scaled_dot_product_attention takes them
    xsa_flash   the fused operator, with a causal mask named rather than written out wherever it is nothing
                else, so that a kernel that knows it by name needs no dense one

A module that was not converted computes plain attention under each of them, provided its model was converted
in part; in a model that never was, they refuse.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from xsa_core.adapters.exclusion import CHILD, Exclusion
from xsa_core.adapters.hf.classes import eager_function
from xsa_core.adapters.hf.layer import OwnValues, thread
from xsa_core.adapters.hf.masks import dense_bias
from xsa_core.adapters.layer import plain_class
from xsa_core.attention.functional import exclude
from xsa_core.attention.variants import Call

MARK = "xsa"  # name of the entry in a config that says what was converted

# What the explicit attention of some models knows, and the fused operator does not.
_ONLY_EAGER = ("softcap", "s_aux", "sinks", "cu_seq_lens_q", "cu_seqlens")


@dataclass(frozen=True)
class EagerCall(Call):
    """A call that attends by a model's own function.

    Attributes:
        module, function: of transformers. extras: further arguments of the function.
        weights: filled with what the function returns beside the output, first call first.
    """

    module: Any = None
    function: Any = None
    extras: dict[str, Any] = field(default_factory=dict)
    weights: list[Any] = field(default_factory=list)

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        own_v: Tensor | None = None,
        strength: float | Tensor | None = None,
    ) -> Tensor:
        """See `Call.attend`.

        Zero queries ask for equal weights (`visible_mean`): of the tokens alone, whatever the model adds.
        """
        if q.stride(-1) == 0:
            return super().attend(q, k, v, own_v, strength)
        y, weights = self.function(
            self.module,
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            self.bias,
            dropout=self.dropout_p,
            scaling=self.scale,
            **self.extras,
        )
        self.weights.append(weights)
        return y if strength is None else exclude(y, v if own_v is None else own_v, strength)


def xsa_eager(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """The model's own explicit attention, then exclusion.

    Args:
        query: `B H T D`. key, value: `B Hkv S D`. attention_mask: added to the logits, as the model made it.

    Returns:
        `B T H D`, and the attention weights.
    """
    function = eager_function(plain_class(module))
    exclusion, own = _state(module)
    if exclusion is None:
        return function(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs)
    bias, position_bias = attention_mask, kwargs.pop("position_bias", None)
    if position_bias is not None:
        bias = position_bias if bias is None else bias + position_bias
    call = EagerCall(
        bias=bias, scale=scaling, dropout_p=dropout, module=module, function=function, extras=kwargs
    )
    own_v = _own_values(module, own, query, value)
    return _attend(exclusion, query, key, value, own_v, call), call.weights[0]


def xsa_sdpa(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The fused operator, with masks as `scaled_dot_product_attention` takes them.

    Without a mask and with several queries it is causal where the module is: then the queries are the first
    T of the S keys (an empty static cache), as in transformers' own function.

    Args:
        query: `B H T D`. key, value: `B Hkv S D`. attention_mask: bool (True is visible) or added to the
            logits, broadcasts to `B H T S`.

    Returns:
        `B T H D` and None.

    Raises:
        ValueError: an argument only the explicit attention of the model knows.
    """
    exclusion, own = _state(module)
    if exclusion is None:
        return _plain_sdpa()(
            module,
            query,
            key,
            value,
            attention_mask,
            dropout=dropout,
            scaling=scaling,
            is_causal=is_causal,
            **kwargs,
        )
    own_v = _own_values(module, own, query, value)
    causal = _is_causal(module, query, attention_mask, is_causal)
    T = query.shape[2]
    if causal and key.shape[2] > T:
        key, value = key[:, :, :T], value[:, :, :T]
    call = _call(module, attention_mask, query.dtype, key.shape[2], kwargs)
    call = replace(call, causal=causal, scale=scaling, dropout_p=dropout, backend=exclusion.backend)
    return _attend(exclusion, query, key, value, own_v, call), None


def xsa_flash(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The fused operator; without a mask, the queries are the last T of the S keys.

    Arguments, result and errors as of :func:`xsa_sdpa`; a mask may also be that of flash attention, `B S` and
    true for real tokens, beside which a causal module stays causal.
    """
    if attention_mask is not None and attention_mask.dim() == 2:
        causal = _is_causal(module, query, None, is_causal)
        attention_mask = attention_mask[:, None, None, -key.shape[2] :].bool()
    else:
        causal = _is_causal(module, query, attention_mask, is_causal)
    exclusion, own = _state(module)
    call = _call(module, attention_mask, query.dtype, key.shape[2], kwargs)
    call = replace(call, causal=causal, scale=scaling, dropout_p=dropout)
    if exclusion is None:
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        return call.attend(q, k, v).contiguous(), None
    own_v = _own_values(module, own, query, value)
    return _attend(exclusion, query, key, value, own_v, replace(call, backend=exclusion.backend)), None


def _call(
    module: nn.Module, attention_mask: Tensor | None, dtype: torch.dtype, S: int, kwargs: dict[str, Any]
) -> Call:
    """Mask and position bias of a call of the fused operator.

    Raises:
        ValueError: an argument only the explicit attention of the model knows.
    """
    for name in _ONLY_EAGER:
        if kwargs.get(name) is not None:
            raise ValueError(
                f"{type(module).__name__} attends with {name}, which the fused operator does not know: use "
                'model.set_attn_implementation("xsa_eager")'
            )
    return Call(bias=dense_bias(attention_mask, kwargs.get("position_bias"), dtype, S))


def _attend(
    exclusion: Exclusion, query: Tensor, key: Tensor, value: Tensor, own_v: Tensor, call: Call
) -> Tensor:
    """From transformers' `B H T D` to `B T H D`."""
    q, k, v, own_v = (x.transpose(1, 2) for x in (query, key, value, own_v))
    return exclusion(q, k, v, own_v, call).contiguous()


def _state(module: nn.Module) -> tuple[Exclusion | None, OwnValues | None]:
    """What a converted module is to do; None for one that is to compute plain attention.

    Raises:
        ValueError: the model was never converted.
    """
    exclusion = module._modules.get(CHILD)
    if exclusion is None:
        if getattr(getattr(module, "config", None), MARK, None) is None:
            raise ValueError(
                f"{type(module).__name__} attends exclusively by name only: call xsa_core.convert(model), or "
                "model.set_attn_implementation(...) after importing xsa_core.adapters.transformers"
            )
        return None, None
    if exclusion.idle:
        return None, None
    own = module.calls.get(thread())
    if own is None:
        raise ValueError(
            f"the forward of {type(module).__name__} was replaced after the conversion by one that goes "
            "around it: revert, and convert with the forward in place"
        )
    own.taken = True
    return (None, None) if own.cross else (exclusion, own)


def _own_values(module: nn.Module, own: OwnValues | None, query: Tensor, value: Tensor) -> Tensor:
    """`B Hkv T D`, the values of the query tokens, with as many heads as `value`.

    Raises:
        ValueError: they are not known: keys of other tokens, or a cache the module does not update.
    """
    T, S = query.shape[2], value.shape[2]
    found = value if own is None else own.of(value, T)
    if found.shape[1:] != (value.shape[1], T, value.shape[3]):
        raise ValueError(
            f"{type(module).__name__} has {T} queries and {S} keys, and which of them are the query tokens' "
            "own is not known; leave this layer out with layers=lambda path: ..."
        )
    return found.expand(query.shape[0], *found.shape[1:]) if found.shape[0] != query.shape[0] else found


def _is_causal(module, query: Tensor, attention_mask: Tensor | None, is_causal: bool | None) -> bool:
    """Whether a call without a mask is causal, by the rule of transformers' own functions."""
    if query.shape[2] == 1 or attention_mask is not None:
        return False
    return bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)


def _plain_sdpa() -> Callable[..., Any]:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    return sdpa_attention_forward
