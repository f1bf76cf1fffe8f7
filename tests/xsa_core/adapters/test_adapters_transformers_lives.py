"""What a converted transformers model goes through: compilers, copies, files, mistakes."""

import copy
import functools
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers")
from transformers_zoo import build, inputs, output  # noqa: E402

import xsa_core.adapters.transformers as registered  # noqa: E402
from xsa_core.adapters import convert, converted_layers, describe, revert, set_strength  # noqa: E402
from xsa_core.adapters.hf.layer import OwnValues, thread  # noqa: E402

EPS = torch.finfo(torch.float32).eps
NAMES = ["gpt2", "llama", "bert", "vit", "t5"]


@functools.cache
def model(name: str = "llama"):
    """A converted model that no test changes."""
    return convert(build(name), strength=0.75)


def run(some, name: str = "llama") -> torch.Tensor:
    with torch.no_grad():
        return output(some, inputs(name))


def close(got: torch.Tensor, expected: torch.Tensor) -> bool:
    return bool((got - expected).abs().max() < 512 * EPS * max(1.0, expected.abs().max().item()))


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_a_compiled_model_computes_the_same_in_one_graph(name):
    torch._dynamo.reset()
    compiled = torch.compile(copy.deepcopy(model(name)), backend="aot_eager", fullgraph=True)
    expected = output(model(name), inputs(name))
    got = output(compiled, inputs(name))
    assert close(got.detach(), expected.detach())
    got.square().mean().backward()


def test_decoding_from_a_static_cache_compiles_in_one_graph():
    torch._dynamo.reset()
    ids = inputs("llama")["input_ids"]
    step = torch.compile(model().forward, backend="aot_eager", fullgraph=True)
    caches = [transformers.StaticCache(config=model().config, max_cache_len=16) for _ in range(2)]
    results = []
    with torch.no_grad():
        for forward, cache in zip((model().forward, step), caches, strict=True):
            model().forward(ids[:, :4], cache=cache, use_cache=True)
            results.append([forward(ids[:, i : i + 1], cache=cache, use_cache=True).logits for i in (4, 5)])
        full = model()(ids, use_cache=False).logits
    for got in results:
        assert close(torch.cat(got, dim=1), full[:, 4:6])


@pytest.mark.parametrize("name", NAMES)
def test_copies_compute_the_same_and_are_independent(name):
    expected = run(model(name), name)
    for twin in (copy.deepcopy(model(name)), pickle.loads(pickle.dumps(model(name)))):
        assert torch.equal(run(twin, name), expected)
        set_strength(twin, 0.25)
        assert torch.equal(run(model(name), name), expected)
        assert not torch.equal(run(twin, name), expected)


@pytest.mark.parametrize("name", NAMES)
def test_a_saved_model_loads_as_converted(name, tmp_path):
    model(name).save_pretrained(tmp_path)
    loaded = type(model(name)).from_pretrained(tmp_path)
    assert torch.equal(run(loaded, name), run(model(name), name))
    assert [e.strength for e in converted_layers(loaded).values()] == [0.75] * len(converted_layers(loaded))


@pytest.mark.parametrize("variant", ["xsa_learned", "head_norm", "random_direction", "mean_direction"])
def test_other_variants_load_with_what_they_learned(variant, tmp_path):
    some = convert(build("llama"), variant=variant)
    with torch.no_grad():
        for parameter in (p for n, p in some.named_parameters() if ".exclusion." in n):
            parameter.add_(0.3)
    some.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(run(loaded), run(some))
    assert not close(run(loaded), run(convert(build("llama"), variant=variant, layers=[0])))


def test_partly_converted_models_load_with_the_same_layers(tmp_path):
    some = convert(build("t5"), layers=lambda path: "encoder" in path)
    convert(some, layers="last:1", strength=0.5)
    some.save_pretrained(tmp_path)
    loaded = type(some).from_pretrained(tmp_path)
    assert {k: e.strength for k, e in converted_layers(loaded).items()} == {
        k: e.strength for k, e in converted_layers(some).items()
    }
    assert torch.equal(run(loaded, "t5"), run(some, "t5"))


def test_a_body_saved_alone_is_found_inside_a_model_with_a_head(tmp_path):
    some = convert(build("llama"), layers=[1])
    some.model.save_pretrained(tmp_path)
    loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    assert list(converted_layers(loaded)) == ["model.layers.1.self_attn"]


def test_a_reverted_model_saves_as_a_plain_one(tmp_path):
    revert(copy.deepcopy(model())).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert "xsa" not in config
    assert "attn_implementation" not in config
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(run(loaded), run(build("llama")))


def test_a_plain_implementation_asked_for_by_name_is_refused_for_an_exclusive_checkpoint(tmp_path):
    model().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="this checkpoint is exclusive"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="sdpa")
    other = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="xsa_eager")
    assert close(run(other), run(model()))


def test_transformers_alone_refuses_a_saved_exclusive_model_and_a_pickle_brings_what_it_needs(tmp_path):
    model().save_pretrained(tmp_path)
    expected = run(model())
    torch.save({"model": model(), "arguments": inputs("llama"), "expected": expected}, tmp_path / "model.pt")
    code = f"""
import sys, torch, transformers
try:
    transformers.LlamaForCausalLM.from_pretrained({str(tmp_path)!r})
except ValueError as error:
    assert "xsa_sdpa" in str(error)
else:
    raise SystemExit("loaded as a plain model")
assert "xsa_core" not in sys.modules
kept = torch.load({str(tmp_path / "model.pt")!r}, weights_only=False)
with torch.no_grad():
    assert torch.equal(kept["model"](**kept["arguments"]).logits, kept["expected"])
print("both")
"""
    root = Path(__file__).resolve().parents[3]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-1] == "both"


@pytest.mark.parametrize("implementation", registered.NAMES)
def test_the_name_alone_converts_and_a_plain_name_reverts(implementation):
    some = build("llama")
    before = run(some)
    some.set_attn_implementation(implementation)
    assert close(run(some), run(convert(build("llama"))))
    assert len(converted_layers(some)) == 2
    some.set_attn_implementation("sdpa")
    assert not converted_layers(some)
    assert torch.equal(run(some), before)


@pytest.mark.parametrize("implementation", registered.NAMES)
@pytest.mark.parametrize("name", ["llama", "bert", "t5", "bart", "whisper"])
def test_a_model_can_be_built_exclusive(name, implementation):
    plain = build(name)
    some = type(plain)._from_config(plain.config, attn_implementation=implementation).eval()
    some.load_state_dict(plain.state_dict())
    assert list(converted_layers(some)) == list(converted_layers(convert(build(name))))
    assert some.config._attn_implementation == implementation
    assert close(run(some, name), run(convert(build(name)), name))


def test_parts_without_self_attention_stay_plain_under_our_name():
    encoder = transformers.SegformerConfig(
        num_encoder_blocks=1,
        depths=[1],
        hidden_sizes=[16],
        num_attention_heads=[2],
        sr_ratios=[2],
        hidden_size=16,
    )
    decoder = transformers.BertConfig(
        vocab_size=20, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    config = transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)
    some = transformers.VisionEncoderDecoderModel(config).eval()
    pixels = torch.randn(1, 3, 32, 32)
    with torch.no_grad():
        before = some.encoder(pixels).last_hidden_state
        some.set_attn_implementation("xsa_eager")
        after = some.encoder(pixels).last_hidden_state
    assert [r.kind for r in describe(some)] == ["subsampled", "self", "cross"]
    assert len(converted_layers(some)) == 1
    assert close(after, before)


def test_another_implementation_keeps_layers_and_strength():
    some = convert(build("llama"), layers=[1], strength=0.5)
    expected = run(some)
    some.set_attn_implementation("xsa_eager")
    assert {k: e.strength for k, e in converted_layers(some).items()} == {"model.layers.1.self_attn": 0.5}
    assert close(run(some), expected)


def test_layers_that_were_not_chosen_compute_plain_attention():
    some = convert(build("llama"), layers=[1])
    before, after = {}, {}
    for store, which in ((before, build("llama")), (after, some)):
        for i, layer in enumerate(which.model.layers):
            layer.self_attn.register_forward_hook(lambda m, a, out, s=store, i=i: s.update({i: out[0]}))
        run(which)
    assert torch.equal(before[0], after[0])
    assert not close(after[1], before[1])


def test_a_module_under_our_name_that_was_never_converted_refuses():
    some = build("llama")
    some.config._attn_implementation = "xsa_sdpa"
    with pytest.raises(ValueError, match="convert"):
        run(some)


def test_gradient_checkpointing_changes_no_gradient():
    grads = []
    for checkpointing in (False, True):
        some = convert(build("llama")).train()
        if checkpointing:
            some.gradient_checkpointing_enable()
        output(some, inputs("llama")).square().mean().backward()
        grads.append([p.grad for p in some.parameters()])
    assert all(map(torch.equal, *grads))


def test_autocast_gives_what_bfloat16_allows():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = run(model())
    expected = run(model())
    assert (got - expected).abs().max() < 16 * torch.finfo(torch.bfloat16).eps * expected.abs().max()


def test_attention_weights_are_those_of_attention():
    some = convert(build("llama"))
    some.set_attn_implementation("xsa_eager")
    with torch.no_grad():
        weights = some(**inputs("llama"), output_attentions=True).attentions
    assert len(weights) == 2
    for w in weights:
        assert w.shape == (2, 4, 7, 7)
        torch.testing.assert_close(w.sum(-1), torch.ones(2, 4, 7))


def test_decoder_with_cross_attention_inside_one_class():
    config = build("gpt2", add_cross_attention=True).config
    torch.manual_seed(0)
    some = transformers.GPT2LMHeadModel(config).eval()
    twin = convert(copy.deepcopy(some))
    assert [r.kind for r in describe(twin)] == ["self", "cross"] * 2
    states = torch.randn(2, 7, 32)  # as many as tokens: the shape does not tell
    ids = inputs("gpt2")["input_ids"]
    with torch.no_grad():
        set_strength(twin, 0.0)
        assert torch.equal(
            twin(ids, encoder_hidden_states=states).logits, some(ids, encoder_hidden_states=states).logits
        )


def test_models_that_do_not_use_the_interface_are_refused_by_name():
    config = transformers.XLNetConfig(vocab_size=50, d_model=16, n_layer=1, n_head=2, d_inner=16)
    some = transformers.XLNetModel(config)
    with pytest.raises(ValueError, match=r"layer\.0\.rel_attn.*XLNetRelativeAttention.*AttentionInterface"):
        convert(some)
    assert not converted_layers(some)


@pytest.mark.parametrize("implementation", registered.NAMES)
def test_the_name_alone_refuses_such_models_as_well(implementation):
    config = transformers.XLNetConfig(vocab_size=50, d_model=16, n_layer=1, n_head=2, d_inner=16)
    with pytest.raises(ValueError, match=r"rel_attn|sdpa|not support"):
        transformers.XLNetModel(config).set_attn_implementation(implementation)
    with pytest.raises(ValueError, match=r"rel_attn|sdpa|not support"):
        transformers.AutoModel.from_config(config, attn_implementation=implementation)


@pytest.mark.parametrize("implementation", registered.NAMES)
def test_left_padding_leaves_gradients_finite_and_equal(implementation):
    """A padded query sees nothing at all; what the real tokens learn does not depend on it."""
    ids, lengths = inputs("llama", batch=1)["input_ids"], (0, 3)
    grads = []
    for pad in lengths:
        some = convert(build("llama"))
        some.set_attn_implementation(implementation)
        padded = torch.cat([torch.zeros(1, pad, dtype=torch.long), ids], dim=1)
        mask = torch.cat([torch.zeros(1, pad, dtype=torch.long), torch.ones_like(ids)], dim=1)
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        logits = some(padded, attention_mask=mask, position_ids=positions).logits
        logits[:, pad:].square().mean().backward()
        grads.append([p.grad for p in some.parameters()])
    for a, b in zip(*grads, strict=True):
        assert torch.isfinite(b).all()
        assert (a - b).abs().max() <= 4096 * EPS * a.abs().max()


@pytest.mark.parametrize("implementation", registered.NAMES)
@pytest.mark.parametrize("name", ["llama", "bert", "t5"])
def test_half_precision_gives_what_it_allows(name, implementation):
    some = copy.deepcopy(model(name))
    some.set_attn_implementation(implementation)
    half = run(some.to(torch.bfloat16), name).float()
    expected = run(model(name), name)
    assert (half - expected).abs().mean() < 8 * torch.finfo(torch.bfloat16).eps * expected.abs().mean()


def test_own_values_among_more_than_the_cache_holds_are_refused():
    """A model that joins other tokens to what its cache gave back: no guess where its own are."""
    from xsa_core.adapters.hf.attention import xsa_sdpa

    attention = convert(build("llama")).model.layers[0].self_attn
    kept, returned = torch.randn(2, 2, 3, 8), torch.randn(2, 2, 5, 8)
    attention.calls[thread()] = OwnValues(values=kept, returned=returned)
    q, k = torch.randn(2, 4, 3, 8), torch.randn(2, 2, 9, 8)
    with pytest.raises(ValueError, match="3 queries and 9 keys"):
        xsa_sdpa(
            attention, q, k, torch.cat([returned, torch.randn(2, 2, 4, 8)], dim=2), torch.zeros(1, 1, 3, 9)
        )
    got, _ = xsa_sdpa(attention, q, k[:, :, :5], returned.clone(), torch.zeros(1, 1, 3, 5))
    own = returned[:, :, 2:].repeat_interleave(2, dim=1).transpose(1, 2)
    assert (got * own).sum(-1).abs().max() < 64 * EPS


def test_the_flash_style_takes_the_masks_of_flash_attention():
    """Models that ask for a flash implementation by name may hand over `B S`, true for real tokens."""
    from xsa_core.adapters.hf.attention import xsa_flash

    attention = convert(build("llama")).model.layers[0].self_attn
    attention.calls[thread()] = OwnValues()
    q = torch.randn(2, 4, 2, 8)
    k, v = torch.randn(2, 2, 2, 2, 8)  # as many tokens as sequences: the shape must not decide
    padding = torch.tensor([[1, 1], [1, 0]])
    got, _ = xsa_flash(attention, q, k, v, padding)
    visible = torch.ones(2, 2).tril().bool() & padding.bool()[:, None, None, :]
    expected, _ = xsa_flash(attention, q, k, v, visible)
    torch.testing.assert_close(got, expected)


def test_distributed_data_parallel_trains_a_converted_model(tmp_path):
    if torch.distributed.is_initialized():
        pytest.skip("another test holds the process group")
    where = f"file://{tmp_path}/rendezvous"
    torch.distributed.init_process_group("gloo", init_method=where, rank=0, world_size=1)
    try:
        parallel = torch.nn.parallel.DistributedDataParallel(copy.deepcopy(model()))
        logits = parallel(**inputs("llama")).logits
        assert torch.equal(logits, output(model(), inputs("llama")))
        logits.square().mean().backward()
        assert all(p.grad is not None for p in parallel.parameters())
    finally:
        torch.distributed.destroy_process_group()


def test_a_model_inside_another_module_is_converted():
    some = torch.nn.ModuleDict({"body": build("bert"), "head": torch.nn.Linear(32, 2)})
    before = run(some["body"], "bert")
    convert(some)
    assert list(converted_layers(some)) == [f"body.encoder.layer.{i}.attention.self" for i in (0, 1)]
    revert(some)
    assert torch.equal(run(some["body"], "bert"), before)
    assert some["body"].config._attn_implementation == "sdpa"


def test_a_forward_that_someone_replaced_is_never_gone_around():
    """What accelerate's hooks do: the old forward, bound, behind a new one on the instance."""
    some = build("llama")
    attention = some.model.layers[1].self_attn
    attention.forward = functools.partial(attention.forward)
    with pytest.raises(ValueError, match=r"layers\.1\.self_attn.*replaced"):
        convert(some)
    assert not converted_layers(some)
    del attention.forward
    convert(some)
    original = type(attention).original
    attention.forward = original.forward.__get__(attention)
    with pytest.raises(ValueError, match="replaced after the conversion"):
        run(some)


def test_a_control_that_needs_positions_is_refused():
    with pytest.raises(ValueError, match="diag_masked"):
        convert(build("llama"), variant="diag_masked")


def test_soft_caps_are_never_dropped_silently():
    with pytest.raises(ValueError, match=r"softcap.*xsa_eager"):
        run(convert(build("gemma2"), backend="reference"), "gemma2")


def test_a_vision_and_language_model_is_converted_in_both_parts():
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.CLIPConfig(
        text_config={**vision, "vocab_size": 50, "eos_token_id": 49},
        vision_config={**vision, "image_size": 32},
    )
    some = convert(transformers.CLIPModel(config))
    assert len(converted_layers(some)) == 2
    parts = (some.config.text_config, some.config.vision_config)
    assert [c._attn_implementation for c in parts] == ["xsa_sdpa"] * 2


def test_such_a_model_loads_as_converted(tmp_path):
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.CLIPConfig(
        text_config={**vision, "vocab_size": 50, "eos_token_id": 49},
        vision_config={**vision, "image_size": 32},
    )
    some = convert(transformers.CLIPModel(config), layers=lambda path: "vision" in path, strength=0.5)
    some.save_pretrained(tmp_path)
    loaded = transformers.CLIPModel.from_pretrained(tmp_path)
    assert list(converted_layers(loaded)) == list(converted_layers(some))
    assert loaded.config.text_config._attn_implementation == "sdpa"
