"""The embedded corpus: English that is installed anyway, the documentation of a fixed list of packages."""

import hashlib
from collections.abc import Sequence
from pathlib import Path

from tasks.text import assembly, dedup, extract
from tasks.text.cache import Built, Progress, load_or_build
from tasks.text.corpus import Corpus, fingerprint
from tasks.text.files import cache_root
from tasks.text.sources import PACKAGES, Package, installed_sources
from tasks.text.tokenizer import ByteTokenizer
from tasks.text.workers import read_documentation

READING = 0.85  # share of the build time: the rest is the search for duplicates


def build_embedded_corpus(
    cache_dir: Path | None = None,
    workers: int = 2,
    progress: Progress | None = None,
    *,
    packages: Sequence[Package] = PACKAGES,
    foreign: bool | None = None,
) -> Corpus:
    """Return the corpus of installed documentation: built once, then read from the cache.

    `cache_dir` defaults to the user's cache directory (`files.cache_root`). `progress(message, fraction)` is
    called from this thread. Two processes that ask at once build it once, and a damaged copy is built again.
    The bytes depend on the versions of the packages and of Python alone, not on the number of workers or the
    order in which they finish. The tokens are bytes, (N,) uint8.

    Raises UserError for a missing package or another version than the lock's (`sources.installed_sources`
    says what `foreign` changes) and for a cache that cannot be written.
    """
    sources, notes = installed_sources(packages, foreign)
    listed = [[s.package.name, s.version, s.package.split, *s.package.directories] for s in sources]

    def build() -> Built:
        report = progress or (lambda message, fraction: None)
        files = [file for source in sources for file in source.files]
        answers = read_documentation(
            files, workers, lambda fraction: report("reading installed documentation", READING * fraction)
        )
        report("removing duplicates", READING)
        texts, description = assembly.assemble(sources, answers)
        digests = {split: hashlib.sha256(text).hexdigest() for split, text in texts.items()}
        report("corpus built", 1.0)
        return texts, {"fingerprint": fingerprint(listed, digests), **description}

    key = fingerprint(listed, _recipe())[:16]
    directory = (cache_dir or cache_root()) / "text" / f"embedded-{key}"
    splits, manifest = load_or_build(directory, build, progress)
    return Corpus(
        splits["train"],
        splits["validation"],
        manifest["fingerprint"],
        manifest | {"notes": notes},
        ByteTokenizer.vocab_size,
    )


def _recipe() -> list[str]:
    """Return what decides the bytes beside the sources: a copy that older code made must not be found."""
    return [hashlib.sha256(Path(m.__file__).read_bytes()).hexdigest() for m in (extract, dedup, assembly)]
