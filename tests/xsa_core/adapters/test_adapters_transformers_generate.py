"""Generation with converted models: what a cache gives is what the full forward gives, at every step."""

import copy
import functools

import pytest
import torch

transformers = pytest.importorskip("transformers")
from transformers_zoo import DECODERS, VOCAB, build, inputs  # noqa: E402

from xsa_core.adapters import convert  # noqa: E402
from xsa_core.adapters.hf.layer import WANTED  # noqa: E402

EPS = torch.finfo(torch.float32).eps
NEW = 6
# The families whose generation is looked at closely: plain and grouped heads, learned and rotary positions,
# sliding windows (all layers, alternating ones), soft caps and sinks.
CLOSE = ["gpt2", "llama", "gpt_neox", "mistral", "gemma2", "gemma3", "gpt_oss", "deepseek_v3"]


@functools.cache
def model(name: str):
    """A converted model that no test changes."""
    return convert(build(name))


def prompt(batch: int = 2, length: int = 7, seed: int = 3) -> torch.Tensor:
    """Token ids without the pad token."""
    return torch.randint(5, VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))


def generate(name: str, ids: torch.Tensor, **kwargs):
    """Greedy generation with the logits of every step, `B NEW V`."""
    mask = kwargs.pop("attention_mask", torch.ones_like(ids))
    settings = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
    result = model(name).generate(
        ids,
        attention_mask=mask,
        output_logits=True,
        return_dict_in_generate=True,
        **{**settings, "disable_compile": True, **kwargs},
    )
    return result.sequences, torch.stack(result.logits, dim=1)


def full_logits(name: str, sequences: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    """Logits of the last NEW steps by one forward without a cache."""
    mask = torch.ones_like(sequences) if mask is None else mask
    positions = {"position_ids": (mask.cumsum(-1) - 1).clamp(min=0)} if name != "opt" else {}
    with torch.no_grad():
        logits = model(name)(sequences, attention_mask=mask, use_cache=False, **positions).logits
    return logits[:, -NEW - 1 : -1]


def assert_close(got: torch.Tensor, expected: torch.Tensor) -> None:
    assert (got - expected).abs().max() < 512 * EPS * max(1.0, expected.abs().max().item())


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", DECODERS)
def test_every_step_with_a_cache_equals_the_full_forward(name, cache):
    sequences, logits = generate(name, prompt(), cache_implementation=cache)
    assert_close(logits, full_logits(name, sequences))


@pytest.mark.parametrize("implementation", ["xsa_eager", "xsa_flash"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_every_implementation_generates_the_same(implementation, cache):
    other = copy.deepcopy(model("mistral"))
    other.set_attn_implementation(implementation)
    sequences, _ = generate("mistral", prompt())
    got = other.generate(
        prompt(),
        max_new_tokens=NEW,
        do_sample=False,
        pad_token_id=0,
        cache_implementation=cache,
        disable_compile=True,
    )
    assert torch.equal(got, sequences)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", CLOSE)
def test_a_left_padded_batch_generates_what_each_prompt_does_alone(name, cache):
    long, short = prompt(1), prompt(1, length=4, seed=4)
    ids = torch.cat([long, torch.cat([torch.zeros(1, 3, dtype=torch.long), short], dim=1)])
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    together, logits = generate(name, ids, attention_mask=mask, cache_implementation=cache)
    for row, alone in enumerate((long, short)):
        sequences, expected = generate(name, alone, cache_implementation=cache)
        assert torch.equal(together[row, -NEW:], sequences[0, -NEW:])
        assert_close(logits[row], expected[0])


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", ["gpt2", "llama", "mistral"])
def test_beam_search_scores_are_those_of_the_full_forward(name, cache):
    ids = prompt()
    result = model(name).generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=NEW,
        min_new_tokens=NEW,
        num_beams=3,
        do_sample=False,
        pad_token_id=0,
        length_penalty=1.0,
        output_scores=True,
        return_dict_in_generate=True,
        cache_implementation=cache,
        disable_compile=True,
    )
    logp = full_logits(name, result.sequences).log_softmax(-1)
    chosen = logp.gather(-1, result.sequences[:, -NEW:, None]).squeeze(-1).sum(-1)
    length = NEW if (chosen / NEW - result.sequences_scores).abs().max() < 0.1 else result.sequences.shape[1]
    assert_close(result.sequences_scores * length, chosen)


@pytest.mark.parametrize("name", CLOSE)
def test_a_prompt_fed_in_chunks_gives_the_logits_of_the_whole(name):
    ids = prompt(length=11)
    cache = transformers.DynamicCache(config=model(name).config)
    with torch.no_grad():
        parts = [
            model(name)(part, cache=cache, use_cache=True).logits for part in ids.split((4, 1, 6), dim=1)
        ]
        whole = model(name)(ids, use_cache=False).logits
    assert_close(torch.cat(parts, dim=1), whole)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("variant", ["xsa_learned", "head_norm", "random_direction", "mean_direction"])
def test_other_variants_decode_as_the_full_forward_does(variant, cache):
    some = convert(build("llama"), variant=variant)
    with torch.no_grad():
        for parameter in (p for n, p in some.named_parameters() if ".exclusion." in n):
            parameter.add_(0.3)
    ids = prompt()
    result = some.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=NEW,
        do_sample=False,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
        cache_implementation=cache,
        disable_compile=True,
    )
    logits = torch.stack(result.logits, dim=1)
    for implementation in ("xsa_sdpa", "xsa_eager"):
        some.set_attn_implementation(implementation)
        with torch.no_grad():
            full = some(result.sequences, use_cache=False).logits
        assert_close(logits, full[:, -NEW - 1 : -1])


def test_a_conversation_goes_on_from_a_copied_cache():
    cache = transformers.DynamicCache(config=model("mistral").config)
    settings = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
    first = model("mistral").generate(prompt(1), past_key_values=cache, **settings)
    longer = torch.cat([first, prompt(1, seed=9)], dim=1)
    got = model("mistral").generate(longer, past_key_values=copy.deepcopy(cache), **settings)
    assert torch.equal(got, model("mistral").generate(longer, **settings))


def test_a_causal_chunk_needs_no_dense_mask_in_the_flash_style():
    from xsa_core.adapters.hf.masks import flash_style_mask

    ones = torch.ones(2, 9, dtype=torch.bool)
    assert flash_style_mask(2, 4, 9, 5, 0, attention_mask=ones) is None
    assert flash_style_mask(2, 4, 12, 5, 0, attention_mask=ones) is not None  # a static cache
    ones[0, 0] = False
    dense = flash_style_mask(2, 4, 9, 5, 0, attention_mask=ones)
    row, column = torch.arange(4)[:, None] + 5, torch.arange(9)
    assert torch.equal(dense[1, 0], column <= row)
    assert torch.equal(dense[0, 0], (column <= row) & (column > 0))


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_assisted_generation_gives_the_greedy_tokens(name):
    ids = prompt(1)
    assistant = build(name)  # the plain model proposes, the exclusive one decides
    expected, _ = generate(name, ids)
    got = model(name).generate(
        ids,
        attention_mask=torch.ones_like(ids),
        assistant_model=assistant,
        max_new_tokens=NEW,
        do_sample=False,
        pad_token_id=0,
    )
    assert torch.equal(got, expected)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", ["t5", "bart", "whisper"])
def test_encoder_decoders_generate_what_the_full_forward_gives(name, cache):
    arguments = inputs(name)
    start = torch.tensor([[1, 9, 20], [1, 17, 8]])
    source = {k: v for k, v in arguments.items() if k != "decoder_input_ids"}
    settings = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False}
    generation = functools.partial(transformers.GenerationMixin.generate, model(name))
    result = generation(
        **source,
        decoder_input_ids=start,
        output_logits=True,
        return_dict_in_generate=True,
        cache_implementation=cache,
        disable_compile=True,
        **settings,
    )
    with torch.no_grad():
        full = model(name)(**source, decoder_input_ids=result.sequences, use_cache=False).logits
    assert_close(torch.stack(result.logits, dim=1), full[:, -NEW - 1 : -1])


def test_nothing_of_a_forward_is_left_behind():
    cache = transformers.DynamicCache()
    with torch.no_grad():
        model("llama")(prompt(), cache=cache, use_cache=True)
    assert getattr(cache, WANTED) is None
    assert model("llama").get_submodule("model.layers.0.self_attn").calls == {}


def test_two_threads_can_generate_with_one_model():
    from concurrent.futures import ThreadPoolExecutor

    prompts = [prompt(1, length=5 + i, seed=i) for i in range(4)]
    expected = [generate("llama", ids)[0] for ids in prompts]
    with ThreadPoolExecutor(2) as pool:
        got = list(pool.map(lambda ids: generate("llama", ids)[0], prompts))
    assert all(map(torch.equal, got, expected))
