"""Continuations are those of the definition, end where a stop string begins, and are alone in a batch."""

from typing import Any

import pytest
import torch

from tasks.text.evaluation.decoding import Options, before, continue_prompts, room
from tasks.text.tokenizer import ByteTokenizer
from tasks.text.trained import Trained
from xsa_core import GPT

PROMPTS = ("a", "some words to go on from", "Return the ", "x" * 30)


class Padded(ByteTokenizer):
    """Bytes below 128 with an end of text at 64: a model's vocabulary is larger than that."""

    vocab_size = 128
    end_of_text = 64


def run(trained: Trained, prompts: list[str] | tuple[str, ...], options: Options, seed: int = 0) -> list[str]:
    ids = [trained.encode(prompt) for prompt in prompts]
    return continue_prompts(trained, ids, options, [seed + place for place in range(len(ids))])


def test_greedy_continuations_are_the_likeliest_tokens(byte_model: Trained, continue_explicitly: Any) -> None:
    found = run(byte_model, PROMPTS, Options(max_new=20))
    for prompt, text in zip(PROMPTS, found, strict=True):
        ids = byte_model.encode(prompt)
        assert text == byte_model.decode(continue_explicitly(byte_model.model, ids, 20))


def test_a_window_that_is_full_slides_as_in_generate(byte_model: Trained) -> None:
    ids = byte_model.encode("a window of 64")
    expected = byte_model.model.generate(torch.tensor([ids]), 150, temperature=0)[0, len(ids) :]
    assert run(byte_model, ["a window of 64"], Options(max_new=150)) == [byte_model.decode(expected.tolist())]


def test_text_is_cut_before_the_first_stop_string_even_inside_longer_text(byte_model: Trained) -> None:
    whole = run(byte_model, PROMPTS, Options(max_new=30))
    until = (whole[0][4:6], whole[1][7:8], "never there", "")
    found = run(byte_model, PROMPTS, Options(max_new=30, until=until))
    for text, cut in zip(whole, found, strict=True):
        places = [text.find(stop) for stop in until[:3] if stop in text]
        assert cut == text[: min(places, default=len(text))]
    assert len(found[0]) <= 4
    assert len({len(text) for text in found}) > 1, "all rows ended together: no test of rows that end early"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_continuation_does_not_depend_on_its_batch(temperature: float, byte_model: Trained) -> None:
    options = Options(max_new=40, until=("e", "\n"), temperature=temperature)
    together = run(byte_model, PROMPTS, options)
    for place, prompt in enumerate(PROMPTS):
        ids = [byte_model.encode(prompt)]
        assert continue_prompts(byte_model, ids, options, [place]) == [together[place]]


def test_drawn_continuations_follow_their_seed(byte_model: Trained) -> None:
    options = Options(max_new=20, temperature=1.0)
    assert run(byte_model, PROMPTS, options) == run(byte_model, PROMPTS, options)
    assert run(byte_model, PROMPTS, options) != run(byte_model, PROMPTS, options, seed=9)
    assert run(byte_model, PROMPTS, Options(max_new=20, temperature=1.0, top_k=1)) == run(
        byte_model, PROMPTS, Options(max_new=20)
    )


def test_an_end_of_text_ends_a_row_and_padding_of_the_vocabulary_is_never_written(make_gpt: Any) -> None:
    model: GPT = make_gpt(256, max_seq_len=64, tie_embeddings=False)
    with torch.no_grad():
        model.head.weight[128:] = model.head.weight[:128] * 2  # what has no text is likelier than what has
    trained = Trained(model, Padded())
    free = run(Trained(model, ByteTokenizer()), PROMPTS, Options(max_new=60, temperature=1.0))
    assert any("�" in text for text in free)
    texts = run(trained, PROMPTS, Options(max_new=200, temperature=1.0))
    assert all(ord(character) < 128 and character != "@" for text in texts for character in text)
    assert any(len(text) < 200 for text in texts)


def test_of_a_long_prompt_as_much_is_read_as_leaves_room_for_the_answer(
    byte_model: Trained, continue_explicitly: Any
) -> None:
    prompt = "".join(chr(97 + i % 26) for i in range(200))
    (found,) = run(byte_model, [prompt], Options(max_new=10))
    assert room(64, 10) == 54
    kept = byte_model.encode(prompt)[-54:]
    assert found == byte_model.decode(continue_explicitly(byte_model.model, kept, 10))
    assert room(64, 64) == 32  # the harness refuses this; half the window is read
    assert run(byte_model, [prompt], Options(max_new=0)) == [""]


def test_the_first_of_several_stop_strings_counts() -> None:
    assert before("one two three", ("three", "two")) == "one "
    assert before("one", ("",)) == "one"
    assert before("stop", ("stop",)) == ""
