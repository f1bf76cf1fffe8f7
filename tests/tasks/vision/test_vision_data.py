"""Images in every layout: what is read, in which split, and what is refused."""

import numpy as np
import pytest
import torch
from PIL import Image

from tasks.errors import UserError
from tasks.vision.digits import STD, load_digits, shifted, split


def test_digits_split_is_disjoint_complete_and_even_over_the_classes():
    images, labels = load_digits()
    train, test = split(labels)
    assert sorted([*train, *test]) == list(range(1797))
    for label in range(10):
        share = np.mean(labels[test] == label) / np.mean(labels == label)
        assert 0.97 < share < 1.03
    both = {images[i].tobytes() for i in train} & {images[i].tobytes() for i in test}
    assert not both


@pytest.mark.parametrize(("down", "right"), [(0, 0), (1, 0), (-1, 1), (0, -1), (1, 1)])
def test_a_shifted_digit_is_the_rolled_one_with_an_empty_edge(down, right):
    image = np.random.default_rng(0).random((5, 5))
    padded = np.pad(image, 1)
    expected = np.roll(padded, (down, right), (0, 1))[1:-1, 1:-1]
    assert np.array_equal(shifted(image, down, right), expected)


@pytest.mark.parametrize("source", ["folder", "shards"])
def test_validation_images_are_the_files_pixels_normalised(vision, sides, source):
    root = getattr(sides, source)
    task = vision(source, f"data.path={root}", "attention=sa")
    ((images, labels),) = task.validation(9, 16)
    assert labels.tolist() == ([0] * 3 + [1] * 3 + [2] * 3 if source == "folder" else [0, 1, 2] * 3)
    if source == "folder":
        pixels = np.asarray(Image.open(root / "val" / "cat" / "0.png"), dtype=np.float64) / 255
    else:
        import io

        import webdataset

        first = next(iter(webdataset.WebDataset(str(root / "test-0.tar"), shardshuffle=False)))
        pixels = np.asarray(Image.open(io.BytesIO(first["png"])), dtype=np.float64) / 255
    expected = (pixels - (0.485, 0.456, 0.406)) / (0.229, 0.224, 0.225)  # ImageNet's
    assert torch.allclose(images[0], torch.from_numpy(expected).permute(2, 0, 1).float(), atol=1e-6)


@pytest.mark.parametrize("augment", ["flip_crop", "rand"])
def test_augmentation_depends_on_seed_and_sample_alone_and_leaves_the_generators(vision, folder, augment):
    overrides = (f"data.path={folder}", f"data.augment={augment}", "attention=sa", "data.mixup=0.5")
    stream = vision("folder", *overrides).stream(0, 1)
    state = torch.get_rng_state(), np.random.get_state()[1].tolist()
    first = stream.next_batch(6)
    assert torch.equal(state[0], torch.get_rng_state())
    assert state[1] == np.random.get_state()[1].tolist()
    torch.rand(1)
    np.random.rand()
    again = vision("folder", *overrides, "data.workers=1").stream(0, 1).next_batch(6)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    other = vision("folder", *overrides, "seed=1").stream(0, 1).next_batch(6)
    assert not torch.equal(first[0], other[0])


def test_mixed_labels_are_weights_that_sum_to_one(vision, folder):
    task = vision(
        "folder", f"data.path={folder}", "data.cutmix=1", "model.label_smoothing=0.1", "attention=sa"
    )
    images, labels = task.stream(0, 1).next_batch(8)
    assert labels.shape == (8, 3)
    assert torch.allclose(labels.sum(1), torch.ones(8))
    assert labels.min() >= 0.1 / 3 - 1e-6
    assert images.shape == (8, 3, 12, 12)


@pytest.mark.parametrize("source", ["folder", "shards"])
def test_a_damaged_image_is_skipped_named_and_counted_up_to_the_limit(vision, sides, source):
    root = getattr(sides, source)
    if source == "folder":
        (root / "train" / "dog" / "2.png").write_bytes(b"no image")
        name = "dog/2.png: not an image"
    else:
        path = root / "train-1.tar"
        data = bytearray(path.read_bytes())
        start = data.index(b"\x89PNG", 2000)
        data[start : start + 4] = b"XXXX"
        path.write_bytes(data)
        name = "train-1.tar:"
    task = vision(source, f"data.path={root}", "data.max_damaged=1", "attention=sa")
    stream = task.stream(0, 1)
    stream.next_batch(17)
    assert task.data_note.startswith("1 damaged samples skipped (")
    assert name in task.data_note
    strict = vision(source, f"data.path={root}", "data.max_damaged=0", "attention=sa")
    with pytest.raises(UserError, match="1 damaged samples, 0 may be skipped"):
        strict.stream(0, 1).next_batch(18)


def test_data_that_cannot_be_used_get_one_line(vision, folder, shards, tmp_path):
    def refusal(source, path, *overrides):
        with pytest.raises(ValueError, match=r"\S") as caught:
            vision(source, f"data.path={path}", "attention=sa", *overrides)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    empty = tmp_path / "empty"
    empty.mkdir()
    assert "is no directory" in refusal("folder", tmp_path / "absent")
    assert "no such folder" in refusal("folder", empty)
    (empty / "train").mkdir()
    assert "no class folders" in refusal("folder", empty)
    (empty / "train" / "cat").mkdir()
    assert "no images" in refusal("folder", empty)
    assert "no classes.txt" in refusal("shards", empty)
    assert "no shards named" in refusal("shards", empty, "data.classes=3")
    assert "not torchvision's CIFAR-10" in refusal("cifar10", empty)
    (folder / "val" / "dog").rename(folder / "val" / "fox")
    assert "other classes than the training images (dog, fox)" in refusal("folder", folder)
    assert "timm does not know" in refusal("shards", shards, "data.augment=rand", "data.rand_augment=sand-m9")


def test_a_label_beyond_the_classes_is_a_damaged_sample(vision, shards):
    task = vision("shards", f"data.path={shards}", "data.classes=2", "data.max_damaged=0", "attention=sa")
    with pytest.raises(UserError, match=r"label 2, expected 0 to 1"):
        task.stream(0, 1).next_batch(9)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("data.path=x",), "data.path: given"),
        (("data.source=folder",), "data.path: no value"),
        (("data.augment=rand",), "takes none or shift"),
        (("data.source=folder", "data.path=x", "data.augment=shift"), "takes none, flip_crop or rand"),
        (("data.train=x",), "has its own split"),
        (("data.crop_scale=0",), "data.crop_scale"),
        (("data.test_copies=2",), "all copies are the same"),
        (("data.source=folder", "data.path=x", "data.noise=0.1"), "of digits"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(vision, overrides, message):
    with pytest.raises(UserError, match=message):
        vision("digits", *overrides)


def test_digits_of_a_size_that_is_no_multiple_are_refused(vision):
    with pytest.raises(ValueError, match="expected a multiple, got 12"):
        vision("digits", "data.image_size=12")


def test_noisy_digits_are_the_clean_ones_with_noise_of_the_size_asked_for(vision):
    clean = vision("digits").held_out
    noisy = vision("digits", "data.noise=0.4", "data.test_copies=3").held_out
    assert len(noisy) == 3 * len(clean)
    added = []
    for copy in range(3):
        for index in range(0, len(clean), 7):
            number = copy * len(clean) + index
            image, label, _ = noisy.fetch(number, None)
            assert torch.equal(image, noisy.fetch(number, None)[0])
            plain, expected, _ = clean.fetch(index, None)
            assert label == expected
            added.append((image - plain) * STD)
    pixels = torch.stack(added)
    assert pixels.std().item() == pytest.approx(0.4, rel=0.03)  # 16,512 draws: deviation 0.6%
    assert not torch.equal(pixels[0], pixels[len(pixels) // 3])
