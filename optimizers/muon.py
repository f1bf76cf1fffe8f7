"""Muon over the package muon-optimizer: its Newton-Schulz iteration, with what its step leaves out.

The package updates every matrix whole, fails on a parameter without gradient, and takes the shape
factor of a convolution from its kernel's sides. Here a fused query-key-value weight is orthogonalised
block by block, a convolution is a matrix (out, in * height * width), and the scale is explicit.
"""

import torch
from muon import SingleDeviceMuonWithAuxAdam, adam_update, zeropower_via_newtonschulz5

NEWTON_SCHULZ_STEPS = 5


def update_scale(rows: int, columns: int, rule: str) -> float:
    """Return the factor of an orthogonalised update of shape (rows, columns).

    keller_jordan: max(1, rows / columns) ** 0.5, as in the package.
    match_rms_adamw: 0.2 * max(rows, columns) ** 0.5, which gives the update the root mean square that
    AdamW's typically has (Liu et al. 2025, arXiv:2502.16982, section 2.2).
    """
    if rule == "keller_jordan":
        return max(1.0, rows / columns) ** 0.5
    if rule == "match_rms_adamw":
        return 0.2 * max(rows, columns) ** 0.5
    raise ValueError(f"lr_scale: expected keller_jordan or match_rms_adamw, got {rule!r}")


class MuonWithAuxAdam(SingleDeviceMuonWithAuxAdam):
    """The package's single-device optimizer with block-wise updates and an explicit scale.

    Args:
        groups: as the package takes them (`use_muon` True or False).
        splits: for each group the row blocks of its matrices; () for whole matrices.
        lr_scale: see `update_scale`.
    """

    def __init__(self, groups: list[dict], splits: list[tuple[int, ...]], lr_scale: str) -> None:
        super().__init__(groups)
        for group, blocks in zip(self.param_groups, splits, strict=True):
            group["splits"], group["lr_scale"] = list(blocks), lr_scale

    @torch.no_grad()
    def step(self, closure=None) -> None:
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            update = self._muon_step if group["use_muon"] else self._adam_step
            for parameter in group["params"]:
                if parameter.grad is not None:
                    update(parameter, group)

    def _muon_step(self, parameter: torch.Tensor, group: dict) -> None:
        state = self.state[parameter]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        momentum, gradient = state["momentum_buffer"], parameter.grad
        momentum.lerp_(gradient, 1 - group["momentum"])
        # Nesterov: look one step ahead along the momentum. The gradient itself stays as it was.
        ahead = gradient.lerp(momentum, group["momentum"]).flatten(1)  # (rows, columns)
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        matrix = parameter.view(len(parameter), -1)
        blocks = group["splits"] or [len(parameter)]
        for block, target in zip(ahead.split(blocks), matrix.split(blocks), strict=True):
            orthogonal = zeropower_via_newtonschulz5(block, steps=NEWTON_SCHULZ_STEPS)
            scale = update_scale(*block.shape, group["lr_scale"])
            target.add_(orthogonal.to(target.dtype), alpha=-group["lr"] * scale)

    def _adam_step(self, parameter: torch.Tensor, group: dict) -> None:
        state = self.state[parameter]
        if not state:
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
            state["step"] = 0
        state["step"] += 1
        update = adam_update(
            parameter.grad, state["exp_avg"], state["exp_avg_sq"], state["step"], group["betas"], group["eps"]
        )
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.add_(update, alpha=-group["lr"])
