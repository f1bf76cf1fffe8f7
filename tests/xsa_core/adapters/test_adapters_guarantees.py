"""What conversion promises of every class it knows, on small models of real classes with random weights."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from zoo import CASES, Case, first, outputs

from xsa_core.adapters import convert, converted_layers, coverage, describe, revert, set_strength

EPS = torch.finfo(torch.float64).eps


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


every_class = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
# One of each way of conversion, where a test costs more.
FEW = (
    "torch-encoder",
    "timm-vit_tiny_patch16_224",
    "timm-swin_tiny_patch4_window7_224",
    "audio-wav2vec2-lengths",
)
few_classes = pytest.mark.parametrize("case", [CASES[name] for name in FEW], ids=FEW)


@contextmanager
def watched(model: nn.Module) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """While open, collects (heads `B T H D`, own values `B T H D`) of every call of a converted layer."""
    calls: list[tuple[Tensor, Tensor]] = []

    def hook(module: nn.Module, args: tuple, heads: Tensor) -> None:
        own = args[3]
        calls.append((heads.detach(), own.detach().repeat_interleave(heads.shape[2] // own.shape[2], dim=2)))

    handles = [layer.register_forward_hook(hook) for layer in converted_layers(model).values()]
    yield calls
    for handle in handles:
        handle.remove()


def gradients(model: nn.Module, case: Case) -> dict[str, Tensor]:
    """Gradient of a random projection of the output, by parameter; those without one are left out."""
    model.zero_grad()
    model.train()  # clears position biases that some layers of timm keep for evaluation, graph and all
    model.eval()
    out = first(model(*case.arguments(torch.float64)))
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(5), dtype=out.dtype)
    (out * weights).sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@every_class
def test_every_layer_of_the_class_is_converted_and_no_other(case: Case) -> None:
    model = convert(case.model())
    rows = describe(model)
    assert {row.cls for row in rows if row.variant is not None} == case.converted
    assert all((row.variant == "xsa") == (row.kind == "self") for row in rows)
    assert {row.path for row in rows if row.variant} == set(converted_layers(model))
    for row in rows:
        untouched = row.kind != "self"
        assert bool(row.reason) == untouched
        assert type(model.get_submodule(row.path)).__name__.startswith("Exclusive") != untouched


@every_class
def test_strength_zero_and_reverting_give_the_original_bit_for_bit(case: Case) -> None:
    model = case.model()
    before = outputs(model, case)
    classes = [type(module) for module in model.modules()]
    convert(model, strength=0.0)
    assert torch.equal(outputs(model, case), before)
    set_strength(model, 1.0)
    revert(model)
    assert [type(module) for module in model.modules()] == classes
    assert torch.equal(outputs(model, case), before)


@every_class
def test_a_vanishing_strength_gives_the_original_to_rounding(case: Case) -> None:
    """The layer's own way of computing, since at 0 it is the library's: masks, biases, scales, layouts.

    The original with its fused attention and, where it has both, with the explicit one.
    """
    model = case.model(torch.float64)
    after = outputs(convert(case.model(torch.float64), strength=1e-200), case, torch.float64)
    switches = [module for module in model.modules() if hasattr(module, "fused_attn")]
    for fused in (True, False)[: 2 if switches else 1]:
        for module in switches:
            module.fused_attn = fused
        before = outputs(model, case, torch.float64)
        assert (after - before).abs().max() <= 256 * EPS * before.abs().max()


@every_class
def test_heads_are_orthogonal_to_their_own_value_and_the_output_changes(case: Case) -> None:
    model = case.model(torch.float64)
    before = outputs(model, case, torch.float64)
    convert(model)
    with watched(model) as calls:
        after = outputs(model, case, torch.float64)
    assert len(calls) >= len(converted_layers(model)) > 0
    for heads, own in calls:
        along = (heads * own).sum(dim=-1).abs() / own.norm(dim=-1).clamp_min(1e-300)
        assert along.max() <= 32 * EPS * own.norm(dim=-1).max()
    assert (after - before).abs().max() > 1e-7 * before.abs().max()


@every_class
def test_the_first_layer_is_the_formula_applied_to_the_original_heads(case: Case) -> None:
    """z = y - (y.v) v / (v.v) with y from plain attention, over all tokens and heads in numpy."""
    heads = {}
    for variant in ("sa", "xsa"):
        model = convert(case.model(torch.float64), variant=variant)
        with watched(model) as calls:
            outputs(model, case, torch.float64)
        heads[variant] = tuple(x.numpy() for x in calls[0])
    (y, v), (z, again) = heads["sa"], heads["xsa"]
    assert (v == again).all()
    expected = y - (y * v).sum(-1, keepdims=True) / (v * v).sum(-1, keepdims=True) * v
    assert abs(z - expected).max() <= 32 * EPS * abs(v).max()


@every_class
def test_gradients_reach_every_parameter_and_are_those_of_the_specification(case: Case) -> None:
    """The fused operator in the layer against plain autograd through the reference backend."""
    plain = gradients(case.model(torch.float64), case)
    fused = gradients(convert(case.model(torch.float64), strength=0.7), case)
    exact = gradients(convert(case.model(torch.float64), strength=0.7, backend="reference"), case)
    assert set(fused) == set(exact) == set(plain)
    largest = max(float(grad.abs().max()) for grad in exact.values())
    for name, grad in fused.items():
        assert bool(grad.any()) == bool(plain[name].any()), name
        assert (grad - exact[name]).abs().max() <= 4096 * EPS * largest, name


@every_class
def test_weights_keep_their_names_and_load_strictly(case: Case) -> None:
    plain = case.model()
    converted = convert(case.model())
    shapes = {name: p.shape for name, p in plain.named_parameters()}
    assert {name: p.shape for name, p in converted.named_parameters()} == shapes
    converted.load_state_dict(plain.state_dict(), strict=True)
    converted.eval()
    plain_output = outputs(plain, case)
    assert torch.equal(outputs(converted, case), outputs(convert(plain), case))
    assert torch.equal(outputs(revert(converted), case), plain_output)


@every_class
def test_saved_weights_of_a_converted_model_are_refused_by_a_plain_one(case: Case) -> None:
    state = convert(case.model(), strength=0.25).state_dict()
    with pytest.raises(RuntimeError, match="exclusion"):
        case.model().load_state_dict(state)
    other = convert(case.model())
    other.load_state_dict(state)
    assert {layer.strength for layer in converted_layers(other).values()} == {0.25}


@every_class
def test_copies_and_pickles_stay_converted(case: Case) -> None:
    model = convert(case.model(), strength=0.5)
    expected = outputs(model, case)
    twins = [copy.deepcopy(model)]
    if not any(hasattr(module, "parametrizations") for module in model.modules()):  # torch pickles none
        twins.append(pickle.loads(pickle.dumps(model)))
    for twin in twins:
        assert torch.equal(outputs(twin, case), expected)
        assert [row.variant for row in describe(twin)] == [row.variant for row in describe(model)]
        set_strength(twin, 1.0)
        assert not torch.equal(outputs(twin, case), expected)
        assert [type(m) for m in revert(twin).modules()] == [type(m) for m in case.model().modules()]
    assert torch.equal(outputs(model, case), expected)


@every_class
def test_autocast_runs_the_attention_in_half_precision(case: Case) -> None:
    model = convert(case.model())
    expected = outputs(model, case)
    with torch.autocast("cpu", dtype=torch.bfloat16), watched(model) as calls:
        out = outputs(model, case).float()
    assert {heads.dtype for heads, _ in calls} <= {torch.bfloat16, torch.float32}
    assert bool(torch.isfinite(out).all())
    # Each layer rounds to 8 bits, and norms after small layers amplify.
    assert (out - expected).abs().max() <= 32 * torch.finfo(torch.bfloat16).eps * expected.abs().max()


@few_classes
def test_compiled_models_give_the_same_and_follow_a_schedule(case: Case) -> None:
    """Whole graphs, where the original compiles as one; a schedule must not compile anew at every step."""
    from torch._dynamo.testing import CompileCounterWithBackend

    model = convert(case.model(), strength=0.1)
    counter = CompileCounterWithBackend("eager")
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    for strength in (0.1, 0.2, 0.3):
        set_strength(model, strength)
        with torch.no_grad():
            traced = first(compiled(*case.arguments()))
        expected = outputs(model, case)
        assert (traced - expected).abs().max() <= 8 * torch.finfo(torch.float32).eps * expected.abs().max()
    assert counter.frame_count == 1


@pytest.fixture
def one_process(tmp_path: Path) -> Iterator[None]:
    """A process group of one."""
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@few_classes
def test_data_parallel_training_gives_the_same_gradients(case: Case, one_process: None) -> None:
    plain = convert(case.model(torch.float64), variant="xsa_learned")
    expected = gradients(plain, case)
    got = gradients(nn.parallel.DistributedDataParallel(plain, find_unused_parameters=True), case)
    assert {name.removeprefix("module.") for name in got} == set(expected)
    assert any("exclusion.variant.raw_strength" in name for name in got)
    for name, grad in got.items():
        assert torch.equal(grad, expected[name.removeprefix("module.")]), name


def test_sharded_models_are_exclusive_and_their_checkpoints_say_so(one_process: None, tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
    from torch.distributed.fsdp import fully_shard

    case = CASES["timm-vit_tiny_patch16_224"]
    model = convert(case.model(), strength=0.5)
    for block in model.blocks:
        fully_shard(block.attn)
    fully_shard(model)
    assert torch.equal(outputs(model, case), outputs(convert(case.model(), strength=0.5), case))
    state = get_model_state_dict(model)
    dcp.save(state, checkpoint_id=tmp_path / "saved")
    set_strength(model, 1.0)
    assert torch.equal(outputs(model, case), outputs(convert(case.model()), case))
    dcp.load(state, checkpoint_id=tmp_path / "saved")
    set_model_state_dict(model, state)
    assert {layer.strength for layer in converted_layers(model).values()} == {0.5}
    with pytest.raises(ValueError, match="is sharded"):
        revert(model)
    with pytest.raises(ValueError, match="convert the model first"):
        convert(model, variant="head_norm")


def test_saved_weights_are_tensors_that_safetensors_takes() -> None:
    from safetensors.torch import load, save

    case = CASES["torch-encoder"]
    model = convert(case.model(), strength=0.5)
    twin = convert(case.model(), strength=0.1)
    twin.load_state_dict(load(save(model.state_dict())))
    assert torch.equal(outputs(twin, case), outputs(model, case))


def test_every_class_of_the_coverage_table_is_converted_here() -> None:
    short = {
        (case.name.partition("-")[0].replace("audio", "torchaudio").replace("torchtorch", "torch"), name)
        for case in CASES.values()
        for name in case.converted
    }
    for row in coverage():
        if row.library in ("timm", "torchaudio") and not row.how.startswith("not covered"):
            assert (row.library, row.cls.rpartition(".")[2]) in short, row
            assert row.tested
