"""`./xsa run X --explain optimizer` tells how each parameter is updated, and trains nothing."""

import pytest

from tasks.runner import cli
from xsa_core import GPT, GPTConfig


@pytest.mark.parametrize("kind", ["adamw", "muon", "muon_torch"])
def test_every_parameter_stands_in_the_table_with_its_optimizer(lab, capsys, kind):
    overrides = lab.overrides(f"optimizer={kind}", "attention=xsa_learned")
    assert cli.main(["run", "text/tiny", "--explain", "optimizer", *overrides]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.strip()]
    rows = {line.split()[0]: line for line in lines}
    config = lab.config("attention=xsa_learned")
    sizes = {
        "n_layers": config.model.n_layers,
        "n_heads": config.model.n_heads,
        "d_model": config.model.d_model,
    }
    model = GPT(GPTConfig(vocab_size=256, max_seq_len=8, variant="xsa_learned", **sizes))
    names = [name for name, _ in model.named_parameters()]
    assert set(names) <= set(rows)
    for name in names:
        muon = kind != "adamw" and name.endswith(("qkv.weight", "out.weight", "up.weight", "down.weight"))
        assert ("muon" in rows[name]) == muon, rows[name]
    sizes = [p.numel() for p in model.parameters()]
    assert rows["all:"].startswith(f"all: {len(sizes)} tensors, {sum(sizes):,} parameters, ")
    parts = [line for line in lines if line.startswith(("adamw: ", "muon: "))]
    assert sum(int(line.split()[1]) for line in parts) == len(sizes)
    assert not (lab.root / "records").exists() or not list((lab.root / "records").iterdir())
