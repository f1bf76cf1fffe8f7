"""Documentation text out of Python source files, read by `ast`: nothing is imported or executed.

This file needs the standard library alone and is also the worker process of the corpus builder
(`python extract.py`): started by its path, a worker does not load torch, and it works from notebooks and
from `python -c`, where `multiprocessing` would run the caller's main module again. The protocol is one
JSON line in (a list of paths) and one JSON line out (the files' docstrings, in the same order).

A *docstring* is a list of *paragraphs*, the pieces between blank lines.
"""

import ast
import gc
import inspect
import json
import re
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

Docstring = list[str]

# Test suites, and copies of other projects inside a package, hold little documentation of the package's own.
SKIPPED_DIRECTORIES = frozenset(
    {"__pycache__", "tests", "test", "testing", "_vendor", "_vendored_packages", "vendored", "externals"}
)
# Modules that hold the documentation of compiled functions, or Python's reference, as plain string constants.
STRING_MODULES = re.compile(r"(_docs|newdocs|docstrings|topics)$")
MIN_CHARACTERS = 80  # shorter docstrings say little more than the name does
MIN_DENSITY = 0.16  # of a file's bytes: leaves out 8% of the text and a third of the parsing
MIN_PROSE = 0.6  # of a paragraph's characters; tables, diagrams and listings lie below

_FENCE = re.compile(r"```.*?(?:```|\Z)", re.DOTALL)
_BLANK = re.compile(r"\n[ \t]*(?:\n[ \t]*)+")
_CONTROL = dict.fromkeys((*range(9), *range(11, 32), *range(127, 160), *range(0xD800, 0xE000)))
_QUOTED = re.compile(rb"(\"\"\"|''')(.*?)\1", re.DOTALL)
_NO_PROSE = re.compile(r"[^A-Za-z ]+")
_BODIES = ("body", "handlers", "orelse", "finalbody")
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def is_documentation(relative: Path) -> bool:
    """Return whether a package's file takes part: a `.py` file outside tests and vendored copies."""
    name = relative.name
    return (
        relative.suffix == ".py"
        and name != "conftest.py"
        and not name.startswith("test_")
        and SKIPPED_DIRECTORIES.isdisjoint(relative.parts[:-1])
    )


def raw_docstrings(source: bytes, all_strings: bool = False) -> Iterator[str]:
    """Yield the docstrings of a module, its classes and functions, in source order.

    With `all_strings`, yield every string constant of more than one line instead. Raises SyntaxError or
    ValueError (null bytes) as `ast.parse` does.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # invalid escapes in other people's docstrings
        tree = ast.parse(source)
    if all_strings:
        constants = [node for node in ast.walk(tree) if isinstance(node, ast.Constant)]
        for node in sorted(constants, key=lambda node: (node.lineno, node.col_offset)):
            if isinstance(node.value, str) and "\n" in node.value:
                yield node.value
        return
    # Only statements are visited: expressions cannot hold a docstring, and they are most of a tree.
    stack: list[ast.AST] = [tree]
    while stack:
        node = stack.pop()
        if isinstance(node, _DOCUMENTED) and node.body:
            match node.body[0]:
                case ast.Expr(value=ast.Constant(value=str(text))):
                    yield text
        children = [child for name in _BODIES for child in getattr(node, name, ())]
        stack.extend(child for child in reversed(children) if hasattr(child, "body"))


def paragraphs(text: str) -> Docstring:
    """Return a docstring's English paragraphs: indentation cleaned, code and tables left out.

    Left out are fenced code, doctest sessions (from `>>>` to the next blank line), control characters and
    paragraphs of which less than `MIN_PROSE` is letters and spaces.
    """
    text = _FENCE.sub("", inspect.cleandoc(text)).translate(_CONTROL)
    kept = []
    for block in _BLANK.split(text):
        lines = []
        for line in block.split("\n"):
            if line.lstrip().startswith(">>>"):
                break
            lines.append(line.rstrip())
        paragraph = "\n".join(lines).strip("\n")
        if paragraph.strip() and (is_heading(paragraph) or _is_prose(paragraph)):
            kept.append(paragraph)
    return without_empty_sections(kept)


def _is_prose(paragraph: str) -> bool:
    dense = " ".join(paragraph.split())
    return len(_NO_PROSE.sub("", dense)) >= MIN_PROSE * len(dense)


def is_dense(source: bytes) -> bool:
    """Return whether enough of a file stands between triple quotes for it to be worth parsing."""
    return sum(len(match[2]) for match in _QUOTED.finditer(source)) >= MIN_DENSITY * len(source)


def is_heading(paragraph: str) -> bool:
    """Return whether a paragraph is a section title alone: one line, underlined."""
    lines = paragraph.split("\n")
    return len(lines) == 2 and len(lines[1].strip()) > 2 and set(lines[1].strip()) <= set("-=~^*#")


def without_empty_sections(docstring: Docstring) -> Docstring:
    """Return a docstring without the titles that nothing follows."""
    kept: Docstring = []
    for paragraph in reversed(docstring):
        if is_heading(paragraph) and (not kept or is_heading(kept[-1])):
            continue
        kept.append(paragraph)
    return kept[::-1]


def docstrings(path: Path) -> list[Docstring]:
    """Return a file's docstrings of at least `MIN_CHARACTERS`; none if it is mostly code.

    Raises SyntaxError, ValueError or OSError.
    """
    source = path.read_bytes()
    all_strings = STRING_MODULES.search(path.stem) is not None
    if not all_strings and not is_dense(source):
        return []
    raw = raw_docstrings(source, all_strings)
    cleaned = (paragraphs(text) for text in raw if len(text) >= MIN_CHARACTERS)
    return [docstring for docstring in cleaned if sum(map(len, docstring)) >= MIN_CHARACTERS]


def serve() -> None:
    """Answer requests on the standard streams until the input ends."""
    gc.disable()  # syntax trees have no cycles, and looking for some takes a seventh of the time
    for line in sys.stdin:
        answers: list[list[Docstring] | str] = []
        for path in json.loads(line):
            try:
                answers.append(docstrings(Path(path)))
            except (SyntaxError, ValueError, RecursionError) as error:
                answers.append(f"{type(error).__name__}: {error}")  # counted and named by the builder
        sys.stdout.write(json.dumps(answers) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    serve()
