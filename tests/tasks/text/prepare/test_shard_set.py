"""Token shards as the data of a run: prepared sets, foreign shards, the loader over them, bits per byte."""

import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from prepare_bench import Bench, make_documents, texts_of, write_json_lines

from tasks.runner.config.compose import load_config
from tasks.runner.progress import Silent
from tasks.text.loader import TokenWindows
from tasks.text.prepare.tokenizers import make_tokenizer
from tasks.text.shard_set import open_shard_set
from tasks.text.shards import TokenShards, write_shard
from tasks.text.task import TextTask

ROOT = Path(__file__).resolve().parents[4]
pytestmark = pytest.mark.usefixtures("inline")


@pytest.fixture
def prepared(bench: Bench) -> Path:
    """A set of bytes: 200 documents, several shards of both splits."""
    source = write_json_lines(bench.root / "a.jsonl", make_documents(200))
    bench.prepare("out", source, held_out=0.3)
    return bench.root / "out"


def config_for(directory: Path, *changes: str):
    chosen = ["data.source=shards", f"data.path={directory}", "data.seq_len=16", *changes]
    return load_config("text/tiny", chosen)


def test_a_prepared_set_opens_with_its_tokenizer_and_all_its_tokens(prepared: Path, bench: Bench) -> None:
    corpus, tokenizer = open_shard_set(prepared)
    assert tokenizer.name == "bytes"
    assert corpus.vocab_size == 257
    for tokens, prefix in ((corpus.train, "train"), (corpus.validation, "val")):
        text = tokenizer.decode(tokens[:])
        assert text == "".join(texts_of(bench.shards("out"), prefix))
    again = open_shard_set(prepared, "bytes")[0]
    assert again.fingerprint == corpus.fingerprint


@pytest.mark.parametrize("headerless", [False, True])
def test_shards_of_others_open_when_their_tokenizer_is_named(tmp_path: Path, headerless: bool) -> None:
    tokens = np.arange(5000) % 50257
    for name, part in (("x_train_000001.bin", tokens[:4000]), ("x_val_000000.bin", tokens[4000:])):
        if headerless:
            part.astype("<u2").tofile(tmp_path / name)
        else:
            write_shard(tmp_path / name, part)
    with pytest.raises(ValueError, match=r"no manifest.*data\.tokenizer=gpt2 or bytes"):
        open_shard_set(tmp_path)
    corpus, _ = open_shard_set(tmp_path, "gpt2", headerless=headerless)
    np.testing.assert_array_equal(corpus.train[:], tokens[:4000])
    np.testing.assert_array_equal(corpus.validation[:], tokens[4000:])
    assert corpus.vocab_size == 50257
    if not headerless:
        return
    with pytest.raises(ValueError, match=r"x_train_000001\.bin: no token shard.*headerless"):
        open_shard_set(tmp_path, "gpt2")
    path = tmp_path / "x_val_000000.bin"
    path.write_bytes(path.read_bytes()[:-2] + b"\7\0")
    assert open_shard_set(tmp_path, "gpt2", headerless=True)[0].fingerprint != corpus.fingerprint


def test_a_set_that_cannot_be_trained_on_is_refused_by_name(prepared: Path, bench: Bench) -> None:
    with pytest.raises(ValueError, match="was tokenized with bytes, not gpt2"):
        open_shard_set(prepared, "gpt2")
    with pytest.raises(ValueError, match="its shards have headers"):
        open_shard_set(prepared, headerless=True)
    with pytest.raises(ValueError, match="no such directory"):
        open_shard_set(prepared / "absent")
    shard = prepared / "train_000001.bin"
    shard.write_bytes(shard.read_bytes()[:-4])
    with pytest.raises(ValueError, match=r"train_000001\.bin: .*damaged"):
        open_shard_set(prepared)
    shard.unlink()
    with pytest.raises(ValueError, match=r"train_000001\.bin: cannot be read"):
        open_shard_set(prepared)
    bench.prepare("none held out", bench.root / "a.jsonl", held_out=0.0)
    with pytest.raises(ValueError, match=r"no validation documents.*--held-out"):
        open_shard_set(bench.root / "none held out")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["data.source=shards"], r"data\.path: no value; set it to a directory of shards"),
        (["data.tokenizer=gpt2"], r"data\.tokenizer, data\.headerless: of shards, data\.source is embedded"),
        (["data.source=shards", "data.path=x", "data.tokenizer=gpt4"], r"data\.tokenizer"),
    ],
)
def test_config_mistakes_about_shards_are_told(changes: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_config("text/tiny", changes)


def test_ranks_over_shards_share_out_disjoint_windows_and_resume_exactly(prepared: Path) -> None:
    corpus, _ = open_shard_set(prepared)
    ranks = [TokenWindows(corpus.train, 16, 3, rank=rank, world_size=3) for rank in range(3)]
    each = ranks[0].windows_per_epoch // 3
    taken = [rank.next_starts(each).tolist() for rank in ranks]
    starts = [start for own in taken for start in own]
    assert len(set(starts)) == len(starts) == 3 * each
    assert np.diff(sorted(starts)).min() >= 16
    restored = TokenWindows(corpus.train, 16, 3, rank=1, world_size=3)
    restored.load_state_dict(ranks[1].state_dict())
    for a, b in zip(ranks[1].next_batch(5), restored.next_batch(5), strict=True):
        assert a.equal(b)


def test_reading_windows_loads_no_whole_shard(tmp_path: Path) -> None:
    """In a process of its own: what it holds of 200 MB of shards after a few windows is a few MB."""
    for name in ("a_train_0.bin", "a_train_1.bin", "a_val_0.bin"):
        with (tmp_path / name).open("wb") as stream:
            header = np.zeros(256, "<i4")
            header[:3] = 20240520, 1, 50_000_000
            stream.write(header.tobytes())
            stream.truncate(1024 + 100_000_000)  # sparse: zeros that take no space
    code = """
import sys
from tasks.text.shard_set import open_shard_set
from tasks.text.loader import TokenWindows
def resident():
    rows = open("/proc/self/status").read().split("\\n")
    return sum(int(row.split()[1]) for row in rows if row.startswith(("RssAnon:", "RssFile:")))
TokenWindows(range(100), 4, 0)  # whatever is loaded on first use
before = resident()
corpus, _ = open_shard_set(sys.argv[1], "bytes")
windows = TokenWindows(corpus.train, 1024, 0)
for _ in range(20):
    windows.next_batch(4)
print(resident() - before)
"""
    if not Path("/proc/self/status").exists():
        pytest.skip("needs /proc to see how much memory a process holds")
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    # 80 windows of 2 kB; the system maps 64 kB around each place that is touched.
    assert int(done.stdout) * 1024 < 40_000_000


def test_bits_per_byte_counts_the_bytes_that_the_targets_stand_for(prepared: Path) -> None:
    task = TextTask.open(config_for(prepared), Silent())
    batches = task.validation(50, 8)
    nats = math.log(257)
    found = task.evaluate(lambda inputs, targets: torch.tensor(nats), batches)
    targets = np.concatenate([batch[1].numpy().ravel() for batch in batches])
    assert (targets == 256).any()
    n_bytes = int((targets != 256).sum())  # one byte a token, none for the end of a text
    assert found["loss"] == pytest.approx(nats)
    assert found["bits_per_byte"] == pytest.approx(len(targets) * nats / math.log(2) / n_bytes)


def test_bits_per_byte_of_gpt2_tokens_follows_the_text(bench: Bench) -> None:
    documents = ["the value of an attention head is removed from its own output " * 30 for _ in range(3)]
    documents = [f"{i} {text}" for i, text in enumerate(documents * 20)]
    source = write_json_lines(bench.root / "words.jsonl", documents)
    bench.prepare("words", source, tokenizer="gpt2", held_out=0.3)
    task = TextTask.open(config_for(bench.root / "words"), Silent())
    batch = task.validation(7, 7)[0]
    gpt2 = make_tokenizer("gpt2")
    text = gpt2.decode(int(i) for i in batch[1].ravel() if i != gpt2.end_of_text)
    found = task.evaluate(lambda inputs, targets: torch.tensor(2.0), [batch])
    assert found["bits_per_byte"] == pytest.approx(batch[1].numel() * 2 / math.log(2) / len(text.encode()))
    assert "gpt2" in task.data_name


def test_a_model_trains_on_a_prepared_set_and_its_vocabulary_fits(prepared: Path) -> None:
    task = TextTask.open(config_for(prepared), Silent())
    model = task.build_model()
    assert model.config.vocab_size == 257
    loss = task.loss(model, task.stream(0, 1).next_batch(4))
    loss.backward()
    assert float(loss.detach()) == pytest.approx(math.log(257), rel=0.05)
    assert isinstance(task.corpus.train, TokenShards)
    assert isinstance(task.sample(model, 20), str)
