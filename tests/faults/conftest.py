"""The runner's small runs, and processes that may be killed without harm to the tests."""

import importlib.util
from pathlib import Path

import pytest
from forked import Forked

_PATH = Path(__file__).parents[1] / "tasks" / "runner" / "conftest.py"
_SPEC = importlib.util.spec_from_file_location("runner_conftest", _PATH)
_RUNNER = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(_RUNNER)

text_file, make_lab, lab, _own_threads = (
    _RUNNER.text_file,
    _RUNNER.make_lab,
    _RUNNER.lab,
    _RUNNER._own_threads,
)


@pytest.fixture
def fork(tmp_path: Path):
    """Start functions in forked processes; what is still running at the end of the test is killed."""
    children: list[Forked] = []

    def start(function, *arguments) -> Forked:
        children.append(Forked(function, arguments, tmp_path / f"child-{len(children)}.txt"))
        return children[-1]

    yield start
    for child in children:
        child.kill()
