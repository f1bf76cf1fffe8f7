"""The chunked vocabulary loss against torch's cross entropy, its memory, and its limits."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from xsa_core.loss import STRIP_BYTES, linear_cross_entropy, token_losses


def problem(n, c, v, dtype=torch.float64, seed=0, ignored=0.0):
    g = torch.Generator().manual_seed(seed)
    hidden = torch.randn(n, c, generator=g, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(v, c, generator=g, dtype=torch.float64).to(dtype).requires_grad_()
    targets = torch.randint(0, v, (n,), generator=g)
    targets[torch.rand(n, generator=g) < ignored] = -100
    return hidden, weight, targets


@given(
    n=st.integers(1, 40),
    c=st.integers(1, 9),
    v=st.integers(1, 50),
    block_rows=st.integers(1, 41),
    ignored=st.sampled_from([0.0, 0.4]),
    scale=st.sampled_from([1.0, 3.5]),
)
@settings(max_examples=40, deadline=None, derandomize=True)
def test_loss_and_gradients_equal_torch_for_any_block(n, c, v, block_rows, ignored, scale):
    hidden, weight, targets = problem(n, c, v, ignored=ignored)
    if (targets == -100).all():
        targets[0] = 0
    loss = linear_cross_entropy(hidden, weight, targets, block_bytes=block_rows * v * 8)
    grads = torch.autograd.grad(loss * scale, [hidden, weight])
    expected = F.cross_entropy(hidden @ weight.T, targets)
    expected_grads = torch.autograd.grad(expected * scale, [hidden, weight])
    torch.testing.assert_close(loss, expected)
    for a, b in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("strip_rows", [1, 3, 100])
def test_strips_change_nothing(monkeypatch, strip_rows):
    hidden, weight, targets = problem(20, 4, 7, ignored=0.3)
    whole = linear_cross_entropy(hidden, weight, targets)
    monkeypatch.setattr("xsa_core.loss.STRIP_BYTES", strip_rows * 7 * 8)
    strips = linear_cross_entropy(hidden, weight, targets)
    torch.testing.assert_close(strips, whole)
    for a, b in zip(*(torch.autograd.grad(x, [hidden, weight]) for x in (strips, whole)), strict=True):
        torch.testing.assert_close(a, b)


def test_shape_of_the_batch_does_not_matter():
    hidden, weight, targets = problem(12, 4, 7)
    a = linear_cross_entropy(hidden.view(3, 4, 4), weight, targets.view(3, 4))
    assert torch.equal(a, linear_cross_entropy(hidden, weight, targets))
    with pytest.raises(ValueError, match="expected hidden"):
        linear_cross_entropy(hidden, weight, targets.view(3, 4))


def test_no_target_at_all_is_zero_with_zero_gradients():
    hidden, weight, targets = problem(5, 4, 7)
    loss = linear_cross_entropy(hidden, weight, torch.full_like(targets, -100))
    loss.backward()
    assert loss.item() == 0
    assert hidden.grad.abs().max() == weight.grad.abs().max() == 0


def test_without_gradients_the_value_is_the_same():
    hidden, weight, targets = problem(9, 4, 7, ignored=0.3)
    with torch.no_grad():
        assert torch.equal(
            linear_cross_entropy(hidden, weight, targets), linear_cross_entropy(hidden, weight, targets)
        )
        value = linear_cross_entropy(hidden, weight, targets)
    assert torch.equal(value, linear_cross_entropy(hidden, weight, targets).detach())


def test_huge_logits_neither_overflow_nor_vanish():
    hidden, weight, targets = problem(6, 4, 7, dtype=torch.float32)
    loss = linear_cross_entropy(hidden * 1e4, weight, targets)
    expected = F.cross_entropy((hidden.double() * 1e4) @ weight.double().T, targets)
    torch.testing.assert_close(loss.double(), expected, rtol=20 * torch.finfo(torch.float32).eps, atol=0)
    assert all(g.isfinite().all() for g in torch.autograd.grad(loss, [hidden, weight]))


@pytest.mark.parametrize("rows", [7, 100])
def test_under_autocast_it_is_no_worse_than_torch(rows):
    hidden, weight, targets = problem(64, 32, 50, dtype=torch.float32)
    exact = F.cross_entropy(hidden.double() @ weight.double().T, targets)
    exact_grads = torch.autograd.grad(exact, [hidden, weight])
    with torch.autocast("cpu", torch.bfloat16):
        ours = linear_cross_entropy(hidden, weight, targets, block_bytes=rows * 50 * 2)
        torchs = F.cross_entropy((hidden @ weight.T).float(), targets)
    assert ours.dtype == torch.float32
    eps = torch.finfo(torch.bfloat16).eps
    assert abs(ours - exact) <= abs(torchs - exact) + eps * exact
    for a, b, e in zip(
        *(torch.autograd.grad(x, [hidden, weight]) for x in (ours, torchs)), exact_grads, strict=True
    ):
        assert a.dtype == torch.float32
        assert (a - e).norm() <= 1.1 * (b - e).norm() + eps * e.norm() / 8


def test_logits_of_all_tokens_are_never_held():
    hidden, weight, targets = problem(4096, 8, 1000, dtype=torch.float32)
    block = 256 * 1000 * 4
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as run:
        linear_cross_entropy(hidden, weight, targets, block_bytes=block).backward()
    live = peak = 0
    for event in run.profiler.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    gradients = 3 * (hidden.numel() + weight.numel()) * 4
    strip = STRIP_BYTES
    assert 0 < peak <= block + strip + gradients + 2**16  # all the logits alone would be 16 blocks


def test_second_derivative_is_refused():
    hidden, weight, targets = problem(4, 3, 5)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(linear_cross_entropy(hidden, weight, targets), hidden, create_graph=True)


def test_token_losses_equal_negative_log_probabilities():
    hidden, weight, targets = problem(6, 4, 7)
    logits = (hidden @ weight.T).view(2, 3, 7)
    expected = -logits.log_softmax(-1).gather(-1, targets.view(2, 3, 1)).squeeze(-1)
    torch.testing.assert_close(token_losses(logits, targets.view(2, 3)), expected)
