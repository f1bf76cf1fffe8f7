"""`./xsa` before anything is installed, and how it makes its environment. Nothing is installed here: where
the launcher would call uv, it finds a script that writes down what it was asked for.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tasks.runner import cli, launch

ROOT = Path(__file__).resolve().parents[2]
PYTHON = Path(sys.base_prefix) / "bin" / f"python{sys.version_info.major}.{sys.version_info.minor}"

# Makes an "environment" whose python says what it was started with; its pip always fails.
UV = """#!/bin/sh
echo "uv $*" >> "$XSA_TEST_LOG"
case $1 in
venv)
    for last in "$@"; do :; done
    mkdir -p "$last/bin"
    sleep "${XSA_TEST_SLEEP:-0}"
    cat > "$last/bin/python" <<'END'
#!/bin/sh
if [ "$1 $2" = "-m pip" ] || [ "$1 $2" = "-m ensurepip" ]; then exit 1; fi
echo "ran $*"
echo "PYTHONPATH $PYTHONPATH"
echo "VIRTUAL_ENV $VIRTUAL_ENV"
END
    chmod +x "$last/bin/python" ;;
pip) exit "${XSA_TEST_PIP:-0}" ;;
esac
"""


@dataclass(frozen=True)
class Tree:
    """A checkout without an environment, and a PATH with one Python and, if asked for, a make-believe uv."""

    root: Path
    bin: Path
    log: Path

    def environment(self, **changes: str) -> dict[str, str]:
        """Return the variables of a newcomer's shell."""
        plain = {
            "PATH": f"{self.bin}:/usr/bin:/bin",
            "HOME": str(self.root.parent),
            "XSA_TEST_LOG": str(self.log),
        }
        return {**plain, **changes}

    def run(self, *arguments: str, command: Path | None = None, cwd: Path | None = None, **changes: str):
        """Run the launcher as a user does."""
        return subprocess.run(
            [str(command or self.root / "xsa"), *arguments],
            cwd=cwd or self.root,
            env=self.environment(**changes),
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )

    def calls(self) -> list[str]:
        """Return what the make-believe uv was asked for."""
        return self.log.read_text().splitlines() if self.log.exists() else []

    def with_uv(self) -> "Tree":
        """Put the make-believe uv on the PATH."""
        (self.bin / "uv").write_text(UV)
        (self.bin / "uv").chmod(0o755)
        return self


@pytest.fixture
def tree(tmp_path: Path) -> Iterator[Tree]:
    """A copy of what the launcher needs, in a folder with a space in its name."""
    root, binary = tmp_path / "my checkout", tmp_path / "bin"
    binary.mkdir()
    (binary / "python3.11").symlink_to(PYTHON)
    for name in ("tasks", "xsa_core", "optimizers", "results", "configs"):
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("xsa", "requirements.lock", "pyproject.toml"):
        shutil.copy(ROOT / name, root / name)
    yield Tree(root, binary, tmp_path / "uv.log")
    assert not (root / ".venv").exists() or (binary / "uv").exists()


def test_help_and_version_need_no_environment(tree: Tree) -> None:
    done = tree.run("--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert all(f"  {name} " in done.stdout for name in cli.COMMANDS)
    assert tree.run().stdout == done.stdout
    version = tree.run("--version")
    assert (version.returncode, version.stderr) == (0, "")
    assert re.fullmatch(r"\d+\.\d+\.\d+\n", version.stdout)
    assert f'version = "{version.stdout.strip()}"' in (ROOT / "pyproject.toml").read_text()


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_help_of_every_command_needs_no_environment(tree: Tree, name: str) -> None:
    done = tree.run(name, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert f"usage: ./xsa {name}" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["quikstart"], "did you mean 'quickstart'?"),
        (["run", "text/tiny", "--frseh"], "unrecognized arguments: --frseh"),
    ],
)
def test_a_misspelt_word_installs_nothing(tree: Tree, arguments: list[str], part: str) -> None:
    tree.with_uv()
    done = tree.run(*arguments)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("xsa: error: ")
    assert part in line
    assert tree.calls() == []
    assert not (tree.root / ".venv").exists()


def test_xsa_python_is_used_as_it_is(tree: Tree) -> None:
    done = tree.run("config", "text/tiny", "seed=3", XSA_PYTHON=sys.executable)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("# run text-tiny_xsa_adamw_s3_")


def test_a_wrong_xsa_python_is_refused_in_one_line(tree: Tree, tmp_path: Path) -> None:
    old = tmp_path / "python2"
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)
    for wrong in ("/no/such/python", str(tmp_path), "no-such-python", str(old)):
        done = tree.run("config", XSA_PYTHON=wrong)
        assert done.returncode == 2, wrong
        (line,) = done.stderr.splitlines()
        assert line.startswith(f"xsa: error: XSA_PYTHON is {wrong}")
        assert "3.11 to 3.13" in line


def test_no_python_at_all_is_one_line(tree: Tree, tmp_path: Path) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("sh", "dirname", "readlink"):
        (tools / name).symlink_to(shutil.which(name))
    done = tree.run("config", PATH=str(tools))
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("xsa: error: no Python 3.11, 3.12 or 3.13 on PATH")


def test_it_works_through_links_and_from_anywhere(tree: Tree, tmp_path: Path) -> None:
    elsewhere = tmp_path / "else where"
    elsewhere.mkdir()
    (elsewhere / "first").symlink_to(tree.root / "xsa")  # absolute
    (elsewhere / "second").symlink_to("first")  # relative, to a link
    for command in (
        tree.root / "xsa",
        elsewhere / "first",
        elsewhere / "second",
        Path("../else where/second"),
    ):
        done = tree.run("config", "text/tiny", command=command, cwd=elsewhere, XSA_PYTHON=sys.executable)
        assert done.stdout.startswith("# run text-tiny_xsa_adamw_s0_"), done.stderr


def test_first_run_makes_the_environment_and_the_second_uses_it(tree: Tree) -> None:
    tree.with_uv()
    first = tree.run("config", "text/tiny")
    assert first.returncode == 0, first.stderr
    venv = tree.root / ".venv"
    assert first.stdout.splitlines() == [
        "ran -P -m tasks config text/tiny",
        f"PYTHONPATH {tree.root}",
        f"VIRTUAL_ENV {venv}",
    ]
    assert [line.split()[1] for line in tree.calls()] == ["venv", "pip"]
    assert f"--require-hashes -r {tree.root / 'requirements.lock'}" in tree.calls()[1]
    assert all(line.startswith("xsa: ") for line in first.stderr.splitlines())
    assert "first run" in first.stderr
    second = tree.run("config", "text/tiny")
    assert (second.stdout, second.stderr) == (first.stdout, "")
    assert len(tree.calls()) == 2


def test_pythonpath_of_the_user_stays_behind_ours(tree: Tree) -> None:
    tree.with_uv()
    assert f"PYTHONPATH {tree.root}:/mine\n" in tree.run("config", PYTHONPATH="/mine").stdout


def test_a_changed_lock_rebuilds(tree: Tree) -> None:
    tree.with_uv()
    tree.run("config")
    lock = tree.root / "requirements.lock"
    lock.write_text(lock.read_text() + "# changed\n")
    done = tree.run("config")
    assert "requirements.lock or Python changed" in done.stderr
    assert len(tree.calls()) == 4
    assert tree.run("config").stderr == ""


def test_an_install_that_fails_is_told_and_begun_anew(tree: Tree) -> None:
    tree.with_uv()
    done = tree.run("config", XSA_TEST_PIP="1")
    assert done.returncode == 2
    assert done.stdout == ""
    assert "uv could not install the lock; trying pip" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("xsa: error: ")
    assert not (tree.root / ".venv" / launch.STAMP).exists()
    again = tree.run("config")
    assert again.returncode == 0
    assert "an install was cut short" in again.stderr


def test_xsa_venv_puts_the_environment_elsewhere(tree: Tree, tmp_path: Path) -> None:
    tree.with_uv()
    done = tree.run("config", XSA_VENV=str(tmp_path / "deep" / "venv"))
    assert f"VIRTUAL_ENV {tmp_path / 'deep' / 'venv'}" in done.stdout
    assert not (tree.root / ".venv").exists()


@pytest.mark.parametrize("place", ["thesis", "venv"])
def test_a_directory_that_is_not_an_environment_of_ours_is_left_alone(
    tree: Tree, tmp_path: Path, place: str
) -> None:
    tree.with_uv()
    mine = tmp_path / place
    mine.mkdir()
    (mine / "chapter.txt").write_text("years of work")
    done = tree.run("config", XSA_VENV=str(mine))
    assert done.returncode == 2
    assert "is not an environment of this suite and is left alone" in done.stderr
    assert (mine / "chapter.txt").read_text() == "years of work"


def test_an_empty_directory_or_a_half_made_environment_is_taken(tree: Tree, tmp_path: Path) -> None:
    tree.with_uv()
    (tmp_path / "empty").mkdir()
    assert tree.run("config", XSA_VENV=str(tmp_path / "empty")).returncode == 0
    half = tmp_path / "half"
    assert tree.run("config", XSA_VENV=str(half), XSA_TEST_PIP="1").returncode == 2
    assert tree.run("config", XSA_VENV=str(half)).returncode == 0


def test_a_file_in_the_place_of_the_environment_is_named(tree: Tree, tmp_path: Path) -> None:
    tree.with_uv()
    (tmp_path / "file").write_text("text")
    done = tree.run("config", XSA_VENV=str(tmp_path / "file"))
    assert done.returncode == 2
    assert "is a file, expected a directory" in done.stderr.splitlines()[-1]
    assert (tmp_path / "file").read_text() == "text"


def test_what_lies_in_the_working_directory_is_not_run(tree: Tree, tmp_path: Path) -> None:
    here = tmp_path / "here"
    (here / "tasks").mkdir(parents=True)
    for name in ("tasks/__init__", "tasks/__main__", "yaml", "torch", "argparse"):
        (here / f"{name}.py").write_text("raise SystemExit('the wrong file was run')")
    done = tree.run("config", "text/tiny", cwd=here, XSA_PYTHON=sys.executable)
    assert "wrong file" not in done.stdout + done.stderr
    assert done.returncode == 0, done.stderr


def test_two_first_runs_at_once_make_one_environment(tree: Tree) -> None:
    tree.with_uv()
    both = [
        subprocess.Popen(
            [str(tree.root / "xsa"), "config"],
            env=tree.environment(XSA_TEST_SLEEP="1"),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    answers = [process.communicate(timeout=60) for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert all(out.startswith("ran -P -m tasks config") for out, _ in answers)
    assert [line.split()[1] for line in tree.calls()] == ["venv", "pip"]
    assert sum("waiting for another process that is installing" in error for _, error in answers) == 1


@pytest.mark.parametrize(
    ("arguments", "answer"),
    [
        ([], True), (["--help"], True), (["help"], True), (["--version"], True), (["run", "-h"], True),
        (["run", "text/tiny", "--help"], True), (["run", "text/tiny"], False),
        (["test", "--", "--help"], False),
    ],
)  # fmt: skip
def test_what_needs_no_environment(arguments: list[str], answer: bool) -> None:
    assert launch.wants_no_environment(arguments) is answer


def test_the_launcher_is_executable_shell() -> None:
    assert os.access(ROOT / "xsa", os.X_OK)
    assert subprocess.run(["sh", "-n", str(ROOT / "xsa")], check=False).returncode == 0
