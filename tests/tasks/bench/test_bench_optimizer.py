"""The share of the optimizer: of the same gradient, for every optimizer there is, and kept as a record."""

import contextlib

import pytest
import torch

from optimizers.build import BUILDERS
from results.store import load_records
from results.summaries import bench_table
from tasks.bench import optimizer
from tasks.runner import cli

CPU = torch.device("cpu")
SMALL = {"vocab_size": 11, "n_layers": 1, "n_heads": 2, "d_model": 16}


def test_sizes_are_ten_and_a_hundred_million_parameters():
    from xsa_core import GPT, GPTConfig

    for name, sizes in optimizer.SIZES.items():
        with torch.device("meta"):
            model = GPT(GPTConfig(variant="sa", max_seq_len=256, **sizes))
        assert model.num_parameters() / 1e6 == pytest.approx(float(name.split()[0]), rel=0.1)


def test_every_optimizer_is_timed_on_the_same_gradient():
    rows = optimizer.measure(SMALL, 2, 8, CPU, contextlib.nullcontext, rounds=6)
    assert [row["optimizer"] for row in rows] == list(BUILDERS)
    assert len({row["gradient_milliseconds"] for row in rows}) == 1
    for row in rows:
        assert 0 < row["share_low"] <= row["share"] <= row["share_high"] < 1
        assert row["update_milliseconds"] > 0
        assert row["tokens"] == 16


def test_a_share_is_the_updates_part_of_both():
    update, gradient = 3.0, 9.0
    assert optimizer.share(update / gradient) == pytest.approx(update / (update + gradient))


def test_the_command_keeps_a_record_that_a_report_shows(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(optimizer, "SIZES", {"10 M": SMALL, "100 M": SMALL})
    words = ["bench", "optimizer", "--rounds", "2", "--lengths", "8", "--records", str(tmp_path)]
    assert cli.main(words) == 0
    assert "share of the step" in capsys.readouterr().out
    (record,) = load_records(tmp_path)
    assert record.name == "optimizer"
    assert [row["rounds"] for row in record.rows] == [2] * len(BUILDERS) + [1] * len(BUILDERS)
    assert all(row["share_low"] is None for row in record.rows)  # too few rounds for an interval
    assert len(bench_table(record).rows) == 2 * len(BUILDERS)
