"""./xsa info adapters: the coverage table."""

from tasks.runner.cli import main
from xsa_core.adapters import coverage


def test_the_table_shows_what_is_converted_and_what_is_not(capsys):
    assert main(["info", "adapters", "--find", "bloom"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "BloomAttention" in said
    assert "not covered" in said
    assert "0 classes converted, 1 known and left alone" in said


def test_every_library_has_its_table(capsys):
    assert main(["info", "adapters"]) == 0
    said = capsys.readouterr().out
    libraries = {row.library for row in coverage()}
    assert {"torch.nn", "timm", "transformers", "torchaudio"} <= libraries
    for library in libraries:
        rows = [row for row in coverage() if row.library == library]
        covered = sum(not row.how.startswith("not covered") for row in rows)
        assert f"{library}: {covered} classes converted, {len(rows) - covered} known and left alone" in said


def test_a_text_that_is_nowhere_is_said_to_be(capsys):
    assert main(["info", "adapters", "--find", "no such attention"]) == 0
    assert "no row with 'no such attention'" in capsys.readouterr().out
