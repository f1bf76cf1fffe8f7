"""Captions of images and answers to questions about them, by one decoder.

Axis legend: B images, C colour channels, S pixels of a side, L tokens of a text, V vocabulary.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tasks.base import Batch
from tasks.multimodal.decoder import NO_TARGET, CaptionModel, build_decoder, greedy
from tasks.multimodal.pair_task import PairTask
from tasks.multimodal.pairs import Pairs
from tasks.multimodal.scenes import CANDIDATES, KINDS, Question
from tasks.multimodal.vocabulary import BEGIN, END, padded
from tasks.samples.source import Sample
from xsa_core.modes import evaluation

SHOWN = 4  # captions of a sample


class CaptioningTask(PairTask):
    """Captions, and for scenes questions too: a training sample is one or the other.

    A validation batch has the captions first, as a training batch has its texts, then the questions.
    """

    def __init__(self, config: Any, train: Pairs, test: Pairs) -> None:
        super().__init__(config, train, test)
        self.length = config.data.context - 1  # of what goes in, and of what is to come out
        patches = (config.data.image_size // config.model.patch_size) ** 2
        self.tokens_per_sample = patches + self.length
        # Single words, so that the likelihood of an answer is read at one position.
        self.answers: dict[str, Tensor] = {}
        for kind, words in CANDIDATES.items() if self.scenes else ():
            self.answers[kind] = torch.tensor([self.vocabulary.encode(word) for word in words])[:, 0]

    def build_model(self) -> nn.Module:
        """Return the decoder, initialised from the run's seed."""
        return build_decoder(self.config, channels=self.channels, vocabulary=self.vocabulary.size)

    def caption_rows(self, caption: str) -> tuple[list[int], list[int]]:
        """Return tokens and targets of a caption, each of `length`; a long one ends early."""
        words = self.vocabulary.encode(caption)[: self.length - 1]
        return padded([BEGIN, *words], self.length), padded([*words, END], self.length, NO_TARGET)

    def question_rows(self, asked: Question) -> tuple[list[int], list[int]]:
        """Return tokens and targets of a question: the one target is its answer, after the last word."""
        words = [BEGIN, *self.vocabulary.encode(asked.text)]
        targets = [NO_TARGET] * (len(words) - 1) + self.vocabulary.encode(asked.answer)
        return padded(words, self.length), padded(targets, self.length, NO_TARGET)

    def sample_of(self, pairs: Pairs, index: int, rng: np.random.Generator | None) -> Sample:
        """Return image, tokens, targets; in evaluation of scenes also a question's, and its kind."""
        image, caption, _ = pairs.pair(index, rng)
        if not self.scenes:
            return image, *self.caption_rows(caption)
        if rng is not None:
            asks = rng.random() < self.config.data.questions
            rows = self.question_rows(pairs.question(index, rng)) if asks else self.caption_rows(caption)
            return image, *rows
        asked = pairs.question(index, None)
        return image, *self.caption_rows(caption), *self.question_rows(asked), KINDS.index(asked.kind)

    def collate(self, samples: Sequence[Sample]) -> Batch:
        """Return images (B, C, S, S), tokens and targets (B, L), in evaluation of scenes three more."""
        images, *rest = zip(*samples, strict=True)
        return torch.stack(images), *(torch.tensor(part) for part in rest)

    def inputs(self, batch: Batch) -> Batch:
        """Return what the model takes of a batch."""
        return batch[:2]

    def weight(self, batch: Batch) -> float:
        """Every token to be written is a target."""
        return float((batch[2] != NO_TARGET).sum())

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the mean cross entropy in nats per target."""
        return model(*batch[:3])

    def evaluate(self, model: CaptionModel, batches: Iterable[Batch]) -> dict[str, float]:
        """Return nats per token of captions, the share that is written exactly, and that of right answers."""
        nats, targets, exact, count = 0.0, 0.0, 0, 0
        right: dict[str, list[bool]] = defaultdict(list)
        for batch in batches:
            weight = self.weight(batch)
            nats += float(self.loss(model, batch)) * weight
            targets += weight
            exact += int((greedy(model, batch[0], self.length) == batch[2]).all(1).sum())
            count += len(batch[0])
            if len(batch) > 3:
                for kind, good in self.answered(model, batch):
                    right[kind].append(good)
        found = {"loss": nats / targets, "exact_match": exact / count}
        every = [good for rows in right.values() for good in rows]
        if every:
            found["answers"] = sum(every) / len(every)
            found |= {f"answers_{kind}": sum(rows) / len(rows) for kind, rows in sorted(right.items())}
        return found

    def answered(self, model: CaptionModel, batch: Batch) -> list[tuple[str, bool]]:
        """Return each question's kind and whether its answer is the likeliest of those that are possible."""
        images, _, _, tokens, targets, kinds = batch
        place = (targets != NO_TARGET).int().argmax(1)
        rows = torch.arange(len(images), device=images.device)
        logits = model(images, tokens)[rows, place].float()  # B V
        answer = targets[rows, place]
        found = []
        for row, kind in enumerate(kinds.tolist()):
            possible = self.answers[KINDS[kind]].to(logits.device)
            best = possible[logits[row, possible].argmax()]
            found.append((KINDS[kind], bool(best == answer[row])))
        return found

    def sample(self, model: nn.Module, size: int) -> str | None:
        """Return captions of some test images, as they are and as they were written; `size` bytes at most."""
        if not size:
            return None
        device = next(model.parameters()).device
        images, _, targets, *_ = (part.to(device) for part in self.validation(SHOWN, SHOWN)[0])
        with evaluation(model):
            made = greedy(model, images, self.length)
        pairs = zip(targets.tolist(), made.tolist(), strict=True)
        lines = [f"{self.vocabulary.decode(own)} -> {self.vocabulary.decode(text)}" for own, text in pairs]
        return "\n".join(lines)[:size]
