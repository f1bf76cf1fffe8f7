"""Muon over the package and over torch's own class: one update, two implementations, one state."""

from collections.abc import Callable

import pytest
import torch
from muon import SingleDeviceMuon
from torch import nn

from optimizers.build import build_optimizer
from optimizers.groups import assign
from optimizers.muon import NEWTON_SCHULZ_STEPS, MuonWithAuxAdam, TorchMuonWithAdamW, update_scale

CLASSES = {"muon": MuonWithAuxAdam, "muon_torch": TorchMuonWithAdamW}
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
# A bfloat16 product is right to 2**-8; the singular values of a full-rank matrix take some fifteen products.
BAND = 0.05
SHAPES = {"square": (16, 16), "tall": (48, 16), "wide": (16, 48), "convolution": (16, 3, 4, 2)}


def full_rank(rows: int, columns: int, seed: int) -> torch.Tensor:
    """Return a matrix with singular values between 0.5 and 1, in float64."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
    u, values, v = torch.linalg.svd(noise, full_matrices=False)
    return u @ torch.diag(torch.linspace(0.5, 1.0, len(values), dtype=torch.float64)) @ v


def slow_newton_schulz(matrix: torch.Tensor) -> torch.Tensor:
    """Return the iteration's result through the singular values, in float64: each goes its own way."""
    u, values, v = torch.linalg.svd(matrix, full_matrices=False)
    values = values / values.norm()
    a, b, c = COEFFICIENTS
    for _ in range(NEWTON_SCHULZ_STEPS):
        values = a * values + b * values**3 + c * values**5
    return u @ torch.diag(values) @ v


def one_group(parameter: nn.Parameter, **changes: object) -> dict:
    """Return a Muon group of one parameter."""
    return {
        "params": [parameter],
        "lr": 1.0,
        "momentum": 0.9,
        "weight_decay": 0.0,
        "use_muon": True,
        **changes,
    }


@pytest.mark.parametrize("kind", CLASSES.values(), ids=CLASSES)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_update_is_the_slow_reference_within_the_band(kind: type, shape: tuple[int, ...]) -> None:
    rows, columns = shape[0], torch.Size(shape[1:]).numel()
    parameter = nn.Parameter(torch.zeros(shape, dtype=torch.float64))
    optimizer = kind([one_group(parameter)], [()], "match_rms_adamw")
    momentum = torch.zeros(rows, columns, dtype=torch.float64)
    for step in range(3):
        gradient = full_rank(rows, columns, 1) + 0.05 * full_rank(rows, columns, 2 + step)
        parameter.grad = gradient.view(shape).clone()
        before = parameter.detach().clone()
        optimizer.step()
        momentum = 0.9 * momentum + 0.1 * gradient
        want = slow_newton_schulz(0.1 * gradient + 0.9 * momentum)
        got = (before - parameter.detach()).reshape(rows, columns)
        got = got / update_scale(rows, columns, "match_rms_adamw")
        assert (got - want).norm() < BAND * want.norm()


@pytest.mark.parametrize("tied", [True, False])
def test_two_implementations_train_a_model_alike(
    decoder: Callable, settings: Callable, fill: Callable, tied: bool
) -> None:
    """Random gradients have full rank, so both iterations end within the band of each other."""
    models = {name: decoder(tie_embeddings=tied) for name in CLASSES}
    start = dict(decoder(tie_embeddings=tied).named_parameters())
    for name, model in models.items():
        optimizer = build_optimizer(model, settings(name))
        assert isinstance(optimizer, CLASSES[name])
        for step in range(3):
            fill(model, step)
            optimizer.step()
    others = dict(models["muon_torch"].named_parameters())
    for each in assign(models["muon"], settings("muon")):
        moved = each.parameter.detach() - start[each.name].detach()
        difference = each.parameter.detach() - others[each.name].detach()
        limit = 2 * BAND if each.algorithm == "muon" else 1e-9
        assert difference.norm() <= limit * moved.norm(), each.name


@pytest.mark.parametrize(
    ("name", "rule"),
    [("muon", "keller_jordan"), ("muon_torch", "keller_jordan"), ("muon_torch", "match_rms_adamw")],
)
def test_whole_matrices_move_as_the_library_moves_them(name: str, rule: str) -> None:
    """Momentum, Nesterov's step, decay and scale are the library's own, bit for bit."""
    weights = {"square": torch.randn(8, 8), "tall": torch.randn(12, 4), "wide": torch.randn(4, 12)}
    ours = [nn.Parameter(weight.clone()) for weight in weights.values()]
    theirs = [nn.Parameter(weight.clone()) for weight in weights.values()]
    group = {**one_group(ours[0], lr=0.1, weight_decay=0.1), "params": ours}
    optimizer = CLASSES[name]([group], [()], rule)
    if name == "muon_torch":
        adjust = {"keller_jordan": "original"}.get(rule, rule)
        library = torch.optim.Muon(theirs, lr=0.1, weight_decay=0.1, momentum=0.9, adjust_lr_fn=adjust)
    else:
        library = SingleDeviceMuon(theirs, lr=0.1, weight_decay=0.1, momentum=0.9)
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        for own, their in zip(ours, theirs, strict=True):
            own.grad = torch.randn(own.shape, generator=generator)
            their.grad = own.grad.clone()
        optimizer.step()
        library.step()
    # The scale is applied to the rate here and to the bfloat16 update there (package): half a unit of that.
    eps = torch.finfo(torch.float32 if name == "muon_torch" else torch.bfloat16).eps
    for own, their in zip(ours, theirs, strict=True):
        torch.testing.assert_close(own, their, rtol=2 * eps, atol=2 * eps * 0.1)
