"""The lock, and the stamp that says an environment was made from it."""

import re
import sys
from pathlib import Path

import pytest

from tasks.runner import launch


@pytest.fixture
def ready(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An environment that is ready by its own stamp, over a lock of its own."""
    venv = tmp_path / "venv"
    (venv / "bin").mkdir(parents=True)
    (venv / "bin" / "python").symlink_to(sys.executable)
    lock = tmp_path / "requirements.lock"
    lock.write_text("a==1\n")
    monkeypatch.setattr(launch, "LOCK", lock)
    launch.write_stamp(venv, launch.wanted_stamp())
    assert launch.is_ready(venv, launch.wanted_stamp())
    return venv


def test_not_ready_after_the_lock_changes(ready: Path) -> None:
    launch.LOCK.write_text("a==2\n")
    assert not launch.is_ready(ready, launch.wanted_stamp())


def test_not_ready_after_python_changes(ready: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 12, 1, "final", 0))
    assert not launch.is_ready(ready, launch.wanted_stamp())


def test_not_ready_without_stamp_or_python(ready: Path) -> None:
    (ready / "bin" / "python").unlink()
    assert not launch.is_ready(ready, launch.wanted_stamp())
    (ready / "bin" / "python").symlink_to(sys.executable)
    (ready / launch.STAMP).unlink()
    assert not launch.is_ready(ready, launch.wanted_stamp())


def stanzas() -> list[str]:
    """Return the lock's requirements, each with its continuation lines."""
    lines = [line for line in launch.LOCK.read_text().splitlines() if line and not line.startswith("#")]
    return "\n".join(lines).replace("\\\n", " ").splitlines()


def test_the_lock_pins_every_package_with_hashes_and_names_no_host() -> None:
    assert len(stanzas()) > 100
    for stanza in stanzas():
        assert re.match(r"[A-Za-z0-9._-]+(\[[a-z,]+\])?==[^ ]+ ", stanza), stanza[:80]
        assert re.search(r"--hash=sha256:[0-9a-f]{64}", stanza), stanza[:80]
    assert "://" not in launch.LOCK.read_text()
    assert "index" not in launch.LOCK.read_text()


def test_the_stanza_of_a_package_is_complete() -> None:
    (want,) = [stanza for stanza in stanzas() if stanza.startswith("uv==")]
    got = launch.lock_stanza("uv")
    assert got.replace("\\\n", " ").split() == want.split()
    assert got.count("--hash=sha256:") > 1
    assert not got.rstrip("\n").endswith("\\")
    assert launch.lock_stanza("no-such-package") is None
