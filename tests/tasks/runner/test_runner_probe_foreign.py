"""./xsa probe --model: Figure 1 of models of other libraries."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tasks.errors import UserError
from tasks.runner.cli import main
from tasks.runner.foreign import probe_foreign

TIMM = "timm:test_vit"  # the smallest of timm's models, of 160 x 160 pixels


@pytest.fixture(scope="module")
def pictures(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("pictures")
    rng = np.random.default_rng(0)
    (folder / "below").mkdir()
    for i, name in enumerate(["one.png", "two.jpg", "below/three.png"]):
        pixels = rng.integers(0, 255, (50 + i, 60, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / name)
    (folder / "notes.txt").write_text("no image")
    return folder


@pytest.fixture(scope="module")
def language_model(tmp_path_factory) -> Path:
    """A small saved decoder with a tokenizer of bytes."""
    transformers = pytest.importorskip("transformers")
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("model")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    config = transformers.GPT2Config(
        vocab_size=256, n_embd=32, n_layer=2, n_head=4, n_positions=40, bos_token_id=None, eos_token_id=None
    )
    torch.manual_seed(0)
    model = transformers.GPT2Model(config)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder)
    return folder


@pytest.fixture
def text(tmp_path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("Every token looks at those before it, and at itself. " * 20, encoding="utf-8")
    return path


def statistics(folder: Path, ids: torch.Tensor) -> torch.Tensor:
    """Figure 1 from the weights that transformers itself returns, `layers x 3`."""
    import transformers

    model = transformers.GPT2Model.from_pretrained(folder, attn_implementation="eager")
    values = []
    for block in model.h:
        block.attn.c_attn.register_forward_hook(lambda m, a, out: values.append(out.split(32, dim=-1)[2]))
    with torch.no_grad():
        weights = model(ids, output_attentions=True).attentions
    rows = []
    for a, v in zip(weights, values, strict=True):
        v = v.unflatten(-1, (4, 8)).transpose(1, 2)  # B H T D
        y = a @ v
        unit = torch.nn.functional.normalize(v, dim=-1)
        pairs = unit @ unit.transpose(-1, -2)
        T = v.shape[2]
        off = (pairs.sum((-1, -2)) - T) / (T * (T - 1))
        cosine = torch.nn.functional.cosine_similarity(y, v, dim=-1).mean()
        rows.append([cosine, a.diagonal(dim1=-2, dim2=-1).mean(), off.mean()])
    return torch.tensor(rows)


def test_statistics_are_those_of_the_weights_the_model_returns(language_model, text):
    outcome = probe_foreign(
        f"hf:{language_model}", images=None, text=str(text), samples=3, batch=2, length=20
    )
    raw = torch.tensor(list(text.read_bytes()))
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(language_model)
    ids = torch.tensor(tokenizer(text.read_text(), add_special_tokens=False)["input_ids"])
    assert len(ids) == len(raw)
    expected = statistics(language_model, ids[:60].reshape(3, 20))
    names = ("cosine_output_value", "diagonal_weight", "cosine_values")
    got = torch.tensor([[layer.means()[n] for n in names] for layer in outcome.stands])
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-4)
    assert outcome.converted is not None
    # The first token sees only itself: its share is rounding over sqrt(eps), see `LayerStatistics`.
    rounding = torch.finfo(torch.float32).eps ** 0.5
    assert all(abs(x) < rounding for layer in outcome.converted for x in layer.cosine_head_value)
    # The first layer reads the same in both; later ones read what the exclusive ones wrote.
    assert outcome.converted[0].means()["cosine_output_value"] == pytest.approx(got[0, 0].item(), abs=1e-5)


def test_windows_are_no_longer_than_the_model_reads(language_model, text):
    outcome = probe_foreign(f"hf:{language_model}", images=None, text=str(text), samples=2, batch=2)
    assert outcome.stands[0].tokens == 2 * 40


def test_an_exclusive_model_is_shown_as_it_is(language_model, text, tmp_path):
    import transformers

    from xsa_core import convert

    model = convert(transformers.GPT2Model.from_pretrained(language_model))
    model.save_pretrained(tmp_path)
    transformers.AutoTokenizer.from_pretrained(language_model).save_pretrained(tmp_path)
    outcome = probe_foreign(f"hf:{tmp_path}", images=None, text=str(text), samples=2, batch=2, length=20)
    assert outcome.converted is None
    assert [layer.variant for layer in outcome.stands] == ["xsa", "xsa"]


def test_the_command_draws_a_figure_and_keeps_a_record_where_asked_to(pictures, tmp_path, capsys):
    where = ["--figure", str(tmp_path / "shown"), "--records", str(tmp_path / "records")]
    code = main(
        ["probe", "--model", TIMM, "--images", str(pictures), "--samples", "3", "--batch", "2", *where]
    )
    said = capsys.readouterr().out
    assert code == 0, said
    assert "random weights" in said
    assert (tmp_path / "shown.png").stat().st_size > 1000
    assert (tmp_path / "shown.svg").stat().st_size > 1000
    (record,) = (tmp_path / "records").glob("*.json")
    content = json.loads(record.read_text())
    assert {row["model"] for row in content["rows"]} == {"as it stands", "converted"}
    assert all(row["tokens"] > 0 for row in content["rows"])
    assert str(tmp_path) not in record.read_text()


def test_weights_come_from_a_file(pictures, tmp_path):
    timm = pytest.importorskip("timm")
    model = timm.create_model("test_vit")
    with torch.no_grad():
        for block in model.blocks:
            block.attn.qkv.weight.mul_(20)
    torch.save(model.state_dict(), tmp_path / "weights.pth")
    given = {"images": str(pictures), "text": None, "samples": 2, "batch": 2}
    outcome = probe_foreign(TIMM, weights=str(tmp_path / "weights.pth"), **given)
    assert "weights.pth" in outcome.foreign.weights
    loaded = outcome.foreign.model.state_dict()["blocks.0.attn.qkv.weight"]
    assert torch.equal(loaded, model.state_dict()["blocks.0.attn.qkv.weight"])


def mistakes(pictures: Path, language_model: Path, tmp_path: Path) -> dict[str, list[str]]:
    """What the one line must say -> arguments."""
    empty = tmp_path / "empty"
    empty.mkdir()
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "picture.png").write_bytes(b"no picture")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9 " * 50)
    (tmp_path / "short.txt").write_text("ab")
    images, model = ["--images", str(pictures)], f"hf:{language_model}"
    return {
        "expected timm:NAME or hf:DIRECTORY": ["--model", "vit", *images],
        "did you mean": ["--model", "timm:vit_tini_patch16_224", *images],
        "no config.json": ["--model", f"hf:{empty}", "--text", str(tmp_path / "short.txt")],
        "no such directory": ["--model", TIMM, "--images", str(tmp_path / "nowhere")],
        "no image there": ["--model", TIMM, "--images", str(empty)],
        "is no image that can be read": ["--model", TIMM, "--images", str(broken)],
        "no such file": ["--model", model, "--text", str(tmp_path / "nowhere.txt")],
        "not UTF-8": ["--model", model, "--text", str(tmp_path / "latin.txt")],
        "2 tokens, and a window has": ["--model", model, "--text", str(tmp_path / "short.txt")],
        "one of them": ["--model", model],
        "give --images DIRECTORY": ["--model", TIMM, "--text", str(tmp_path / "short.txt")],
        "--weights": ["--model", TIMM, *images, "--weights", str(tmp_path / "nowhere.pth")],
        "has no self attention": ["--model", "timm:test_resnet", *images],
        "belongs to --model": ["somewhere", *images],
        "expected a run directory, or --model": [],
    }


def test_every_mistake_is_one_line(pictures, language_model, tmp_path, capsys):
    for line, arguments in mistakes(pictures, language_model, tmp_path).items():
        code = main(["probe", *arguments])
        said = capsys.readouterr().err
        assert code == 2, arguments
        assert line in said, said
        assert len(said.strip().splitlines()) == 1, said


def test_a_picture_that_cannot_be_read_names_its_file(tmp_path):
    (tmp_path / "picture.png").write_bytes(b"no picture")
    with pytest.raises(UserError, match=r"picture\.png"):
        probe_foreign(TIMM, images=str(tmp_path), text=None, samples=1, batch=1)
