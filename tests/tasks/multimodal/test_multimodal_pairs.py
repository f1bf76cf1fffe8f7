"""Images with captions in files: what is read, on which side of the split, and what is refused."""

import io

import numpy as np
import pytest
import torch
import webdataset
from PIL import Image

from tasks.errors import UserError
from tasks.multimodal.pairs import decoded, emoji_base
from tests.tasks.multimodal.conftest import picture


def captions(side):
    """All captions of one side, by webdataset's own reader."""
    names = {side.pairs.shards.names[number] for number in side.pairs.chosen}
    found = []
    for path in side.pairs.shards.paths:
        for sample in webdataset.WebDataset(str(path), shardshuffle=False):
            if f"{path.name}:{sample['__key__']}" in names:
                found.append(sample["txt"].decode())
    return found


def test_pairs_are_the_files_images_and_texts(multimodal, shards):
    task = multimodal("img2dataset", f"data.path={shards}", "attention=sa")
    first = next(iter(webdataset.WebDataset(str(shards / "00001.tar"), shardshuffle=False)))
    side, index = next(
        (side, side.pairs.chosen.index(20)) for side in (task.train, task.held_out) if 20 in side.pairs.chosen
    )
    image, text, label = side.pairs.pair(index, None)
    pixels = np.asarray(Image.open(io.BytesIO(first["png"])), dtype=np.float64) / 255
    expected = (pixels - (0.485, 0.456, 0.406)) / (0.229, 0.224, 0.225)  # ImageNet's
    assert torch.allclose(image, torch.from_numpy(expected).permute(2, 0, 1).float(), atol=1e-6)
    assert (text, label) == ("b picture of thing 0", -1)


def test_equal_captions_are_on_one_side_and_none_is_lost(multimodal, shards):
    task = multimodal("img2dataset", f"data.path={shards}", "attention=sa")
    train, test = captions(task.train), captions(task.held_out)
    assert len(train) + len(test) == 40
    assert not set(train) & set(test)
    assert len(set(test)) >= 2


def test_shards_of_test_can_be_named(multimodal, shards):
    where = (f"data.path={shards}", "attention=sa")
    task = multimodal("img2dataset", *where, "data.train=00000*.tar", "data.validation=00001*.tar")
    assert {text[0] for text in captions(task.train)} == {"a"}
    assert {text[0] for text in captions(task.held_out)} == {"b"}
    with pytest.raises(UserError, match="name the same shards"):
        multimodal("img2dataset", *where, "data.validation=00001*.tar")


def test_skin_tones_of_an_emoji_are_on_one_side(multimodal, emoji):
    task = multimodal("openmoji", f"data.path={emoji}", "attention=sa")
    sides = [{text.partition(":")[0] for text in captions(side)} for side in (task.train, task.held_out)]
    assert not sides[0] & sides[1]
    assert len(sides[0] | sides[1]) == 30
    assert len(captions(task.train)) + len(captions(task.held_out)) == 50
    assert any(":" in text for text in captions(task.held_out))
    assert task.train.pairs.classes == ["a", "b"]
    assert sorted({task.held_out.fetch(i, None)[2] for i in range(len(task.held_out))}) == [0, 1]


def test_the_base_of_an_emoji_has_no_skin_tone():
    for one, other in (
        ("261D-FE0F", "261D-1F3FB"),
        ("1F9D1-1F3FB-200D-1F91D-200D-1F9D1-1F3FF", "1F9D1-200D-1F91D-200D-1F9D1"),
        ("1f44b-1f3fd", "1F44B"),
    ):
        assert emoji_base(one) == emoji_base(other)
    assert emoji_base("1F468-200D-1F9B0") != emoji_base("1F469-200D-1F9B0")


def test_what_is_transparent_is_white():
    pixels = np.zeros((4, 4, 4), np.uint8)
    pixels[0, 0] = (10, 20, 30, 255)
    palette = Image.fromarray(pixels, "RGBA").convert("P")
    for image in (Image.fromarray(pixels, "RGBA"), palette):
        stream = io.BytesIO()
        extra = {} if image.mode == "RGBA" else {"transparency": palette.getpixel((2, 2))}
        image.save(stream, "PNG", **extra)
        found = np.asarray(decoded({"png": stream.getvalue()}))
        assert found.shape == (4, 4, 3)
        assert (found[2, 2] == 255).all()
        assert found[0, 0].max() < 60


def test_zero_shot_accuracy_is_measured_where_there_are_classes(multimodal, shards):
    overrides = (f"data.path={shards}", "attention=sa", "data.class_key=group")
    task = multimodal("img2dataset", *overrides, "data.prompts=['a {}','one {}']")
    assert [len(prompts) for prompts in task.prompts] == [2, 2]
    assert task.vocabulary.decode(task.prompts[1][0]) == "a kind 1"
    model = task.build_model().eval()
    with torch.no_grad():
        assert 0 <= task.evaluate(model, task.validation(8, 4))["zero_shot"] <= 1


def test_crops_depend_on_seed_and_sample_alone(multimodal, shards):
    overrides = (f"data.path={shards}", "attention=sa", "data.augment=crop")
    state = torch.get_rng_state()
    first = multimodal("img2dataset", *overrides).stream(0, 1).next_batch(5)
    assert torch.equal(state, torch.get_rng_state())
    again = multimodal("img2dataset", *overrides, "data.workers=1").stream(0, 1).next_batch(5)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(
        first[0], multimodal("img2dataset", *overrides, "seed=1").stream(0, 1).next_batch(5)[0]
    )


def test_damaged_pairs_are_skipped_named_and_counted_up_to_the_limit(multimodal, tmp_path):
    files = [
        {"png": picture(1), "txt": "good one"},
        {"png": b"no image", "txt": "no image"},
        {"png": picture(2), "txt": "  "},
        {"png": picture(3), "txt": b"\xff\xfe"},
        {"png": picture(4), "json": b"{}"},
        {"txt": "no picture"},
        {"png": picture(5), "txt": "good too"},
    ]
    for name in ("train.tar", "val.tar"):
        with webdataset.TarWriter(str(tmp_path / name)) as writer:
            for row, sample in enumerate(files):
                writer.write({"__key__": f"{row}", **sample})
    overrides = (f"data.path={tmp_path}", "attention=sa", "data.train=train.tar", "data.validation=val.tar")
    task = multimodal("img2dataset", *overrides, "data.max_damaged=5")
    task.stream(0, 1).next_batch(6)
    assert task.data_note.startswith("5 damaged samples skipped (train.tar:")
    reasons = " ".join(task.damaged.found.values())
    for reason in ("not an image", "empty caption", "utf-8", "expected a caption", "expected an image"):
        assert reason in reasons
    with pytest.raises(UserError, match="damaged samples, 4 may be skipped"):
        multimodal("img2dataset", *overrides, "data.max_damaged=4").stream(0, 1).next_batch(6)


def test_data_that_cannot_be_used_get_one_line(multimodal, shards, tmp_path):
    def refusal(experiment, path, *overrides):
        with pytest.raises(ValueError, match=r"\S") as caught:
            multimodal(experiment, f"data.path={path}", "attention=sa", *overrides)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    empty = tmp_path / "empty"
    empty.mkdir()
    assert "is no directory" in refusal("img2dataset", tmp_path / "absent")
    assert "no shards named" in refusal("img2dataset", empty)
    assert "no hexcode" in refusal("openmoji", shards)
    assert "1 classes" in refusal("img2dataset", shards, "data.class_key=status")
    assert "0 classes" in refusal("img2dataset", shards, "data.class_key=colour")
    assert "split by emoji" in refusal("openmoji", shards, "data.train=x")
    assert "expected texts with one {} each" in refusal("img2dataset", shards, "data.prompts=[cat]")
    assert "source scenes" in refusal("img2dataset", shards, "data.noise=0.1")
    assert "no test samples" in refusal("img2dataset", shards, "data.validation_fraction=0.0001")
    with webdataset.TarWriter(str(empty / "0.tar")) as writer:
        writer.write({"__key__": "a", "cls": 1, "png": picture(0)})
    assert "has cls, png; expected an image and txt" in refusal("img2dataset", empty)
