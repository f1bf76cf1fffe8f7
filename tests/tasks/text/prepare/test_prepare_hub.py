"""The hub by streaming, with the real client against a stand-in on this machine; nothing leaves it."""

import io
import json
import os
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from prepare_bench import Bench, make_documents, texts_of

from tasks.text.prepare import sources
from tasks.text.prepare.sources import find_source, with_patience

ROOT = Path(__file__).resolve().parents[4]
COMMIT = "c0ffee" + "0" * 34
REPOSITORY = "HuggingFaceFW/fineweb"
# What the hub answers, by the name of the data set.
REFUSALS = {
    "gated": (403, "GatedRepo"),
    "unknown": (401, "RepoNotFound"),
    "revision": (404, "RevisionNotFound"),
}


@dataclass
class Hub:
    """Serves one data set as the hub does, as far as reading it goes."""

    files: dict[str, bytes]
    failures: int = 0  # requests for content that are answered with 503 first
    elsewhere: bool = False  # whether content is at another address, as on the hub itself
    sent: dict[str, int] = field(default_factory=dict)  # file -> bytes of content
    asked: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def answer(self, path: str, range_: str | None) -> tuple[int, dict[str, str], bytes]:
        """Return status, headers and body."""
        self.asked.append(path)
        for name, (status, code) in REFUSALS.items():
            if path.startswith(f"/api/datasets/owner/{name}"):
                return status, {"X-Error-Code": code, "X-Error-Message": "refused"}, b"{}"
        if self.elsewhere and path.startswith(f"/datasets/{REPOSITORY}/resolve/"):
            return 302, {"Location": f"/content{path}", "X-Repo-Commit": COMMIT}, b""
        path = path.removeprefix("/content")
        api = f"/api/datasets/{REPOSITORY}"
        if path.startswith(f"{api}/tree/{COMMIT}"):
            rows = [
                {"type": "file", "path": name, "size": len(data), "oid": "0" * 40}
                for name, data in self.files.items()
            ]
            return 200, {}, json.dumps(rows).encode()
        if path.startswith(api):
            facts = {
                "_id": "1",
                "id": REPOSITORY,
                "sha": COMMIT,
                "private": False,
                "tags": [],
                "siblings": [],
            }
            return 200, {}, json.dumps(facts).encode()
        prefix = f"/datasets/{REPOSITORY}/resolve/{COMMIT}/"
        if not path.startswith(prefix) or path.removeprefix(prefix) not in self.files:
            return 404, {}, b"{}"
        with self.lock:
            if self.failures:
                self.failures -= 1
                return 503, {}, b""
        name = path.removeprefix(prefix)
        data = self.files[name]
        first, last = 0, len(data) - 1
        if range_:
            ends = range_.removeprefix("bytes=").split("-")
            first, last = int(ends[0]), min(int(ends[1] or last), last)
        with self.lock:
            self.sent[name] = self.sent.get(name, 0) + last + 1 - first
        headers = {"Content-Range": f"bytes {first}-{last}/{len(data)}"}
        return 206 if range_ else 200, headers, data[first : last + 1]


@pytest.fixture
def hub() -> Iterator[tuple[Hub, dict[str, str]]]:
    """A stand-in of the hub, and the environment in which the client talks to it."""
    hub = Hub({})

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, headers, body = hub.answer(self.path, self.headers.get("Range"))
            self.send_response(status)
            for name, value in {"Content-Length": str(len(body)), "ETag": '"1"', **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        do_HEAD = do_GET  # noqa: N815  (the name the library asks for)

        def log_message(self, *arguments: object) -> None:
            return None

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "NO_PROXY": "127.0.0.1",
        "no_proxy": "127.0.0.1",
    }
    environment.pop("HF_TOKEN", None)
    yield hub, environment
    server.shutdown()
    server.server_close()


def parquet(texts: list[str], other: int) -> bytes:
    """Return a Parquet file with the texts and another column of `other` bytes that do not compress."""
    noise = [random.Random(i).randbytes(other // len(texts)) for i in range(len(texts))]
    stream = io.BytesIO()
    pq.write_table(pa.table({"text": texts, "noise": noise}), stream)
    return stream.getvalue()


def prepare(place: str, out: Path, environment: dict[str, str]) -> subprocess.CompletedProcess:
    options = ["--tokenizer", "bytes", "--held-out", "0.1", "--workers", "2", "--out", str(out)]
    words = [sys.executable, "-m", "tasks", "data", "prepare", place, *options]
    return subprocess.run(
        words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False
    )


def test_fineweb_is_read_by_range_at_one_commit_and_not_as_a_whole(
    bench: Bench, hub: tuple[Hub, dict[str, str]]
) -> None:
    server, environment = hub
    documents = make_documents(400)
    server.files = {
        "sample/10BT/000_00000.parquet": parquet(documents[:200], 20_000_000),
        "sample/10BT/001_00000.parquet": parquet(documents[200:], 1000),
    }
    server.failures = 1  # a server's fault that goes away
    server.elsewhere = True
    done = prepare("fineweb:sample-10BT", bench.root / "out", environment)
    assert done.returncode == 0, done.stderr
    shards = bench.shards("out")
    found = texts_of(shards, "train") + texts_of(shards, "val")
    assert sorted(found) == sorted(documents)
    assert [text for text in documents if text in set(texts_of(shards, "train"))] == texts_of(shards, "train")
    assert server.failures == 0
    assert server.sent["sample/10BT/000_00000.parquet"] < 12_000_000  # the other column alone has 20 MB
    manifest = json.loads((bench.root / "out" / "manifest.json").read_text())
    assert manifest["source"]["repository"] == REPOSITORY
    assert manifest["source"]["revision"] == COMMIT
    assert [row["name"] for row in manifest["source"]["files"]] == ["000_00000.parquet", "001_00000.parquet"]
    assert not [path for path in server.asked if "/resolve/" in path and COMMIT not in path]
    assert any(path.startswith("/content/") for path in server.asked)


def test_without_a_network_or_the_folder_the_user_gets_one_line(
    bench: Bench, hub: tuple[Hub, dict[str, str]]
) -> None:
    server, environment = hub
    server.files = {"data/readme.txt": b"no text here"}
    done = prepare(f"hub:{REPOSITORY}/data", bench.root / "out", environment)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "no Parquet file in 'data'" in done.stderr
    done = prepare("fineweb:sample-10BT", bench.root / "out", environment | {"HF_HUB_OFFLINE": "1"})
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "HuggingFaceFW/fineweb/sample/10BT: the hub may not be asked" in done.stderr
    assert not (bench.root / "out").exists()


def test_every_refusal_is_one_line_that_says_what_to_do(hub: tuple[Hub, dict[str, str]]) -> None:
    _, environment = hub
    code = (
        "import sys\n"
        "from tasks.errors import UserError\n"
        "from tasks.text.prepare import sources\n"
        "sources.with_patience = lambda function: function()\n"  # nothing here will change
        "for name in sys.argv[1:]:\n"
        "    try: sources.hub_source(name, 'data')\n"
        "    except UserError as error: print(error)\n"
    )

    def told(*names: str, **changes: str) -> list[str]:
        words = [sys.executable, "-c", code, *names]
        done = subprocess.run(
            words,
            cwd=ROOT,
            env=environment | changes,
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
        return done.stdout.splitlines()

    gated, unknown, revision, name, absent = told(
        "owner/gated", "owner/unknown", "owner/revision", "owner/na?me", "owner/absent"
    )
    assert "gated on the hub; accept its terms" in gated
    assert "no such data set, or a private one" in unknown
    assert "no such revision" in revision
    assert "no name of a data set" in name
    assert "no answer from the hub that can be used" in absent
    assert "404" in absent
    (closed,) = told(REPOSITORY, HF_ENDPOINT="http://127.0.0.1:1")
    assert "check the network" in closed


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["fineweb:sample-1TB"], r"expected fineweb:sample-10BT, fineweb:sample-100BT"),
        (["hub:owner"], r"expected hub:OWNER/NAME/FOLDER"),
        (["fineweb:sample-10BT", "a.jsonl"], r"stands alone"),
    ],
)
def test_a_place_that_cannot_be_on_the_hub_is_refused_before_asking(words: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        find_source(words)


def test_patience_ends_and_is_not_wasted_on_what_will_not_change() -> None:
    calls: list[int] = []

    class RefusedError(Exception):
        def __init__(self, status: int) -> None:
            self.response = type("Response", (), {"status_code": status})

    def fail(error: Exception):
        calls.append(1)
        raise error

    for error, attempts in (
        (RefusedError(503), 3),
        (ConnectionResetError(), 3),
        (RefusedError(404), 1),
        (KeyError(), 1),
    ):
        calls.clear()
        with pytest.raises(type(error)):
            with_patience(lambda error=error: fail(error), attempts=3, wait=0.0)
        assert len(calls) == attempts
    assert sources.transient(RefusedError(429))
