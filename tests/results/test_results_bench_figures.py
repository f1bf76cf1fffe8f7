"""Figures of benchmarks show every candidate, and only where there is something to show."""

import pytest

from results.bench_figures import bench_figure
from results.record import BenchRecord, Environment, utc_now


def bench(rows, name="attention"):
    machine = {"python": "3.11.7", "platform": "Linux-x86_64", "cpu": "some CPU", "device": "cpu"}
    environment = Environment(**machine, threads=2, versions={}, precision="float32")
    now = utc_now()
    return BenchRecord(
        name=name, config={}, environment=environment, rows=rows, started_at=now, finished_at=now
    )


def row(attention, **fields):
    return {"attention": attention, "ratio": 1.1, "ratio_low": 1.0, "ratio_high": 1.2, **fields}


def test_every_candidate_of_a_sweep_is_named_in_the_figure(tmp_path):
    names = ["plain", "two lines", "fused"]
    rows = [row(name, sweep="fixed tokens", length=length) for name in names for length in (512, 1024)]
    png, svg = bench_figure(bench(rows), tmp_path / "figure")
    text = svg.read_text()
    assert "two lines" in text
    assert "fused" in text
    assert png.stat().st_size > 5000


def test_a_training_step_is_drawn_by_model_length_and_precision(tmp_path):
    rows = [row(name, model="10.7 M", length=256, precision="bfloat16") for name in ("two lines", "fused")]
    _, svg = bench_figure(bench(rows, "step"), tmp_path / "figure")
    assert "bfloat16" in svg.read_text()


@pytest.mark.parametrize("rows", [[], [{"part": "attention", "share": 0.3}]])
def test_a_benchmark_without_such_rows_has_no_figure(tmp_path, rows):
    assert bench_figure(bench(rows), tmp_path / "figure") == []


def test_the_same_record_gives_the_same_bytes(tmp_path):
    record = bench([row("fused", sweep="width", heads=heads) for heads in (4, 8)])
    first = [path.read_bytes() for path in bench_figure(record, tmp_path / "a")]
    assert first == [path.read_bytes() for path in bench_figure(record, tmp_path / "b")]
