"""Choice among backends, their refusals, and the lowering of masks to the kernels that need a GPU."""

import dataclasses
import itertools

import pytest
import torch
from operator_oracle import assert_close, causal_visible, correlated, gradients, loop_attention

from xsa_core.attention import (
    BACKENDS,
    Mask,
    attention_with_lse,
    backend_matrix,
    choose_backend,
    exclusive_attention,
    flex,
    reference_attention,
    xformers_pair,
)
from xsa_core.attention.backends import Request, check_backend, sdpa_kernel
from xsa_core.attention.kernel_pairs import PAIRS

CPU = Request("cpu", "float32", frozenset({"causal"}), 8, 8, 4, 2, 16, 16)
CUDA = dataclasses.replace(CPU, device="cuda", dtype="bfloat16")


@pytest.fixture
def gpu(monkeypatch):
    """Records as they read on a machine with a GPU; no kernel is run."""
    able = {n: dataclasses.replace(b, unavailable=lambda: None) for n, b in BACKENDS.items()}
    for name, record in able.items():
        monkeypatch.setitem(BACKENDS, name, record)


def test_auto_is_sdpa_on_the_cpu():
    assert choose_backend(CPU) == "sdpa"


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, "xformers"),
        ({"masks": frozenset({"window", "causal"})}, "flex"),
        ({"masks": frozenset({"documents"})}, "flex"),
        ({"masks": frozenset({"padding"})}, "xformers"),
        ({"dtype": "float32"}, "sdpa"),
        ({"dropout": True}, "sdpa"),
        ({"bias": True, "bias_gradient": True}, "sdpa"),
        ({"key_size": 20, "value_size": 20}, "sdpa"),
        ({"value_size": 32}, "sdpa"),
        ({"masks": frozenset({"documents", "exclude_self"})}, "xformers"),
    ],
    ids=lambda part: part if isinstance(part, str) else "+".join(part) or "plain",
)
def test_auto_follows_the_records_on_cuda(gpu, change, expected):
    request = dataclasses.replace(CUDA, **change)
    assert choose_backend(request) == expected
    assert check_backend(expected, request) == expected


def test_the_choice_traces_into_one_graph():
    def run(x):
        return x + len(choose_backend(CUDA)), choose_backend(CUDA)

    torch._dynamo.reset()
    whole = torch.compile(run, fullgraph=True, backend="eager")
    assert whole(torch.zeros(1))[1] == choose_backend(CUDA)


@pytest.mark.parametrize(
    ("request_", "dense", "kernel"),
    [
        (CPU, False, "flash_cpu"),
        (dataclasses.replace(CPU, dropout=True), False, "math"),
        (dataclasses.replace(CPU, bias=True, bias_gradient=True), True, "math"),
        (dataclasses.replace(CPU, value_size=8), False, "math"),
        (CUDA, False, "flash_cuda"),
        (CUDA, True, "efficient"),
        (dataclasses.replace(CUDA, dtype="float32"), False, "efficient"),
        (dataclasses.replace(CUDA, key_size=20, value_size=20), False, "math"),
        (dataclasses.replace(CUDA, dtype="float64"), False, "math"),
    ],
    ids=str,
)
def test_sdpa_takes_flash_where_it_applies(request_, dense, kernel):
    assert sdpa_kernel(request_, dense) == kernel


@pytest.mark.parametrize("name", ["xformers", "flex"])
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_asking_for_an_unavailable_backend_says_why_and_what_works(name):
    q = torch.randn(1, 4, 2, 16)
    with pytest.raises(ValueError, match=r"no CUDA device.*would work here: reference, sdpa"):
        exclusive_attention(q, q, q, backend=name)


def test_unknown_backend_lists_the_known_ones():
    q = torch.randn(1, 4, 2, 16)
    with pytest.raises(
        ValueError, match=r"unknown attention backend 'flash'.*reference, sdpa, xformers, flex"
    ):
        exclusive_attention(q, q, q, backend="flash")


def test_every_refusal_names_what_is_missing(gpu):
    request = dataclasses.replace(CUDA, dropout=True, bias=True, bias_gradient=True, key_size=300)
    with pytest.raises(ValueError, match="dropout") as error:
        check_backend("xformers", request)
    for part in ("gradient of a bias", "300", "values of another size", "sdpa"):
        assert part in str(error.value)


def test_matrix_has_a_row_per_backend_and_a_reason_where_unavailable():
    rows = backend_matrix()
    assert [row["name"] for row in rows] == list(BACKENDS)
    assert all(row["available"] == (row["reason"] is None) for row in rows)
    assert {"devices", "dtypes", "masks", "bias_gradient", "gqa", "dropout", "lse"} <= rows[0].keys()


def test_records_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        BACKENDS["sdpa"].dropout = False


# ---------------------------------------------------------------- log-sum-exp


@pytest.mark.parametrize("backend", ["reference", "sdpa"])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("causal", [True, False])
def test_log_sum_exp_and_its_gradient(backend, with_bias, causal):
    tensors = [correlated(2, 7, h, 8, seed=i, shared=0.3) for i, h in enumerate((4, 2, 2))]
    if with_bias:
        tensors.append(correlated(2, 7, 4, 7, seed=5, shared=0.0).transpose(1, 2).contiguous())
    visible = causal_visible(2, 7, 7)[:, None] if causal else torch.tensor(True)

    def ours(q, k, v, bias=None):
        y, lse = attention_with_lse(q, k, v, causal=causal, bias=bias, backend=backend)
        return torch.cat([y, lse.transpose(1, 2).unsqueeze(-1)], dim=-1)

    def by_hand(q, k, v, bias=None):
        logits = torch.einsum("bthd,bshd->bhts", q, k.repeat_interleave(2, 2)) * 8**-0.5
        logits = logits if bias is None else logits + bias
        logits = logits.masked_fill(~visible, -torch.inf)
        lse = torch.log(torch.exp(logits).sum(-1))
        seen = None if not causal else visible[:, 0]
        y = loop_attention(q, k, v, bias=bias, visible=seen, strength=None)
        return torch.cat([y, lse.transpose(1, 2).unsqueeze(-1)], dim=-1)

    weight = torch.randn(2, 7, 4, 9, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    assert_close(gradients(ours, tensors, weight), gradients(by_hand, tensors, weight), torch.float64)


def test_halves_of_the_keys_merge_by_log_sum_exp_to_the_whole():
    q, k, v = (correlated(1, 8, 2, 8, seed=i) for i in range(3))
    parts = [attention_with_lse(q, k[:, half], v[:, half]) for half in (slice(0, 4), slice(4, 8))]
    total = torch.logaddexp(parts[0][1], parts[1][1])
    merged = sum(y * torch.exp(lse - total).transpose(1, 2).unsqueeze(-1) for y, lse in parts)
    assert_close([merged], [exclusive_attention(q, k, v, strength=None)], torch.float64)


# ---------------------------------------------------------------- masks of xformers and FlexAttention


N = 9
IDS = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2, 2], [5, 5, 5, 5, 5, 5, 5, 5, 7]])
PARTS = {
    "causal": Mask.causal(),
    "window": Mask.window(3),
    "documents": Mask.documents(IDS),
    "prefix": Mask.prefix(torch.tensor([3, 0])),
    "padding": Mask.padding(torch.arange(N)[None] < torch.tensor([[9], [5]])),
}
COMBINATIONS = [names for n in (1, 2, 3) for names in itertools.combinations(PARTS, n)]


def joined(names):
    mask = Mask.full()
    for name in names:
        mask = mask & PARTS[name]
    return mask


@pytest.mark.parametrize("T", [9, 4])
@pytest.mark.parametrize("names", COMBINATIONS, ids="+".join)
def test_flex_sees_what_the_dense_mask_shows(names, T):
    mask = joined(names)
    b, i, j = torch.meshgrid(torch.arange(2), torch.arange(T), torch.arange(N), indexing="ij")
    found = flex.mask_mod(mask, T, N, "cpu")(b, b * 0, i, j)
    assert torch.equal(found, mask.to_dense(2, T, N, "cpu")[:, 0].expand(2, T, N))


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_and_its_log_sum_exp_equal_the_reference():
    q, k, v = (torch.randn(2, 32, h, 16, generator=torch.Generator().manual_seed(h)) for h in (4, 2, 2))
    mask = Mask.causal() & Mask.window(5)
    with torch.no_grad():  # uncompiled, as here, FlexAttention is a dense reference of its own
        y, lse = flex.attention(q, k, v, mask, None)
    expected, _, expected_lse = reference_attention(q.double(), k.double(), v.double(), mask=mask)
    assert_close([y, lse], [expected, expected_lse], torch.float32)


def test_flex_refuses_the_mask_it_cannot_say():
    with pytest.raises(ValueError, match="exclude_self"):
        flex.mask_mod(Mask.causal(exclude_self=True), 4, 4, "cpu")


@pytest.mark.parametrize("T", [9, 4])
@pytest.mark.parametrize("names", COMBINATIONS, ids="+".join)
def test_xformers_biases_materialize_to_the_dense_mask(names, T):
    pytest.importorskip("xformers")
    mask = joined(names)
    plan = xformers_pair.plan_mask(mask, 2, T, N)
    if plan is None:
        return
    dense = mask.to_dense(2, T, N, "cpu")[:, 0].expand(2, T, N)
    if plan.packed:
        dense = torch.block_diag(*dense).bool()[None]
    seen = plan.bias.materialize(dense.shape, dtype=torch.float32) == 0
    assert torch.equal(seen, dense)


def test_xformers_has_a_bias_of_its_own_for_the_common_masks():
    pytest.importorskip("xformers")
    for names in [("causal",), ("window",), ("causal", "window"), ("documents",), ("causal", "documents")]:
        assert xformers_pair.plan_mask(joined(names), 2, N, N) is not None, names
    returning = Mask.documents(torch.tensor([[0, 1, 0]]))
    assert xformers_pair.plan_mask(returning, 1, 3, 3) is None


@pytest.mark.parametrize(
    "names", [(), ("causal",), ("documents",), ("causal", "documents"), ("padding",)], ids=str
)
@pytest.mark.parametrize("with_sinks", [False, True])
def test_the_xformers_pair_hands_over_and_takes_back_the_right_tensors(monkeypatch, gpu, names, with_sinks):
    """The library's two calls give way to exact ones with its layouts: B M H K, lse (B, H, M), all heads."""
    fmha = pytest.importorskip("xformers.ops").fmha

    def tensor_bias(bias, q, k):
        if bias is None or isinstance(bias, torch.Tensor):
            return bias
        return bias.materialize((1, 1, q.shape[1], k.shape[1]), dtype=q.dtype)

    def forward(q, k, v, bias, p, scale):
        assert q.shape[2] == k.shape[2] == v.shape[2]
        y, lse, _ = PAIRS["math"].forward(q, k, v, tensor_bias(bias, q, k), False, scale, p)
        return y, lse

    def backward(g, y, lse, q, k, v, bias, p, scale):
        assert lse.shape == (q.shape[0], q.shape[2], q.shape[1])
        args = (g, q, k, v, y, lse, tensor_bias(bias, q, k), (None, None), False, scale, p, False)
        return PAIRS["math"].backward(*args)[:3]

    monkeypatch.setattr(fmha, "memory_efficient_attention_forward_requires_grad", forward)
    monkeypatch.setattr(fmha, "memory_efficient_attention_backward", backward)
    able = dataclasses.replace(BACKENDS["xformers"], devices=("cpu",), dtypes=("float64",))
    monkeypatch.setitem(BACKENDS, "xformers", able)
    tensors = [correlated(2, N, h, 8, seed=i) for i, h in enumerate((4, 2, 2))]
    tensors += [correlated(3, 1, 2, 8, seed=i)[:, 0] for i in (7, 8)] if with_sinks else []

    def run(backend):
        def call(q, k, v, *sinks):
            return exclusive_attention(q, k, v, mask=joined(names), sinks=sinks or None, backend=backend)

        return gradients(call, tensors, tensors[0])

    assert_close(run("xformers"), run("reference"), torch.float64)
