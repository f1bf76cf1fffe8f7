"""Files are written whole or not at all."""

from pathlib import Path

import pytest

from xsa_core.files import cache_root, whole


def test_a_file_appears_under_its_name_only_when_it_is_complete(tmp_path):
    path = tmp_path / "file"
    with whole(path) as temporary:
        temporary.write_text("half")
        assert not path.exists()
        assert temporary.parent == path.parent, "a rename must not cross file systems"
        temporary.write_text("whole")
    assert path.read_text() == "whole"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("failure", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_after_a_failure_the_old_file_is_as_it_was_and_nothing_else_is_left(tmp_path, failure):
    path = tmp_path / "file"
    path.write_text("old")

    def write() -> None:
        with whole(path) as temporary:
            temporary.write_text("ne")
            raise failure

    with pytest.raises(type(failure)):
        write()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_block_that_writes_nothing_is_an_error_not_an_empty_file(tmp_path):
    def write_nothing() -> None:
        with whole(tmp_path / "file"):
            pass

    with pytest.raises(FileNotFoundError):
        write_nothing()


def test_the_cache_follows_its_variables_in_order(monkeypatch, tmp_path):
    for name in ("XSA_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_root() == tmp_path / ".cache" / "xsa"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_root() == tmp_path / "xdg" / "xsa"
    monkeypatch.setenv("XSA_CACHE", str(tmp_path / "own"))
    assert cache_root() == Path(tmp_path / "own")
