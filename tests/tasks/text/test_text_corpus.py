import hashlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tasks.errors import UserError
from tasks.text.cache import MANIFEST
from tasks.text.corpus import Corpus, build_embedded_corpus
from tasks.text.dedup import MAX_REPEATED, leakage, repeated_share
from tasks.text.files import cache_root, exclusive
from tasks.text.sources import PACKAGES, PYTHON, Package, installed_sources, locked_versions

PROSE = "The {} of a {} explains what it does and why anyone would want to call it with {} arguments."
BUILDER = """
import sys
from pathlib import Path
from tasks.text.corpus import build_embedded_corpus
from tasks.text.sources import PACKAGES
packages = [package for package in PACKAGES if package.name in sys.argv[2:]]
progress = lambda message, fraction: print(message, flush=True)
print(build_embedded_corpus(Path(sys.argv[1]), 1, progress, packages=packages, foreign=True).fingerprint)
"""


def _bytes(corpus: Corpus) -> tuple[bytes, bytes]:
    return corpus.train.tobytes(), corpus.validation.tobytes()


def _builder(cache: Path, packages: list[Package]) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", BUILDER, str(cache), *(package.name for package in packages)]
    root = Path(__file__).resolve().parents[3]
    environment = os.environ | {"PYTHONPATH": str(root)}
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, cwd=root)


@pytest.fixture(scope="module")
def whole() -> Corpus:
    """The corpus itself, from the user's cache: `./xsa quickstart` uses the same copy."""
    return build_embedded_corpus(foreign=bool(os.environ.get("XSA_PYTHON")))


def test_the_corpus_has_fifteen_megabytes_and_a_validation_text_of_five_to_eight_percent(
    whole: Corpus,
) -> None:
    if whole.note:
        pytest.skip(f"this interpreter is not the lock's: {whole.note}")
    total = len(whole.train) + len(whole.validation)
    assert total >= 15e6
    assert 0.05 <= len(whole.validation) / total <= 0.08


def test_the_corpus_is_english(whole: Corpus) -> None:
    text = whole.train.tobytes().decode("utf-8")
    words = text.lower().split()
    common = {
        "the",
        "of",
        "a",
        "to",
        "is",
        "in",
        "and",
        "for",
        "be",
        "that",
        "this",
        "with",
        "if",
        "are",
        "or",
    }
    # In running English these words are about a third of all; in code hardly any.
    assert sum(word in common for word in words) / len(words) > 0.2
    assert sum(character.isascii() for character in text) / len(text) > 0.999
    assert text.count(">>> ") / text.count("\n") < 1e-3


def test_hardly_a_validation_line_stands_in_training(whole: Corpus) -> None:
    found = leakage(whole.train.tobytes().decode("utf-8"), whole.validation.tobytes().decode("utf-8"))
    assert found.lines < 0.04
    assert found.characters < 0.02
    assert whole.manifest["leakage"] == {"lines": found.lines, "characters": found.characters}


def test_every_package_is_locked_and_gives_text_to_one_split(whole: Corpus) -> None:
    locked = locked_versions()
    assert [p.name for p in PACKAGES if p.name not in locked] == [PYTHON]
    directories = [directory for package in PACKAGES for directory in package.directories]
    assert len(directories) == len(set(directories))
    assert all(row["bytes"] > 0 and not row["unreadable"] for row in whole.manifest["packages"])


def test_the_manifest_adds_up(whole: Corpus) -> None:
    for split, tokens in (("train", whole.train), ("validation", whole.validation)):
        stated = whole.manifest["splits"][split]
        assert stated == {"bytes": len(tokens), "sha256": hashlib.sha256(tokens).hexdigest()}
        rows = [row for row in whole.manifest["packages"] if row["split"] == split]
        assert sum(row["bytes"] for row in rows) == len(tokens)


def test_a_rebuild_gives_identical_bytes_with_any_number_of_workers(
    tmp_path: Path, small_packages: list[Package]
) -> None:
    one = build_embedded_corpus(tmp_path / "one", 1, packages=small_packages, foreign=True)
    three = build_embedded_corpus(tmp_path / "three", 3, packages=small_packages, foreign=True)
    assert _bytes(one) == _bytes(three)
    assert one.fingerprint == three.fingerprint
    assert one.manifest == three.manifest
    assert len(one.train) > 100_000


def test_the_fingerprint_follows_the_packages_and_their_versions(tmp_path: Path, install) -> None:
    names = ("xsatestone", "xsatesttwo")
    packages = [Package(n, (n,), s) for n, s in zip(names, ("train", "validation"), strict=True)]
    install(names[1], "1.0", {"a.py": f'"""{PROSE.format("docstring", "class", "two")}"""\n'})
    install(
        names[0], "1.0", {"a.py": f'"""{PROSE.format("manual", "module", "no")} Nothing else is said."""\n'}
    )
    first = build_embedded_corpus(tmp_path, packages=packages, foreign=True)
    (tmp_path / "site" / f"{names[0]}-1.0.dist-info").rename(tmp_path / "site" / f"{names[0]}-1.1.dist-info")
    metadata = tmp_path / "site" / f"{names[0]}-1.1.dist-info" / "METADATA"
    metadata.write_text(metadata.read_text().replace("1.0", "1.1"))
    second = build_embedded_corpus(tmp_path, packages=packages, foreign=True)
    assert _bytes(first) == _bytes(second)
    assert first.fingerprint != second.fingerprint


def test_duplicates_within_and_between_splits_are_removed_from_training(tmp_path: Path, install) -> None:
    shared, own = (
        PROSE.format("documentation", "function", "many"),
        PROSE.format("x", "y", "z").replace(" ", " quite "),
    )
    edited = shared.replace("anyone", "somebody")
    install("xsatestvalid", "1.0", {"a.py": f'"""{shared}"""\n'})
    install(
        "xsatesttrain",
        "1.0",
        {"a.py": f'"""{own}\n\n{edited}"""\n', "b.py": f'"""{own}"""\n', "c.py": f'"""{shared}"""\n'},
    )
    packages = [
        Package("xsatesttrain", ("xsatesttrain",), "train"),
        Package("xsatestvalid", ("xsatestvalid",), "validation"),
    ]
    corpus = build_embedded_corpus(tmp_path, packages=packages, foreign=True)
    assert _bytes(corpus) == (f"{own}\n\n\n".encode(), f"{shared}\n\n\n".encode())
    assert corpus.manifest["removed"] == {"exact_docstrings": 1, "near_duplicate_paragraphs": 2}


def test_what_duplicates_leave_of_a_docstring_is_kept_only_if_it_is_most_of_it(
    tmp_path: Path, install
) -> None:
    shared = " ".join(PROSE.format(*words) for words in (("a", "b", "c"), ("d", "e", "f")))
    mostly_old = "Entirely other words stand in this paragraph, and nothing in it repeats what came before."
    mostly_new = PROSE.format("new", "text", "long").replace(" ", " very ")
    install("xsatestvalid", "1.0", {"a.py": f'"""{shared}"""\n'})
    install(
        "xsatesttrain",
        "1.0",
        {"a.py": f'"""{shared}\n\n{mostly_old}"""\n', "b.py": f'"""{shared[:120]}\n\n{mostly_new}"""\n'},
    )
    packages = [
        Package("xsatesttrain", ("xsatesttrain",), "train"),
        Package("xsatestvalid", ("xsatestvalid",), "validation"),
    ]
    corpus = build_embedded_corpus(tmp_path, packages=packages, foreign=True)
    assert _bytes(corpus)[0] == f"{mostly_new}\n\n\n".encode()


def test_no_paragraph_repeats_the_ones_before_it(tmp_path: Path, small_packages: list[Package]) -> None:
    corpus = build_embedded_corpus(tmp_path, packages=small_packages, foreign=True)
    parts = (corpus.validation.tobytes() + corpus.train.tobytes()).decode("utf-8").split("\n\n")
    assert len(parts) > 1000
    assert (repeated_share(parts) < MAX_REPEATED).all()


def test_a_cached_corpus_is_read_and_not_built_again(tmp_path: Path, small_packages: list[Package]) -> None:
    messages: list[str] = []
    first = build_embedded_corpus(tmp_path, packages=small_packages, foreign=True)
    second = build_embedded_corpus(
        tmp_path,
        progress=lambda message, fraction: messages.append(message),
        packages=small_packages,
        foreign=True,
    )
    assert messages == []
    assert second.fingerprint == first.fingerprint
    assert second.manifest == first.manifest
    assert not second.train.flags.writeable


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("name", "damage", "said"),
    [
        ("train.bin", lambda path: path.write_bytes(path.read_bytes()[:-1]), "bytes, expected"),
        ("validation.bin", _flip, "another sha256"),
        ("train.bin", Path.unlink, "cannot be read"),
        (MANIFEST, lambda path: path.write_bytes(path.read_bytes()[:100]), "cannot be read"),
        (MANIFEST, Path.unlink, None),
    ],
)
def test_a_damaged_cache_is_noticed_and_built_again(
    tmp_path: Path, small_packages: list[Package], name: str, damage, said: str | None
) -> None:
    two = [package for package in small_packages if package.name in ("more-itertools", "werkzeug")]
    before = build_embedded_corpus(tmp_path, packages=two, foreign=True)
    expected = _bytes(before)
    (path,) = tmp_path.glob(f"text/*/{name}")
    damage(path)
    messages: list[str] = []
    after = build_embedded_corpus(
        tmp_path, progress=lambda message, fraction: messages.append(message), packages=two, foreign=True
    )
    assert _bytes(after) == expected
    assert after.fingerprint == before.fingerprint
    assert ("damaged" in messages[0] and said in messages[0]) if said else "damaged" not in " ".join(messages)


def test_a_second_process_waits_says_so_and_uses_what_the_first_built(
    tmp_path: Path, small_packages: list[Package]
) -> None:
    two = [package for package in small_packages if package.name in ("more-itertools", "werkzeug")]
    corpus = build_embedded_corpus(tmp_path, packages=two, foreign=True)
    (manifest,) = tmp_path.glob(f"text/*/{MANIFEST}")
    content = manifest.read_bytes()
    manifest.unlink()  # as while the first process is at work
    with exclusive(manifest.parent.with_name(f"{manifest.parent.name}.lock"), lambda: None):
        process = _builder(tmp_path, two)
        assert process.stdout is not None
        assert process.stdout.readline() == "waiting for another process building the corpus\n"
        manifest.write_bytes(content)
    rest, _ = process.communicate(timeout=60)
    assert rest.splitlines() == [corpus.fingerprint]


def test_a_builder_that_is_killed_leaves_nothing_that_is_taken_for_a_corpus(
    tmp_path: Path, small_packages: list[Package]
) -> None:
    two = [package for package in small_packages if package.name in ("more-itertools", "werkzeug")]
    process = _builder(tmp_path, two)
    assert process.stdout is not None
    assert process.stdout.readline().startswith("reading")
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL
    corpus = build_embedded_corpus(tmp_path / "untouched", packages=two, foreign=True)
    again = build_embedded_corpus(tmp_path, packages=two, foreign=True)  # its lock died with it
    assert _bytes(again) == _bytes(corpus)


def test_missing_and_other_versions_are_errors_that_name_the_package(tmp_path: Path) -> None:
    packages = [package for package in PACKAGES if package.name in ("joblib", "werkzeug")]
    versions = locked_versions()
    lock = tmp_path / "requirements.lock"
    lock.write_text(f"joblib==0.0.1 \\\n    --hash=sha256:00\nwerkzeug=={versions['werkzeug']}\n")
    message = f"joblib is {versions['joblib']}, expected 0.0.1"
    with pytest.raises(UserError, match=message) as caught:
        installed_sources(packages, foreign=False, lock=lock)
    assert "\n" not in str(caught.value)
    sources, notes = installed_sources(packages, foreign=True, lock=lock)
    assert notes == [message]
    assert [source.version for source in sources] == [versions["joblib"], versions["werkzeug"]]


def test_a_foreign_interpreter_may_lack_packages_and_the_corpus_says_so(
    tmp_path: Path, small_packages: list[Package]
) -> None:
    absent = Package("xsa-test-absent", ("xsa_test_absent",), "train")
    with pytest.raises(UserError, match="xsa-test-absent is not installed"):
        build_embedded_corpus(tmp_path, packages=[*small_packages, absent], foreign=False)
    corpus = build_embedded_corpus(tmp_path, packages=[*small_packages, absent], foreign=True)
    assert corpus.note is not None
    assert "xsa-test-absent is not installed" in corpus.note
    alone = [package for package in small_packages if package.split == "train"]
    with pytest.raises(UserError, match="no package of the validation text"):
        build_embedded_corpus(tmp_path, packages=alone, foreign=True)


def test_the_environment_chooses_the_cache_and_whether_packages_may_be_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    absent = [*PACKAGES, Package("xsa-test-absent", ("xsa_test_absent",), "train")]
    monkeypatch.setenv("XSA_PYTHON", sys.executable)
    assert any("xsa-test-absent" in note for note in installed_sources(absent)[1])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "shared"))
    monkeypatch.delenv("XSA_CACHE", raising=False)
    assert cache_root() == tmp_path / "shared" / "xsa"
    monkeypatch.setenv("XSA_CACHE", str(tmp_path / "own"))
    assert cache_root() == tmp_path / "own"
    monkeypatch.delenv("XSA_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_root() == Path.home() / ".cache" / "xsa"


def test_a_cache_that_cannot_be_written_is_an_error_that_says_what_to_do(
    tmp_path: Path, small_packages: list[Package]
) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UserError, match="set XSA_CACHE"):
        build_embedded_corpus(tmp_path / "file", packages=small_packages, foreign=True)
