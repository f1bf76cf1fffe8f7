"""Early fusion: pairs that need both senses, padding, variants, metrics."""

from collections import Counter

import pytest
import torch

from optimizers.groups import assign
from tasks.errors import UserError
from tasks.multimodal.spoken import digit_of
from tasks.runner.config.compose import load_config
from tasks.vision.digits import MEAN, STD, load_digits
from xsa_core.attention.variants import VARIANTS
from xsa_core.initialization import weights_sha256
from xsa_core.roles import Role, parameter_roles

FEW = ("data.train_pairs=400", "data.test_pairs=100")


@pytest.fixture
def fusion(few_spoken, multimodal):
    """How to open the task: fusion("attention=sa", ...)."""
    return lambda *overrides: multimodal("spoken_digits", *FEW, *overrides)


def test_the_sum_is_that_of_what_is_seen_and_what_is_said(fusion):
    task = fusion("attention=sa", "data.noise=0.0", "data.noise_db=null")
    images, labels = load_digits()
    known = {image.tobytes(): label for image, label in zip(images, labels, strict=True)}
    for side in (task.train, task.held_out):
        for index in range(20):
            image, features, total = side.fetch(index, None)
            pixels = (image[0].numpy() * STD + MEAN).round(4)
            seen = [label for key, label in known.items() if _near(key, pixels)]
            said = side.speech.recordings.said(side.places(index)[1])
            assert [total - int(label) for label in seen] == [digit_of(said)] * len(seen) != []
            assert features.shape[1] == 40


def _near(key, pixels):
    import numpy as np

    return np.abs(np.frombuffer(key, np.float32).reshape(8, 8) - pixels).max() < 1e-3


def test_neither_sense_alone_gives_the_sum(fusion):
    task = fusion("attention=sa", "data.train_pairs=5000")
    pairs = []
    for index in range(5000):
        image, recording = task.train.places(index)
        said = digit_of(task.train.speech.recordings.said(recording))
        pairs.append((int(task.train.labels[image]), said))
    for sense in (0, 1):
        best = sum(
            max(Counter(sum(p) for p in pairs if p[sense] == digit).values()) for digit in range(10)
        )  # right answers of the best rule that knows one digit
        assert best / 5000 < 0.16  # a tenth, and what chance adds in 500 pairs of each
    assert len(set(pairs)) == 100


def test_sides_share_no_image_and_no_voice(fusion):
    task = fusion("attention=sa")
    sides = (task.train, task.held_out)
    images = [{image.tobytes() for image in side.images} for side in sides]
    voices = [{voice.partition("+")[2] for voice in side.speech.recordings.spoken.voices} for side in sides]
    assert not images[0] & images[1]
    assert not voices[0] & voices[1]


def test_noise_of_evaluation_is_fixed_and_that_of_training_is_drawn(fusion):
    stream = fusion("attention=sa").stream(0, 1)
    again = fusion("attention=sa", "data.workers=1").stream(0, 1)
    first = stream.next_batch(6)
    assert all(torch.equal(a, b) for a, b in zip(first, again.next_batch(6), strict=True))
    task = fusion("attention=sa", "seed=3")
    for batch, other in zip(task.validation(8, 4), fusion("attention=xsa").validation(8, 4), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(batch, other, strict=True))


@pytest.mark.parametrize("variant", sorted(VARIANTS))
def test_padding_has_no_influence(fusion, variant):
    task = fusion(f"attention={variant}")
    model = task.build_model().double().eval()
    images, features, lengths, _ = task.validation(6, 6)[0]
    assert len(set(lengths.tolist())) > 1
    with torch.no_grad():
        together = model(images.double(), features.double(), lengths)
        for row, length in enumerate(lengths.tolist()):
            alone = slice(row, row + 1)
            parts = images[alone].double(), features[alone, :length].double(), lengths[alone]
            assert torch.allclose(together[row], model(*parts)[0])


@pytest.mark.parametrize("variant", sorted(VARIANTS))
def test_every_variant_starts_from_the_same_weights_and_trains(fusion, variant):
    plain = fusion("attention=sa").build_model()
    task = fusion(f"attention={variant}")
    model = task.build_model()
    assert weights_sha256(model) == weights_sha256(plain)
    task.loss(model, task.stream(0, 1).next_batch(4)).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_seen_and_heard_reach_each_other_in_the_first_layer(fusion):
    task = fusion("attention=sa", "model.n_layers=1")
    model = task.build_model().double().eval()
    images, features, lengths, _ = (part[:1] for part in task.validation(2, 2)[0])
    images, features = images.double().requires_grad_(), features.double().requires_grad_()
    kept = []
    model.encoder.blocks[0].attention.register_forward_hook(lambda _, __, out: kept.append(out))
    model(images, features, lengths)
    count = model.patches.count
    for rows, other in ((kept[0][0, :count], features), (kept[0][0, count:], images)):
        (gradient,) = torch.autograd.grad(rows.square().sum(), other, retain_graph=True)
        assert bool(gradient.any())


def test_every_parameter_has_a_role(fusion):
    model = fusion("attention=xsa").build_model()
    roles = parameter_roles(model)
    assert roles["head.weight"].role is Role.HEAD
    assert {roles[name].role for name in ("modality", "patches.position")} == {Role.EMBEDDING}
    assert roles["subsample.layers.0.weight"].role is Role.PATCH
    chosen = assign(model, load_config("multimodal/spoken_digits", ["optimizer=muon"]).optimizer)
    assert all(".blocks." in row.name for row in chosen if row.algorithm == "muon")
    assert sum(row.algorithm == "muon" for row in chosen) == 8


def test_metrics_equal_a_loop_over_the_pairs(fusion):
    task = fusion("attention=xsa")
    model = task.build_model().eval()
    nats = hits = 0
    with torch.no_grad():
        found = task.evaluate(model, task.validation(20, 7))
        for batch in task.validation(20, 1):
            row = model(*task.inputs(batch))[0].double().log_softmax(0)
            nats, hits = nats - float(row[batch[3][0]]), hits + int(row.argmax() == batch[3][0])
    assert found["loss"] == pytest.approx(nats / 20, rel=1e-4)
    assert found["accuracy"] == hits / 20


def test_settings_that_cannot_be_used_get_one_line(fusion):
    for override, message in (
        ("data.source=digits", "needs a directory"),
        ("data.path=x", "data.source is synthetic"),
        ("data.split=speaker", "speaker is for source digits"),
        ("model.patch_size=3", "no multiple of 3"),
        ("model.n_heads=3", "n_heads 3"),
    ):
        with pytest.raises(ValueError, match=message) as caught:
            fusion("attention=sa", override).build_model()
        assert "\n" not in str(caught.value)
    assert [digit_of(said) for said in ("zero", "nine", "7")] == [0, 9, 7]
    for said in ("ten", "10", "\u0663", ""):
        with pytest.raises(ValueError, match="is no digit"):
            digit_of(said)


def test_recordings_that_are_no_digits_are_refused(fusion, tmp_path):
    import io

    import numpy as np
    import soundfile
    import webdataset

    stream = io.BytesIO()
    soundfile.write(stream, np.zeros(800, np.float32), 8000, format="WAV")
    for name in ("train-0.tar", "test-0.tar"):
        with webdataset.TarWriter(str(tmp_path / name)) as writer:
            writer.write({"__key__": "a", "wav": stream.getvalue(), "cls": 12})
    with pytest.raises(UserError, match="'12' is no digit"):
        fusion("attention=sa", "data.source=digits", f"data.path={tmp_path}")
