"""Where things lie."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = ROOT / "configs"


def under_root(path: str) -> Path:
    """Return a path of a config or option: relative ones lie below the repository's root."""
    return ROOT / Path(path).expanduser()


def shown(path: Path) -> str:
    """Return a path for people: relative to the working directory where it lies below it."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)
