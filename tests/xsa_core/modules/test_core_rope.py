"""Rotary embedding: the property it is made for, and both ways of computing it."""

import pytest
import torch

from xsa_core.attention.rope import Rotation, rotary_angles


def heads(T=6, D=8, dtype=torch.float64, seed=0):
    return torch.randn(2, T, 3, D, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(
        dtype
    )


def test_products_depend_on_the_distance_alone():
    q, k = heads(), heads(seed=1)

    def logits(offset):
        turn = Rotation(torch.arange(6) + offset, 8, 100.0, torch.float64)
        return torch.einsum("bthd,bshd->bhts", turn(q), turn(k))

    torch.testing.assert_close(
        logits(0), logits(1000), rtol=0, atol=1e-11
    )  # angles near 1000: 1000 * eps * some
    turned = Rotation(torch.arange(6) * 2, 8, 100.0, torch.float64)
    other = torch.einsum("bthd,bshd->bhts", turned(q), turned(k))
    assert (other - logits(0)).abs().max() > 0.1


def test_lengths_are_kept_and_position_zero_is_left_alone():
    x = heads()
    y = Rotation(torch.arange(6), 8, 100.0, torch.float64)(x)
    torch.testing.assert_close(y.norm(dim=-1), x.norm(dim=-1))
    assert torch.equal(y[:, 0], x[:, 0])


def test_channels_beyond_the_rotated_ones_pass_unchanged():
    x = heads()
    y = Rotation(torch.arange(6), 4, 100.0, torch.float64)(x)
    assert torch.equal(y[..., 4:], x[..., 4:])
    assert (y[:, 1:, :, :4] != x[:, 1:, :, :4]).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_compiled_arithmetic_equals_complex_arithmetic(dtype):
    x = heads(dtype=dtype).requires_grad_()
    positions = torch.tensor([[0, 5, 1, 700, 2, 9], [3, 3, 3, 0, 1, 2]])

    def turn(x):
        return Rotation(positions, 6, 50.0, dtype)(x)

    torch._dynamo.reset()
    compiled = torch.compile(turn, fullgraph=True, backend="aot_eager")
    (a, da), (b, db) = (
        (y, torch.autograd.grad(y.square().sum() + y.sum(), x)[0]) for y in (turn(x), compiled(x))
    )
    eps = torch.finfo(dtype).eps
    assert (a - b).abs().max() <= 2 * eps * a.abs().max()
    assert (da - db).abs().max() <= 4 * eps * da.abs().max()


def test_bfloat16_heads_keep_apart_distant_neighbours():
    x = torch.ones(1, 2, 1, 2, dtype=torch.bfloat16)
    turned = Rotation(torch.tensor([1000, 1001]), 2, 10000.0, torch.bfloat16)(x)
    exact = rotary_angles(torch.tensor([1000, 1001]), 2)
    expected = (exact.cos() - exact.sin()).flatten()
    assert (turned[0, :, 0, 0].double() - expected).abs().max() <= torch.finfo(torch.bfloat16).eps


@pytest.mark.parametrize("rotated", [0, 3, -2])
def test_odd_or_empty_rotation_is_refused(rotated):
    with pytest.raises(ValueError, match="even"):
        rotary_angles(torch.arange(3), rotated)
