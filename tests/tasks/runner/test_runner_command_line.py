"""The command line: help at once, mistakes in one line with status 2, never a traceback."""

import os
import signal
import subprocess
import sys
from typing import Any

import pytest

from tasks.errors import UserError
from tasks.runner import cli
from tasks.runner.paths import ROOT

COMMANDS = [name for name in cli.COMMANDS if (ROOT / "tasks" / "runner" / "commands" / f"{name}.py").exists()]


def tasks(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `python -m tasks ...` in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "tasks", *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["run", "text/tiny", "loop.max_step=3"], ["unknown key 'loop.max_step'", "'loop.max_steps'"]),
        (["config", "text/tiny", "seed=abc"], ["seed: expected integer, got 'abc' (str)"]),
        (["rnu", "text/tiny"], ["unknown command 'rnu'; did you mean 'run'?", "quickstart"]),
        (["run"], ["the following arguments are required: experiment; see ./xsa run --help"]),
    ],
)
def test_a_mistake_exits_with_two_and_one_line(arguments: list[str], parts: list[str]) -> None:
    done = tasks(*arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("xsa: error: ")
    assert [part for part in parts if part not in line] == [], line


@pytest.mark.parametrize(
    ("own", "advice"), [("/usr/bin/python3", "install requirements.lock"), ("", "then ./xsa makes it anew")]
)
def test_a_missing_package_is_one_line_that_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, capsys: Any, own: str, advice: str
) -> None:
    monkeypatch.setenv("XSA_PYTHON", own)

    def gone(arguments: list[str]) -> int:
        raise ModuleNotFoundError("No module named 'hydra'", name="hydra.core")

    monkeypatch.setattr(cli, "dispatch", gone)
    assert cli.main(["config"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "has no package 'hydra'; " in line
    assert advice in line


def test_a_full_disk_under_the_output_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    def full(arguments: list[str]) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cli, "dispatch", full)
    monkeypatch.setattr(cli, "silence_output", lambda: None)
    assert cli.main(["config"]) == 2
    assert "no space left" in capsys.readouterr().err


def test_a_missing_module_of_our_own_is_a_fault_and_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(arguments: list[str]) -> int:
        raise ModuleNotFoundError("No module named 'tasks.none'", name="tasks.none")

    monkeypatch.setattr(cli, "dispatch", gone)
    with pytest.raises(ModuleNotFoundError):
        cli.main(["config"])


def test_ctrl_c_is_one_line_and_status_130(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    def stopped(arguments: list[str]) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "dispatch", stopped)
    assert cli.main(["config"]) == 128 + signal.SIGINT
    assert capsys.readouterr().err == "xsa: stopped\n"


def test_a_reader_that_has_enough_is_not_an_error() -> None:
    """`./xsa config text/tiny | head -1`."""
    done = subprocess.run(
        f"set -o pipefail; '{sys.executable}' -m tasks config text/tiny | head -1",
        shell=True,
        executable="/bin/bash",
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.stdout.startswith("# run text-tiny_xsa_adamw_s0_")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("word", [["--help"], ["-h"], ["help"], []])
def test_help_names_every_command(word: list[str], capsys: Any) -> None:
    assert cli.main(word) == 0
    printed = capsys.readouterr().out
    assert all(f"  {name} " in printed for name in cli.COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_a_command_tells_its_use(name: str, capsys: Any) -> None:
    with pytest.raises(SystemExit) as left:
        cli.main([name, "--help"])
    assert left.value.code == 0
    assert f"usage: ./xsa {name}" in capsys.readouterr().out


def test_options_may_stand_anywhere_among_overrides() -> None:
    _, options = cli.parse(["run", "text/tiny", "seed=1", "--fresh", "loop.max_steps=2"])
    assert (options.experiment, options.overrides, options.fresh) == (
        "text/tiny", ["seed=1", "loop.max_steps=2"], True,
    )  # fmt: skip
    _, options = cli.parse(["run", "text/tiny"])
    assert (options.overrides, options.fresh) == ([], False)


def test_the_test_command_passes_every_word_on() -> None:
    assert cli.parse(["test"])[1].arguments == []
    _, options = cli.parse(["test", "-x", "tests/results", "-k", "pairing"])
    assert options.arguments == ["-x", "tests/results", "-k", "pairing"]


def test_an_unknown_option_is_refused() -> None:
    with pytest.raises(UserError, match=r"unrecognized arguments: --frseh; see ./xsa run --help"):
        cli.parse(["run", "text/tiny", "--frseh"])


def test_config_lists_what_there_is_and_prints_the_identity(capsys: Any) -> None:
    import yaml

    from tasks.runner.config.compose import load_config

    assert cli.main(["config"]) == 0
    printed = capsys.readouterr().out
    assert "text/quick" in printed
    assert "attention: diag_masked" in printed
    assert cli.main(["config", "text/tiny", "seed=3"]) == 0
    printed = capsys.readouterr().out
    config = load_config("text/tiny", ["seed=3"])
    assert f"# run {config.run_id()}, config hash {config.config_hash()}" in printed
    assert yaml.safe_load(printed) == config.resolved()
