"""The public functions: :func:`exclude`, :func:`exclusive_attention`, :func:`attention_with_lse`.

B batch   T queries   S keys   H query heads   Hkv key/value heads   N sinks   Dk, Dv head sizes
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from xsa_core.attention import arguments, backends, documents, flex, fused, projection, xformers_pair
from xsa_core.attention import sinks as sink_merging
from xsa_core.attention.masks import Mask, resolve_mask
from xsa_core.attention.precision import autocast_dtype, bias_as, without_autocast
from xsa_core.attention.projection import Strength, accumulation_dtype
from xsa_core.attention.reference import reference_attention, reference_exclude

Sinks = tuple[Tensor, Tensor]


def exclude(y: Tensor, v: Tensor, strength: Strength = 1.0) -> Tensor:
    """Remove from ``y`` the part along the token's own value: ``z = y - s (y . vh) vh`` with ``vh = v/|v|``.

    A zero value (largest entry below the dtype's smallest normal number) has no direction and removes
    nothing; one with a NaN or infinite entry gives NaN for its token and its heads, gradients too.

    Args:
        y: (B, T, H, D) attention output.
        v: (B, T, Hkv, D) the values that attention used, of the same tokens; head h uses value head h // (H /
            Hkv).
        strength: 1 removes all of it; a number, or a tensor that broadcasts to (B, T, H), which gets its
            gradient.

    Returns:
        z (B, T, H, D).

    Raises:
        ValueError: if shapes or dtypes do not belong together, or the dtype has no arithmetic here.
        RuntimeError: under ``torch.func`` transforms, forward-mode and second derivatives, which
            :func:`xsa_core.attention.reference_exclude` has.
    """
    arguments.check_given(y=y, v=v)
    arguments.check_strength(strength, optional=False)
    projection.check_value_shape(y, v)
    dtype = autocast_dtype(y.device)
    if dtype is not None and y.dtype != torch.float64:
        y, v = y.to(dtype), v.to(dtype)
    if y.dtype != v.dtype:
        raise ValueError(f"y is {y.dtype} and v is {v.dtype}; cast one of them, both must have one dtype")
    projection.check_dtype(y)
    if isinstance(strength, Tensor):
        projection.expand_strength(strength, *y.shape[:3])
    elif not strength:
        return y
    with without_autocast(y.device):
        return fused.exclude(y, v, strength)


def exclusive_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    mask: Mask | None = None,
    bias: Tensor | None = None,
    own_v: Tensor | None = None,
    strength: Strength | None = 1.0,
    scale: float | None = None,
    dropout_p: float = 0.0,
    sinks: Sinks | None = None,
    backend: str = "auto",
) -> Tensor:
    """Exclusive self attention: ``z_i = y_i - s (y_i . vh_i) vh_i`` with ``y_i = sum_j a_ij v_j``
    (arXiv:2603.09078).

    A query that sees nothing, its bias -inf for every key, has output 0 and no gradients. On the CPU packed
    documents are attended each on its own where that is not slower, outside of compiled graphs: the same, bit
    for bit, as separate sequences.

    Under autocast the inputs take its dtype; the sums inside stay in the accumulation type. The fused
    backends give first derivatives by reverse mode only: for second ones, for forward mode, and for
    ``torch.func`` transforms (grad, vmap, jvp), use ``backend="reference"``.

    Args:
        q: (B, T, H, Dk). k: (B, S, Hkv, Dk). v: (B, S, Hkv, Dv). Hkv divides H; query head h uses head h //
            (H / Hkv).
        causal: queries see no later key; they are the last T of the S positions.
        mask: who sees whom, joined with ``causal`` where both are given.
        bias: added to the scaled logits; broadcasts to (B, H, T, S) and gets its gradient.
        own_v: (B, T, Hkv, Dv), values of the query tokens; required when S != T (with a cache: the new
            tokens' own).
        strength: 1 is full exclusion; a number, or a tensor that broadcasts to (B, T, H) (so (H,) is one per
            head). None or 0 is plain attention by the same kernel.
        scale: of the logits, a number, 1/sqrt(Dk) by default; multiply ``q`` by a learned one.
        dropout_p: probability of dropping an attention weight.
        sinks: (sink_k (N, Hkv, Dk), sink_v (N, Hkv, Dv)) that every query may attend besides the keys.
            Exclusion acts on the whole output, their part included.
        backend: 'auto' or a name of :data:`xsa_core.attention.backends.BACKENDS`.

    Returns:
        (B, T, H, Dv).

    Raises:
        ValueError: for arguments that do not belong together, or a backend that cannot do this.
        RuntimeError: for derivatives and transforms that only the reference has.
    """
    arguments.check_given(q=q, k=k, v=v)
    arguments.check_tensors(own_v=own_v, bias=bias)
    arguments.check_strength(strength)
    arguments.check_sinks_pair(sinks)
    q, k, v, own_v, bias, sinks = _autocast(q, k, v, own_v, bias, sinks)
    arguments.check_call(q, k, v, bias, sinks, dropout_p, scale, causal)
    mask = resolve_mask(causal, mask)
    exclusive = isinstance(strength, Tensor) or bool(strength)
    if exclusive:
        arguments.check_own_values(q, k, v, own_v, strength)
    request = backends.Request.of(q, k, v, mask, bias, dropout_p, lse=sinks is not None)
    name = backends.choose_backend(request) if backend == "auto" else backends.check_backend(backend, request)
    run = _RUNNERS[name]
    strength = strength if exclusive else None
    with without_autocast(q.device):
        return run(request, q, k, v, mask, bias, own_v, strength, scale, dropout_p, sinks)


def attention_with_lse(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    mask: Mask | None = None,
    bias: Tensor | None = None,
    scale: float | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Plain attention and the log-sum-exp of its logits, both differentiable; for merging partial results.

    Shapes as in :func:`exclusive_attention`.

    Returns:
        y (B, T, H, Dv), lse (B, H, T) in float32 (float64 for float64 inputs).

    Raises:
        ValueError: as :func:`exclusive_attention`.
    """
    arguments.check_given(q=q, k=k, v=v)
    arguments.check_tensors(bias=bias)
    q, k, v, _, bias, _ = _autocast(q, k, v, None, bias, None)
    arguments.check_call(q, k, v, bias, None, 0.0, scale, causal)
    mask = resolve_mask(causal, mask)
    request = backends.Request.of(q, k, v, mask, bias, lse=True)
    name = backends.choose_backend(request) if backend == "auto" else backends.check_backend(backend, request)
    with without_autocast(q.device):
        return _run_with_lse(name, request, q, k, v, mask, bias, scale)


def _run_with_lse(name, request, q, k, v, mask, bias, scale):
    if name == "reference":
        y, _, lse = reference_attention(q, k, v, mask=mask, bias=bias, scale=scale)
        return y, lse
    q, scale = _positive_scale(q, scale)
    if name == "flex":
        return flex.attention(q, k, v, mask, scale)
    pattern, dense, kernel = _lower(request, name, q, mask, bias)
    if request.bias_gradient:
        kernel = "math"  # the one pair that also gives the bias its gradient through the log-sum-exp
    return fused.attention_with_lse(q, k, v, kernel=kernel, causal=pattern, bias=dense, scale=scale)


def _run_reference(request, q, k, v, mask, bias, own_v, strength, scale, dropout_p, sinks):
    y, _, _ = reference_attention(
        q, k, v, mask=mask, bias=bias, scale=scale, dropout_p=dropout_p, sinks=sinks
    )
    return y if strength is None else reference_exclude(y, v if own_v is None else own_v, strength)


def _run_fused(name, request, q, k, v, mask, bias, own_v, strength, scale, dropout_p, sinks):
    q, scale = _positive_scale(q, scale)
    pattern, dense, kernel = _lower(request, name, q, mask, bias)
    return fused.fused_attention(
        q,
        k,
        v,
        kernel=kernel,
        causal=pattern,
        bias=dense,
        own_v=own_v,
        strength=strength,
        scale=scale,
        dropout_p=dropout_p,
        sink_kv=sinks,
    )


def _run_flex(request, q, k, v, mask, bias, own_v, strength, scale, dropout_p, sinks):
    q, scale = _positive_scale(q, scale)
    y, lse = flex.attention(q, k, v, mask, scale)
    if sinks is not None:
        y = sink_merging.merge(y, lse, q, *sinks, scale)
    return y if strength is None else fused.exclude(y, v if own_v is None else own_v, strength)


_RUNNERS = {
    "reference": _run_reference,
    "sdpa": functools.partial(_run_fused, "sdpa"),
    "xformers": functools.partial(_run_fused, "xformers"),
    "flex": _run_flex,
}


def _positive_scale(q, scale):
    """Queries and scale with the same logits and a scale above 0.

    The kernels hide a key by -inf and take the largest logit of a row before they multiply by the scale,
    which a negative scale turns round and one of 0 (in the accumulation type) makes NaN.
    """
    if scale is None:
        return q, scale
    tiny = torch.finfo(accumulation_dtype(q.dtype)).tiny
    if scale >= tiny:
        return q, scale
    return (-q, -scale) if scale <= -tiny else (q * scale, 1.0)


def _lower(request, name, q, mask, bias):
    """Mask and bias as the kernel takes them: (its causal argument, dense bias or None, kernel name)."""
    B, T = q.shape[:2]
    S = request.S
    mask.check(B, T, S)
    mask = mask.simplified(T, S)
    if name == "xformers":
        plan = xformers_pair.plan_mask(mask, B, T, S) if bias is None else None
        if plan is not None and plan.packed and q.dtype == torch.float32:
            plan = None  # only its half-precision kernels lay out the log-sum-exp of a packed row as one
        dense = None if plan is not None else _dense_bias(q, S, mask, bias)
        return plan, dense, "xformers"
    if mask.features == {"causal"} and T == S and bias is None:
        return True, None, backends.sdpa_kernel(request, False)
    # Ids of documents are data, which a traced graph cannot read.
    eager = bias is None and not torch.compiler.is_compiling()
    if eager and backends.sdpa_kernel(request, True) == "flash_cpu":
        packed = documents.packed_documents(mask, B, T, S)
        if packed is not None:
            return packed, None, "flash_cpu"
    dense = _dense_bias(q, S, mask, bias)
    return False, dense, backends.sdpa_kernel(request, dense is not None)


def _dense_bias(q, S, mask, bias):
    """Mask and bias together (B or 1, H or 1, T, S), in q's dtype or the type of its sums, the two that the
    kernels read; None where there is neither."""
    B, T = q.shape[:2]
    dense = None
    if bias is not None:
        dense = bias if bias.dtype == q.dtype else bias_as(bias, accumulation_dtype(q.dtype))
        dense = dense.reshape((1,) * (4 - dense.dim()) + dense.shape)
        dense = dense.expand(*dense.shape[:2], T, S)
    if mask.features:
        hidden = mask.to_bias(B, T, S, q.dtype if dense is None else dense.dtype, q.device)
        dense = hidden if dense is None else dense + hidden
    return dense


def _autocast(q, k, v, own_v, bias, sinks):
    """Under autocast the inputs take its dtype, as scaled_dot_product_attention's do."""
    dtype = autocast_dtype(q.device)
    if dtype is None or q.dtype == torch.float64:
        return q, k, v, own_v, bias, sinks
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    own_v = None if own_v is None else own_v.to(dtype)
    bias = None if bias is None else bias_as(bias, dtype)
    sinks = None if sinks is None else (sinks[0].to(dtype), sinks[1].to(dtype))
    return q, k, v, own_v, bias, sinks
