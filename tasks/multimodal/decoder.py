"""One decoder for an image and a text: patches see each other, text sees patches and what was written.

Axis legend: B images, C colour channels, S pixels of a side, P patches, L tokens of a text, V vocabulary.
"""

import torch
from torch import Tensor, nn

from tasks.multimodal.config import CaptioningModelConfig
from tasks.multimodal.towers import stack_config
from tasks.multimodal.vocabulary import BEGIN, END
from xsa_core import GPT, KVCache, Mask, initialize, linear_cross_entropy
from xsa_core.roles import ParameterRole, Role

NO_TARGET = -100


class Patches(nn.Module):
    """Linear patch embedding with learned positions, `B C S S -> B P width`.

    Raises:
        ValueError: an image that is no whole number of patches.
    """

    def __init__(self, image_size: int, channels: int, patch_size: int, width: int) -> None:
        super().__init__()
        side, rest = divmod(image_size, patch_size)
        if rest:
            raise ValueError(
                f"model.patch_size: {image_size} pixels are no multiple of {patch_size}; give a divisor"
            )
        self.count = side * side
        self.projection = nn.Conv2d(channels, width, kernel_size=patch_size, stride=patch_size)
        self.position = nn.Parameter(torch.zeros(self.count, width))

    def forward(self, images: Tensor) -> Tensor:
        """Embed."""
        return self.projection(images).flatten(2).transpose(1, 2) + self.position

    def declared_roles(self) -> dict[str, ParameterRole]:
        """Positions are looked up."""
        return {"position": ParameterRole(Role.EMBEDDING)}


class CaptionModel(nn.Module):
    """Patches, then text, through a decoder with a prefix mask.

    Args:
        model, attention: config sections. image_size, channels: of the images. vocabulary: V.
        context: tokens of a text at most.
    """

    def __init__(
        self,
        model: CaptioningModelConfig,
        attention,
        *,
        image_size: int,
        channels: int,
        vocabulary: int,
        context: int,
    ) -> None:
        super().__init__()
        self.patches = Patches(image_size, channels, model.patch_size, model.d_model)
        self.gpt = GPT(stack_config(model, attention, vocabulary, self.patches.count + context))

    def forward(
        self,
        images: Tensor | None,
        tokens: Tensor | None = None,
        targets: Tensor | None = None,
        cache: KVCache | None = None,
    ) -> Tensor:
        """Logits `B L V` of the text, or the mean loss in nats per target.

        Args:
            images: `B C S S`; None where the cache has them. tokens: `B L`; none is the begin of a text.
            targets: `B L`, -100 where there is none. cache: of earlier positions, extended in place.
        """
        if tokens is None:
            tokens = torch.full((len(images), 1), BEGIN, device=images.device)
        embedded = self.gpt.embedding(tokens)
        mask, first = None, 0
        if images is not None:
            patches = self.patches(images)
            embedded = torch.cat([patches.to(embedded.dtype), embedded], dim=1)  # B P+L width
            mask, first = Mask.prefix(self.patches.count), self.patches.count
        hidden = self.gpt.hidden(embeddings=embedded, mask=mask, cache=cache)[:, first:]
        if targets is None:
            return self.gpt.head(hidden)
        return linear_cross_entropy(hidden, self.gpt.head.weight, targets)


@torch.no_grad()
def greedy(model: CaptionModel, images: Tensor, length: int) -> Tensor:
    """Return the likeliest next token again and again, `B length`; after END there is NO_TARGET.

    All texts begin at the same position, so the cache needs no padding.
    """
    made = torch.full((len(images), length), NO_TARGET, device=images.device)
    cache = model.gpt.make_cache()
    tokens = torch.full((len(images), 1), BEGIN, device=images.device)
    done = torch.zeros(len(images), dtype=torch.bool, device=images.device)
    for place in range(length):
        logits = model(None if place else images, tokens, None, cache)
        chosen = logits[:, -1].argmax(-1)
        made[:, place] = torch.where(done, NO_TARGET, chosen)
        done |= chosen == END
        if bool(done.all()):
            break
        tokens = chosen[:, None]
    return made


def build_decoder(config, *, channels: int, vocabulary: int) -> CaptionModel:
    """Return the model of a run, initialised from its seed.

    Raises:
        ValueError: sizes that do not fit together, or an unknown variant.
    """
    data = config.data
    model = CaptionModel(
        config.model,
        config.attention,
        image_size=data.image_size,
        channels=channels,
        vocabulary=vocabulary,
        context=data.context,
    )
    initialize(model, config.seed)
    return model
