"""The house: who imports what, what help costs, and what the wheel ships."""

import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
HEAVY = [
    "timm",
    "lm_eval",
    "transformers",
    "torchaudio",
    "torchvision",
    "hydra",
    "pydantic",
    "xformers",
    "triton",
]


def modules_after(*statements: str) -> set[str]:
    """Return the names in sys.modules after some statements, run in a process of their own."""
    code = "\n".join(["import sys, json", *statements, "print(json.dumps(sorted(sys.modules)))"])
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "HOME": str(Path.home())},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


@pytest.fixture(scope="module")
def library() -> tuple[set[str], set[str]]:
    """Modules that torch alone brings, and those after everything public of the library was named."""
    code = ["import torch", "before = sorted(sys.modules)", "import xsa_core"]
    code += ["for name in getattr(xsa_core, '__all__', ()): getattr(xsa_core, name)"]
    code += ["print(json.dumps(before))"]
    source = "\n".join(["import sys, json", *code, "print(json.dumps(sorted(sys.modules)))"])
    done = subprocess.run(
        [sys.executable, "-c", source],
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "HOME": str(Path.home())},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    before, after = map(json.loads, done.stdout.splitlines()[-2:])
    return set(before), set(after)


def test_the_library_imports_nothing_heavy(library: tuple[set[str], set[str]]) -> None:
    before, after = library
    assert "xsa_core.attention.functional" in after
    assert sorted(name for name in HEAVY if name in after - before) == []


def test_the_library_knows_nothing_of_the_suite(library: tuple[set[str], set[str]]) -> None:
    _, after = library
    assert not {name.partition(".")[0] for name in after} & {"tasks", "results", "optimizers"}


def test_the_library_does_not_start_the_compiler(library: tuple[set[str], set[str]]) -> None:
    """torch._dynamo with sympy takes seconds to import: more than all the rest beyond torch."""
    before, after = library
    assert "torch._dynamo" not in before
    assert "torch._dynamo" not in after


def test_results_are_read_without_torch() -> None:
    names = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for path in sorted((ROOT / "results").glob("*.py"))
        if path.stem != "__init__"
    ]
    assert "results.report" in names
    found = modules_after(*(f"import {name}" for name in names))
    assert set(names) <= found
    assert not {name.partition(".")[0] for name in found} & {"torch", "tasks", "optimizers"}


def test_command_modules_import_the_standard_library_alone() -> None:
    """`./xsa COMMAND --help` must answer before anything is installed."""
    names = [
        f"tasks.runner.commands.{path.stem}"
        for path in sorted((ROOT / "tasks" / "runner" / "commands").glob("*.py"))
        if path.stem != "__init__"
    ]
    assert len(names) >= 6
    found = modules_after("import tasks.runner.cli", *(f"import {name}" for name in names))
    assert set(names) <= found
    known = sys.stdlib_module_names | {"tasks", "__main__", "sitecustomize", "usercustomize"}
    # A virtual environment's own .pth files (editable installs, distutils) are not ours.
    alone = {name.partition(".")[0] for name in modules_after()}
    assert {name.partition(".")[0] for name in found} - known - alone == set()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Names in the wheel, built from a copy of the tree without network or isolation."""
    pytest.importorskip("hatchling")
    copy = tmp_path_factory.mktemp("wheel") / "tree"
    junk = shutil.ignore_patterns(".git", ".venv*", "runs", "__pycache__", "shared", ".*_cache")
    shutil.copytree(ROOT, copy, ignore=junk)
    done = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel"],
        cwd=copy,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (path,) = (copy / "dist").glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        return archive.namelist()


def test_the_wheel_ships_the_library_alone(wheel: list[str]) -> None:
    tops = {name.partition("/")[0] for name in wheel}
    (info,) = [top for top in tops if top.endswith(".dist-info")]
    assert tops == {"xsa_core", info}


def test_the_wheel_ships_all_of_the_library(wheel: list[str]) -> None:
    wanted = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "xsa_core").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".pyc"
    }
    assert any("csrc" in name for name in wanted)
    assert {name for name in wheel if name.startswith("xsa_core/")} == wanted


def test_what_a_newcomer_reads_has_no_placeholder() -> None:
    for name in ("README.md", "CONTRIBUTING.md", "results/README.md"):
        text = (ROOT / name).read_text(encoding="utf-8")
        assert not [mark for mark in ("@@", "TODO", "FIXME", "XXX") if mark in text], name


def test_the_readme_shows_the_committed_quickstart() -> None:
    import re

    from results.store import load_records

    shown = re.search(r"validation bits per byte +([0-9.]+) +([0-9.]+)", (ROOT / "README.md").read_text())
    quick = {
        record.variant: record.metrics["validation_bits_per_byte"]
        for record in load_records(ROOT / "results" / "runs")
        if record.kind == "train"
        and record.experiment == "text/quick"
        and record.seed == 0
        and record.optimizer == "adamw"
        and record.variant in {"sa", "xsa"}
    }
    assert shown is not None
    assert shown.groups() == (f"{quick['sa']:.4f}", f"{quick['xsa']:.4f}")
