"""Which text belongs to which image: two towers under CLIP's loss.

Axis legend: B pairs, C colour channels, S pixels of a side, L tokens, E width of the space, K classes.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tasks.base import Batch
from tasks.errors import UserError
from tasks.multimodal.contrast import contrastive_loss, distinct, recalls, several_ranks
from tasks.multimodal.pair_task import PairTask
from tasks.multimodal.pairs import Pairs
from tasks.multimodal.towers import Towers, build_towers
from tasks.multimodal.vocabulary import BEGIN, END, padded
from tasks.samples.source import Sample
from tasks.vision.model import create_vit


class ContrastiveTask(PairTask):
    """Images and texts in one space. The wrong answers of a pair are the other pairs of its global batch."""

    def __init__(self, config: Any, train: Pairs, test: Pairs) -> None:
        if config.loop.micro_batch:
            raise UserError(
                "loop.micro_batch: the contrastive loss compares all pairs of a batch, smaller passes would "
                "change it; leave it 0 and take a smaller loop.global_batch, or more processes"
            )
        super().__init__(config, train, test)
        self.tokens_per_sample = self._image_tokens() + config.data.context
        prompts = test.prompts()
        self.prompts = [[self.text(prompt) for prompt in prompts_of] for prompts_of in prompts]

    def build_model(self) -> nn.Module:
        """Return the towers, initialised from the run's seed."""
        return build_towers(
            self.config.model,
            self.config.attention,
            image_size=self.config.data.image_size,
            channels=self.channels,
            vocabulary=self.vocabulary.size,
            context=self.config.data.context,
            seed=self.config.seed,
        )

    def text(self, caption: str) -> list[int]:
        """Return a caption as L tokens: begin, text, end, padding; a long text loses its rest."""
        length = self.config.data.context
        return padded([BEGIN, *self.vocabulary.encode(caption)[: length - 2], END], length)

    def sample_of(self, pairs: Pairs, index: int, rng: np.random.Generator | None) -> Sample:
        """Return image (C, S, S), tokens and class."""
        image, caption, label = pairs.pair(index, rng)
        return image, self.text(caption), label

    def collate(self, samples: Sequence[Sample]) -> Batch:
        """Return images (B, C, S, S), tokens (B, L) and classes (B,), -1 where there is none."""
        images, tokens, labels = zip(*samples, strict=True)
        return torch.stack(images), torch.tensor(tokens), torch.tensor(labels)

    def inputs(self, batch: Batch) -> Batch:
        """Return what the model takes of a batch."""
        return batch[:2]

    def weight(self, batch: Batch) -> float:
        """Every pair is a target."""
        return float(len(batch[0]))

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return CLIP's loss in nats per pair, in training over the pairs of all ranks."""
        features = model(*self.inputs(batch))
        return contrastive_loss(*features, gathered=model.training and several_ranks())

    def evaluate(self, model: Towers, batches: Iterable[Batch]) -> dict[str, float]:
        """Return loss in nats per pair and recalls over all test pairs at once, and zero-shot accuracy.

        Recall is the mean of both ways. Equal captions are one text, for which each of their images is right.
        """
        images, texts, tokens, labels, nats, count = [], [], [], [], 0.0, 0
        for batch in batches:
            features = model(*self.inputs(batch))
            nats += float(contrastive_loss(*features, gathered=False)) * len(batch[0])
            count += len(batch[0])
            images.append(features[0])
            texts.append(features[1])
            tokens.append(batch[1])
            labels.append(batch[2])
        every = torch.cat(images).double()  # half types would make equals of what is not
        first, which = distinct(torch.cat(tokens))
        found = {"loss": nats / count, **recalls(every, torch.cat(texts).double()[first], which)}
        return found | self._zero_shot(model, every, torch.cat(labels))

    def sample(self, model: nn.Module, size: int) -> str | None:
        """Two towers make nothing to show."""
        return None

    def _zero_shot(self, model: Towers, images: Tensor, labels: Tensor) -> dict[str, float]:
        """Return how often the class's texts are the most similar, over images that have a class."""
        known = labels >= 0
        if not self.prompts or not bool(known.any()):
            return {}
        classes = []
        for prompts in self.prompts:
            features = model(None, torch.tensor(prompts, device=images.device))[1].double()
            classes.append(F.normalize(features.mean(0), dim=0))
        similar = images[known] @ torch.stack(classes).T  # N K
        return {"zero_shot": float((similar.argmax(1) == labels[known]).double().mean())}

    def _image_tokens(self) -> int:
        shape = self.config.model.image.model_copy(update={"weights": None})
        with torch.device("meta"):
            vit = create_vit(shape, self.config.data.image_size, self.channels, self.config.model.width)
        return vit.patch_embed.num_patches + vit.num_prefix_tokens
