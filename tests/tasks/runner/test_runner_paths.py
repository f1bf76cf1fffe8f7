"""What a user may call a trained run: a path from here, from the root of the repository, or its id."""

from pathlib import Path

import pytest

from tasks.errors import UserError
from tasks.runner import paths

ID = "text-tiny_sa_adamw_s0_01234567"


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with one run of the runner and one of the quickstart, seen from another directory."""
    root = tmp_path / "repository"
    for directory in (root / "runs" / ID, root / "runs" / "quickstart" / "other"):
        (directory / "checkpoints").mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.setattr(paths, "ROOT", root)
    monkeypatch.setattr(paths, "RUNS", root / "runs")
    monkeypatch.chdir(tmp_path / "elsewhere")
    return root


def test_a_run_is_found_from_any_directory(root: Path) -> None:
    assert paths.trained_path(f"runs/{ID}") == root / "runs" / ID
    assert paths.trained_path(ID) == root / "runs" / ID
    assert paths.trained_path("other") == root / "runs" / "quickstart" / "other"
    assert paths.trained_path(str(root / "runs" / ID)) == root / "runs" / ID


def test_what_lies_here_goes_before_what_lies_at_the_root(root: Path) -> None:
    here = Path("runs") / ID
    here.mkdir(parents=True)
    assert paths.trained_path(f"runs/{ID}").samefile(here)
    assert paths.trained_path(ID) == root / "runs" / ID


def test_an_id_that_several_runs_have_is_refused_with_their_directories(root: Path) -> None:
    (root / "runs" / "quickstart" / ID / "checkpoints").mkdir(parents=True)
    with pytest.raises(UserError, match=f"several runs have this id.*{ID}.*{ID}"):
        paths.trained_path(ID)


def test_what_is_nowhere_comes_back_as_given_and_folders_of_a_run_are_no_runs(root: Path) -> None:
    assert paths.trained_path("absent") == Path("absent")
    assert paths.trained_path("no/such/run") == Path("no/such/run")
    assert paths.trained_path("checkpoints") == Path("checkpoints")
