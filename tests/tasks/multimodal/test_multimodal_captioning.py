"""The decoder over patches and words: who sees whom, what is written, what is answered."""

import pytest
import torch

from optimizers.groups import assign
from tasks.errors import UserError
from tasks.multimodal.decoder import NO_TARGET, greedy
from tasks.multimodal.scenes import CANDIDATES, KINDS
from tasks.multimodal.vocabulary import BEGIN, END, PAD
from tasks.runner.config.compose import load_config
from xsa_core.adapters.probing import probe_converted
from xsa_core.attention.probe import probe
from xsa_core.attention.variants import VARIANTS
from xsa_core.initialization import weights_sha256
from xsa_core.roles import Role, parameter_roles


@pytest.fixture
def task(multimodal):
    """Small captioning with exclusive attention."""
    return multimodal("scenes_captions", "attention=xsa")


def hidden_of(model, images, tokens, patches=None):
    """Hidden states of all positions, patches first; `patches` replaces what the images are embedded to."""
    from xsa_core import Mask

    patches = model.patches(images) if patches is None else patches
    embedded = torch.cat([patches, model.gpt.embedding(tokens)], dim=1)
    return model.gpt.hidden(embeddings=embedded, mask=Mask.prefix(patches.shape[1]))


@pytest.mark.parametrize("variant", sorted(VARIANTS))
def test_patches_see_each_other_and_text_sees_patches_and_earlier_text(multimodal, variant):
    task = multimodal("scenes_captions", f"attention={variant}")
    model = task.build_model().double().eval()
    images, tokens = task.validation(2, 2)[0][:2]
    images = images.double()
    patches = model.patches(images).detach().requires_grad_()
    count, length = patches.shape[1], tokens.shape[1]
    table = model.gpt.embedding(tokens).detach()
    words = table.clone().requires_grad_()
    model.gpt.embedding.forward = lambda _: words
    hidden = hidden_of(model, images, tokens, patches)
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(hidden.shape[-1], generator=generator, dtype=torch.float64)
    for place in (0, count - 1, count, count + 5, count + length - 1):
        of_patches, of_words = torch.autograd.grad(
            hidden[0, place] @ weight, (patches, words), retain_graph=True
        )
        assert (of_patches[0].abs().sum(-1) > 0).all()  # every patch, also a later one
        seen = (of_words[0].abs().sum(-1) > 0).tolist()
        assert seen == [count + word <= place for word in range(length)]
        assert not of_patches[1].any()


def test_forward_is_that_of_the_prefix_mask(task):
    model = task.build_model().double().eval()
    images, tokens = task.validation(3, 3)[0][:2]
    with torch.no_grad():
        found = model(images.double(), tokens)
        hidden = hidden_of(model, images.double(), tokens)[:, model.patches.count :]
        assert torch.allclose(found, model.gpt.head(hidden))


def test_padding_after_a_text_has_no_influence_on_its_loss(task):
    model = task.build_model().double().eval()
    images, tokens, targets = task.validation(4, 4)[0][:3]
    other = torch.where(tokens == PAD, 9, tokens)
    with torch.no_grad():
        assert torch.equal(model(images.double(), tokens, targets), model(images.double(), other, targets))


def test_loss_is_nats_per_token_of_the_captions(task):
    model = task.build_model().double().eval()
    batch = task.validation(5, 5)[0]
    images, tokens, targets = batch[0].double(), *batch[1:3]
    nats, count = 0.0, 0
    with torch.no_grad():
        for row in range(5):
            length = int((targets[row] != NO_TARGET).sum())
            rows = model(images[row : row + 1], tokens[row : row + 1, :length])[0].log_softmax(-1)
            nats -= sum(float(rows[place, targets[row, place]]) for place in range(length))
            count += length
            assert targets[row, :length].tolist() == [*tokens[row, 1:length].tolist(), END]
        assert float(task.loss(model, (images, tokens, targets))) == pytest.approx(nats / count)
    assert task.weight(batch) == count
    with torch.no_grad():
        found = task.evaluate(model, [(images, *batch[1:])])
    assert found["loss"] == pytest.approx(nats / count)


@pytest.mark.parametrize("variant", sorted(VARIANTS))
def test_greedy_decoding_with_the_cache_is_that_without(multimodal, variant):
    task = multimodal("scenes_captions", f"attention={variant}")
    model = task.build_model().double().eval()
    with torch.no_grad():  # some weights at which texts differ and some end early
        for parameter in model.parameters():
            parameter *= 8.0 if parameter.ndim > 1 else 1.0
        model.gpt.embedding.weight[END] *= 1.5
    images = task.validation(6, 6)[0][0].double()
    made = greedy(model, images, 9)
    for row, image in enumerate(images):
        text, ended = [BEGIN], False
        for place in range(9):
            with torch.no_grad():
                best = int(model(image[None], torch.tensor([text]))[0, -1].argmax())
            assert int(made[row, place]) == (NO_TARGET if ended else best)
            ended = ended or best == END
            text.append(best)


def test_exact_match_counts_captions_that_are_written_to_their_end(task, monkeypatch):
    model = task.build_model().eval()
    batches = task.validation(6, 3)
    made = iter([batches[0][2].clone(), batches[1][2].clone()])

    def written(model, images, length):
        rows = next(made)
        rows[0, 3] += 1  # one word of each three captions is wrong
        return rows

    monkeypatch.setattr("tasks.multimodal.captioning.greedy", written)
    with torch.no_grad():
        assert task.evaluate(model, batches)["exact_match"] == pytest.approx(4 / 6)


def test_answers_are_the_likeliest_of_those_that_are_possible(task):
    model = task.build_model().eval()
    batches = task.validation(40, 16)
    with torch.no_grad():
        found = task.evaluate(model, batches)
        right = {kind: [] for kind in KINDS}
        for index in (np_index * 2000 // 40 for np_index in range(40)):
            asked = task.held_out.pairs.question(index, None)
            image = task.held_out.pairs.pair(index, None)[0][None]
            prompt = [BEGIN, *task.vocabulary.encode(asked.text)]
            scores = {}
            for answer in CANDIDATES[asked.kind]:
                (number,) = task.vocabulary.encode(answer)
                logits = model(image, torch.tensor([prompt]))[0, -1].double()
                scores[answer] = float(logits.log_softmax(0)[number])
            right[asked.kind].append(max(scores, key=scores.get) == asked.answer)
    every = [good for rows in right.values() for good in rows]
    assert found["answers"] == pytest.approx(sum(every) / 40)
    for kind, rows in right.items():
        assert found[f"answers_{kind}"] == pytest.approx(sum(rows) / len(rows))


def test_training_asks_and_tells_in_the_share_that_was_set(multimodal):
    asked = {}
    for share in (0.0, 0.5, 1.0):
        task = multimodal("scenes_captions", "attention=sa", f"data.questions={share}")
        targets = torch.cat([task.stream(0, 1).next_batch(64)[2] for _ in range(2)])
        asked[share] = float(((targets != NO_TARGET).sum(1) == 1).double().mean())
    assert asked[0.0] == 0
    assert asked[1.0] == 1
    assert 0.3 < asked[0.5] < 0.7


@pytest.mark.parametrize("variant", sorted(VARIANTS))
def test_every_variant_starts_from_the_same_weights_and_trains(multimodal, variant):
    plain = multimodal("scenes_captions", "attention=sa").build_model()
    task = multimodal("scenes_captions", f"attention={variant}")
    model = task.build_model()
    assert weights_sha256(model) == weights_sha256(plain)
    task.loss(model, task.stream(0, 1).next_batch(6)).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_every_parameter_has_a_role(multimodal):
    model = multimodal("scenes_captions", "attention=xsa").build_model()
    roles = parameter_roles(model)
    assert roles["patches.projection.weight"].role is Role.PATCH
    assert roles["patches.position"].role is Role.EMBEDDING
    chosen = assign(model, load_config("multimodal/scenes_captions", ["optimizer=muon"]).optimizer)
    matrices = {row.name.rpartition("blocks.")[2] for row in chosen if row.algorithm == "muon"}
    leaves = ("attention.qkv", "attention.out", "mlp.up", "mlp.down")
    assert matrices == {f"{layer}.{leaf}.weight" for layer in (0, 1) for leaf in leaves}


def test_captions_of_files_are_bytes_and_end_early_where_they_are_too_long(multimodal, shards):
    overrides = ("data.source=img2dataset", f"data.path={shards}", "data.context=12", "model.patch_size=10")
    task = multimodal("scenes_captions", "attention=sa", *overrides)
    (batch,) = task.validation(4, 8)
    assert len(batch) == 3
    rows = batch[2].tolist()
    assert all(row[-1] == END and row.index(END) == 10 for row in rows)
    assert {task.vocabulary.decode(row) for row in rows} <= {"a picture ", "b picture "}
    shown = task.sample(task.build_model(), 300)
    assert len(shown.splitlines()) >= 1
    assert " -> " in shown


@pytest.mark.parametrize(
    ("override", "message"),
    [("model.patch_size=6", "no multiple of 6"), ("model.n_heads=3", "3"), ("attention.layers=first:9", "9")],
)
def test_a_model_that_cannot_be_built_gets_one_line(multimodal, override, message):
    with pytest.raises((ValueError, UserError), match=message) as caught:
        multimodal("scenes_captions", "attention=xsa", override).build_model()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("experiment", ["scenes_captions", "scenes_contrastive", "spoken_digits"])
def test_the_statistics_of_figure_1_are_found_in_every_layer(few_spoken, multimodal, experiment):
    task = multimodal(experiment, "attention=sa")
    model = task.build_model()
    inputs = task.inputs(task.validation(4, 4)[0])
    layers = probe(model, inputs)
    if experiment == "scenes_contrastive":  # timm's layers are converted ones, with a probe of their own
        layers += probe_converted(model, [inputs])
        assert [layer.name.partition(".")[0] for layer in layers] == ["text", "text", "image", "image"]
    assert len(layers) == (4 if experiment == "scenes_contrastive" else 2)
    for layer in layers:
        assert all(-1 <= value <= 1 for value in layer.means().values())
