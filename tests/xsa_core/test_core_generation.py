"""Sampling: the cache changes nothing, and options do what they say."""

import pytest
import torch

from xsa_core import GPT, GPTConfig, initialize
from xsa_core.generation import sample_token


def gpt(**options):
    sizes = {"vocab_size": 17, "n_layers": 2, "n_heads": 2, "d_model": 16, "max_seq_len": 32}
    model = GPT(GPTConfig(**(sizes | options))).double()
    initialize(model, 1)
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim > 1:
                p.mul_(20)
    return model.eval()


def prompt(B=2, T=5, seed=0):
    return torch.randint(0, 17, (B, T), generator=torch.Generator().manual_seed(seed))


def greedy_without_cache(model, tokens, n):
    for _ in range(n):
        tokens = torch.cat((tokens, model(tokens)[:, -1].argmax(-1, keepdim=True)), dim=1)
    return tokens


@pytest.mark.parametrize("options", [{}, {"variant": "sa"}, {"variant": "mean_direction"}, {"n_sinks": 2}])
def test_greedy_continuation_equals_the_one_without_cache(options):
    model = gpt(**options)
    out = model.generate(prompt(), 12, temperature=0)
    assert torch.equal(out, greedy_without_cache(model, prompt(), 12))
    assert len(out.unique()) > 3  # a constant continuation would show nothing


def test_left_padded_prompts_equal_each_alone():
    model = gpt(n_sinks=1)
    lengths = torch.tensor([6, 2, 4])
    tokens = prompt(3, 6)
    batched = model.generate(tokens, 10, temperature=0, prompt_lengths=lengths)
    for row, length in enumerate(lengths.tolist()):
        alone = model.generate(tokens[row : row + 1, 6 - length :], 10, temperature=0)
        assert torch.equal(batched[row, 6 - length :], alone[0])


def test_generation_goes_on_beyond_the_context_from_its_later_half():
    model = gpt(max_seq_len=8)
    out = model.generate(prompt(1, 5), 9, temperature=0)
    assert out.shape == (1, 14)
    assert torch.equal(out[:, :9], greedy_without_cache(model, prompt(1, 5), 4))
    # Eight seen positions are full at column 9: the model goes on from columns 5 to 8.
    assert torch.equal(out[:, 5:13], greedy_without_cache(model, out[:, 5:9], 4))
    long = prompt(1, 20)
    assert torch.equal(
        model.generate(long, 1, temperature=0)[:, 12:], greedy_without_cache(model, long[:, 12:], 1)
    )


def test_seeded_sampling_repeats_and_leaves_the_mode_alone():
    model = gpt().train()
    draws = [model.generate(prompt(), 8, generator=torch.Generator().manual_seed(s)) for s in (1, 1, 2)]
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])
    assert model.training


def test_stop_token_ends_and_fills_rows():
    model = gpt()
    free = model.generate(prompt(), 12, temperature=0)
    stop = free[0, 8].item()
    out = model.generate(prompt(), 12, temperature=0, stop=stop)
    for row in range(2):
        new, expected = out[row, 5:].tolist(), free[row, 5:].tolist()
        end = expected.index(stop) + 1 if stop in expected else len(expected)
        assert new[:end] == expected[:end][: len(new)]
        assert all(t == stop for t in new[end:])


def test_sampling_follows_the_distribution():
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0]]).expand(20000, 4)
    g = torch.Generator().manual_seed(0)
    for temperature, top_k in ((1.0, None), (0.5, None), (2.0, 2)):
        counts = sample_token(logits, temperature, top_k, g).flatten().bincount(minlength=4) / 20000
        p = torch.softmax(logits[0] / temperature, 0)
        if top_k:
            p = torch.where(p >= p.topk(top_k).values[-1], p, 0)
        p = p / p.sum()
        assert ((counts - p).abs() <= 5 * (p * (1 - p) / 20000).sqrt()).all()


@pytest.mark.parametrize(
    ("tokens", "options", "match"),
    [
        (torch.zeros(1, 0, dtype=torch.int64), {}, "at least one token"),
        (torch.zeros(3, dtype=torch.int64), {}, "at least one token"),
        (prompt(), {"temperature": -1.0}, "temperature"),
        (prompt(), {"top_k": 0}, "top_k"),
        (prompt(), {"max_new_tokens": -1}, "max_new_tokens"),
        (prompt(), {"prompt_lengths": torch.tensor([0, 1])}, "between 1 and 5"),
        (prompt(), {"prompt_lengths": torch.tensor([1])}, "prompt_lengths"),
    ],
)
def test_wrong_requests_are_one_clear_line(tokens, options, match):
    with pytest.raises(ValueError, match=match):
        gpt().generate(tokens, **({"max_new_tokens": 1} | options))
