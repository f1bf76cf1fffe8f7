"""Benchmarks measure what they say: ratios within rounds, saved bytes by storage, correct peers."""

import pytest
import torch

from results.record import parse_record
from tasks.bench import attention, gpu, peers, step, timing
from tasks.bench.memory import SavedBytes
from xsa_core import exclude
from xsa_core.attention.reference import reference_exclude

CPU = torch.device("cpu")


def test_every_candidate_runs_once_a_round_and_is_compared_within_it():
    calls = []
    names = ["a", "b", "c"]
    found = timing.interleave({n: (lambda n=n: calls.append(n)) for n in names}, 4, "b", CPU, warmup=1)
    rounds = [calls[i : i + 3] for i in range(0, len(calls), 3)]
    assert len(rounds) == 5
    assert all(sorted(round_) == names for round_ in rounds)
    assert len({tuple(round_) for round_ in rounds}) > 1, "the order must change between rounds"
    assert found["b"].ratios == [1.0] * 4
    expected = [own / other for own, other in zip(found["a"].seconds, found["b"].seconds, strict=True)]
    assert found["a"].ratios == expected


def test_the_interval_of_a_median_covers_it_as_often_as_claimed():
    generator = torch.Generator().manual_seed(0)
    covered = 0
    for _ in range(400):
        low, high = timing.median_interval(torch.randn(25, generator=generator).tolist())
        covered += low <= 0.0 <= high
    assert 0.92 <= covered / 400 <= 1.0


def test_saved_bytes_count_each_storage_once_and_known_ones_never():
    x = torch.randn(10, 10, requires_grad=True)
    counter = SavedBytes(x)
    with counter.counting():
        y = x.exp()  # saves its result
        (y * y).sum()  # saves y again, twice
    assert counter.total == y.nbytes


def test_the_two_lines_are_the_exclusion_of_the_specification():
    y, v = torch.randn(2, 2, 7, 4, 16, dtype=torch.float64)
    torch.testing.assert_close(peers.two_lines(y, v), reference_exclude(y, v, 1.0))


def test_two_line_attention_and_the_fused_operator_agree_for_grouped_heads():
    q = torch.randn(2, 9, 4, 16, dtype=torch.float64)
    k, v = torch.randn(2, 2, 9, 2, 16, dtype=torch.float64)
    fused = attention.candidates(with_compiled=False)["fused"](q, k, v)
    torch.testing.assert_close(peers.two_line_attention(q, k, v), fused)


def test_a_model_with_the_two_lines_computes_what_the_exclusive_one_does():
    sizes = {"vocab_size": 11, "n_layers": 2, "n_heads": 2, "d_model": 32, "max_seq_len": 8}
    tokens = torch.arange(8).unsqueeze(0)
    plain, two, fused = (builder(sizes).double()(tokens) for builder in step.BUILDERS.values())
    torch.testing.assert_close(two, fused)
    assert not torch.allclose(plain, fused, rtol=1e-3)


def test_the_fused_operator_saves_one_scalar_more_per_token_and_head_than_plain_attention():
    shape = attention.Shape("target", 2, 64, 4, 32, "bfloat16")
    problem = attention.Problem(shape, CPU)
    found = attention.candidates(with_compiled=False)
    extra = problem.saved_bytes(found["fused"]) - problem.saved_bytes(found["plain"])
    assert 0 < extra <= 4 * 2 * 64 * 4


@pytest.fixture(scope="module")
def gpu_record():
    return gpu.record(CPU, minutes=1.0, small=True)


def test_the_gpu_script_writes_a_record_of_the_suite(gpu_record):
    record = parse_record(gpu_record)
    assert {row["part"] for row in record.rows} == {"check", "operator", "block", "step"}
    assert record.summary["matrix_flops_per_second"] > 0


def test_the_gpu_script_refuses_to_measure_a_wrong_kernel(monkeypatch):
    monkeypatch.setattr(
        gpu, "exclusive_attention", lambda q, k, v, **_: exclude(peers.torch_attention(q, k, v), v, 0.9)
    )
    with pytest.raises(gpu.WrongKernelError, match="checks failed"):
        gpu.run(CPU, small=True)
