"""The encoder: bidirectional, blind to padding, savable."""

import pytest
import torch

from xsa_core import Encoder, EncoderConfig, Mask, initialize
from xsa_core.attention.variants import VARIANTS


def encoder(**options):
    sizes = {"n_layers": 2, "n_heads": 4, "d_model": 16, "max_seq_len": 16}
    model = Encoder(EncoderConfig(**(sizes | options))).double()
    initialize(model, 0)
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim > 1:
                p.mul_(20)
    return model.eval()


def features(B=2, T=9, seed=0):
    return torch.randn(B, T, 16, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("variant", VARIANTS)
def test_padded_batch_equals_each_sequence_alone(variant):
    model, x = encoder(variant=variant), features()
    real = torch.arange(9) < torch.tensor([[9], [5]])
    y = model(x.masked_fill(~real[..., None], 1e3), mask=Mask.padding(real))
    torch.testing.assert_close(y[0], model(x[:1])[0])
    torch.testing.assert_close(y[1, :5], model(x[1:, :5])[0])


def test_every_frame_sees_the_last_one_unless_causal():
    x = features()
    changed = x.clone()
    changed[:, -1] += 1
    both, past = encoder(), encoder(causal=True)
    assert (both(x)[:, 0] != both(changed)[:, 0]).any(dim=-1).all()
    assert torch.equal(past(x)[:, :-1], past(changed)[:, :-1])


def test_without_positions_order_does_not_matter():
    x, order = features(), torch.randperm(9, generator=torch.Generator().manual_seed(0))
    free, placed = encoder(rope_base=None), encoder()
    torch.testing.assert_close(free(x)[:, order], free(x[:, order]))
    assert (placed(x)[:, order] - placed(x[:, order])).abs().max() > 1e-3


def test_saved_encoder_is_the_same(tmp_path):
    model = encoder(variant="head_norm", bias=True)
    model.save_pretrained(tmp_path)
    assert torch.equal(Encoder.from_pretrained(tmp_path)(features()), model(features()))


def test_wrong_features_are_one_clear_line():
    with pytest.raises(ValueError, match=r"expected features \(B, T, 16\)"):
        encoder()(features()[..., :8])
    with pytest.raises(ValueError, match="max_seq_len 16"):
        encoder()(features(T=17))
