import ast
import inspect
import sys
from pathlib import Path

import pytest

from tasks.text import extract, workers
from tasks.text.extract import docstrings, is_documentation, paragraphs, raw_docstrings

PROSE = "This sentence explains what the function does, and why anyone would want to call it at all."


def test_docstrings_are_those_that_ast_reports() -> None:
    source = Path(inspect.__file__).read_bytes()
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, documented)]
    expected = [text for node in nodes if (text := ast.get_docstring(node, clean=False)) is not None]
    assert len(expected) > 50
    assert sorted(raw_docstrings(source)) == sorted(expected)


def test_docstrings_come_in_source_order_and_from_conditional_definitions() -> None:
    source = '''"""one"""
class A:
    """two"""
    def f(self):
        """three"""
        async def g():
            """four"""
try:
    def h():
        """five"""
except ImportError:
    def h():
        """six"""
else:
    if True:
        class B:
            """seven"""
'''
    assert list(raw_docstrings(source.encode())) == ["one", "two", "three", "four", "five", "six", "seven"]


def test_reading_executes_nothing(tmp_path: Path) -> None:
    witness = tmp_path / "executed"
    path = tmp_path / "module.py"
    path.write_text(f'"""{PROSE}"""\nopen({str(witness)!r}, "w").close()\nraise SystemExit\n')
    assert docstrings(path) == [[PROSE]]
    assert not witness.exists()


def test_modules_of_documentation_strings_give_all_their_strings(tmp_path: Path) -> None:
    content = f'add_docstr(f, """\n{PROSE}\n""")\nadd_docstr(g, "one line is a name, not documentation")\n'
    for name, expected in (("_torch_docs.py", [[PROSE]]), ("other.py", [])):
        (tmp_path / name).write_text(content)
        assert docstrings(tmp_path / name) == expected


def test_files_that_are_mostly_code_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    documented = f'"""{PROSE}"""\n'
    enough, too_little = int(len(PROSE) / 0.17), int(len(PROSE) / 0.15)
    for size, expected in ((enough, [[PROSE]]), (too_little, [])):
        path.write_text(documented + "pass\n" * ((size - len(documented)) // 5))
        assert docstrings(path) == expected


def test_code_and_tables_are_left_out_and_prose_is_kept() -> None:
    text = f"""{PROSE}

    Examples
    --------
    >>> f(1)
    2

    Before the session.
    >>> f(3)
    4

    ```python
    import fenced

    fenced.code()
    ```

    === === ===
     1   2   3
    === === ===

    Notes
    -----

    {PROSE.upper()}
    """
    assert paragraphs(text) == [
        PROSE,
        "Examples\n--------",
        "Before the session.",
        "Notes\n-----",
        PROSE.upper(),
    ]


def test_indentation_is_cleaned_as_inspect_does() -> None:
    def documented() -> None:
        """First line of the documentation.

        Parameters
        ----------
        name : str
            What it is called, in words that anyone can read.
        """

    assert "\n\n".join(paragraphs(documented.__doc__ or "")) == inspect.getdoc(documented)


def test_control_characters_and_lone_surrogates_are_removed() -> None:
    assert paragraphs("A text\x00 with\x1b odd\ud800 characters and é.") == [
        "A text with odd characters and é."
    ]


@pytest.mark.parametrize(
    ("path", "taken"),
    [
        ("pkg/a.py", True),
        ("pkg/contest.py", True),
        ("pkg/tests/a.py", False),
        ("pkg/_vendor/other/a.py", False),
        ("pkg/test_a.py", False),
        ("pkg/conftest.py", False),
        ("pkg/a.pyi", False),
    ],
)
def test_tests_and_vendored_copies_take_no_part(path: str, taken: bool) -> None:
    assert is_documentation(Path(path)) is taken


def test_titles_of_sections_that_held_only_code_are_left_out() -> None:
    text = f"{PROSE}\n\nNotes\n-----\n\nExamples\n--------\n>>> f(1)\n2\n\nSee Also\n--------\n>>> g(2)\n3"
    assert paragraphs(text) == [PROSE]


def test_workers_answer_as_this_process_does(tmp_path: Path) -> None:
    good, bad, other = tmp_path / "good.py", tmp_path / "bad.py", Path(inspect.__file__)
    good.write_text(f'"""{PROSE} Ünïcödé."""\n', encoding="utf-8")
    bad.write_text('"""text"""\ndef broken(:\n')
    fractions: list[float] = []
    answers = workers.read_documentation([good, bad, other], 2, fractions.append)
    assert answers[0] == docstrings(good)
    assert isinstance(answers[1], str)
    assert answers[1].startswith("SyntaxError")
    assert answers[2] == docstrings(other)
    assert fractions == sorted(fractions)
    assert fractions[-1] == 1.0


def test_workers_need_the_standard_library_alone() -> None:
    tree = ast.parse(Path(extract.__file__).read_bytes())
    imported = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    imported += [str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert imported
    assert {name.split(".")[0] for name in imported} <= sys.stdlib_module_names


def test_a_dying_worker_is_an_error_that_names_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "dies.py"
    script.write_text("import sys\nsys.stdin.readline()\nsys.exit('no memory')\n")
    monkeypatch.setattr(extract, "__file__", str(script))
    with pytest.raises(RuntimeError, match=r"inspect\.py.*no memory"):
        workers.read_documentation([Path(inspect.__file__)], 2, lambda fraction: None)
