"""Attention and exclusion written independently of the library: float64, a head at a time, masks by loops."""

import torch

EPS = {
    dtype: torch.finfo(dtype).eps for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)
}


def loop_attention(q, k, v, *, visible=None, bias=None, own_v=None, strength=1.0, scale=None, sinks=None):
    """q (B, T, H, Dk), k (B, S, Hkv, Dk), v (B, S, Hkv, Dv), visible (B, T, S) bool -> (B, T, H, Dv)."""
    B, T, H, Dk = q.shape
    S, group = k.shape[1], H // k.shape[2]
    own_v = v if own_v is None else own_v
    scale = Dk**-0.5 if scale is None else scale
    bias = None if bias is None else bias.expand(B, H, T, S)
    rows = []
    for b in range(B):
        heads = []
        for h in range(H):
            keys, values = k[b, :, h // group], v[b, :, h // group]
            logits = scale * (q[b, :, h] @ keys.T)  # (T, S)
            if bias is not None:
                logits = logits + bias[b, h]
            if visible is not None:
                logits = torch.where(visible[b], logits, torch.tensor(float("-inf"), dtype=logits.dtype))
            if sinks is not None:
                logits = torch.cat([logits, scale * (q[b, :, h] @ sinks[0][:, h // group].T)], dim=1)
                values = torch.cat([values, sinks[1][:, h // group]], dim=0)
            weights = torch.exp(logits - logits.max(dim=1, keepdim=True).values)
            y = (weights / weights.sum(dim=1, keepdim=True)) @ values  # (T, Dv)
            if strength is not None:
                own = own_v[b, :, h // group]
                s = (
                    strength
                    if not isinstance(strength, torch.Tensor)
                    else strength.expand(B, T, H)[b, :, h, None]
                )
                y = y - s * (y * own).sum(1, keepdim=True) / (own * own).sum(1, keepdim=True) * own
            heads.append(y)
        rows.append(torch.stack(heads, dim=1))
    return torch.stack(rows)


def causal_visible(B, T, S):
    """(B, T, S) bool by definition, queries at the end of the keys."""
    return torch.tensor([[[j <= i + S - T for j in range(S)] for i in range(T)]] * B)


def correlated(B, T, H, D, *, seed, shared=1.0):
    """Values with a common part, so that outputs point along them; float64 (B, T, H, D)."""
    generator = torch.Generator().manual_seed(seed)
    common = torch.randn(1, 1, H, D, generator=generator, dtype=torch.float64)
    return torch.randn(B, T, H, D, generator=generator, dtype=torch.float64) + shared * common


def gradients(function, tensors, weight):
    """Output and gradients of ``(function(*tensors) * weight).sum()``."""
    leaves = [t.detach().clone().requires_grad_() for t in tensors]
    output = function(*leaves)
    output.backward(weight.to(output.dtype).expand_as(output))
    return [output.detach(), *(leaf.grad for leaf in leaves)]


def assert_close(found, expected, dtype, *, factor=64.0):
    """Every entry within ``factor`` eps of the largest entry of its tensor, which is what rounding leaves."""
    for i, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert a is not None, f"tensor {i} is missing"
        assert a.shape == b.shape, f"tensor {i}"
        bound = factor * EPS[dtype] * max(1.0, b.abs().max().item())
        worst = (a.double() - b.double()).abs().max().item() if a.numel() else 0.0
        assert worst <= bound, f"tensor {i}: {worst:.3e} > {bound:.3e}"
