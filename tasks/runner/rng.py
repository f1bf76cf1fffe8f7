"""The state of every random generator a run may draw from, as plain values and tensors."""

import hashlib
import random
from typing import Any

import numpy as np
import torch
import torch.distributed as dist


def seed_all(seed: int, rank: int = 0) -> None:
    """Seed Python, NumPy and torch. Data and initial weights have generators of their own.

    Ranks draw differently, or dropout would drop the same on all of them; the first as a process alone.
    """
    if rank:
        digest = hashlib.sha256(f"{seed}:{rank}".encode()).digest()
        seed = int.from_bytes(digest[:8], "little") >> 1
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def capture() -> dict[str, Any]:
    """Return the present state, loadable with weights_only."""
    name, keys, position, has_gauss, gauss = np.random.get_state()
    state = {
        "python": random.getstate(),
        "numpy": (name, torch.from_numpy(keys.astype(np.int64)), position, has_gauss, gauss),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = [torch.cuda.get_rng_state(device) for device in own_devices()]
    return state


def restore(state: dict[str, Any]) -> None:
    """Go back to a captured state."""
    version, internal, gauss_next = state["python"]
    random.setstate((version, tuple(internal), gauss_next))
    name, keys, position, has_gauss, gauss = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, gauss))
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        for device, generator in zip(own_devices(), state["cuda"], strict=False):
            torch.cuda.set_rng_state(generator, device)


def own_devices() -> list[int]:
    """Return the GPUs that are this process's: one of several processes must not touch the others'."""
    if dist.is_initialized():
        return [torch.cuda.current_device()]
    return list(range(torch.cuda.device_count()))
