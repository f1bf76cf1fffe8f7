"""The encoders: padding, variants, roles, metrics."""

import pytest
import torch
import torch.nn.functional as F

from optimizers.groups import assign
from tasks.runner.config.compose import load_config
from tasks.speech.transcription import spell
from xsa_core.attention.variants import VARIANTS
from xsa_core.initialization import variant_parameter_names, weights_sha256
from xsa_core.roles import Role, parameter_roles


@pytest.mark.parametrize("variant", sorted(VARIANTS))
@pytest.mark.parametrize("experiment", ["words", "sentences"])
def test_padding_has_no_influence(speech, experiment, variant):
    task = speech(experiment, f"attention={variant}")
    model = task.build_model().double().eval()
    features, lengths = task.validation(6, 6)[0][:2]
    features = features.double()
    with torch.no_grad():
        together, sizes = model(features, lengths)
        for row, length in enumerate(lengths.tolist()):
            alone, _ = model(features[row : row + 1, :length], lengths[row : row + 1])
            real = ... if experiment == "words" else slice(sizes[row])
            assert torch.allclose(together[row][real], alone[0][real])


@pytest.mark.parametrize("variant", sorted(VARIANTS))
@pytest.mark.parametrize("architecture", ["transformer", "conformer"])
def test_every_variant_starts_from_the_same_weights_and_trains(speech, architecture, variant):
    overrides = (f"model.architecture={architecture}", "model.kernel_size=5")
    plain = speech("sentences", "attention=sa", *overrides).build_model()
    task = speech("sentences", f"attention={variant}", *overrides)
    model = task.build_model()
    assert weights_sha256(model) == weights_sha256(plain)
    task.loss(model, task.stream(0, 1).next_batch(4)).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
    assert (
        (variant == "sa")
        or not torch.equal(model(*task.validation(2, 2)[0][:2])[0], plain(*task.validation(2, 2)[0][:2])[0])
        or bool(variant_parameter_names(model))
    )


@pytest.mark.parametrize("architecture", ["transformer", "conformer"])
def test_every_parameter_has_a_role(speech, architecture):
    model = speech("words", f"model.architecture={architecture}", "attention=xsa").build_model()
    roles = parameter_roles(model)
    assert roles["head.weight"].role is Role.HEAD
    assert roles["subsample.layers.0.weight"].role is Role.PATCH
    optimizer = load_config("speech/words", ["optimizer=muon"]).optimizer
    matrices = [row for row in assign(model, optimizer) if row.algorithm == "muon"]
    assert matrices
    assert all(row.parameter.ndim == 2 and row.name != "head.weight" for row in matrices)


def test_batches_have_recordings_of_like_length(speech):
    task = speech("words", "attention=sa")
    stream = task.stream(0, 1)
    waste = []
    for _ in range(4):
        features, lengths, _ = stream.next_batch(16)
        waste.append(1 - float(lengths.sum()) / features.shape[:2].numel())
    assert sum(waste) / len(waste) < 0.12  # in random batches of these it is about 0.35


def test_word_metrics_equal_a_loop_over_the_recordings(speech):
    task = speech("words", "attention=xsa")
    model = task.build_model().eval()
    nats = hits = count = 0
    with torch.no_grad():
        found = task.evaluate(model, task.validation(20, 7))
        for features, lengths, labels in task.validation(20, 1):
            row = model(features, lengths)[0][0].double().log_softmax(0)
            nats, hits, count = nats - float(row[labels[0]]), hits + int(row.argmax() == labels[0]), count + 1
    assert found["loss"] == pytest.approx(nats / count, rel=1e-4)
    assert found["accuracy"] == hits / count


def test_transcription_loss_is_nats_per_letter(speech):
    task = speech("sentences", "attention=xsa")
    model = task.build_model().eval()
    (batch,) = task.validation(5, 5)
    features, lengths, letters, counts = batch
    with torch.no_grad():
        nats = 0.0
        for row in range(5):
            logits, size = model(features[row : row + 1, : lengths[row]], lengths[row : row + 1])
            log_probs = logits.double().log_softmax(-1).transpose(0, 1)
            target = letters[row : row + 1, : counts[row]]
            nats += float(F.ctc_loss(log_probs, target, size, counts[row : row + 1], reduction="sum"))
        assert float(task.loss(model, batch)) == pytest.approx(nats / float(counts.sum()), rel=1e-4)
    assert task.weight(batch) == float(counts.sum())


def test_a_sample_shows_what_was_said_and_what_was_heard(speech):
    task = speech("sentences", "attention=xsa", "model.beam=2")
    shown = task.sample(task.build_model(), 1000)
    said = [spell(row[:count].tolist()) for row, count in zip(*task.validation(4, 4)[0][2:], strict=True)]
    assert [line.partition(" -> ")[0] for line in shown.splitlines()] == said


@pytest.mark.parametrize(
    ("override", "message"),
    [("model.n_heads=3", "3"), ("model.kernel_size=4", "odd"), ("attention.layers=first:9", "9")],
)
def test_a_model_that_cannot_be_built_gets_one_line(speech, override, message):
    with pytest.raises(ValueError, match=message) as caught:
        speech("words", "attention=xsa", override).build_model()
    assert "\n" not in str(caught.value)
