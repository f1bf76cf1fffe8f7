"""Text from a trained decoder."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tasks.text.task import build_gpt
from tasks.text.tokenizer import ByteTokenizer


def write(
    config: Any,
    weights: Mapping[str, Tensor],
    prompt: str,
    tokens: int,
    *,
    temperature: float,
    top_k: int | None,
    seed: int,
) -> str:
    """Return `prompt` with the `tokens` tokens that the model of a run continues it with."""
    tokenizer = ByteTokenizer()
    model = build_gpt(config, tokenizer.vocab_size)
    model.load_state_dict(weights)
    ids = torch.tensor([tokenizer.encode(prompt)])
    generator = torch.Generator().manual_seed(seed)
    result = model.generate(ids, tokens, temperature=temperature, top_k=top_k, generator=generator)
    return tokenizer.decode(result[0].tolist())
