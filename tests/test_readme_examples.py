"""The Python examples of the README run exactly as they are printed, and download nothing."""

import re
import socket
from pathlib import Path

import pytest

README = (Path(__file__).resolve().parents[1] / "README.md").read_text(encoding="utf-8")
SECTION = "## XSA in a model you have"
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
EXAMPLES = BLOCK.findall(README)


def refuse(*args, **kwargs):
    raise OSError("an example of the README asked for the network")


def test_there_are_three_examples_of_models_people_have():
    section = README.partition(SECTION)[2].partition("\n## ")[0]
    imported = [re.findall(r"^import (\w+)", code, re.MULTILINE)[0] for code in BLOCK.findall(section)]
    assert imported == ["timm", "torch", "torch"]
    assert "transformers" in BLOCK.findall(section)[1]


@pytest.mark.parametrize("code", EXAMPLES, ids=[str(i + 1) for i in range(len(EXAMPLES))])
def test_an_example_runs_as_printed(code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    exec(compile(code, "README.md", "exec"), {"__name__": "__main__"})
