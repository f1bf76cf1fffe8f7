"""The towers: loss over ranks, retrieval, variants of each tower, roles."""

import math
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from optimizers.groups import assign
from tasks.errors import UserError
from tasks.multimodal.contrast import contrastive_loss, distinct, recalls
from tasks.multimodal.vocabulary import END
from tasks.runner.config.compose import load_config
from xsa_core.adapters import describe
from xsa_core.attention.variants import VARIANTS
from xsa_core.initialization import weights_sha256
from xsa_core.roles import Role, parameter_roles

ROOT = Path(__file__).resolve().parents[3]


def features(count, width=5, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return F.normalize(torch.randn(count, width, generator=generator, dtype=torch.float64), dim=-1)


def clip_by_loop(images, texts, scale):
    """The mean over pairs of both directions' cross entropy, pair by pair."""
    total = 0.0
    for i in range(len(images)):
        for own, others in ((images[i], texts), (texts[i], images)):
            scores = [float(scale * (own @ other)) for other in others]
            total += math.log(sum(map(math.exp, scores))) - scores[i]
    return total / (2 * len(images))


def test_loss_is_clips_by_an_explicit_loop():
    images, texts, scale = features(7), features(7, seed=1), torch.tensor([3.0], dtype=torch.float64)
    found = float(contrastive_loss(images, texts, scale, gathered=False))
    assert found == pytest.approx(clip_by_loop(images, texts, scale), rel=1e-12)


def test_loss_under_autocast_keeps_float32():
    images, texts, scale = features(7).float(), features(7, seed=1).float(), torch.tensor([100.0])
    plain = contrastive_loss(images, texts, scale, gathered=False)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(contrastive_loss(images, texts, scale, gathered=False), plain)


def test_loss_gathered_over_two_processes_is_that_of_one(tmp_path):
    sizes = torch.tensor([4, 3])  # ranks may differ by a pair
    content = {"images": features(7), "texts": features(7, seed=1), "sizes": sizes}
    content["scale"] = torch.tensor([3.0], dtype=torch.float64)
    torch.save(content, tmp_path / "pairs.pt")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    command = [sys.executable, str(Path(__file__).with_name("contrast_ranks.py"))]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    ranks = [subprocess.Popen([*command, str(rank), port, str(tmp_path)], env=environment) for rank in (0, 1)]
    assert [rank.wait(timeout=100) for rank in ranks] == [0, 0]
    found = [torch.load(tmp_path / f"rank{rank}.pt", weights_only=True) for rank in (0, 1)]
    leaves = {name: content[name].clone().requires_grad_() for name in ("images", "texts", "scale")}
    whole = contrastive_loss(*leaves.values(), gathered=False)
    whole.backward()
    mean = sum(float(part["loss"]) * int(size) for part, size in zip(found, sizes, strict=True)) / 7
    assert mean == pytest.approx(float(whole.detach()), rel=1e-12)
    for name in ("images", "texts"):
        assert torch.allclose(torch.cat([part[name] for part in found]), leaves[name].grad, rtol=1e-10)
    assert torch.allclose(sum(part["scale"] for part in found), leaves["scale"].grad, rtol=1e-10)


def test_recalls_equal_a_loop_in_which_equal_captions_are_one():
    images, every = features(40), features(12, seed=1)
    which = torch.randint(12, (40,), generator=torch.Generator().manual_seed(2))
    which[:12] = torch.arange(12)
    found = recalls(images, every, which)
    hits = {(way, k): [] for way in ("image_to_text", "text_to_image") for k in (1, 5)}
    for i in range(40):
        order = sorted(range(12), key=lambda t: -float(images[i] @ every[t]))
        for k in (1, 5):
            hits["image_to_text", k].append(int(which[i]) in order[:k])
    for t in range(12):
        order = sorted(range(40), key=lambda i: -float(images[i] @ every[t]))
        for k in (1, 5):
            hits["text_to_image", k].append(any(int(which[i]) == t for i in order[:k]))
    for (way, k), rows in hits.items():
        assert found[f"{way}_at_{k}"] == pytest.approx(sum(rows) / len(rows)), (way, k)
    assert found["recall_at_1"] == pytest.approx(
        (found["image_to_text_at_1"] + found["text_to_image_at_1"]) / 2
    )


@pytest.mark.parametrize("value", [1.0, math.nan])
def test_features_that_are_all_the_same_or_no_numbers_are_no_hits(value):
    same = torch.full((6, 3), value, dtype=torch.float64)
    assert set(recalls(same, same, torch.arange(6)).values()) == {0.0}


def test_distinct_captions_are_found_with_their_first_row():
    rows = torch.tensor([[5, 2], [3, 2], [5, 2], [4, 2], [3, 2]])
    first, which = distinct(rows)
    assert sorted(first.tolist()) == [0, 1, 3]
    assert torch.equal(rows[first][which], rows)


def test_metrics_are_those_of_one_pair_at_a_time(multimodal):
    task = multimodal("scenes_contrastive", "attention=xsa")
    model = task.build_model().eval()
    with torch.no_grad():
        found = task.evaluate(model, task.validation(30, 8))
        again = task.evaluate(model, task.validation(30, 30))
        rows = [model(batch[0], batch[1]) for batch in task.validation(30, 1)]
    batches = task.validation(30, 1)
    images, texts = torch.cat([row[0] for row in rows]), torch.cat([row[1] for row in rows])
    captions = [tuple(batch[1][0].tolist()) for batch in batches]
    hits = []
    for i in range(30):
        best = max(range(30), key=lambda t: float(images[i].double() @ texts[t].double()))
        hits.append(captions[best] == captions[i])
    assert found["image_to_text_at_1"] == pytest.approx(sum(hits) / 30)
    assert {k: v for k, v in found.items() if k != "loss"} == {k: v for k, v in again.items() if k != "loss"}
    labelled = [(images[i], int(batch[2])) for i, batch in enumerate(batches) if int(batch[2]) >= 0]
    with torch.no_grad():
        classes = [
            F.normalize(torch.stack([model(None, torch.tensor([p]))[1][0] for p in prompts]).mean(0), dim=0)
            for prompts in task.prompts
        ]
    right = [max(range(10), key=lambda c: float(row @ classes[c])) == label for row, label in labelled]
    assert found["zero_shot"] == pytest.approx(sum(right) / len(right))
    assert 5 <= len(labelled) <= 15


def test_what_follows_the_end_of_a_text_has_no_influence(multimodal):
    task = multimodal("scenes_contrastive", "attention=xsa")
    text = task.build_model().double().eval().text
    rows = torch.tensor([task.text(row) for row in ("one digit: a six at the top-left",)])
    length = int((rows[0] == END).nonzero()[0]) + 1
    other = rows.clone()
    other[0, length:] = 17
    with torch.no_grad():
        assert torch.equal(text(rows), text(other))
        assert torch.allclose(text(rows), text(rows[:, :length]))
        other[0, 3] += 1
        assert not torch.allclose(text(rows), text(other))


@pytest.mark.parametrize("variant", sorted(VARIANTS))
def test_every_variant_of_both_towers_starts_from_the_same_weights_and_trains(multimodal, variant):
    plain = multimodal("scenes_contrastive", "attention=sa").build_model()
    task = multimodal("scenes_contrastive", f"attention={variant}")
    model = task.build_model()
    assert weights_sha256(model) == weights_sha256(plain)
    task.loss(model, task.stream(0, 1).next_batch(6)).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize(("where", "changed"), [("both", (1, 1)), ("image", (1, 0)), ("text", (0, 1))])
def test_a_variant_acts_in_the_towers_that_were_named(multimodal, where, changed):
    task = multimodal("scenes_contrastive", "attention=xsa", f"model.exclusive={where}")
    plain = multimodal("scenes_contrastive", "attention=sa").build_model().eval()
    model = task.build_model().eval()
    batch = task.validation(6, 6)[0]
    with torch.no_grad():
        pairs = zip(model(*task.inputs(batch))[:2], plain(*task.inputs(batch))[:2], strict=True)
        assert tuple(int(not torch.equal(own, other)) for own, other in pairs) == changed
    assert all((row.variant == "xsa") == bool(changed[0]) for row in describe(model.image))
    text = {block.attention.variant_name for block in model.text.gpt.blocks}
    assert text == {"xsa" if changed[1] else "sa"}


def test_every_parameter_has_a_role_and_the_temperature_no_decay(multimodal):
    model = multimodal("scenes_contrastive", "attention=xsa_learned").build_model()
    roles = parameter_roles(model)
    assert roles["temperature"].role is Role.STRENGTH
    assert {roles[name].role for name in ("text.projection.weight", "image.vit.head.weight")} == {Role.HEAD}
    rows = {
        row.name: row for row in assign(model, load_config("vision/digits", ["optimizer=muon"]).optimizer)
    }
    assert rows["temperature"].weight_decay == 0
    assert rows["text.gpt.blocks.0.attention.qkv.weight"].algorithm == "muon"
    assert rows["image.vit.blocks.0.attn.qkv.weight"].algorithm == "muon"


def test_the_temperature_starts_at_clips_and_stays_below_a_hundred(multimodal):
    task = multimodal("scenes_contrastive", "attention=sa")
    model = task.build_model()
    batch = task.validation(4, 4)[0]
    assert float(model(*task.inputs(batch))[2].detach()) == pytest.approx(1 / 0.07)
    with torch.no_grad():
        model.temperature += 9.0
    task.loss(model, batch).backward()
    assert float(model(*task.inputs(batch))[2].detach()) == pytest.approx(100.0)
    assert float(model.temperature.grad) != 0  # it may fall again


def test_settings_that_cannot_be_used_get_one_line(multimodal):
    for override, message in (
        ("loop.micro_batch=4", "smaller passes would change it"),
        ("model.image.label_smoothing=0.1", "is of classifiers"),
        ("data.image_size=32", "scenes have 20 pixels a side, got 32"),
        ("data.context=10", "captions of scenes need 18, got 10"),
        ("data.path=x", "set data.source too"),
        ("data.augment=crop", "scenes are not cropped"),
        ("data.source=img2dataset", "needs a directory"),
    ):
        with pytest.raises(UserError, match=message) as caught:
            multimodal("scenes_contrastive", "attention=sa", override)
        assert "\n" not in str(caught.value)
