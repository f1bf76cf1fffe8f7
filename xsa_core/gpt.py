"""The decoder of the paper: nanoGPT's, with rotary positions and one more LayerNorm after the embedding.

Axes: B batch, T tokens, C width, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from xsa_core.attention.cache import KVCache
from xsa_core.attention.masks import Mask
from xsa_core.attention.module import check_sizes
from xsa_core.checkpoint_io import load_model, save_model
from xsa_core.generation import generate
from xsa_core.layers import Stack, StackConfig, make_norm
from xsa_core.loss import linear_cross_entropy
from xsa_core.roles import ParameterRole, Role


@dataclass(frozen=True, kw_only=True)
class GPTConfig(StackConfig):
    """A decoder over a vocabulary; see `StackConfig` for the rest.

    Attributes:
        vocab_size: V.
        tie_embeddings: one matrix for input and output embedding.
        post_embedding_norm: the paper's LayerNorm between embedding and first block.
    """

    vocab_size: int
    tie_embeddings: bool = True
    post_embedding_norm: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_sizes(vocab_size=self.vocab_size)


class GPT(nn.Module):
    """Causal language model.

    Args:
        config: sizes and variant. Weights are torch's defaults until `xsa_core.initialize(model, seed)`.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.d_model)
        self.embedding_norm = make_norm(config) if config.post_embedding_norm else nn.Identity()
        self.blocks = Stack(config, causal=True)
        self.final_norm = make_norm(config)
        self.head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        self.tie_weights()

    def tie_weights(self) -> None:
        """Make both embeddings one tensor again, after something replaced them (`to_empty`, loading)."""
        if self.config.tie_embeddings:
            self.head.weight = self.embedding.weight

    def forward(
        self,
        tokens: Tensor | None = None,
        targets: Tensor | None = None,
        *,
        embeddings: Tensor | None = None,
        mask: Mask | None = None,
        positions: Tensor | None = None,
        cache: KVCache | None = None,
        last_only: bool = False,
    ) -> Tensor:
        """Logits, or the loss where targets are given.

        Args:
            tokens: `B T` int64.
            targets: `B T` int64, the token that follows each one; -100 where there is none.
            embeddings: `B T C` in place of tokens, for inputs that are not all text.
            mask: joined with the causal rule, unless it has a prefix (see `Mask`).
            positions: `T` or `B T` int64, by default those after the cache.
            cache: keys and values of earlier tokens, extended in place.
            last_only: logits of the last position alone, `B 1 V`: all that sampling needs.

        Returns:
            `B T V` in the dtype of the computation; with targets, the mean loss in nats as a float32 scalar
            (float64 for a float64 model), formed without the logits of all tokens.
        """
        x = self.hidden(tokens, embeddings=embeddings, mask=mask, positions=positions, cache=cache)
        if targets is not None:
            return linear_cross_entropy(x, self.head.weight, targets)
        return self.head(x[:, -1:] if last_only else x)

    def hidden(
        self,
        tokens: Tensor | None = None,
        *,
        embeddings: Tensor | None = None,
        mask: Mask | None = None,
        positions: Tensor | None = None,
        cache: KVCache | None = None,
    ) -> Tensor:
        """Normalised output of the last block, `B T C`: what the head reads. Arguments as for `forward`."""
        if (tokens is None) == (embeddings is None):
            raise ValueError("give either tokens or embeddings, not both and not neither")
        if tokens is not None and tokens.ndim != 2:
            raise ValueError(f"expected tokens (B, T), got {tuple(tokens.shape)}")
        if embeddings is not None and (embeddings.ndim != 3 or embeddings.shape[-1] != self.config.d_model):
            raise ValueError(
                f"expected embeddings (B, T, {self.config.d_model}), got {tuple(embeddings.shape)}"
            )
        x = self.embedding(tokens) if embeddings is None else embeddings
        x = self.embedding_norm(x)
        if self.config.dropout:
            x = F.dropout(x, self.config.dropout, self.training)
        return self.final_norm(self.blocks(x, mask=mask, positions=positions, cache=cache))

    def make_cache(self, capacity: int | None = None) -> KVCache:
        """An empty cache for this model, of `max_seq_len` positions unless told otherwise.

        Raises:
            ValueError: more positions than the model has, or fewer than one.
        """
        most = self.config.max_seq_len
        check_sizes(capacity=capacity)
        if capacity is not None and capacity > most:
            raise ValueError(
                f"a cache of {capacity} positions is larger than max_seq_len {most}: ask for less"
            )
        return KVCache(self.config.n_layers, most if capacity is None else capacity)

    def generate(
        self,
        tokens: Tensor,
        max_new_tokens: int,
        temperature: float = 1.0,
        top_k: int | None = None,
        generator: torch.Generator | None = None,
        stop: int | None = None,
        *,
        prompt_lengths: Tensor | None = None,
    ) -> Tensor:
        """Continue prompts, `B T -> B T+N`: see `xsa_core.generation.generate`."""
        return generate(
            self,
            tokens,
            max_new_tokens,
            temperature=temperature,
            top_k=top_k,
            generator=generator,
            stop=stop,
            prompt_lengths=prompt_lengths,
        )

    def num_parameters(self, non_embedding: bool = False) -> int:
        """Number of parameters, a tied matrix once; `non_embedding` leaves out input and output embedding."""
        total = sum(p.numel() for p in self.parameters())
        if non_embedding:
            total -= sum({id(p): p.numel() for p in (self.embedding.weight, self.head.weight)}.values())
        return total

    def declared_roles(self) -> dict[str, ParameterRole]:
        """A tied matrix counts as embedding."""
        return {
            "embedding.weight": ParameterRole(Role.EMBEDDING),
            "head.weight": ParameterRole(Role.EMBEDDING if self.config.tie_embeddings else Role.HEAD),
        }

    def save_pretrained(self, directory: str | Path) -> None:
        """Write `model.safetensors` and `config.json`, each whole."""
        save_model(self, self.config, directory)

    @classmethod
    def from_pretrained(cls, directory: str | Path) -> GPT:
        """The model that `save_pretrained` wrote, in evaluation mode: same logits bit for bit.

        Raises:
            ValueError: not such a directory, or damaged; the message says what.
        """
        return load_model(cls, GPTConfig, directory)
