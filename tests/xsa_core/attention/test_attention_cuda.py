"""The operator on a GPU: every backend against float64, the Triton kernels for real, and what is kept."""

import pytest
import torch
from operator_oracle import assert_close, correlated, gradients

from xsa_core.attention import BACKENDS, Mask, exclusive_attention

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

IDS = torch.repeat_interleave(torch.arange(4), torch.tensor([50, 3, 64, 13]))
MASKS = {
    "full": Mask.full(),
    "causal": Mask.causal(),
    "window": Mask.causal() & Mask.window(17),
    "documents": Mask.causal() & Mask.documents(IDS),
    "prefix": Mask.prefix(torch.tensor([5, 40])),
    "padding": Mask.padding(torch.arange(130)[None] < torch.tensor([[130], [77]])),
    "diag": Mask.causal(exclude_self=True),
}


def compare(dtype, backend, mask, *, H=4, Hkv=2, D=64, T=130, sinks=False, **options):
    tensors = [correlated(2, T, h, D, seed=i, shared=0.5).to(dtype) for i, h in enumerate((H, Hkv, Hkv))]
    tensors += [correlated(3, 1, Hkv, D, seed=i)[:, 0].to(dtype) for i in (7, 8)] if sinks else []

    def run(backend):
        def call(q, k, v, *sink_kv):
            return exclusive_attention(q, k, v, mask=mask, sinks=sink_kv or None, backend=backend, **options)

        return call

    found = gradients(run(backend), [t.cuda() for t in tensors], tensors[0].cuda())
    expected = gradients(run("reference"), [t.double() for t in tensors], tensors[0].double())
    assert_close([x.cpu() for x in found], expected, dtype)


@pytest.mark.parametrize("backend", ["sdpa", "xformers", "flex", "auto"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("mask", MASKS)
def test_every_backend_equals_float64(backend, dtype, mask):
    if backend != "auto":
        record = BACKENDS[backend]
        if reason := record.unavailable():
            pytest.skip(reason)
        if not MASKS[mask].features <= record.masks:
            pytest.skip(f"{backend} has no such mask")
    if dtype == torch.float32:
        torch.backends.cuda.matmul.allow_tf32 = False
    compare(dtype, backend, MASKS[mask])


@pytest.mark.parametrize("strength", [1.0, 0.3])
@pytest.mark.parametrize("D", [16, 80, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_head_sizes_and_strengths(strength, D, dtype):
    compare(dtype, "sdpa", Mask.causal(), D=D, strength=strength)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_sinks(dtype):
    compare(dtype, "auto", Mask.causal(), sinks=True)


@pytest.mark.parametrize(
    "dtypes", [("float32", "float32"), ("bfloat16", "float32"), ("float16", "float16")], ids=str
)
@pytest.mark.parametrize(
    "shape", [(1, 2, 40, 40), (2, 2, 40, 40), (40, 40), (2, 1, 1, 40), (1, 2, 40, 1)], ids=str
)
@pytest.mark.parametrize("with_sinks", [False, True])
def test_bias_gets_its_gradient_and_a_row_that_sees_nothing_is_zero(dtypes, shape, with_sinks):
    dtype, bias_dtype = (getattr(torch, name) for name in dtypes)
    q, k, v = (correlated(2, 40, h, 32, seed=i).to(dtype) for i, h in enumerate((2, 1, 1)))
    generator = torch.Generator().manual_seed(4)
    bias = torch.randn(shape, generator=generator, dtype=torch.float64).to(bias_dtype)
    if shape[-2:] == (40, 40):
        bias[..., 7, :] = bias[..., 9, 1:] = -torch.inf
    sinks = [correlated(3, 1, 1, 32, seed=i)[:, 0].to(dtype) for i in (7, 8)] if with_sinks else []

    def call(backend):
        def inner(q, k, v, b, *kept):
            return exclusive_attention(q, k, v, bias=b, sinks=kept or None, backend=backend)

        return inner

    leaves = [q, k, v, bias, *sinks]
    found = gradients(call("sdpa"), [x.cuda() for x in leaves], q.cuda())
    expected = gradients(call("reference"), [x.double() for x in leaves], q.double())
    assert_close([x.cpu() for x in found], expected, dtype)


@pytest.mark.parametrize("backend", ["sdpa", "xformers"])
@pytest.mark.parametrize("offset", [1, 4, 8])
def test_rows_at_any_address_are_taken(backend, offset):
    if reason := BACKENDS[backend].unavailable():
        pytest.skip(reason)
    wide = [correlated(2, 33, h, 80, seed=h).bfloat16().cuda() for h in (4, 2, 2)]
    views = [x[..., offset : offset + 64] for x in wide]
    found = exclusive_attention(*views, causal=True, backend=backend)
    expected = exclusive_attention(*(x.contiguous() for x in views), causal=True, backend=backend)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_dropout_repeats_with_its_seed_and_keeps_the_mean(dtype):
    q, k, v = (correlated(1, 64, h, 64, seed=h).to(dtype).cuda() for h in (4, 2, 2))

    def run(q, k, v):
        torch.manual_seed(5)
        return exclusive_attention(q, k, v, causal=True, dropout_p=0.3, backend="sdpa")

    first, second = (gradients(run, (q, k, v), q) for _ in range(2))
    assert all(torch.isfinite(x).all() for x in first)
    assert_close(first, [x.double() for x in second], dtype, factor=4)
    many = [x.expand(2000, -1, -1, -1) for x in (q, k, v)]
    dropped = exclusive_attention(*many, causal=True, dropout_p=0.3, strength=None, backend="sdpa").double()
    plain = exclusive_attention(q, k, v, causal=True, strength=None, backend="sdpa").double()
    error = dropped.std(dim=0) / 2000**0.5 + 4 * torch.finfo(dtype).eps
    assert ((dropped.mean(dim=0) - plain[0]).abs() <= 6 * error).all()


def test_the_forward_keeps_one_scalar_per_token_and_head_more_than_plain_attention():
    B, T, H, D = 2, 256, 8, 128
    held = {}
    for strength in (None, 1.0):
        q, k, v = (
            torch.randn(B, T, H, D, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in "qkv"
        )
        exclusive_attention(q, k, v, causal=True, strength=strength, backend="sdpa")  # warm up
        before = torch.cuda.memory_allocated()
        out = exclusive_attention(q, k, v, causal=True, strength=strength, backend="sdpa")
        held[strength] = torch.cuda.memory_allocated() - before
        assert out.requires_grad
        del out
    assert 0 < held[1.0] - held[None] <= 4 * B * T * H + 512  # the allocator rounds to 512 bytes


def test_a_compiled_block_is_one_graph_with_the_same_numbers():
    q, k, v = (correlated(2, 64, h, 64, seed=h).bfloat16().cuda() for h in (4, 2, 2))

    def run(q, k, v):
        return exclusive_attention(q, k, v, causal=True, backend="sdpa") * 2

    eager = gradients(run, (q, k, v), q)
    compiled = gradients(torch.compile(run, fullgraph=True), (q, k, v), q)
    assert_close([x.cpu() for x in compiled], [x.double().cpu() for x in eager], torch.bfloat16, factor=4)
