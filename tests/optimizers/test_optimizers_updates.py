"""AdamW and Muon step by step, against plain formulas and the singular value decomposition."""

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from optimizers.build import BUILDERS, build_optimizer
from optimizers.groups import assign
from optimizers.muon import MuonWithAuxAdam, update_scale
from optimizers.schedule import set_learning_rate

EPS = torch.finfo(torch.float64).eps
STEPS = 4


def adam_by_hand(
    assignments: list, gradients: list[dict], rates: list[float], config: Any
) -> dict[str, torch.Tensor]:
    """Return the weights after AdamW (Loshchilov & Hutter 2019, algorithm 2)."""
    result = {}
    for a in assignments:
        weight = a.parameter.detach().clone()
        first, second = torch.zeros_like(weight), torch.zeros_like(weight)
        for step, (gradient, rate) in enumerate(zip(gradients, rates, strict=True), start=1):
            g, lr = gradient[a.name], a.lr * rate
            first = config.beta1 * first + (1 - config.beta1) * g
            second = config.beta2 * second + (1 - config.beta2) * g**2
            corrected = first / (1 - config.beta1**step)
            root = torch.sqrt(second / (1 - config.beta2**step))
            weight = weight - lr * a.weight_decay * weight - lr * corrected / (root + config.eps)
        result[a.name] = weight
    return result


@pytest.mark.parametrize("name", BUILDERS)
def test_adam_is_its_plain_formula_in_float64(
    decoder: Callable, settings: Callable, fill: Callable, name: str
) -> None:
    model, config = decoder(), settings(name)
    assignments = [a for a in assign(model, config) if a.algorithm == "adamw"]
    optimizer = build_optimizer(model, config)
    rates, gradients = [0.5, 1.0, 0.7, 0.1], []
    start = copy.deepcopy(model)
    for step, rate in enumerate(rates):
        fill(model, step)
        gradients.append({a.name: a.parameter.grad.clone() for a in assignments})
        set_learning_rate(optimizer, rate)
        optimizer.step()
    before = dict(start.named_parameters())
    from_start = [copy.copy(a) for a in assignments]
    for a in from_start:
        object.__setattr__(a, "parameter", before[a.name])
    want = adam_by_hand(from_start, gradients, rates, config)
    for a in assignments:
        torch.testing.assert_close(a.parameter.detach(), want[a.name], rtol=100 * EPS, atol=100 * EPS)


def muon_alone(
    weight: torch.Tensor, splits: tuple[int, ...] = (), **changes: Any
) -> tuple[nn.Parameter, MuonWithAuxAdam]:
    """Return a parameter and a Muon over it alone."""
    parameter = nn.Parameter(weight.clone())
    group = {
        "params": [parameter],
        "lr": 1.0,
        "momentum": 0.0,
        "weight_decay": 0.0,
        "use_muon": True,
        **changes,
    }
    return parameter, MuonWithAuxAdam([group], [splits], "keller_jordan")


def full_rank(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    """Return a matrix with singular values between 0.5 and 1, hence a well-conditioned one."""
    generator = torch.Generator().manual_seed(seed)
    u, _, v = torch.linalg.svd(
        torch.randn(rows, columns, generator=generator, dtype=torch.float64), full_matrices=False
    )
    values = torch.linspace(0.5, 1.0, len(_), dtype=torch.float64)
    return u @ torch.diag(values) @ v


def one_update(gradient: torch.Tensor, splits: tuple[int, ...] = (), **changes: Any) -> torch.Tensor:
    """Return what Muon subtracts for this gradient, at rate 1."""
    parameter, optimizer = muon_alone(torch.zeros_like(gradient), splits, **changes)
    parameter.grad = gradient.clone()
    optimizer.step()
    return -parameter.detach()


SHAPES = {"square": (16, 16), "tall": (48, 16), "wide": (16, 48), "convolution": (16, 3, 4, 2)}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_muon_update_is_near_the_polar_factor(shape: tuple[int, ...]) -> None:
    """U S' V^T with the gradient's own U and V, and S' in the band of five Newton-Schulz steps."""
    rows, columns = shape[0], torch.Size(shape[1:]).numel()
    gradient = full_rank(rows, columns)
    update = one_update(gradient.view(shape)).reshape(rows, columns) / max(1.0, rows / columns) ** 0.5
    u, _, v = torch.linalg.svd(gradient, full_matrices=False)
    core = u.T @ update @ v.T  # diagonal where the singular vectors are kept
    diagonal = core.diagonal()
    assert diagonal.min() > 0.6
    assert diagonal.max() < 1.25
    # The iteration runs in bfloat16: 2**-8 a product, some twenty of them, over sixteen singular values.
    assert (core - torch.diag(diagonal)).abs().max() < 0.08
    inside = update - u @ core @ v
    assert inside.norm() < 0.1 * update.norm()


def test_a_fused_weight_is_orthogonalised_block_by_block() -> None:
    """Queries, keys and values of very different size each get an update of the same size."""
    blocks = [full_rank(16, 16, 1) * 100, full_rank(8, 16, 2), full_rank(8, 16, 3) * 0.01]
    update = one_update(torch.cat(blocks), splits=(16, 8, 8))
    for block, got in zip(blocks, update.split((16, 8, 8)), strict=True):
        alone = one_update(block)
        torch.testing.assert_close(got, alone, rtol=0, atol=0)
        values = torch.linalg.svdvals(got)
        assert values.min() > 0.6
        assert values.max() < 1.25
    whole = one_update(torch.cat(blocks))
    assert (whole - update).abs().max() > 0.1


def test_the_models_fused_projections_are_split(
    decoder: Callable, settings: Callable, fill: Callable
) -> None:
    """Scaling one block's gradient must not change the update of the others."""
    model = decoder()
    name, blocks = next((a.name, a.role.splits) for a in assign(model, settings("muon")) if a.role.splits)
    assert len(blocks) == 3
    updates = []
    for scale in (1.0, 1000.0):
        twin = copy.deepcopy(model)
        optimizer = build_optimizer(twin, settings("muon"))
        fill(twin, 0)
        weight = dict(twin.named_parameters())[name]
        weight.grad[: blocks[0]] *= scale
        before = weight.detach().clone()
        optimizer.step()
        updates.append(weight.detach() - before)
    torch.testing.assert_close(updates[0][blocks[0] :], updates[1][blocks[0] :], rtol=0, atol=0)


def test_muon_decays_first_and_looks_ahead_along_the_momentum() -> None:
    """Two steps against the formula, with the package's own iteration for the orthogonal factor alone."""
    from muon import zeropower_via_newtonschulz5

    beta, lr, decay = 0.9, 0.1, 0.2
    start = full_rank(12, 8, 5)
    parameter, optimizer = muon_alone(start, momentum=beta, lr=lr, weight_decay=decay)
    weight, momentum = start.clone(), torch.zeros_like(start)
    for seed in (6, 7):
        gradient = full_rank(12, 8, seed)
        parameter.grad = gradient.clone()
        optimizer.step()
        assert torch.equal(parameter.grad, gradient)  # the step reads the gradient, it does not change it
        momentum = beta * momentum + (1 - beta) * gradient
        ahead = beta * momentum + (1 - beta) * gradient
        step = zeropower_via_newtonschulz5(ahead, steps=5).double() * (12 / 8) ** 0.5
        weight = weight * (1 - lr * decay) - lr * step
        # The iteration starts by rounding to bfloat16, where one ulp of the input is 2**-8.
        torch.testing.assert_close(parameter.detach(), weight, rtol=0, atol=lr * 2**-5)


def test_update_scales() -> None:
    assert update_scale(48, 16, "keller_jordan") == pytest.approx(3**0.5)
    assert update_scale(16, 48, "keller_jordan") == 1.0
    assert update_scale(16, 48, "match_rms_adamw") == pytest.approx(0.2 * 48**0.5)
    with pytest.raises(ValueError, match="keller_jordan or match_rms_adamw, got 'other'"):
        update_scale(1, 1, "other")


def test_matched_scale_gives_the_root_mean_square_of_adamw() -> None:
    """An orthogonal (rows, columns) matrix has root mean square 1 / sqrt(max): times the scale, 0.2."""
    for rows, columns in ((64, 64), (128, 32), (32, 128)):
        q = torch.linalg.qr(torch.randn(max(rows, columns), min(rows, columns), dtype=torch.float64))[0]
        matrix = (q if rows >= columns else q.T) * update_scale(rows, columns, "match_rms_adamw")
        assert matrix.square().mean().sqrt().item() == pytest.approx(0.2, rel=1e-9)


@pytest.mark.parametrize("name", BUILDERS)
def test_a_parameter_without_gradient_stays_as_it_is(
    decoder: Callable, settings: Callable, fill: Callable, name: str
) -> None:
    model = decoder()
    optimizer = build_optimizer(model, settings(name))
    fill(model, 0)
    skipped = [p for i, p in enumerate(model.parameters()) if i % 3 == 0]
    before = [p.detach().clone() for p in model.parameters()]
    for p in skipped:
        p.grad = None
    optimizer.step()
    for p, old in zip(model.parameters(), before, strict=True):
        assert torch.equal(p, old) == any(p is s for s in skipped)
    assert not any(p in optimizer.state and optimizer.state[p] for p in skipped)


@pytest.mark.parametrize("name", BUILDERS)
def test_state_goes_through_a_file_bit_for_bit(
    decoder: Callable, settings: Callable, fill: Callable, name: str
) -> None:
    model = decoder()
    optimizer = build_optimizer(model, settings(name))
    for step in range(2):
        fill(model, step)
        optimizer.step()
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    other = decoder()
    other.load_state_dict(saved["model"])
    resumed = build_optimizer(other, settings(name))
    resumed.load_state_dict(saved["optimizer"])
    for step in range(2, STEPS):
        for m, o in ((model, optimizer), (other, resumed)):
            fill(m, step)
            set_learning_rate(o, 1.0 / step)
            o.step()
    for (key, a), (_, b) in zip(model.named_parameters(), other.named_parameters(), strict=True):
        assert torch.equal(a, b), key


@pytest.mark.parametrize("name", BUILDERS)
def test_training_lowers_a_convex_loss(settings: Callable, name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 8, generator=generator)
    target = x @ torch.randn(8, 8, generator=generator)
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    optimizer = build_optimizer(model, settings(name, lr=0.2, weight_decay=0.0))
    losses = []
    for _ in range(60):
        loss = (model(x) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.2 * losses[0]
