"""Muon (Jordan et al. 2024): hidden matrices move along the orthogonalised momentum, the rest takes Adam.

Two implementations stand side by side, with the same groups, schedule, state and scale:

* `MuonWithAuxAdam` over the package muon-optimizer: its Newton-Schulz iteration, its Adam, its single-device
  class. That class's own step is right for whole 2-D matrices on one device only: it updates a fused
  query-key-value weight as one matrix, fails on a parameter without gradient, and takes the shape factor of a
  convolution from its kernel's sides. The package's distributed class is not used: it pads wrongly when the
  number of matrices is no multiple of the number of ranks, mixes up shapes, and keeps momentum on the owner
  alone, so that a checkpoint of one rank lacks the rest.
* `TorchMuonWithAdamW` over torch.optim.Muon and torch.optim.AdamW.

What both leave out is here, once: blocks of a fused weight, convolutions as matrices (out, in * height *
width), an explicit scale, and any number of ranks, replicated or sharded (`optimizers.exchange`).
"""

from typing import Any

import torch
from muon import SingleDeviceMuonWithAuxAdam, adam_update, zeropower_via_newtonschulz5
from torch import Tensor, nn

from optimizers.exchange import Matrix, directions, first_row, local

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


class MatrixSteps:
    """Muon's step for the groups with `use_muon`, for any optimizer that has groups and state.

    A group holds params, lr, momentum, weight_decay, splits (rows of the blocks, empty: whole) and lr_scale.
    State: `momentum_buffer`, like the parameter; under data parallelism whole and equal on all ranks.
    """

    param_groups: list[dict[str, Any]]
    state: Any

    def orthogonalise(self, block: Tensor) -> Tensor:
        """Return the block `R C` with its singular values near one, in the type of the computation."""
        raise NotImplementedError

    def matrix_steps(self) -> None:
        """Update every Muon parameter that has a gradient."""
        matrices = [
            Matrix(parameter, group)
            for group in self.param_groups
            if group["use_muon"]
            for parameter in group["params"]
            if parameter.grad is not None
        ]
        for matrix, direction in directions(matrices, self._ahead, self.orthogonalise):
            self._apply(matrix, direction)

    def _ahead(self, matrix: Matrix) -> Tensor:
        """Advance the momentum; return Nesterov's look one step ahead along it, this rank's rows `R C`."""
        parameter, beta = matrix.parameter, matrix.group["momentum"]
        state = self.state[parameter]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        momentum, gradient = local(state["momentum_buffer"]), local(parameter.grad)
        momentum.lerp_(gradient, 1 - beta)
        # The gradient itself stays as it was.
        return gradient.lerp(momentum, beta).flatten(1)

    def _apply(self, matrix: Matrix, direction: Tensor) -> None:
        """Decay this rank's rows of a parameter and move them along the direction, block by block."""
        group, part = matrix.group, local(matrix.parameter)
        part.mul_(1 - group["lr"] * group["weight_decay"])
        if not len(part):
            return  # more ranks than rows
        target, first, start = part.view(len(part), -1), first_row(matrix), 0
        for rows in matrix.blocks:
            low, high = max(start - first, 0), min(start + rows - first, len(target))
            start += rows
            if low < high:
                scale = update_scale(rows, matrix.columns, group["lr_scale"])
                moved = direction[low:high].to(target.dtype)
                target[low:high].add_(moved, alpha=-group["lr"] * scale)


class MuonWithAuxAdam(MatrixSteps, SingleDeviceMuonWithAuxAdam):
    """The package's single-device optimizer, its step replaced (see above).

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
        self.matrix_steps()
        for group in self.param_groups:
            for parameter in group["params"]:
                if not group["use_muon"] and parameter.grad is not None:
                    self._adam_step(parameter, group)

    def orthogonalise(self, block: Tensor) -> Tensor:
        """Five steps of the package's Newton-Schulz iteration."""
        return zeropower_via_newtonschulz5(block, steps=NEWTON_SCHULZ_STEPS)

    def _adam_step(self, parameter: Tensor, group: dict) -> None:
        state = self.state[parameter]
        if not state:
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
            state["step"] = 0
        state["step"] += 1
        # Elementwise, so a shard is updated as the whole is.
        first, second, part = local(state["exp_avg"]), local(state["exp_avg_sq"]), local(parameter)
        gradient = local(parameter.grad)
        update = adam_update(gradient, first, second, state["step"], group["betas"], group["eps"])
        part.mul_(1 - group["lr"] * group["weight_decay"])
        part.add_(update, alpha=-group["lr"])


class TorchMuonWithAdamW(MatrixSteps, torch.optim.Optimizer):
    """torch.optim.Muon for hidden matrices and torch.optim.AdamW for the rest: one object, one state dict.

    torch's Muon takes plain 2-D parameters only. So it is given each block as a parameter of its own that
    stands for the block's update: its gradient is the momentum's direction, its momentum is off (that is
    elementwise and stays with the parameter or its shard), and what it is after a step of rate 1 is the
    update. AdamW runs on the model's own parameters and keeps its state in this object's.

    Args: as for `MuonWithAuxAdam`.
    """

    def __init__(self, groups: list[dict], splits: list[tuple[int, ...]], lr_scale: str) -> None:
        for group, blocks in zip(groups, splits, strict=True):
            group["splits"], group["lr_scale"] = list(blocks), lr_scale
        super().__init__(groups, {})
        rest = [group for group in self.param_groups if not group["use_muon"]]
        self.adamw = torch.optim.AdamW(rest, fused=True) if rest else None
        self.muon = torch.optim.Muon(
            [nn.Parameter(torch.zeros(1, 1))],
            lr=1.0,
            weight_decay=0.0,
            momentum=0.0,
            nesterov=False,
            ns_steps=NEWTON_SCHULZ_STEPS,
            adjust_lr_fn="original",
        )
        self._share()

    def _share(self) -> None:
        """Let AdamW use this object's state and groups, which loading replaces."""
        if self.adamw is not None:
            self.adamw.state = self.state
            self.adamw.param_groups = [group for group in self.param_groups if not group["use_muon"]]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state dict of this class."""
        super().load_state_dict(state_dict)
        self._share()

    @torch.no_grad()
    def step(self, closure=None) -> None:
        """Update every parameter that has a gradient."""
        self.matrix_steps()
        if self.adamw is not None:
            self.adamw.step()

    def orthogonalise(self, block: Tensor) -> Tensor:
        """Five steps of torch's Newton-Schulz iteration."""
        # Lying down, a block's "original" factor max(1, rows / columns) ** 0.5 is one: the scale is ours.
        tall = block.shape[0] > block.shape[1]
        lying = (block.T if tall else block).contiguous()
        update = nn.Parameter(torch.zeros_like(lying))
        update.grad = lying
        self.muon.param_groups[0]["params"] = [update]
        self.muon.step()
        self.muon.state.clear()
        return -(update.T if tall else update)
