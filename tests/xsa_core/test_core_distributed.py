"""The models under DDP and FSDP2, two gloo processes: same gradients as one process."""

import os
import socket

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from xsa_core import GPT, GPTConfig, initialize, weights_sha256

CONFIG = GPTConfig(
    vocab_size=29, n_layers=2, n_heads=2, d_model=16, max_seq_len=8, variant="xsa_learned", n_sinks=1
)
STRATEGIES = ("ddp", "fsdp")


def batch():
    g = torch.Generator().manual_seed(0)
    return torch.randint(0, 29, (4, 8), generator=g), torch.randint(0, 29, (4, 8), generator=g)


def build():
    model = GPT(CONFIG).double()
    initialize(model, 0)
    return model


def distributed(strategy):
    if strategy == "ddp":
        return torch.nn.parallel.DistributedDataParallel(build())
    model = GPT(CONFIG).double()
    mesh = init_device_mesh("cpu", (2,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    initialize(model, 0)  # after sharding: every rank fills its own shard
    return model


def worker(rank, port, folder):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    try:
        tokens, targets = (t[rank::2] for t in batch())
        for strategy in STRATEGIES:
            model = distributed(strategy)
            digest = weights_sha256(model)
            model(tokens, targets).backward()
            grads = {}
            for name, p in model.named_parameters():
                g = p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
                grads[name.removeprefix("module.")] = g
            if rank == 0:
                torch.save((digest, grads), folder / strategy)
        dist.barrier()
    finally:
        dist.destroy_process_group()


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def test_two_processes_give_the_weights_and_gradients_of_one(tmp_path):
    mp.start_processes(worker, (free_port(), tmp_path), nprocs=2, start_method="spawn")
    model = build()
    model(*batch()).backward()
    for strategy in STRATEGIES:
        digest, grads = torch.load(tmp_path / strategy, weights_only=True)
        assert digest == weights_sha256(model)
        assert grads.keys() == dict(model.named_parameters()).keys()
        for name, p in model.named_parameters():
            torch.testing.assert_close(grads[name], p.grad)
