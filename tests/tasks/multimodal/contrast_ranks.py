"""One of two processes under gloo: the gathered contrastive loss and its gradients, written to a file.

Arguments: rank, port, folder with pairs.pt (images, texts, scale, sizes of the ranks).
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from tasks.multimodal.contrast import contrastive_loss


def main(rank: int, port: str, folder: Path) -> None:
    """Compute this rank's part and its gradients of the weighted sum of all parts."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"}
    dist.init_process_group("gloo", rank=rank, world_size=2)
    content = torch.load(folder / "pairs.pt", weights_only=True)
    sizes = content["sizes"].tolist()
    own = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
    leaves = [content[name][own].requires_grad_() for name in ("images", "texts")]
    scale = content["scale"].clone().requires_grad_()
    loss = contrastive_loss(*leaves, scale, gathered=True)
    (loss * sizes[rank] / sum(sizes)).backward()
    found = {"loss": loss.detach(), "images": leaves[0].grad, "texts": leaves[1].grad, "scale": scale.grad}
    torch.save(found, folder / f"rank{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
