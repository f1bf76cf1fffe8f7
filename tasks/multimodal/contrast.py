"""CLIP's loss over all ranks, and retrieval between images and texts.

Axis legend: B pairs of this rank, G pairs of all ranks, N images, M distinct texts, E width of the space.
Source of the loss: Radford et al. 2021, figure 3.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

ROWS = 2048  # of the matrix of similarities that are formed at a time


def contrastive_loss(images: Tensor, texts: Tensor, scale: Tensor, *, gathered: bool) -> Tensor:
    """Return the mean of both directions' cross entropy, in nats per pair, over this rank's pairs.

    Args:
        images, texts: `B E`, of length one, pair by pair. scale: what similarities are multiplied with.
        gathered: whether the pairs of other ranks are among the wrong answers. The mean of the ranks' losses,
            weighted by their pairs, is then the loss of one process over all pairs, and so are the gradients.
    """
    all_images, all_texts, first = images, texts, 0
    if gathered:
        sizes = _sizes(len(images), images.device)
        first = sum(sizes[: dist.get_rank()])
        all_images, all_texts = _gathered(images, sizes), _gathered(texts, sizes)
    targets = first + torch.arange(len(images), device=images.device)
    # A similarity times 100 in bfloat16 is right to half a nat: products as exact as the features.
    with torch.autocast(images.device.type, enabled=False):
        to_texts = F.cross_entropy(scale * images @ all_texts.T, targets)  # B G
        to_images = F.cross_entropy(scale * texts @ all_images.T, targets)
    return (to_texts + to_images) / 2


def several_ranks() -> bool:
    """Whether there are other processes whose pairs count."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _sizes(own: int, device: torch.device) -> list[int]:
    found = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(dist.get_world_size())]
    dist.all_gather(found, torch.tensor([own], device=device))
    return [int(size) for size in found]


def _gathered(features: Tensor, sizes: list[int]) -> Tensor:
    """Return all ranks' features `G E` in order of ranks, with gradient to each of them."""
    from torch.distributed.nn.functional import all_gather

    filled = F.pad(features, (0, 0, 0, max(sizes) - len(features)))  # ranks may differ by one pair
    parts = all_gather(filled.contiguous())
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])


def distinct(texts: Tensor) -> tuple[Tensor, Tensor]:
    """Return of token rows `N L` where each distinct one comes first (M,), and which one each is (N,).

    Captions that are equal count as one text: any image that has it is right for it.
    """
    _, which = torch.unique(texts, dim=0, return_inverse=True)
    first = torch.full((int(which.max()) + 1,), len(texts), dtype=torch.int64, device=texts.device)
    first.scatter_reduce_(0, which, torch.arange(len(texts), device=texts.device), "amin")
    return first, which


def image_to_text(images: Tensor, texts: Tensor, which: Tensor) -> Tensor:
    """Return for every image how many texts are at least as similar to it as its own, (N,).

    Args:
        images: `N E`. texts: `M E`, distinct. which: (N,) text of each image.
    """
    ahead = []
    for rows, own in zip(images.split(ROWS), which.split(ROWS), strict=True):
        similar = rows @ texts.T
        right = similar.gather(1, own[:, None])
        ahead.append((~(similar < right)).sum(1) - 1)  # not a number is never less: it counts as ahead
    return torch.cat(ahead)


def text_to_image(images: Tensor, texts: Tensor, which: Tensor) -> Tensor:
    """Return for every text how many wrong images are at least as similar as the best right one, (M,)."""
    ahead = []
    for start in range(0, len(texts), ROWS):
        rows = texts[start : start + ROWS]
        similar = rows @ images.T
        own = which[None] == torch.arange(start, start + len(rows), device=which.device)[:, None]
        best = similar.masked_fill(~own, -torch.inf).amax(1, keepdim=True)
        ahead.append((~(similar < best) & ~own).sum(1))
    return torch.cat(ahead)


def recalls(images: Tensor, texts: Tensor, which: Tensor) -> dict[str, float]:
    """Return the share of queries whose right answer is the first, or among the first five, both ways.

    Between equal similarities the wrong answer counts as ahead. Arguments as for `image_to_text`.
    """
    ranks = {"image_to_text": image_to_text(images, texts, which)}
    ranks["text_to_image"] = text_to_image(images, texts, which)
    found = {}
    for k in (1, 5):
        for way, ahead in ranks.items():
            found[f"{way}_at_{k}"] = float((ahead < k).double().mean())
        found[f"recall_at_{k}"] = sum(found[f"{way}_at_{k}"] for way in ranks) / len(ranks)
    return found
