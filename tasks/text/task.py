"""Language modelling: the next token of a text, for every token.

Axis legend: B samples, T tokens of a sample, V vocabulary.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tasks.base import Batch, Display
from tasks.text.corpus import Corpus, build_embedded_corpus, file_corpus
from tasks.text.loader import TokenWindows, validation_windows
from tasks.text.shard_set import open_shard_set
from tasks.text.tokenizer import ByteTokenizer, bits_per_byte
from xsa_core import GPT, GPTConfig, initialize

PROMPT = "Return the "  # the start of many a docstring, and of an ordinary sentence
SAMPLE_TEMPERATURE = 0.8


def build_gpt(config: Any, vocab_size: int) -> GPT:
    """Return the decoder a run's config describes, its weights not yet set.

    Raises:
        ValueError: sizes that do not fit together, or an unknown variant or backend.
    """
    attention = config.attention
    return GPT(
        GPTConfig(
            vocab_size=vocab_size,
            max_seq_len=config.data.seq_len,
            **config.model.model_dump(),
            **attention.model_dump(),
        )
    )


class TextTask:
    """A corpus with a decoder over it."""

    equal_lengths = True

    def __init__(self, config: Any, corpus: Corpus, name: str, tokenizer: Any = None) -> None:
        self.config = config
        self.corpus = corpus
        self.tokenizer = tokenizer or ByteTokenizer()
        # V: bytes of text that a token stands for; None where every token is one byte
        self.byte_lengths = torch.from_numpy(tokenizer.byte_lengths()) if tokenizer else None
        self.data_name = name
        self.fingerprint = corpus.fingerprint
        self.data_note = corpus.note
        self.tokens_per_sample = config.data.seq_len

    @classmethod
    def open(cls, config: Any, display: Display) -> "TextTask":
        """Open (for the embedded corpus: build, if need be) the data of a run.

        Raises:
            ValueError: a file that cannot be used, a package of the embedded corpus that is missing.
        """
        data = config.data
        if data.source == "file":
            return cls(
                config, file_corpus(data.path, data.validation_fraction), f"file {Path(data.path).name}"
            )
        if data.source == "shards":
            corpus, tokenizer = open_shard_set(data.path, data.tokenizer, headerless=data.headerless)
            name = f"shards {Path(data.path).expanduser().resolve().name}, tokens of {tokenizer.name}"
            return cls(config, corpus, name, tokenizer)
        with display.work("embedded corpus") as report:
            corpus = build_embedded_corpus(progress=report)
        return cls(config, corpus, "embedded documentation")

    def build_model(self) -> nn.Module:
        """Return the decoder, initialised from the run's seed."""
        model = build_gpt(self.config, self.corpus.vocab_size)
        initialize(model, self.config.seed)
        return model

    def stream(self, rank: int, world_size: int) -> TokenWindows:
        """Return this rank's windows of the training tokens, in the order of the run's seed."""
        data = self.config.data
        return TokenWindows(
            self.corpus.train, data.seq_len, self.config.seed, rank=rank, world_size=world_size
        )

    def validation(self, samples: int, batch: int) -> list[Batch]:
        """Return evenly spread windows of the validation tokens, the same for every seed."""
        return list(validation_windows(self.corpus.validation, self.config.data.seq_len, samples, batch))

    def inputs(self, batch: Batch) -> Batch:
        """Return what the model takes of a batch."""
        return batch[:1]

    def weight(self, batch: Batch) -> float:
        """Every token is a target."""
        return float(batch[1].numel())

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Return the mean cross entropy in nats per token."""
        inputs, targets = batch  # B T each
        return model(inputs, targets)

    def evaluate(self, model: nn.Module, batches: Iterable[Batch]) -> dict[str, float]:
        """Return the loss in nats per token and in bits per byte of the text that the targets stand for.

        An end of text is predicted like every other token and stands for no byte.
        """
        nats, tokens, size = 0.0, 0, 0
        for batch in batches:
            count = batch[1].numel()
            nats += float(self.loss(model, batch)) * count
            tokens += count
            size += self._text_bytes(batch[1])
        loss = nats / tokens
        return {"loss": loss, "bits_per_byte": bits_per_byte(loss, tokens, n_bytes=size)}

    def _text_bytes(self, targets: torch.Tensor) -> int:
        """Return how many bytes of text the targets (B T) stand for."""
        if self.byte_lengths is None:
            return targets.numel()
        return int(self.byte_lengths[targets.cpu()].sum())

    def sample(self, model: nn.Module, size: int) -> str | None:
        """Return text the model continues a fixed prompt with, always from the same generator."""
        if not size:
            return None
        device = next(model.parameters()).device
        prompt = torch.tensor([list(map(int, self.tokenizer.encode(PROMPT)))], device=device)  # 1 T
        generator = torch.Generator(device).manual_seed(0)
        if self.byte_lengths is not None:  # about as many bytes, whatever a token stands for
            size = max(1, round(size / float(self.byte_lengths.double().mean())))
        tokens = model.generate(prompt, size, temperature=SAMPLE_TEMPERATURE, generator=generator)
        return self.tokenizer.decode(tokens[0].tolist())
