"""The decoder against loops in float64, its loss, sizes, saving, and what it must work under."""

import copy
import json

import attention_oracle as oracle
import numpy as np
import pytest
import torch
import torch.nn.functional as F

from xsa_core import GPT, GPTConfig, Mask, initialize
from xsa_core.attention.variants import VARIANTS
from xsa_core.checkpoint_io import CONFIG_FILE, WEIGHTS_FILE

EPS = torch.finfo(torch.float64).eps


def make_gpt(dtype=torch.float64, seed=0, **options):
    sizes = {"vocab_size": 31, "n_layers": 3, "n_heads": 4, "d_model": 16, "max_seq_len": 24}
    model = GPT(GPTConfig(**(sizes | options))).to(dtype)
    initialize(model, seed)
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim > 1:
                p.mul_(10)  # logits and branches of order one
    return model


def tokens(B=2, T=10, seed=3, vocabulary=31):
    return torch.randint(0, vocabulary, (B, T), generator=torch.Generator().manual_seed(seed))


def gelu(x):
    from scipy.special import erf

    return 0.5 * x * (1 + erf(x / np.sqrt(2)))


def oracle_logits(model, ids):
    w = {n: p.detach().double().numpy() for n, p in model.state_dict().items()}
    x = w["embedding.weight"][ids.numpy()]
    if model.config.post_embedding_norm:
        x = oracle.layer_norm(x, w, "embedding_norm")
    visible = oracle.causal(*ids.shape)
    for i, block in enumerate(model.blocks):
        p = f"blocks.{i}."
        x = x + oracle.layer_output(block.attention, oracle.layer_norm(x, w, p + "attention_norm"), visible)
        h = oracle.layer_norm(x, w, p + "mlp_norm") @ w[p + "mlp.up.weight"].T + w.get(p + "mlp.up.bias", 0.0)
        x = x + gelu(h) @ w[p + "mlp.down.weight"].T + w.get(p + "mlp.down.bias", 0.0)
    return oracle.layer_norm(x, w, "final_norm") @ w["head.weight"].T


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"variant": "sa", "post_embedding_norm": False},
        {"variant": "mean_direction", "tie_embeddings": False, "bias": True},
        {"n_kv_heads": 2, "head_dim": 6, "n_sinks": 2, "qk_norm": True, "layers": "last:1"},
        {"rope_base": 100.0, "rotary_fraction": 0.5, "head_dim": 8, "mlp_ratio": 2.5},
    ],
)
def test_logits_equal_loops(options):
    model, ids = make_gpt(**options), tokens()
    expected = torch.from_numpy(oracle_logits(model, ids))
    torch.testing.assert_close(model(ids), expected, rtol=0, atol=2000 * EPS * expected.abs().max().item())


@pytest.mark.parametrize("options", [{}, {"tie_embeddings": False}, {"n_sinks": 1, "variant": "xsa_learned"}])
def test_loss_and_gradients_equal_those_of_full_logits(options):
    ids, targets = tokens(), tokens(seed=4)
    targets[0, :3] = -100
    fast, slow = make_gpt(**options), make_gpt(**options)
    fast(ids, targets).backward()
    expected = F.cross_entropy(slow(ids).flatten(0, 1), targets.flatten())
    expected.backward()
    torch.testing.assert_close(fast(ids, targets), expected)
    for (name, a), b in zip(fast.named_parameters(), slow.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("variant", VARIANTS)
def test_future_tokens_change_no_earlier_logit(variant):
    model, ids = make_gpt(variant=variant, n_sinks=1), tokens()
    other = ids.clone()
    other[:, 7:] = (other[:, 7:] + 1) % 31
    a, b = model(ids), model(other)
    assert torch.equal(a[:, :7], b[:, :7])
    assert not torch.equal(a[:, 7:], b[:, 7:])


def test_padding_mask_does_not_open_the_future():
    model, ids = make_gpt(), tokens()
    mask = Mask.padding(torch.ones(2, 10, dtype=torch.bool))
    torch.testing.assert_close(model(ids, mask=mask), model(ids))


def test_prefix_embeddings_see_each_other_and_text_stays_causal():
    model = make_gpt()
    x = torch.randn(1, 9, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    mask = Mask.prefix(torch.tensor([4]))
    base = model(embeddings=x, mask=mask)
    late_prefix, late_text = x.clone(), x.clone()
    late_prefix[:, 3] += 1
    late_text[:, 7] += 1
    assert (model(embeddings=late_prefix, mask=mask)[:, 0] != base[:, 0]).any()
    assert torch.equal(model(embeddings=late_text, mask=mask)[:, :7], base[:, :7])


def test_layer_selection_builds_plain_attention_elsewhere():
    model = make_gpt(variant="xsa_learned", layers=[1])
    assert [b.attention.variant_name for b in model.blocks] == ["sa", "xsa_learned", "sa"]
    assert [n for n, _ in model.named_parameters() if "strength" in n] == [
        "blocks.1.attention.variant.raw_strength"
    ]
    none = make_gpt(variant="xsa", layers="none")
    assert torch.equal(none(tokens()), make_gpt(variant="sa")(tokens()))


@pytest.mark.parametrize(
    ("sizes", "billions"),
    [
        ({"n_layers": 24, "d_model": 1536, "n_heads": 6, "head_dim": 256}, 0.68),
        ({"n_layers": 24, "d_model": 2048, "n_heads": 24, "head_dim": 128}, 1.41),
        ({"n_layers": 32, "d_model": 2560, "n_heads": 24, "head_dim": 128}, 2.68),
    ],
)
def test_paper_sizes_have_the_stated_parameters(sizes, billions):
    config = GPTConfig(vocab_size=50304, max_seq_len=2048, **sizes)
    with torch.device("meta"):
        model = GPT(config)
    assert round(model.num_parameters(non_embedding=True) / 1e9, 2) == billions
    assert model.num_parameters() - model.num_parameters(non_embedding=True) == 50304 * config.d_model


@pytest.mark.parametrize(
    "options", [{}, {"tie_embeddings": False, "variant": "random_direction", "layers": [0, 2]}]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_saved_model_gives_the_same_logits_bit_for_bit(tmp_path, options, dtype):
    model = make_gpt(dtype, **options).eval()
    model.save_pretrained(tmp_path / "model")
    again = GPT.from_pretrained(tmp_path / "model")
    assert again.config == model.config
    assert torch.equal(again(tokens()), model(tokens()))
    assert (again.head.weight is again.embedding.weight) == model.config.tie_embeddings
    assert sorted(p.name for p in (tmp_path / "model").iterdir()) == [CONFIG_FILE, WEIGHTS_FILE]
    again(tokens(), tokens()).backward()  # the loaded one can be trained on


def test_damaged_saves_are_refused_by_name(tmp_path):
    make_gpt().save_pretrained(tmp_path)
    weights, config = tmp_path / WEIGHTS_FILE, tmp_path / CONFIG_FILE
    good_weights, good_config = weights.read_bytes(), config.read_text()
    weights.write_bytes(good_weights[:-100])
    with pytest.raises(ValueError, match=WEIGHTS_FILE):
        GPT.from_pretrained(tmp_path)
    weights.write_bytes(good_weights)
    config.write_text(json.dumps(json.loads(good_config) | {"n_layers": 2}))
    with pytest.raises(ValueError, match="does not fit"):
        GPT.from_pretrained(tmp_path)
    config.write_text(json.dumps(json.loads(good_config) | {"wings": 2}))
    with pytest.raises(ValueError, match="unknown settings wings"):
        GPT.from_pretrained(tmp_path)
    config.write_text(good_config[:20])
    with pytest.raises(ValueError, match="not valid JSON"):
        GPT.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match="is not there"):
        GPT.from_pretrained(tmp_path / "elsewhere")


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"n_heads": 0}, "n_heads"),
        ({"n_heads": 5}, "head_dim"),
        ({"n_kv_heads": 3}, "n_kv_heads"),
        ({"vocab_size": -1}, "vocab_size"),
        ({"dropout": 1.0}, "dropout"),
        ({"variant": "exsa"}, "xsa"),
        ({"variant": "sa", "strength": 0.5}, "strength"),
        ({"strength": float("inf")}, "strength"),
        ({"layers": "first:9"}, "layers"),
        ({"head_dim": 3}, "rotat"),
        ({"rope_base": 0.0}, "rope_base"),
        ({"n_sinks": -1}, "n_sinks"),
        ({"n_sinks": 1, "attention_dropout": 0.1}, "n_sinks"),
        ({"n_sinks": 0.5}, "n_sinks"),
        ({"backend": "flash"}, "unknown attention backend 'flash'"),
        ({"rope_base": float("nan")}, "rope_base"),
        ({"dropout": "0.1"}, "dropout"),
        ({"attention_dropout": -0.1}, "attention_dropout"),
        ({"n_kv_heads": 0}, "n_kv_heads"),
        ({"n_layers": True}, "n_layers"),
        ({"vocab_size": 2.0}, "vocab_size"),
    ],
)
def test_wrong_configurations_are_one_clear_line(options, match):
    with pytest.raises(ValueError, match=match) as caught:
        make_gpt(**options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"tokens": torch.zeros(5, dtype=torch.long)}, r"expected tokens \(B, T\), got \(5,\)"),
        ({"embeddings": torch.zeros(1, 5, 3)}, r"expected embeddings \(B, T, \d+\), got \(1, 5, 3\)"),
        ({"tokens": torch.zeros(2, 5, dtype=torch.long), "positions": torch.arange(4)}, "positions must be"),
    ],
    ids=["tokens", "embeddings", "positions"],
)
def test_inputs_of_another_shape_are_one_clear_line(given, message):
    with pytest.raises(ValueError, match=message):
        make_gpt()(**given)


@pytest.mark.parametrize(
    ("capacity", "message"), [(25, "larger than max_seq_len 24"), (0, "positive"), (-1, "got -1")]
)
def test_a_cache_is_as_large_as_asked_or_refused(capacity, message):
    model = make_gpt()
    assert [model.make_cache(n).capacity for n in (None, 1, 24)] == [24, 1, 24]
    with pytest.raises(ValueError, match=message):
        model.make_cache(capacity)


def test_sequences_beyond_the_limit_are_refused():
    with pytest.raises(ValueError, match="max_seq_len 24"):
        make_gpt()(tokens(T=25))
    with pytest.raises(ValueError, match="either tokens or embeddings"):
        make_gpt()()


def test_checkpointing_changes_neither_loss_nor_gradients():
    plain, recomputed = make_gpt(), make_gpt(checkpointing=True)
    ids = tokens()
    for model in (plain, recomputed):
        model.train()(ids, ids).backward()
    for a, b in zip(plain.parameters(), recomputed.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)


def test_checkpointing_keeps_fewer_bytes():
    def saved(model):
        total = 0

        def count(t):
            nonlocal total
            total += t.numel() * t.element_size()
            return t

        with torch.autograd.graph.saved_tensors_hooks(count, lambda t: t):
            model.train().hidden(tokens(T=24))
        return total

    assert saved(make_gpt(n_layers=6, checkpointing=True)) < saved(make_gpt(n_layers=6)) / 2


def test_dropout_acts_in_training_only_and_follows_the_seed():
    model = make_gpt(torch.float32, dropout=0.2, attention_dropout=0.2)
    ids = tokens()
    assert torch.equal(model.eval()(ids), make_gpt(torch.float32)(ids))
    model.train()
    torch.manual_seed(0)
    a = model(ids)
    b = model(ids)
    torch.manual_seed(0)
    assert torch.equal(model(ids), a)
    assert not torch.equal(a, b)


def test_model_survives_deepcopy_and_state_dict():
    model = make_gpt(variant="random_direction")
    clone = copy.deepcopy(model)
    fresh = make_gpt(variant="random_direction", seed=9)
    assert not torch.equal(fresh(tokens()), model(tokens()))
    fresh.load_state_dict(model.state_dict())
    assert torch.equal(clone(tokens()), model(tokens()))
    assert torch.equal(fresh(tokens()), model(tokens()))
    assert clone.head.weight is clone.embedding.weight


def test_autocast_loss_is_float32_and_near_the_exact_one():
    model, ids = make_gpt(torch.float32), tokens()
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(ids, ids)
    exact = model.double()(ids, ids)
    assert loss.dtype == torch.float32
    assert abs(loss.item() - exact.item()) <= 8 * torch.finfo(torch.bfloat16).eps * exact.item()


@pytest.mark.parametrize(("variant", "autocast"), [("xsa", True), *((v, False) for v in VARIANTS)])
def test_compiled_model_is_one_graph_with_the_same_gradients(variant, autocast):
    torch._dynamo.reset()
    model = make_gpt(torch.float32, variant=variant, n_layers=1, n_sinks=1)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    results = []
    for run in (model, compiled):
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = run(tokens(), tokens(seed=4))
        loss.backward()
        results.append([loss.detach(), *(p.grad for p in model.parameters())])
    eps = torch.finfo(torch.bfloat16 if autocast else torch.float32).eps
    for a, b in zip(*results, strict=True):
        assert (a - b).abs().max() <= 30 * eps * a.abs().max()


def test_compiled_model_does_not_recompile_for_every_length():
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    model = make_gpt(torch.float32, n_layers=1)
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    for T in (8, 11, 13, 20, 23):
        ids = tokens(T=T)
        torch.testing.assert_close(compiled(ids), model(ids))
    assert counter.frame_count <= 2  # one for the first length, one for all others
