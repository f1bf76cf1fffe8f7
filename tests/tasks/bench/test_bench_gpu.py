"""The GPU script on a machine nobody has seen: what fails is noted, and time ends."""

import itertools

import pytest
import torch

from tasks.bench import gpu

CPU = torch.device("cpu")
CASE = {"backend": "flex", "dtype": "bfloat16", "length": 3, "heads": 2, "kv_heads": 1, "head_dim": 8}


def raising(error):
    def call(*args, **options):
        raise error

    return call


@pytest.mark.parametrize(
    ("error", "failed"), [(RuntimeError("no kernel\nfor this"), True), (ValueError("no bias"), False)]
)
def test_what_a_kernel_raises_is_noted_in_one_line(monkeypatch, error, failed):
    monkeypatch.setattr(gpu, "exclusive_attention", raising(error))
    found = gpu.check(CASE, CPU)
    assert found["ok"] is None
    assert found["failed"] is failed
    assert found["note"] == f"{type(error).__name__}: {str(error).splitlines()[0]}"


def test_a_default_kernel_that_fails_stops_the_run_before_anything_is_measured(monkeypatch):
    monkeypatch.setattr(gpu, "exclusive_attention", raising(RuntimeError("no device code")))
    monkeypatch.setattr(gpu, "check_cases", lambda device: iter([{**CASE, "backend": "sdpa"}]))
    with pytest.raises(gpu.WrongKernelError, match=r"1 of 1 checks failed.*no device code"):
        gpu.run(CPU, small=True)


def test_another_backend_that_fails_is_left_out_and_counted(monkeypatch):
    measured = []
    monkeypatch.setattr(
        gpu, "check_cases", lambda device: iter([{**CASE, "backend": b} for b in ("sdpa", "flex")])
    )
    monkeypatch.setattr(
        gpu, "check", lambda case, device: case | {"ok": case["backend"] == "sdpa", "worst_error": 1.0}
    )
    monkeypatch.setattr(gpu, "block_rows", lambda *args: [])
    monkeypatch.setattr(gpu.step, "measure", lambda *args: [])
    monkeypatch.setattr(gpu, "operator_rows", lambda *args: measured.append(args[-1]) or [])
    found = gpu.run(CPU, small=True)
    assert measured == [{"sdpa"}]
    assert found["summary"]["checks_failed"] == 1
    assert [row["ok"] for row in found["rows"]] == [True, False]


def test_no_piece_starts_that_would_not_end_in_time(monkeypatch):
    times = itertools.chain([0.0, 40.0, 70.0, 71.0])
    monkeypatch.setattr(gpu.time, "monotonic", lambda: next(times))
    clock = gpu.Clock(end=100.0)
    assert clock.room()  # at 0
    assert clock.room()  # at 40, a piece takes 40
    assert not clock.room()  # at 70: 40 more would be 110
    assert not clock.room()


def test_every_backend_is_checked_and_those_compiled_for_every_case_only_a_little(monkeypatch):
    monkeypatch.setattr(gpu, "usable_backends", lambda device: ["reference", "sdpa", "flex"])
    cases = list(gpu.check_cases(torch.device("cuda")))
    assert {c["dtype"] for c in cases if c["backend"] == "sdpa"} == {"float32", "bfloat16", "float16"}
    assert 1 in {c["length"] for c in cases if c["backend"] == "sdpa"}
    assert 0 < sum(c["backend"] == "flex" for c in cases) <= 2
