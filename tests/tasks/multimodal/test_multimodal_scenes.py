"""The embedded scenes: what is drawn, told and asked, against an independent reading of the canvas."""

import re

import numpy as np
import pytest

from tasks.multimodal import config
from tasks.multimodal.scenes import (
    CANDIDATES,
    NAMES,
    PLACES,
    SIZE,
    VOCABULARY,
    Layout,
    Scenes,
    caption,
    question,
)
from tasks.multimodal.vocabulary import Bytes, Words
from tasks.vision.digits import MEAN, STD, load_digits

CORNERS = {"top-left": (0, 0), "top-right": (0, 10), "bottom-left": (10, 0), "bottom-right": (10, 10)}


def seen(scenes, index):
    """Place -> digit, read off the canvas: cut out what is in each quarter and find it among the digits."""
    images, labels = load_digits()
    canvas = scenes.pair(index, None)[0][0].numpy() * np.float32(STD) + np.float32(MEAN)
    found = {}
    for place, (top, left) in CORNERS.items():
        quarter = canvas[top : top + 10, left : left + 10]
        if quarter.max() < 0.01:
            continue
        errors = [
            np.abs(images - quarter[down : down + 8, right : right + 8]).sum((1, 2))
            for down in range(3)
            for right in range(3)
        ]
        _, number = np.unravel_index(np.argmin(errors), (9, len(images)))
        found[place] = NAMES[labels[number]]
    return found


def told(text):
    """Place -> digit, by reading the caption as a person would."""
    counted, _, rest = text.partition(" digit")
    rest = rest.partition(": ")[2]
    names = re.findall(rf"\b({'|'.join(NAMES)})\b", rest)
    places = re.findall("(?:top|bottom)-(?:left|right)", rest)
    assert len(places) == 1
    assert NAMES.index(counted) == len(names)
    if len(names) == 1:
        return {places[0]: names[0]}
    if len(names) == 3:
        return dict(zip([place for place in CORNERS if place != places[0]], names, strict=True))
    top, left = CORNERS[places[0]]
    if "above" in rest:
        top += 10
    if "left of" in rest:
        left += 10
    if "right of" in rest:
        left -= 10
    (other,) = [place for place, corner in CORNERS.items() if corner == (top, left)]
    return {places[0]: names[0], other: names[1]}


@pytest.mark.parametrize("train", [True, False])
def test_captions_tell_what_is_on_the_canvas(train):
    scenes = Scenes(train=train)
    kinds = set()
    for index in range(60):
        _, text, label = scenes.pair(index, None)
        there = seen(scenes, index)
        assert told(text) == there
        assert label == (NAMES.index(next(iter(there.values()))) if len(there) == 1 else -1)
        kinds.add((len(there), "left of" in text, "above" in text, "right of" in text))
    assert len(kinds) >= 6  # one, three, and two in four relations


def test_answers_are_what_is_on_the_canvas():
    scenes = Scenes(train=False)
    asked = set()
    for index in range(150):
        there = told(scenes.pair(index, None)[1])
        found = scenes.question(index, np.random.default_rng(index))
        digits = [there[place] for place in CORNERS if place in there]
        match found.kind:
            case "which":
                expected = there.get(re.search(r"at the (\S+)\?", found.text)[1], "none")
            case "where":
                (expected,) = [p for p, digit in there.items() if f"is the {digit}?" in found.text]
            case "count" if "there" in found.text:
                expected = NAMES[len(digits)]
            case "count":
                expected = NAMES[digits.count(re.search(r"are (\S+)\?", found.text)[1])]
            case "order":
                ordered = digits if "comes" in found.text else sorted(digits, key=NAMES.index)
                expected = ordered[0 if "first" in found.text or "smallest" in found.text else -1]
        assert found.answer == expected
        assert found.answer in CANDIDATES[found.kind]
        asked.add((found.kind, found.text.split()[-1]))
    assert {kind for kind, _ in asked} == set(CANDIDATES)
    assert {"first?", "last?", "largest?", "smallest?"} <= {word for _, word in asked}


def test_different_layouts_have_different_captions():
    captions = {}
    for seed in range(3000):
        rng = np.random.default_rng(seed)
        places = sorted(rng.choice(4, rng.integers(1, 4), replace=False).tolist())
        digits = rng.integers(10, size=len(places)).tolist()
        layout = Layout(tuple(places), tuple(digits), (), ())
        assert captions.setdefault(caption(layout), layout) == layout
    assert len(captions) > 1000


def test_training_and_test_scenes_share_no_handwritten_digit():
    sides = [{image.tobytes() for image in Scenes(train=train).images} for train in (True, False)]
    assert not sides[0] & sides[1]


def test_a_scene_is_a_function_of_its_number_and_noise_is_drawn_anew_in_training_alone():
    scenes = Scenes(train=True, noise=0.2)
    again = Scenes(train=True, noise=0.2)
    assert scenes.fingerprint == again.fingerprint
    assert scenes.pair(7, None)[0].equal(again.pair(7, None)[0])
    drawn = [scenes.pair(7, np.random.default_rng(seed))[0] for seed in (0, 0, 1)]
    assert drawn[0].equal(drawn[1])
    assert not drawn[0].equal(drawn[2])
    noise = (drawn[0] - Scenes(train=True).pair(7, None)[0]).numpy() * STD
    assert noise.std() == pytest.approx(0.2, rel=0.15)  # of 400 pixels: 3% deviation


def test_everything_that_is_said_has_a_number_and_comes_back():
    words = Words(VOCABULARY)
    longest = 0
    for places in ((0,), (3,), (0, 1), (0, 3), (1, 2), (0, 1, 2), (1, 2, 3)):
        text = caption(Layout(places, (3, 3, 8)[: len(places)], (), ()))
        longest = max(longest, len(words.encode(text)) + 2)
        assert words.decode(words.encode(text)) == text
    assert longest == config.LONGEST_CAPTION
    assert config.SCENE == SIZE
    for seed in range(200):
        layout = Layout((0, 2), (seed % 10, 4), (), ())
        text = question(layout, np.random.default_rng(seed).integers(2**31, size=4)).text
        assert words.decode(words.encode(text)) == text
    assert len(set(VOCABULARY)) == len(VOCABULARY)
    assert all(len(words.encode(word)) == 1 for kind in CANDIDATES.values() for word in kind)
    with pytest.raises(ValueError, match="'cat' is none of the 40 words"):
        words.encode("a cat")
    assert Bytes().decode(Bytes().encode("Ärger: 猫")) == "Ärger: 猫"
    assert tuple(CORNERS) == PLACES
