"""Two towers that meet in one space: timm's Vision Transformer and a causal stack over text.

Axis legend: B pairs, C colour channels, S pixels of a side, L tokens, E width of the space.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tasks.multimodal.config import ContrastiveModelConfig, StackSection
from tasks.multimodal.vocabulary import END
from tasks.vision.model import build_classifier
from xsa_core import GPT, GPTConfig, initialize
from xsa_core.roles import ParameterRole, Role

# CLIP's temperature at the start, and the largest factor it may reach (Radford et al. 2021, section 2.5).
START, LARGEST = 1 / 0.07, 100.0


class TextTower(nn.Module):
    """A causal stack read at the end of the text, `B L -> B E`. What follows the end has no influence."""

    def __init__(self, model: StackSection, attention, *, vocabulary: int, context: int, width: int) -> None:
        super().__init__()
        self.gpt = GPT(stack_config(model, attention, vocabulary, context))
        self.projection = nn.Linear(model.d_model, width, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return features. Every row of `tokens` has END."""
        end = (tokens == END).int().argmax(1)  # the first of them
        hidden = self.gpt.hidden(tokens)  # B L C
        return self.projection(hidden[torch.arange(len(tokens), device=tokens.device), end])

    def declared_roles(self) -> dict[str, ParameterRole]:
        """What is projected is an output, no hidden state."""
        return {"projection.weight": ParameterRole(Role.HEAD)}


class Towers(nn.Module):
    """Features of images and texts, of length one, and the factor on their similarities."""

    def __init__(self, image: nn.Module, text: TextTower) -> None:
        super().__init__()
        self.image, self.text = image, text
        # The logarithm of the factor over its start; of one element, since sharding takes no scalars.
        self.temperature = nn.Parameter(torch.zeros(1))

    def forward(
        self, images: Tensor | None, tokens: Tensor | None = None
    ) -> tuple[Tensor | None, Tensor | None, Tensor]:
        """Return features of what is given, and the factor.

        Args:
            images: `B C S S`. tokens: `B L`.

        Returns:
            Features `B E` of images and of texts, None for what is not given; the factor (1,).
        """
        with torch.no_grad():  # as CLIP does after every update
            self.temperature.clamp_(max=math.log(LARGEST / START))
        of_images = None if images is None else unit(self.image(images))
        of_texts = None if tokens is None else unit(self.text(tokens))
        return of_images, of_texts, START * self.temperature.exp()

    def declared_roles(self) -> dict[str, ParameterRole]:
        """Like an attention's strength, the temperature is drawn to nothing."""
        return {"temperature": ParameterRole(Role.STRENGTH)}


def unit(features: Tensor) -> Tensor:
    """Return features `B E` of length one, in float32 at least: half types would lose the nearest ones."""
    wide = features.to(torch.promote_types(features.dtype, torch.float32))
    return F.normalize(wide, dim=-1)


def stack_config(model: StackSection, attention, vocabulary: int, length: int) -> GPTConfig:
    """Return a decoder's configuration. Raises ValueError for sizes that do not fit together."""
    return GPTConfig(
        vocab_size=vocabulary,
        n_layers=model.n_layers,
        n_heads=model.n_heads,
        d_model=model.d_model,
        max_seq_len=length,
        mlp_ratio=model.mlp_ratio,
        dropout=model.dropout,
        **attention.model_dump(),
    )


def build_towers(
    model: ContrastiveModelConfig,
    attention,
    *,
    image_size: int,
    channels: int,
    vocabulary: int,
    context: int,
    seed: int,
) -> Towers:
    """Return both towers, the one that `model.exclusive` leaves out with plain attention.

    Raises:
        ValueError: sizes that do not fit together, weights that cannot be loaded, or an unknown variant.
    """
    plain = attention.model_copy(update={"variant": "sa", "strength": 1.0})
    own = {side: attention if model.exclusive in ("both", side) else plain for side in ("image", "text")}
    image = build_classifier(
        model.image,
        own["image"],
        image_size=image_size,
        channels=channels,
        classes=model.width,
        seed=seed,
    )
    text = TextTower(model.text, own["text"], vocabulary=vocabulary, context=context, width=model.width)
    initialize(text, seed)
    return Towers(image, text)
