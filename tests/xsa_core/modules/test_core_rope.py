"""Rotary embedding: the property it is made for, and both ways of computing it."""

import pytest
import torch

from xsa_core.attention.rope import Rotation, _rotate, _turn_real, rotary_angles


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
def test_all_ways_of_computing_it_agree(dtype):
    x = heads(dtype=dtype)[..., 2:].requires_grad_()  # a view, as queries are
    rotation = Rotation(torch.tensor([[0, 5, 1, 700, 2, 9], [3, 3, 3, 0, 1, 2]]), 6, 50.0, dtype)
    ways = (
        rotation,
        lambda x: _rotate(x, rotation.cos, rotation.sin),
        lambda x: _turn_real(x, rotation.cos, rotation.sin),
    )
    outputs = [way(x) for way in ways]
    gradients = [torch.autograd.grad(y.square().sum() + y.sum(), x)[0] for y in outputs]
    eps = torch.finfo(dtype).eps
    for y, dx in zip(outputs[1:], gradients[1:], strict=True):
        assert (y - outputs[0]).abs().max() <= 2 * eps * outputs[0].abs().max()
        assert (dx - gradients[0]).abs().max() <= 4 * eps * gradients[0].abs().max()


def test_odd_layouts_are_turned_as_well():
    rotation = Rotation(torch.arange(6), 6, 50.0, torch.float64)
    x = heads(D=9)
    for view in (x[..., 1:7], x[..., 3:], x.transpose(-1, -2).contiguous().transpose(-1, -2)[..., :6]):
        assert not view.is_contiguous()
        assert torch.equal(rotation(view), rotation(view.contiguous()))
        torch.testing.assert_close(_rotate(view, rotation.cos, rotation.sin), rotation(view))


def test_graph_node_is_registered_in_full():
    x = heads()[..., 2:].requires_grad_()
    rotation = Rotation(torch.arange(6), 6, 50.0, torch.float64)
    torch.library.opcheck(_rotate, (x, rotation.cos, rotation.sin))
    few = heads(T=6, D=6)[:1, :, :1].requires_grad_()
    assert torch.autograd.gradgradcheck(lambda x: _rotate(x, rotation.cos, rotation.sin), few)


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
