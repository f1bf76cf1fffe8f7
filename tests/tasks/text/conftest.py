"""Small packages, installed ones and made ones, for the corpus tests."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tasks.text.sources import PACKAGES, Package

SMALL = ("more-itertools", "attrs", "joblib", "werkzeug")


@pytest.fixture
def small_packages() -> list[Package]:
    """Four installed packages of the real list, one of them for validation: 0.3 s to read."""
    return [package for package in PACKAGES if package.name in SMALL]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Make a package of given files and version that `importlib.metadata` finds as installed."""
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.syspath_prepend(str(site))

    def make(name: str, version: str, files: dict[str, str]) -> None:
        information = site / f"{name}-{version}.dist-info"
        information.mkdir()
        (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        for relative, content in files.items():
            path = site / name / relative
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content, encoding="utf-8")

    return make
