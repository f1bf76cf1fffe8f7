"""./xsa plan: what it says of the paper's models, and how it answers mistakes."""

import pytest

from tasks.errors import UserError
from tasks.runner import cli
from tasks.runner.config.compose import load_config
from tasks.runner.plan import GPUS, make_plan, memory_table, warnings


def plan_of(experiment="text/paper_1.3b", gpu="h100", gpus=8, utilisation=0.4, **options):
    return make_plan(load_config(experiment), gpu, gpus, utilisation, **options)


def test_days_are_the_operations_over_the_speed():
    plan = plan_of()
    tokens = 200_000 * 256 * 2048
    # 6 N D and causal attention, by hand.
    per_token = 6 * (24 * (4 * 2048 * 24 * 128 + 8 * 2048**2) + 50257 * 2048) + 6 * 24 * 24 * 128 * 2049
    assert plan.days == pytest.approx(tokens * per_token / (8 * 0.4 * 989e12) / 86400)
    assert plan_of(gpus=16).days == pytest.approx(plan.days / 2)
    assert plan_of(utilisation=0.2).days == pytest.approx(plan.days * 2)


@pytest.mark.parametrize("gpus", [1, 2, 8, 64, 256])
def test_accumulation_reaches_half_a_million_tokens_from_any_divisor(gpus):
    for layout in plan_of(gpus=gpus).layouts:
        assert layout.micro_batch * layout.accumulation * gpus * 2048 == 2**19


def test_a_layout_that_does_not_fit_is_warned_of_with_a_cure_that_does():
    plan = plan_of("text/paper_2.7b", micro_batch=8)
    line = next(line for line in warnings(plan) if "ddp will not fit" in line)
    largest = int(line.rpartition("loop.micro_batch=")[2])
    (ddp,) = [x for x in plan_of("text/paper_2.7b", micro_batch=largest).layouts if x.strategy == "ddp"]
    assert ddp.fits
    (ddp,) = [x for x in plan_of("text/paper_2.7b", micro_batch=2 * largest).layouts if x.strategy == "ddp"]
    assert not ddp.fits


def test_what_cannot_fit_at_all_is_said_so():
    assert any("no micro-batch does" in line for line in warnings(plan_of("text/paper_2.7b", "rtx4090")))


def test_the_largest_micro_batch_is_taken_where_none_is_set():
    plan = make_plan(load_config("text/paper_1.3b", ["loop.micro_batch=0"]), "h200", 8, 0.4)
    assert all(layout.fits and layout.micro_batch == layout.largest for layout in plan.layouts)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--gpu", "h1000"), "unknown GPU 'h1000'"),
        (("--gpus", "0"), "expected at least 1, got 0"),
        (("--gpus", "257"), "256 samples of a step leave some of 257 without any; take at most 256"),
        (("--utilisation", "40"), "at most 1, got 40"),
        (("loop.precision=float64",), "no memory model of loop.precision=float64"),
        (("loop.global_batch=5000",), "5000 tokens are not a multiple of the 2048"),
    ],
)
def test_mistakes_are_answered_in_one_line(capsys, options, said):
    assert cli.main(["plan", "text/paper_1.3b", *options]) == 2
    line = capsys.readouterr().err
    assert said in line
    assert line.count("\n") == 1


def test_the_command_prints_every_part_for_both_strategies(capsys):
    assert cli.main(["plan", "text/paper_1.3b", "--gpus", "8", "--gpu", "h100"]) == 0
    text = capsys.readouterr().out
    for part in (
        "weights",
        "optimizer",
        "gradients",
        "activations",
        "logits",
        "ddp",
        "fsdp",
        "tokens/s",
        "days",
    ):
        assert part in text
    assert "1.51 B parameters, 1.41 B outside the embedding" in text


def test_every_gpu_is_planned_for_without_error():
    for gpu in GPUS:
        assert plan_of(gpu=gpu).tokens_per_second > 0


def test_an_unknown_task_is_a_user_error():
    config = load_config("text/tiny").model_copy(update={"task": "vision"})
    with pytest.raises(UserError, match="no model of task vision"):
        make_plan(config, "h100", 1, 0.4)


def test_gpus_that_do_not_divide_the_batch_share_it_unevenly():
    plan = plan_of("text/paper_1.3b", gpus=3, micro_batch=8)
    (layout,) = [layout for layout in plan.layouts if layout.strategy == "fsdp"]
    assert (layout.micro_batch, layout.accumulation) == (8, 11)  # 86, 85 and 85 of 256 samples
    assert any("8 x 11 x 3 samples a step at most" in note for note in memory_table(plan).notes)
