"""Where things lie."""

from pathlib import Path

from tasks.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = ROOT / "configs"
RUNS = ROOT / "runs"  # where runs are written unless a config says otherwise


def under_root(path: str) -> Path:
    """Return a path of a config or option: relative ones lie below the repository's root."""
    return ROOT / Path(path).expanduser()


def shown(path: Path) -> str:
    """Return a path for people: relative to the working directory where it lies below it."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def trained_path(where: str) -> Path:
    """Return the run directory, checkpoint or exported directory that a user names.

    A path is looked for below the working directory first and below the repository's root then, since that
    is where runs are written and shown from; a bare name is also taken as the id of a run below `runs`. What
    is found nowhere comes back as it was given.

    Raises:
        UserError: several runs have that id.
    """
    path = Path(where).expanduser()
    for candidate in (path, ROOT / path):
        if candidate.exists():
            return candidate
    if where and len(path.parts) == 1:
        # Quickstart keeps its runs one level deeper; a run's own folders are not places of runs.
        places = [RUNS, *(place for place in sorted(RUNS.glob("*")) if not (place / "checkpoints").exists())]
        found = [place / path for place in places if (place / path).is_dir()]
        if len(found) > 1:
            raise UserError(
                f"{where}: several runs have this id; name a directory: {', '.join(map(shown, found))}"
            )
        if found:
            return found[0]
    return path
