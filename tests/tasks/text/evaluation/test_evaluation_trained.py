"""Trained models leave the suite and come back: the same bits, the same text, the same history."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tasks.errors import UserError
from tasks.runner import checkpoint, cli
from tasks.runner.config.compose import load_config
from tasks.runner.trained import load_trained
from tasks.text.task import build_gpt
from tasks.text.trained import HISTORY_FILE, export_model, import_model, tokenizer_for
from xsa_core import GPT, initialize

TOKENS = torch.arange(40).reshape(2, 20)


@pytest.fixture(scope="module", params=["sa", "xsa_learned"])
def run_directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run directory with a checkpoint, as the trainer writes it."""
    config = load_config("text/tiny", [f"attention={request.param}", "seed=3", "model.n_kv_heads=1"])
    model = build_gpt(config, 256)
    initialize(model, config.seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)) * 0.1)
    root = tmp_path_factory.mktemp("run")
    state = {"model": model.state_dict(), "config": config.resolved(), "data_fingerprint": "made-up"}
    checkpoint.save(root / "checkpoints", 7, state, keep=2)
    return root


def logits(model: GPT) -> torch.Tensor:
    with torch.no_grad():
        return model(TOKENS)


def test_an_exported_model_has_the_same_logits_bit_for_bit(run_directory: Path, tmp_path: Path) -> None:
    trained = load_trained(str(run_directory))
    export_model(trained, tmp_path / "out")
    assert torch.equal(logits(GPT.from_pretrained(tmp_path / "out")), logits(trained.model))
    back = load_trained(str(tmp_path / "out"))
    assert torch.equal(logits(back.model), logits(trained.model))
    assert back.history == trained.history
    assert back.weights_sha256() == trained.weights_sha256()
    assert (back.history["seed"], back.history["step"]) == (3, 7)


def test_an_exported_model_is_usable_without_the_suite(run_directory: Path, tmp_path: Path) -> None:
    assert cli.main(["export", str(run_directory), str(tmp_path / "out")]) == 0
    script = (
        "import sys, torch, xsa_core\n"
        "model = xsa_core.GPT.from_pretrained(sys.argv[1])\n"
        "assert not any(name.split('.')[0] in ('tasks', 'results', 'optimizers') for name in sys.modules)\n"
        "with torch.no_grad(): torch.save(model(torch.arange(40).reshape(2, 20)), sys.argv[2])\n"
    )
    found = tmp_path / "logits.pt"
    root = Path(__file__).resolve().parents[4]
    subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "out"), str(found)], check=True, cwd=root, timeout=120
    )
    assert torch.equal(torch.load(found, weights_only=True), logits(load_trained(str(run_directory)).model))


def test_sample_writes_the_same_text_from_all_three_forms(
    run_directory: Path, tmp_path: Path, capsys: Any
) -> None:
    export_model(load_trained(str(run_directory)), tmp_path / "out")
    texts = []
    for where in (run_directory, run_directory / "checkpoints" / "step-00000007.pt", tmp_path / "out"):
        assert cli.main(["sample", str(where), "--prompt", "one", "--tokens", "12"]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0].startswith("one")
    assert len(set(texts)) == 1


def test_weights_that_are_not_those_of_the_history_are_refused(run_directory: Path, tmp_path: Path) -> None:
    trained = load_trained(str(run_directory))
    export_model(trained, tmp_path)
    other = GPT.from_pretrained(tmp_path)
    with torch.no_grad():
        other.final_norm.weight[0] += 1
    other.save_pretrained(tmp_path)
    with pytest.raises(UserError, match="holds other weights"):
        import_model(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 9}, "export version 9"),
        ({"format": "else"}, "damaged"),
        ({"tokenizer": None}, "incomplete"),
        ({"tokenizer": "words"}, "not known"),
    ],
    ids=["version", "format", "tokenizer-missing", "tokenizer-unknown"],
)
def test_a_history_that_cannot_be_used_is_one_line(
    change: dict[str, Any], message: str, run_directory: Path, tmp_path: Path
) -> None:
    export_model(load_trained(str(run_directory)), tmp_path)
    path = tmp_path / HISTORY_FILE
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(UserError, match=message) as caught:
        import_model(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_directory_of_the_library_alone_is_taken_without_history(
    run_directory: Path, tmp_path: Path
) -> None:
    load_trained(str(run_directory)).model.save_pretrained(tmp_path)
    found = load_trained(str(tmp_path))
    assert found.history == {"variant": found.model.config.variant}


def test_export_into_a_run_directory_is_refused(run_directory: Path) -> None:
    with pytest.raises(UserError, match="a run directory"):
        export_model(load_trained(str(run_directory)), run_directory)


def test_tokenizers_are_told_by_vocabulary_and_may_be_named() -> None:
    assert [tokenizer_for(n).name for n in (256, 257, 50257, 50304)] == ["bytes", "bytes", "gpt2", "gpt2"]
    assert not hasattr(tokenizer_for(256), "end_of_text")
    assert tokenizer_for(257).end_of_text == 256
    assert tokenizer_for(512, "bytes").vocab_size == 257
    with pytest.raises(UserError, match="none of a known tokenizer"):
        tokenizer_for(1000)
    with pytest.raises(UserError, match="the model 256"):
        tokenizer_for(256, "gpt2")


def test_what_is_no_model_is_one_line(tmp_path: Path, capsys: Any) -> None:
    for where in (tmp_path / "absent", tmp_path):
        assert cli.main(["export", str(where), str(tmp_path / "out")]) == 2
        error = capsys.readouterr().err
        assert error.startswith("xsa: error: ")
        assert error.count("\n") == 1
