import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.text.dedup import leakage, near_duplicates, repeated_share, sequence_leakage
from tasks.text.extract import docstrings
from tasks.text.sources import PACKAGES, installed_sources

texts = st.lists(st.lists(st.sampled_from("abc"), max_size=9).map(" ".join), max_size=8)


@given(texts, st.integers(1, 4))
@settings(max_examples=150, deadline=None)
def test_repeated_share_equals_an_explicit_search(given_texts: list[str], length: int) -> None:
    seen: set[tuple[str, ...]] = set()
    expected = []
    for text in given_texts:
        words = text.split()
        own = [tuple(words[i : i + length]) for i in range(len(words) - length + 1)]
        expected.append(sum(sequence in seen for sequence in own) / max(len(own), 1))
        seen.update(own)
    np.testing.assert_array_equal(repeated_share(given_texts, length), expected)


def _paragraph(rng: random.Random, words: int) -> list[str]:
    return ["".join(rng.choices("abcdefghij", k=6)) for _ in range(words)]


def test_edited_copies_are_near_duplicates_and_other_text_is_not() -> None:
    rng = random.Random(0)
    original, other = _paragraph(rng, 60), _paragraph(rng, 60)
    edited = [*original]
    edited[30] = "changed"
    inside = [*_paragraph(rng, 10), *original]  # the copy is only a part
    given_texts = [" ".join(words) for words in (original, other, edited, inside)]
    assert near_duplicates(given_texts).tolist() == [False, False, True, True]


def test_case_digits_punctuation_and_layout_do_not_hide_a_copy() -> None:
    text = "The number of samples that are drawn at once, 10 by default, from the set of all samples."
    copy = "the number of\n    samples that are drawn at once (25 by default) from the set of ALL samples"
    assert near_duplicates([text, copy]).tolist() == [False, True]


def test_section_titles_may_repeat() -> None:
    assert not near_duplicates(["Parameters\n----------"] * 5).any()


def test_leakage_counts_lines_and_their_characters() -> None:
    training = "a line that stands in both texts\nanother line of training\nshort\n"
    validation = "   a line that stands in both texts\na line of validation alone\nshort\n"
    found = leakage(training, validation)
    assert found.lines == 1 / 2
    assert found.characters == 32 / (32 + 26)


def test_leakage_of_nothing_is_an_error() -> None:
    with pytest.raises(ValueError, match="no validation line"):
        leakage("a line of training text, long enough", "short\n")


def test_sequence_leakage_is_the_share_of_known_sequences() -> None:
    training = ["one two three four five six seven"]
    validation = ["one two three four five six eight", "nothing of this stands in the other"]
    assert sequence_leakage(training, validation) == 1 / 4


def test_a_split_by_package_leaks_far_less_than_a_split_by_docstring() -> None:
    """Measured before any duplicate is removed: why validation is a set of packages."""
    names = ("torchmetrics", "joblib", "jinja2", "werkzeug")
    sources, _ = installed_sources([p for p in PACKAGES if p.name in names], foreign=True)
    text = {
        source.package.name: ["\n\n".join(d) for file in source.files() for d in docstrings(file)]
        for source in sources
    }
    held_out = text.pop("werkzeug")
    rest = [docstring for package in text.values() for docstring in package]
    by_package = leakage("\n".join(rest), "\n".join(held_out))
    mixed = rest + held_out
    random.Random(0).shuffle(mixed)
    cut = len(mixed) // 12
    by_docstring = leakage("\n".join(mixed[cut:]), "\n".join(mixed[:cut]))
    assert by_docstring.lines > 3 * by_package.lines
