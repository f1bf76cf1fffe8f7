"""The KV cache: any chunks equal the whole, and a call that fails leaves it as it was."""

import pytest
import torch
from small_layers import TOLERANCE, inputs, make_layer

from xsa_core.attention.cache import LayerCache
from xsa_core.attention.masks import Mask
from xsa_core.attention.variants import VARIANTS
from xsa_core.gpt import GPT, GPTConfig
from xsa_core.initialization import initialize


@pytest.mark.parametrize("chunks", [[1] * 11, [11], [4, 4, 3], [1, 5, 5], [10, 1]])
@pytest.mark.parametrize("variant", VARIANTS)
def test_cache_in_any_chunks_equals_the_whole(variant, chunks):
    layer = make_layer(variant=variant, causal=True, rope_base=100.0, n_kv_heads=2, n_sinks=1)
    x = inputs(2, 11, 16)
    cache, out = LayerCache(capacity=16), []
    with torch.no_grad():
        for piece in x.split(chunks, dim=1):
            out.append(layer(piece, cache=cache))
        torch.testing.assert_close(torch.cat(out, dim=1), layer(x), **TOLERANCE)


def test_the_cache_refuses_to_drop_gradients():
    layer, x = make_layer(causal=True), inputs(1, 3, 16)
    with pytest.raises(ValueError, match="keeps no gradients"):
        layer(x, cache=LayerCache(capacity=3))
    with torch.no_grad():
        assert layer(x, cache=LayerCache(capacity=3)).shape == x.shape


@torch.no_grad()
def test_cache_beyond_its_capacity_is_refused():
    layer = make_layer(causal=True)
    cache = LayerCache(capacity=3)
    layer(inputs(1, 3, 16), cache=cache)
    with pytest.raises(ValueError, match="holds 3 positions, 4 are needed"):
        layer(inputs(1, 1, 16), cache=cache)
    with pytest.raises(ValueError, match="cannot cut"):
        cache.truncate(5)


def test_cache_can_be_cut_and_reordered():
    layer = make_layer(causal=True, rope_base=100.0)
    x = inputs(3, 8, 16)
    cache = LayerCache(capacity=8)
    with torch.no_grad():
        layer(x[:, :6], cache=cache)
        cache.truncate(4)
        cache.reorder(torch.tensor([2, 0]))
        again = layer(x[[2, 0], 4:], cache=cache)
        torch.testing.assert_close(again, layer(x)[[2, 0], 4:], **TOLERANCE)


FAILING = {
    "mask": lambda x: {"x": x, "mask": Mask.padding(torch.ones(2, 2, dtype=torch.bool))},
    "no mask": lambda x: {"x": x, "mask": torch.ones(2, 9, dtype=torch.bool)},
    "batch": lambda x: {"x": x[:1]},
    "dtype": lambda x: {"x": x.float()},
    "width": lambda x: {"x": x[..., 1:]},
    "room": lambda x: {"x": x.repeat(1, 9, 1)},
    "gradient": lambda x: {"x": x.clone().requires_grad_()},
    "observer": lambda x: {"x": x},
}


@pytest.mark.parametrize("depth", ["layer", "model"])
@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("failure", FAILING)
def test_a_call_that_fails_leaves_the_cache_as_it_was(failure, first, depth):
    options = {"n_heads": 4, "d_model": 16, "rope_base": 50.0}
    if depth == "model":
        model = GPT(GPTConfig(vocab_size=5, n_layers=3, max_seq_len=12, **options)).double().eval()
        initialize(model, 0)
        layer, cache = model.blocks[1].attention, model.make_cache()

        def run(x, **given):
            return model.hidden(embeddings=x, **given)
    else:
        layer = run = make_layer(causal=True, **options)
        cache = LayerCache(12)
    x = inputs(2, 9, 16)
    with torch.no_grad():
        whole = run(x)
        seen = 0 if first else 5
        if not first:
            run(x[:, :5], cache=cache)

        def broken(*given):
            raise RuntimeError("an observer that fails")

        layer.observer = broken if failure == "observer" else None
        given = FAILING[failure](x[:, seen:])
    before = len(cache)
    # An empty cache takes any batch and, in a single layer, any dtype that the layer takes.
    if not (failure == "batch" and first):
        with torch.set_grad_enabled(failure == "gradient"), pytest.raises((ValueError, RuntimeError)):
            run(given.pop("x"), cache=cache, **given)
    assert len(cache) == before
    layer.observer = None
    with torch.no_grad():
        torch.testing.assert_close(run(x[:, seen:], cache=cache), whole[:, seen:], **TOLERANCE)


def test_a_cache_keeps_to_one_dtype_until_it_is_empty():
    x = torch.randn(1, 2, 2, 4)
    cache = LayerCache(4)
    cache.append(x, x)
    with pytest.raises(ValueError, match=r"holds torch\.float32, the new tokens are torch\.bfloat16; decode"):
        cache.append(x.bfloat16(), x.bfloat16())
    with pytest.raises(ValueError, match=r"holds heads \(2, 4\) on cpu, got \(2, 8\) on cpu"):
        cache.append(torch.ones(1, 1, 2, 8), torch.ones(1, 1, 2, 8))
    cache.truncate(0)
    for again in (x.bfloat16(), x.repeat(3, 1, 1, 1), x[:, :, :1]):
        assert torch.equal(cache.append(again, again)[1], again)
        cache.truncate(0)


def test_a_cache_filled_in_inference_mode_says_so():
    x, cache = torch.ones(1, 2, 2, 4), LayerCache(4)
    with torch.inference_mode():
        cache.append(x, x)
    with pytest.raises(ValueError, match=r"filled under torch\.inference_mode"):
        cache.append(x, x)
    with torch.inference_mode():
        assert cache.append(x, x)[0].shape[1] == 4
