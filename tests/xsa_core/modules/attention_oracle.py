"""Self attention of every variant written as loops over sequences, heads and tokens in numpy float64.

Shares no code with the library: only weights are read from the layer.
"""

import numpy as np


def weights_of(layer):
    return {name: p.detach().double().numpy() for name, p in layer.state_dict().items()}


def rotate(x, position, base, rotated):
    """One head vector at one position, pair by pair."""
    out = x.copy()
    for i in range(rotated // 2):
        angle = position * base ** (-2 * i / rotated)
        a, b = x[2 * i], x[2 * i + 1]
        out[2 * i] = a * np.cos(angle) - b * np.sin(angle)
        out[2 * i + 1] = a * np.sin(angle) + b * np.cos(angle)
    return out


def removed(y, direction, share):
    square = direction @ direction
    return y if square == 0 else y - share * (y @ direction) / square * direction


def rms(x, gain, eps):
    return x / np.sqrt((x * x).mean() + eps) * gain


def heads_of(layer, x, visible, positions=None, value_embedding=None):
    """Heads before the output projection, and the pieces: (z, y, v, weights).

    x (B, T, C); visible (B, T, T) bool. z, y: (B, T, H, D); v: (B, T, Hkv, D); weights: (B, H, T, T), sinks
    left out.
    """
    w = weights_of(layer)
    B, T, _ = x.shape
    H, K, D = layer.n_heads, layer.n_kv_heads, layer.head_dim
    positions = np.broadcast_to(np.arange(T) if positions is None else positions, (B, T))
    projected = x @ w["qkv.weight"].T + w.get("qkv.bias", 0.0)
    q = projected[..., : H * D].reshape(B, T, H, D)
    k = projected[..., H * D : (H + K) * D].reshape(B, T, K, D)
    v = projected[..., (H + K) * D :].reshape(B, T, K, D)
    if value_embedding is not None:
        v = v + value_embedding
    q, k = q.copy(), k.copy()
    for b in range(B):
        for t in range(T):
            for heads, name in ((q, "q_norm.weight"), (k, "k_norm.weight")):
                for h in range(heads.shape[2]):
                    if name in w:
                        heads[b, t, h] = rms(heads[b, t, h], w[name], np.finfo(np.float64).eps)
                    if layer.rope_base is not None:
                        heads[b, t, h] = rotate(
                            heads[b, t, h], positions[b, t], layer.rope_base, layer.rotary_dim
                        )
    z, y = np.zeros((B, T, H, D)), np.zeros((B, T, H, D))
    weights = np.zeros((B, H, T, T))
    for b in range(B):
        for h in range(H):
            g = h // (H // K)
            for i in range(T):
                seen = [j for j in range(T) if visible[b, i, j]]
                if layer.variant_name == "diag_masked":
                    seen = [j for j in seen if j != i] or [i]
                keys = [k[b, j, g] for j in seen]
                values = [v[b, j, g] for j in seen]
                if "sink_k" in w:
                    keys += list(w["sink_k"][:, g])
                    values += list(w["sink_v"][:, g])
                logits = np.array([q[b, i, h] @ key for key in keys]) / np.sqrt(D)
                a = np.exp(logits - logits.max())
                a /= a.sum()
                y[b, i, h] = sum(p * value for p, value in zip(a, values, strict=True))
                weights[b, h, i, seen] = a[: len(seen)]
                mean = sum(v[b, j, g] for j in seen) / len(seen)
                z[b, i, h] = changed(layer, w, y[b, i, h], v[b, i, g], mean, h)
    return z, y, v, weights


def changed(layer, w, y, own, mean, h):
    """What the variant makes of one head of one token."""
    name = layer.variant_name
    share = getattr(layer.variant, "strength", None)
    if name == "xsa":
        return removed(y, own, share)
    if name == "xsa_learned":
        return removed(y, own, np.tanh(w["variant.raw_strength"][h]))
    if name == "random_direction":
        return removed(y, w["variant.direction"][h], share)
    if name == "mean_direction":
        return removed(y, mean, share)
    if name == "head_norm":
        return rms(y, w["variant.gain"][h], 1e-6)
    return y


def layer_output(layer, x, visible, **options):
    w = weights_of(layer)
    z, *_ = heads_of(layer, x, visible, **options)
    return z.reshape(*z.shape[:2], -1) @ w["out.weight"].T + w.get("out.bias", 0.0)


def causal(B, T):
    return np.broadcast_to(np.tril(np.ones((T, T), bool)), (B, T, T))


def everything(B, T):
    return np.ones((B, T, T), bool)


def layer_norm(x, w, name, eps=1e-5):
    mean = x.mean(-1, keepdims=True)
    variance = ((x - mean) ** 2).mean(-1, keepdims=True)
    return (x - mean) / np.sqrt(variance + eps) * w[f"{name}.weight"] + w.get(f"{name}.bias", 0.0)
