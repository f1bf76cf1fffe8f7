"""What was said, letter by letter, with the CTC loss.

Axis legend: B recordings, T positions, V symbols, U letters of a transcript.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from tasks.base import Batch
from tasks.errors import UserError
from tasks.speech.config import TRANSCRIBED
from tasks.speech.ctc import beam_search, greedy, positions_needed
from tasks.speech.model import build_model
from tasks.speech.recordings import ALPHABET, Recordings, spelled
from tasks.speech.source import Target
from tasks.speech.task import SpeechTask

SHOWN = 4  # transcripts of a sample


class TranscriptionTask(SpeechTask):
    """Transcription into a to z, apostrophe and space."""

    kind = "sentences"

    def targets(self, sides: Sequence[Recordings]) -> Target:
        """Number the letters from 1; 0 is the blank."""
        source = self.config.data.source
        if source not in TRANSCRIBED:
            raise UserError(
                f"data.source: {source} has no transcripts; task transcription takes "
                f"{', '.join(sorted(TRANSCRIBED))}"
            )

        def target(said: str) -> list[int]:
            letters = [ALPHABET.index(letter) + 1 for letter in spelled(said)]
            if not letters:
                raise ValueError("has an empty transcript")
            return letters

        return target

    def check(self, frames: int, target: list[int]) -> None:
        """Refuse a transcript that does not fit into the encoder's positions: its loss is infinite."""
        factor = self.config.model.subsample
        needed, there = positions_needed(target), -(-frames // factor)
        if needed > there:
            raise ValueError(
                f"its transcript needs {needed} positions, there are {there}; take a smaller model.subsample"
            )

    def build_model(self) -> nn.Module:
        """Return the encoder with a head of letters, initialised from the run's seed."""
        return build_model(self.config, classes=len(ALPHABET) + 1, pooled=False)

    def collate_targets(self, targets: list[Any]) -> tuple[Tensor, ...]:
        """Return transcripts (B, U) padded with 0, and their lengths (B,)."""
        rows = [torch.tensor(letters) for letters in targets]
        return pad_sequence(rows, batch_first=True), torch.tensor([len(row) for row in rows])

    def weight(self, batch: Batch) -> float:
        """Every letter is a target."""
        return float(batch[3].sum())

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the CTC loss in nats per letter."""
        features, lengths, letters, counts = batch
        log_probs, lengths = self._log_probs(model, features, lengths)
        total = F.ctc_loss(log_probs.transpose(0, 1), letters, lengths, counts, reduction="sum")
        return total / counts.sum()

    def evaluate(self, model: nn.Module, batches: Iterable[Batch]) -> dict[str, float]:
        """Return the loss in nats per letter, and errors per letter and per word of the transcripts."""
        nats, count = 0.0, 0
        said: list[str] = []
        heard: list[str] = []
        for batch in batches:
            letters = int(batch[3].sum())
            nats += float(self.loss(model, batch)) * letters
            count += letters
            said += self._texts(batch)
            heard += self._heard(model, batch)
        return {"loss": nats / count, **error_rates(said, heard)}

    def sample(self, model: nn.Module, size: int) -> str | None:
        """Return some test sentences and what was heard, `size` bytes at most."""
        if not size:
            return None
        batch = tuple(part.to(next(model.parameters()).device) for part in self.validation(SHOWN, SHOWN)[0])
        was_training = model.training
        with torch.no_grad():
            heard = self._heard(model.eval(), batch)
        model.train(was_training)
        lines = [f"{said} -> {text}" for said, text in zip(self._texts(batch), heard, strict=True)]
        return "\n".join(lines)[:size]

    def _log_probs(self, model: nn.Module, features: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        logits, lengths = model(features, lengths)
        return logits.float().log_softmax(-1), lengths  # B T V

    def _texts(self, batch: Batch) -> list[str]:
        return [spell(row[:count].tolist()) for row, count in zip(batch[2], batch[3].tolist(), strict=True)]

    def _heard(self, model: nn.Module, batch: Batch) -> list[str]:
        log_probs, lengths = self._log_probs(model, *batch[:2])
        width = self.config.model.beam
        texts = []
        for row, length in zip(log_probs.cpu().numpy(), lengths.tolist(), strict=True):
            own: np.ndarray = row[:length]
            texts.append(spell(greedy(own) if width == 1 else beam_search(own, width)))
        return texts


def spell(letters: Iterable[int]) -> str:
    """Return the text that letters 1 .. V-1 stand for."""
    return "".join(ALPHABET[letter - 1] for letter in letters)


def error_rates(said: list[str], heard: list[str]) -> dict[str, float]:
    """Return edits over letters, and over words, of all transcripts together."""
    import jiwer

    return {
        "character_error_rate": jiwer.cer(said, heard),
        "word_error_rate": jiwer.wer(said, heard),
    }
