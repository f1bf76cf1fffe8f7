"""Muon's matrices over the ranks of a run: each is orthogonalised once, whole, by the rank that owns it.

Axis legend: R rows, C columns of a parameter seen as a matrix; a shard holds some of its rows.

Newton-Schulz needs the whole matrix; everything else in Muon is elementwise and stays where the parameter
is. So only two things travel: under data parallelism, where every rank holds every gradient, the owner's
result; under sharding the rows to the owner and the rows of the result back. Both travel as bfloat16, in
which the iteration computes: nothing is lost, and from the same gradient the update is that of one process,
bit for bit.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

WIRE = torch.bfloat16  # the type Newton-Schulz computes in


@dataclass(frozen=True)
class Matrix:
    """A parameter as Muon sees it: `R C`, orthogonalised in blocks of rows."""

    parameter: nn.Parameter
    group: dict

    @property
    def rows(self) -> int:
        """R, of the whole parameter."""
        return self.parameter.shape[0]

    @property
    def columns(self) -> int:
        """C: input channels, times the area of a convolution's kernel."""
        return math.prod(self.parameter.shape[1:])

    @property
    def blocks(self) -> list[int]:
        """Rows of each block."""
        return list(self.group["splits"]) or [self.rows]

    @property
    def cost(self) -> float:
        """Work of Newton-Schulz in arbitrary units: products of the smaller side."""
        return sum(min(rows, self.columns) ** 2 * max(rows, self.columns) for rows in self.blocks)


def local(tensor: Tensor) -> Tensor:
    """Return what this rank holds of a tensor: itself, or the shard of a DTensor, sharing its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def rounds(costs: list[float], ranks: int) -> list[list[int | None]]:
    """Deal items out to ranks, heaviest first, each to the rank with the least so far.

    Returns:
        For each round what every rank works on: the index of an item, or None. Each item occurs once.

    >>> rounds([1.0, 5.0, 3.0, 2.0], 2)
    [[1, 2], [0, 3]]
    """
    load, mine = [0.0] * ranks, [[] for _ in range(ranks)]
    for index in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        rank = min(range(ranks), key=lambda r: (load[r], r))
        load[rank] += costs[index]
        mine[rank].append(index)
    depth = max(map(len, mine), default=0)
    return [[own[k] if k < len(own) else None for own in mine] for k in range(depth)]


def shard_rows(rows: int, ranks: int) -> list[int]:
    """Return how many rows each rank holds under `Shard(0)`: as `torch.chunk` cuts, maybe none at the end."""
    chunk = -(-rows // ranks)
    return [max(0, min(chunk, rows - rank * chunk)) for rank in range(ranks)]


def first_row(matrix: Matrix) -> int:
    """Return which row of the whole parameter this rank's part begins with."""
    parameter = matrix.parameter
    if not isinstance(parameter, DTensor):
        return 0
    mesh = parameter.device_mesh
    return sum(shard_rows(matrix.rows, mesh.size())[: mesh.get_local_rank()])


def directions(
    matrices: list[Matrix], ahead: Callable[[Matrix], Tensor], orthogonalise: Callable[[Tensor], Tensor]
) -> Iterator[tuple[Matrix, Tensor]]:
    """Yield every matrix with this rank's rows of its orthogonalised direction.

    Args:
        matrices: the same on all ranks, in the same order.
        ahead: advances a matrix's momentum and returns this rank's rows of what is to be orthogonalised;
            called once for each matrix.
        orthogonalise: `R C -> R C` for one block.

    Raises:
        ValueError: a parameter that is sharded otherwise than by rows over one mesh.
    """

    def whole(matrix: Matrix, rows: Tensor) -> Tensor:
        return torch.cat([orthogonalise(block) for block in rows.split(matrix.blocks)])

    sharded = [matrix for matrix in matrices if isinstance(matrix.parameter, DTensor)]
    plain = [matrix for matrix in matrices if not isinstance(matrix.parameter, DTensor)]
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    if ranks == 1:
        for matrix in plain:
            yield matrix, whole(matrix, ahead(matrix))
    else:
        yield from replicated(plain, ahead, whole)
    yield from gathered(sharded, ahead, whole)


def replicated(
    matrices: list[Matrix],
    ahead: Callable[[Matrix], Tensor],
    whole: Callable[[Matrix, Tensor], Tensor],
) -> Iterator[tuple[Matrix, Tensor]]:
    """Every rank has every gradient: the owner orthogonalises, all get the result."""
    rank = dist.get_rank()
    for turn in rounds([matrix.cost for matrix in matrices], dist.get_world_size()):
        under_way = []
        for owner, index in enumerate(turn):
            if index is None:
                continue
            matrix = matrices[index]
            rows = ahead(matrix)  # on all ranks: momentum is the same everywhere
            if owner == rank:
                result = whole(matrix, rows).to(WIRE).contiguous()
            else:
                result = rows.new_empty((matrix.rows, matrix.columns), dtype=WIRE)
            under_way.append((owner, matrix, result))
        # The own matrix is done before anything is waited for, so the ranks work at the same time.
        handles = [dist.broadcast(result, owner, async_op=True) for owner, _, result in under_way]
        for handle, (_, matrix, result) in zip(handles, under_way, strict=True):
            handle.wait()
            yield matrix, result


def gathered(
    matrices: list[Matrix],
    ahead: Callable[[Matrix], Tensor],
    whole: Callable[[Matrix, Tensor], Tensor],
) -> Iterator[tuple[Matrix, Tensor]]:
    """Every rank has some rows of each matrix: they go to the owner, rows of its result come back."""
    if not matrices:
        return
    mesh = check_sharding(matrices)
    group, rank, ranks = mesh.get_group(), mesh.get_local_rank(), mesh.size()
    for turn in rounds([matrix.cost for matrix in matrices], ranks):
        chosen = [None if index is None else matrices[index] for index in turn]
        parts = [None if matrix is None else ahead(matrix).to(WIRE) for matrix in chosen]
        flat = [part.reshape(-1) for part in parts if part is not None]
        sent = [0 if part is None else part.numel() for part in parts]  # to each owner
        own = chosen[rank]
        received = [0] * ranks  # from each rank
        if own is not None:
            received = [rows * own.columns for rows in shard_rows(own.rows, ranks)]
        rows = flat[0].new_empty(sum(received))
        dist.all_to_all_single(rows, torch.cat(flat), received, sent, group=group)
        if own is not None:
            matrix = rows.view(own.rows, own.columns).to(own.parameter.dtype)
            rows = whole(own, matrix).to(WIRE).reshape(-1)
        back = flat[0].new_empty(sum(sent))
        dist.all_to_all_single(back, rows, sent, received, group=group)
        for matrix, piece in zip(chosen, back.split(sent), strict=True):
            if matrix is not None:
                yield matrix, piece.view(-1, matrix.columns)


def check_sharding(matrices: list[Matrix]) -> torch.distributed.DeviceMesh:
    """Return the one mesh that all matrices are sharded over, by rows."""
    mesh = matrices[0].parameter.device_mesh
    for matrix in matrices:
        parameter = matrix.parameter
        if parameter.device_mesh != mesh or mesh.ndim != 1 or parameter.placements != (Shard(0),):
            raise ValueError(
                f"Muon on sharded parameters: expected Shard(0) over one mesh of one dimension, got "
                f"{parameter.placements} over {parameter.device_mesh}"
            )
    return mesh
