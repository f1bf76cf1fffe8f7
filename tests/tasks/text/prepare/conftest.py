"""Fixtures for small preparation jobs."""

import os
from pathlib import Path

import pytest
from prepare_bench import Bench, InlinePool

from tasks.text.prepare import job


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


@pytest.fixture
def inline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let jobs do the work of their pools in this process."""
    monkeypatch.setattr(job, "Pool", InlinePool)


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """What no test can see, a power cut, is not paid for in each of thousands of small files."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
