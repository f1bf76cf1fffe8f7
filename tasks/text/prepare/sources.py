"""Where text comes from: local files and globs, or a data set on the Hugging Face hub.

A source is opened by name alone, so that every worker process can open it for itself. On the hub nothing is
downloaded as a whole: Parquet files are read by row group over HTTP, pinned to one commit.
"""

import glob
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeVar

from tasks.errors import UserError

FINEWEB = "HuggingFaceFW/fineweb"
SUBSETS = {f"sample-{size}": f"sample/{size}" for size in ("10BT", "100BT", "350BT")}
COMPRESSIONS = ("gz", "zst")
FORMATS = {
    "parquet": "parquet",
    "jsonl": "json",
    "json": "json",
    "ndjson": "json",
    "txt": "text",
    "text": "text",
}
HUB_LIBRARY = "huggingface_hub"
NETWORK = {"httpx", "httpx2", "httpcore", "httpcore2", "requests", "urllib3", "aiohttp"}
HUB_ATTEMPTS = 5
HUB_WAIT = 2.0  # seconds before the second attempt, doubled for each further one

T = TypeVar("T")


@dataclass(frozen=True)
class File:
    """One file of a source. `name` is what a manifest calls it; the same wherever the set is prepared."""

    path: str
    name: str
    size: int
    format: str  # parquet, json or text
    compression: str | None = None
    modified: int | None = None  # nanoseconds, of a local file: a changed source is noticed


@dataclass(frozen=True)
class Source:
    """All files of a job, in their order, and how to open them."""

    kind: str  # local or hub
    files: tuple[File, ...]
    repo: str | None = None
    revision: str | None = None  # the commit that the hub's files are read from

    def describe(self) -> dict[str, Any]:
        """Return what a manifest says of the source."""
        if self.kind == "hub":
            return {"kind": "hub", "repository": self.repo, "revision": self.revision}
        return {"kind": "local"}


def find_source(words: Sequence[str], revision: str | None = None) -> Source:
    """Return the source that words of a command name: files, globs, directories, or one place on the hub.

    `fineweb:sample-10BT` and `hub:OWNER/NAME/FOLDER` are on the hub, all else is local. Raises UserError.
    """
    if not words:
        raise UserError("no source; give files, a glob, or fineweb:sample-10BT")
    remote = [word for word in words if word.startswith(("fineweb:", "hub:"))]
    if not remote:
        return local_source(words)
    if len(words) > 1:
        raise UserError(
            f"{remote[0]}: a place on the hub stands alone; prepare other sources into another set"
        )
    return hub_source(*_hub_place(remote[0]), revision)


def local_source(words: Sequence[str]) -> Source:
    """Return the files that paths, directories and globs name, sorted within each word, none twice.

    Raises UserError for a word that names nothing and for a name that tells no format.
    """
    paths: dict[Path, None] = {}
    for word in words:
        found = _local_paths(word)
        if not found:
            raise UserError(
                f"{word}: no such file, expected Parquet, JSON lines or text; check the path or glob"
            )
        paths |= dict.fromkeys(path.resolve() for path in found)
    parents = [path.parent.parts for path in paths]
    common = next(i for i in range(len(parents[0]), -1, -1) if len({part[:i] for part in parents}) == 1)
    files = []
    for path in paths:
        format_, compression = format_of(path.name)
        status = path.stat()
        name = "/".join(path.parts[common:])
        files.append(File(str(path), name, status.st_size, format_, compression, status.st_mtime_ns))
    return Source("local", tuple(files))


def _local_paths(word: str) -> list[Path]:
    path = Path(word).expanduser()
    if path.is_dir():
        return sorted(p for p in path.rglob("*") if p.is_file() and _known(p.name))
    if path.is_file():
        return [path]
    names = glob.glob(str(path), recursive=True)  # noqa: PTH207  (Path.glob refuses absolute patterns)
    return sorted(Path(name) for name in names if Path(name).is_file())


def _known(name: str) -> bool:
    try:
        format_of(name)
    except UserError:
        return False
    return not name.startswith(".")


def format_of(name: str) -> tuple[str, str | None]:
    """Return format and compression by a file's name. Raises UserError for a name that does not tell."""
    parts = name.lower().split(".")[1:]
    compression = parts.pop() if parts and parts[-1] in COMPRESSIONS else None
    format_ = FORMATS.get(parts[-1]) if parts else None
    if format_ is None or (format_ == "parquet" and compression):
        raise UserError(
            f"{name}: the name tells no format; expected .parquet, .jsonl, .json or .txt (also .gz, .zst)"
        )
    return format_, compression


def _hub_place(word: str) -> tuple[str, str]:
    kind, _, rest = word.partition(":")
    if kind == "fineweb":
        if rest not in SUBSETS:
            raise UserError(f"{word}: no sample of FineWeb; expected fineweb:{', fineweb:'.join(SUBSETS)}")
        return FINEWEB, SUBSETS[rest]
    owner, _, tail = rest.partition("/")
    name, _, folder = tail.partition("/")
    if not owner or not name:
        raise UserError(f"{word}: expected hub:OWNER/NAME/FOLDER, a folder of Parquet files in a data set")
    return f"{owner}/{name}", folder


def hub_source(repo: str, folder: str, revision: str | None = None) -> Source:
    """Return the Parquet files of a folder of a data set, pinned to the commit that `revision` is now.

    Raises UserError where the hub cannot be reached, refuses, or has no Parquet file there.
    """
    with hub_errors(f"{repo}/{folder}"):
        from huggingface_hub import HfApi, HfFileSystem

        commit = with_patience(lambda: HfApi().dataset_info(repo, revision=revision).sha)
        root = f"datasets/{repo}@{commit}"
        rows = with_patience(lambda: HfFileSystem().find(f"{root}/{folder}".rstrip("/"), detail=True))
    files = tuple(
        File(path, name.removeprefix(f"{folder}/"), int(row["size"]), "parquet")
        for path, row in sorted(rows.items())
        if (name := path.removeprefix(f"{root}/")).endswith(".parquet")
    )
    if not files:
        raise UserError(
            f"{repo}: no Parquet file in '{folder}'; check the folder on the hub's page of the data set"
        )
    return Source("hub", files, repo, commit)


def open_file(source: Source, file: File) -> IO[bytes]:
    """Open a file of a source for reading; the caller closes it. Raises OSError and the hub's errors."""
    if source.kind == "local":
        return Path(file.path).open("rb")
    from huggingface_hub import HfFileSystem

    # Row groups are read once, front to back: what was read is not kept.
    return HfFileSystem().open(file.path, "rb", block_size=1 << 22, cache_type="readahead")


def with_patience(function: Callable[[], T], attempts: int = HUB_ATTEMPTS, wait: float = HUB_WAIT) -> T:
    """Return what `function` returns, trying again when the network fails, each time after a longer wait."""
    for attempt in range(attempts - 1):
        try:
            return function()
        except Exception as error:
            if not transient(error):
                raise
            time.sleep(wait * 2**attempt)
    return function()


def transient(error: BaseException) -> bool:
    """Tell whether an error of the network may go away: no answer, too many requests, a server's fault."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status is not None:
        return status == 429 or status >= 500
    # What the hub's library itself refuses (offline mode, a bad name) is no different the next time.
    return type(error).__module__.partition(".")[0] != HUB_LIBRARY and from_network(error)


def from_network(error: BaseException) -> bool:
    """Tell whether an error came from the libraries that talk to the hub, or is a broken connection."""
    return bool(_libraries(error) & {*NETWORK, HUB_LIBRARY}) or isinstance(
        error, ConnectionError | TimeoutError
    )


def _libraries(error: BaseException) -> set[str]:
    """Return the top-level packages that an error's class and its bases come from."""
    return {cls.__module__.partition(".")[0] for cls in type(error).__mro__}


@contextmanager
def hub_errors(place: str) -> Iterator[None]:
    """Turn errors of the hub into one line for the user."""
    try:
        yield
    except Exception as error:
        known = from_network(error) or isinstance(error, FileNotFoundError)
        if isinstance(error, UserError) or not (known or HUB_LIBRARY in _libraries(error)):
            raise
        raise UserError(_advice(place, error)) from error


def _advice(place: str, error: Exception) -> str:
    """Return in one line what the hub refused and what to do about it."""
    from huggingface_hub import errors

    if isinstance(error, errors.GatedRepoError):
        return f"{place}: gated on the hub; accept its terms on its page and set HF_TOKEN, then start again"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{place}: the hub has no such revision of it; check --revision"
    if isinstance(error, errors.RepositoryNotFoundError):
        return f"{place}: the hub has no such data set, or a private one; check the name, or set HF_TOKEN"
    if isinstance(error, errors.HFValidationError):
        return f"{place}: no name of a data set; expected OWNER/NAME"
    if isinstance(error, errors.EntryNotFoundError | FileNotFoundError):
        return f"{place}: the hub has no such folder or file; check it on the data set's page"
    if isinstance(error, errors.OfflineModeIsEnabled):
        return f"{place}: the hub may not be asked, as HF_HUB_OFFLINE is set; unset it, or give local files"
    reason = " ".join(str(error).split())[:200] or type(error).__name__
    return (
        f"{place}: no answer from the hub that can be used ({reason}); check the network, then start again: "
        "what was done is kept"
    )
