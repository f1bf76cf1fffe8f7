"""The GPU script on a machine nobody has seen: what fails is noted, and time ends."""

import dataclasses
import itertools

import pytest
import torch

from tasks.bench import attention, gpu
from xsa_core.attention import BACKENDS

CPU = torch.device("cpu")
CASE = {"backend": "flex", "dtype": "bfloat16", "kind": "causal", "length": 3}
CASE |= {"heads": 2, "kv_heads": 1, "head_dim": 8}


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
    monkeypatch.setattr(gpu.gpu_cases, "cases", lambda *args: iter([{**CASE, "backend": "sdpa"}]))
    with pytest.raises(gpu.WrongKernelError, match=r"1 of 1 checks failed.*no device code"):
        gpu.run(CPU, small=True)


def test_another_backend_that_fails_is_left_out_and_counted(monkeypatch):
    measured = []
    both = [{**CASE, "backend": backend} for backend in ("sdpa", "flex")]
    monkeypatch.setattr(gpu.gpu_cases, "cases", lambda *args: iter(both))
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


def test_every_backend_is_checked_and_those_compiled_for_every_case_only_a_little():
    cases = list(gpu.gpu_cases.cases(["reference", "sdpa", "flex"], torch.device("cuda")))
    assert {c["dtype"] for c in cases if c["backend"] == "sdpa"} == {"float32", "bfloat16", "float16"}
    assert 1 in {c["length"] for c in cases if c["backend"] == "sdpa"}
    assert {c["kind"] for c in cases} == {"causal", *gpu.gpu_cases.KINDS}
    assert 0 < sum(c["backend"] == "flex" for c in cases) <= 2


@pytest.mark.parametrize("kind", gpu.gpu_cases.KINDS)
@pytest.mark.parametrize("wrong", [False, True])
def test_every_kind_is_right_here_and_a_wrong_strength_is_noticed(monkeypatch, kind, wrong):
    case = {"backend": "sdpa", "dtype": "float32", "kind": kind, "length": 30}
    case |= {"heads": 4, "kv_heads": 2, "head_dim": 16}
    if wrong:
        right = gpu.exclusive_attention
        monkeypatch.setattr(
            gpu, "exclusive_attention", lambda *args, **kw: right(*args, **{**kw, "strength": 0.9})
        )
        if kind == "learned strength":  # then the parameter has no gradient at all
            monkeypatch.setattr(
                gpu,
                "exclusive_attention",
                lambda *a, **kw: right(*a, **{**kw, "strength": kw["strength"] * 0.9}),
            )
    assert gpu.check(case, CPU)["ok"] is not wrong


def test_xformers_is_compared_where_it_runs_and_left_out_elsewhere(monkeypatch):
    able = dataclasses.replace(BACKENDS["xformers"], unavailable=lambda: None)
    monkeypatch.setitem(BACKENDS, "xformers", able)
    found = attention.candidates(with_compiled=False)
    assert "xformers" in found
    rows = attention.measure(attention.Shape("target", 1, 8, 2, 8, "float32"), CPU, 1, found)
    assert [row["attention"] for row in rows] == [name for name in found if name != "xformers"]
    monkeypatch.setitem(BACKENDS, "xformers", dataclasses.replace(able, unavailable=lambda: "not here"))
    assert "xformers" not in attention.candidates(with_compiled=False)
