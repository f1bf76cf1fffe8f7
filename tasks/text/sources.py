"""Which packages the embedded corpus is made of, and where they lie in this interpreter.

The names are fixed here and the versions by `requirements.lock`, so that a new dependency of the suite
leaves the corpus as it is. Validation packages have authors, and mostly subjects, of their own.
"""

import importlib.metadata
import os
import platform
import re
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tasks.errors import UserError
from tasks.text.extract import is_documentation

LOCK = Path(__file__).resolve().parents[2] / "requirements.lock"
PYTHON = "python"  # stands for the interpreter's own language reference, pydoc_data/topics.py


@dataclass(frozen=True)
class Package:
    """A distribution, the directories of it to read (relative to site-packages) and its split."""

    name: str
    directories: tuple[str, ...]
    split: str  # "train" or "validation"


def _package(name: str, *directories: str, split: str = "train") -> Package:
    return Package(name, directories or (name.replace("-", "_"),), split)


PACKAGES: tuple[Package, ...] = (
    _package(PYTHON, "pydoc_data"),
    _package("numpy"),
    _package("scipy"),
    _package("scikit-learn", "sklearn"),
    _package("pandas"),
    _package("networkx"),
    _package("sympy"),
    _package("mpmath"),
    _package("nltk"),
    _package("torch"),
    _package("torchvision"),
    _package("torchaudio"),
    _package("torchmetrics"),
    _package("datasets"),
    _package("evaluate"),
    _package("huggingface-hub"),
    _package("lm-eval"),
    _package("webdataset"),
    _package("tensorboard"),
    _package("absl-py", "absl"),
    _package("fsspec"),
    _package("pillow", "PIL"),
    _package("joblib"),
    _package("setuptools"),
    _package("pydantic"),
    _package("rich"),
    _package("jinja2"),
    _package("click"),
    _package("pytest", "_pytest"),
    _package("pyparsing"),
    _package("more-itertools"),
    _package("python-dateutil", "dateutil"),
    _package("attrs", "attr"),
    _package("matplotlib", "matplotlib", "mpl_toolkits", split="validation"),
    _package("werkzeug", split="validation"),
    _package("hypothesis", split="validation"),
)


@dataclass(frozen=True)
class Source:
    """A package as installed here: its version, and the directory that its own directories lie in."""

    package: Package
    version: str
    root: Path

    def files(self) -> list[Path]:
        """Return the package's documentation files in a fixed order. Walks its directories: 0.2 s for all."""
        found: list[Path] = []
        for directory in self.package.directories:
            relative = (path.relative_to(self.root) for path in (self.root / directory).rglob("*.py"))
            kept = [path for path in relative if is_documentation(path)]
            found.extend(self.root / path for path in sorted(kept, key=Path.as_posix))
        return found


def locked_versions(lock: Path = LOCK) -> dict[str, str]:
    """Return the version of every package in a requirements file. Raises UserError where there is none."""
    try:
        text = lock.read_text("utf-8")
    except OSError as error:
        raise UserError(
            f"cannot read {lock} ({error.strerror}), which fixes the corpus; restore it from the repository"
        ) from None
    return dict(re.findall(r"^([A-Za-z0-9._-]+)==([^\s;\\]+)", text, flags=re.MULTILINE))


def installed_sources(
    packages: Sequence[Package], foreign: bool | None = None, lock: Path = LOCK
) -> tuple[list[Source], list[str]]:
    """Return the packages as installed here, and notes on what differs from the lock.

    In the suite's own environment a package that is missing or of another version raises UserError.
    An interpreter used as it is (`foreign`, by default whether `XSA_PYTHON` is set) may lack some: the notes
    name them, and the corpus has another fingerprint.
    """
    foreign = bool(os.environ.get("XSA_PYTHON")) if foreign is None else foreign
    locked = locked_versions(lock)
    sources, notes = [], []
    for package in packages:
        source = _find(package)
        found = source.version if source else "not installed"
        wanted = (
            found if package.name == PYTHON and source else locked.get(package.name, "a version in the lock")
        )
        if found != wanted:
            problem = f"{package.name} is {found}, expected {wanted}"
            if not foreign:
                raise UserError(
                    f"the corpus reads installed packages, and {problem}; remove .venv and run ./xsa again, "
                    "or set XSA_PYTHON to use an interpreter as it is"
                )
            notes.append(problem)
        if source:
            sources.append(source)
    for split in ("train", "validation"):
        if not any(source.package.split == split for source in sources):
            names = ", ".join(package.name for package in packages if package.split == split)
            raise UserError(f"no package of the {split} text is installed; install at least one of: {names}")
    return sources, notes


def _find(package: Package) -> Source | None:
    """Return where a package lies, or None if it is absent or installed in place (`pip install -e`)."""
    if package.name == PYTHON:
        root, version = Path(sysconfig.get_path("stdlib")), platform.python_version()
    else:
        try:
            distribution = importlib.metadata.distribution(package.name)
        except importlib.metadata.PackageNotFoundError:
            return None
        root, version = Path(str(distribution.locate_file(""))), distribution.version
    present = any((root / directory).is_dir() for directory in package.directories)
    return Source(package, version, root) if present else None
