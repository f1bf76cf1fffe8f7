"""Evaluation mode for a while."""

import pytest
import torch
from torch import nn

from xsa_core.attention.probe import probe
from xsa_core.generation import generate
from xsa_core.gpt import GPT, GPTConfig
from xsa_core.modes import evaluation


def test_every_module_gets_its_own_mode_back_also_after_an_error():
    model = nn.Sequential(nn.Dropout(), nn.Sequential(nn.Dropout(), nn.Dropout()))
    model[1].eval()
    before = [m.training for m in model.modules()]
    seen = []

    def fail_inside():
        with evaluation(model):
            seen.extend(m.training for m in model.modules())
            raise KeyError

    with pytest.raises(KeyError):
        fail_inside()
    assert len(seen) == 5
    assert not any(seen)
    assert [m.training for m in model.modules()] == before


@pytest.mark.parametrize(
    "use", [lambda m, t: probe(m, t), lambda m, t: generate(m, t, 2)], ids=["probe", "generate"]
)
def test_probing_and_generating_leave_a_frozen_part_frozen(use):
    model = GPT(GPTConfig(vocab_size=11, n_layers=2, n_heads=2, d_model=16, max_seq_len=8)).train()
    next(model.children()).eval()
    before = [m.training for m in model.modules()]
    use(model, torch.tensor([[1, 2, 3]]))
    assert [m.training for m in model.modules()] == before
