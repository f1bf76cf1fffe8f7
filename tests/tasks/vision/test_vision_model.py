"""The classifier: timm's names, weights and roles, the same start for every variant, metrics."""

import pytest
import timm
import torch
import torch.nn.functional as F

from optimizers.groups import assign
from tasks.runner.config.compose import load_config
from xsa_core.adapters import describe
from xsa_core.attention.variants import VARIANTS
from xsa_core.initialization import variant_parameter_names, weights_sha256
from xsa_core.roles import Role, parameter_roles


@pytest.mark.parametrize("variant", sorted(VARIANTS))
def test_every_variant_trains_from_the_same_weights_under_timms_names(vision, variant):
    plain = vision("digits", "attention=sa").build_model()
    task = vision("digits", f"attention={variant}")
    model = task.build_model()
    assert weights_sha256(model) == weights_sha256(plain)
    extra = variant_parameter_names(model)
    names = {name.removeprefix("vit.") for name, _ in model.named_parameters() if name not in extra}
    theirs = timm.create_model(
        "vit_tiny_patch16_224", img_size=8, patch_size=4, embed_dim=16, depth=2, num_heads=2, in_chans=1,
        global_pool="avg", class_token=False, num_classes=10,
    )  # fmt: skip
    assert names == {name for name, _ in theirs.named_parameters()}
    assert all(row.variant == variant for row in describe(model.vit))
    task.loss(model, task.stream(0, 1).next_batch(4)).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_every_parameter_has_a_role_and_fused_projections_are_split(vision):
    model = vision("digits", "attention=xsa", "model.registers=2", "model.class_token=true").build_model()
    roles = parameter_roles(model)
    for name in ("cls_token", "reg_token", "pos_embed"):
        assert roles[f"vit.{name}"].role is Role.EMBEDDING
    assert roles["vit.head.weight"].role is Role.HEAD
    assert roles["vit.patch_embed.proj.weight"].role is Role.PATCH
    assert roles["vit.blocks.0.attn.qkv.weight"].splits == (16, 16, 16)
    muon = load_config("vision/digits", ["optimizer=muon"]).optimizer
    chosen = {a.name for a in assign(model, muon) if a.algorithm == "muon"}
    blocks = {
        f"vit.blocks.{i}.{leaf}.weight"
        for i in (0, 1)
        for leaf in ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")
    }
    assert chosen == blocks


def test_selected_layers_alone_are_changed(vision):
    model = vision("digits", "attention=xsa", "attention.layers=last:1").build_model()
    assert [row.variant for row in describe(model.vit)] == [None, "xsa"]


def test_weights_of_timm_are_loaded(vision, tmp_path):
    torch.manual_seed(5)
    theirs = timm.create_model(
        "vit_tiny_patch16_224", img_size=8, patch_size=4, embed_dim=16, depth=2, num_heads=2, in_chans=1,
        global_pool="avg", class_token=False, num_classes=10,
    )  # fmt: skip
    path = tmp_path / "vit.pth"
    torch.save(theirs.state_dict(), path)
    task = vision("digits", "attention=xsa", "attention.strength=0.0", f"model.weights={path}")
    model = task.build_model().eval()
    ((images, _),) = task.validation(4, 4)
    with torch.no_grad():
        assert torch.equal(model(images), theirs.eval()(images))


def test_tokens_of_a_sample_count_the_special_ones(vision):
    assert vision("digits").tokens_per_sample == 4
    assert (
        vision(
            "digits", "model.class_token=true", "model.pooling=token", "model.registers=3"
        ).tokens_per_sample
        == 8
    )


def test_metrics_equal_a_loop_over_the_images(vision):
    task = vision("digits", "attention=xsa")
    model = task.build_model().eval()
    batches = task.validation(50, 16)
    nats, hits, five, count = 0.0, 0, 0, 0
    with torch.no_grad():
        found = task.evaluate(model, batches)
        for images, labels in batches:
            for image, label in zip(images, labels, strict=True):
                logits = model(image[None])[0].double()
                nats -= float(logits.log_softmax(0)[label])
                better = int((logits > logits[label]).sum())
                hits, five, count = hits + (better < 1), five + (better < 5), count + 1
    assert count == 50
    assert found["loss"] == pytest.approx(nats / count, rel=1e-5)
    assert (found["accuracy"], found["top5"]) == (hits / count, five / count)


def test_label_smoothing_acts_in_training_alone(vision):
    task = vision("digits", "attention=sa", "model.label_smoothing=0.2")
    model = task.build_model()
    images, labels = task.stream(0, 1).next_batch(8)
    logits = model(images)
    plain, smooth = F.cross_entropy(logits, labels), F.cross_entropy(logits, labels, label_smoothing=0.2)
    assert torch.allclose(task.loss(model.train(), (images, labels)), smooth)
    assert torch.allclose(task.loss(model.eval(), (images, labels)), plain)
    assert not torch.allclose(plain, smooth)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.architecture=resnet18", "is none of timm's"),
        ("model.architecture=vit_tinny", "is none of timm's"),
        ("model.weights=/absent.pth", "is no file"),
        (f"model.weights={__file__}", "is no checkpoint"),
        ("model.n_heads=3", "cannot build"),
        ("attention.layers=first:9", "9"),
    ],
)
def test_a_model_that_cannot_be_built_gets_one_line(vision, override, message):
    with pytest.raises(ValueError, match=message) as caught:
        vision("digits", "attention=xsa", override).build_model()
    assert "\n" not in str(caught.value)
