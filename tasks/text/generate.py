"""Text from a trained decoder."""

import torch

from tasks.errors import UserError
from tasks.text.trained import Trained


def write(
    trained: Trained,
    prompt: str,
    tokens: int,
    *,
    temperature: float,
    top_k: int | None,
    seed: int,
) -> str:
    """Return `prompt` with at most `tokens` tokens that the model continues it with, up to an end of text.

    Raises:
        UserError: a prompt without a token.
    """
    ids = trained.encode(prompt)
    if not ids:
        raise UserError("--prompt: empty; give at least one character to continue")
    device = trained.model.embedding.weight.device
    result = trained.model.generate(
        torch.tensor([ids], device=device),  # 1 T
        tokens,
        temperature=temperature,
        top_k=top_k,
        generator=torch.Generator(device).manual_seed(seed),
        stop=trained.end_of_text,
    )
    return trained.decode(result[0].tolist())
