import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.text.tokenizer import ByteTokenizer, bits_per_byte


@given(st.text())
def test_every_text_survives_a_round_trip(text: str) -> None:
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(text)
    assert all(0 <= i < tokenizer.vocab_size for i in ids)
    assert tokenizer.decode(ids) == text


@given(st.binary())
def test_every_byte_string_decodes(data: bytes) -> None:
    assert ByteTokenizer().decode(data) == data.decode("utf-8", errors="replace")


@pytest.mark.parametrize("wrong", [-1, 256, 50256])
def test_ids_of_another_vocabulary_are_refused(wrong: int) -> None:
    with pytest.raises(ValueError, match=f"token {wrong} is no byte"):
        ByteTokenizer().decode([65, wrong])


def test_a_uniform_guess_among_bytes_costs_eight_bits() -> None:
    eps = 2.0**-52
    assert bits_per_byte(math.log(256), 10, 10) == pytest.approx(8.0, rel=4 * eps)


def test_bits_per_byte_does_not_depend_on_how_text_is_cut_into_tokens() -> None:
    nats = 120.0  # of one text of 60 bytes, as 60 tokens or as 15
    assert bits_per_byte(nats / 60, 60, 60) == pytest.approx(bits_per_byte(nats / 15, 15, 60), rel=2.0**-50)


def test_bits_per_byte_of_nothing_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least one"):
        bits_per_byte(1.0, 0, 5)
