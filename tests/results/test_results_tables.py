"""Tables, published numbers and the closing comparison: exact, unbroken, gaps visible."""

import csv
import io

import pytest

from results.comparison import quick_comparison
from results.published import PAPER, load_published, published_table
from results.tables import Column, Table, markdown, show, to_csv


def test_published_numbers_have_sources_and_a_broken_entry_is_named(tmp_path):
    entries = load_published(PAPER)
    assert entries
    text = (PAPER / "published.yaml").read_text()
    (tmp_path / "a.yaml").write_text(text.replace("  work: karpathy/nanochat\n", "", 1))
    with pytest.raises(ValueError, match="nanochat-702-bits-per-byte: work: missing"):
        load_published(tmp_path)
    (tmp_path / "a.yaml").write_text(text + text)
    with pytest.raises(ValueError, match="stands there twice"):
        load_published(tmp_path)


def test_difference_of_published_values_is_marked_as_computed_here():
    table = published_table(load_published(PAPER))
    for row in table.rows:
        if row["origin"] == "computed here":
            assert row["change"] == pytest.approx(row["xsa"] - row["baseline"], abs=1e-6)
        else:
            assert row["change"] == row["difference"]


def test_csv_keeps_every_digit_and_marks_what_is_missing():
    value = 0.1 + 0.2
    columns = (Column("a", "A", 2), Column("b", "B"))
    table = Table("t", "T", columns, ({"a": value, "b": 'x,"y"'}, {"b": None}))
    rows = list(csv.DictReader(io.StringIO(to_csv(table))))
    assert float(rows[0]["a"]) == value
    assert rows[0]["b"] == 'x,"y"'
    assert (rows[1]["a"], rows[1]["b"]) == ("NA", "NA")


def test_markdown_cells_cannot_break_the_table():
    table = Table("t", "T", (Column("a", "A"), Column("b", "B")), ({"a": "x|y\nz <b>", "b": None},))
    row = markdown(table).splitlines()[-1]
    assert row == "| x\\|y z &lt;b> | missing |"


@pytest.mark.parametrize(
    ("value", "options", "text"),
    [
        (None, {}, "missing"),
        (3200000, {}, "3,200,000"),
        (0.0, {"signed": True}, "+0.0000"),
        (-0.01234, {"digits": 3}, "-0.012"),
        (1.5, {"digits": None}, "1.5"),
        (float("nan"), {}, "nan"),
        (True, {}, "yes"),
    ],
)
def test_values_are_shown_as_people_read_them(value, options, text):
    assert show(value, **options) == text


def test_tiny_probability_is_not_shown_as_zero():
    table = Table("t", "T", (Column("p", "p", probability=True),), ({"p": 1e-9},))
    assert table.text_rows() == [["<0.0001"]]


def test_comparison_shows_the_difference_of_a_pair(make_run):
    baseline, other = make_run("sa", 0, loss=1.40), make_run("xsa", 0, loss=1.39)
    table = quick_comparison(baseline, other)
    rows = {row[0]: row[1:] for row in table.text_rows()}
    name = "validation_bits_per_byte"
    difference = other.metrics[name] - baseline.metrics[name]
    assert rows["validation bits per byte"][2] == f"{difference:+.4f}"
    assert rows["parameters"] == ["3,200,000", "3,200,000", "+0"]
    assert rows["training tokens/s (own clock)"] == ["20,123", "20,123", "see note"]
    assert any("one pair, seed 0" in note for note in table.notes)


def test_comparison_of_runs_that_are_no_pair_shows_no_difference(make_run):
    table = quick_comparison(make_run("sa", 0), make_run("xsa", 1))
    assert table.text_rows()[0][3] == "not comparable"
    assert "different seed: 0 and 1" in table.notes[0]


def test_comparison_shows_what_a_failed_run_lacks(make_run):
    failed = make_run("xsa", status="failed", reason="nan", metrics={}, primary_metric=None, model=None)
    rows = quick_comparison(make_run("sa"), failed).text_rows()
    assert rows[0][2] == "missing"
    assert rows[-1][2:] == ["missing", "missing"]
