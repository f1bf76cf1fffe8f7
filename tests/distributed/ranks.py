"""Runs jobs in many processes that meet over gloo, each process a fork of this one: torch is imported once.

Standard input: a JSON list of jobs. A job has `processes`, `out` (a directory for the results of each rank)
and either `arguments` (a command line of the suite; with `signal`: [rank, step], maybe, for a rank that gets
SIGTERM in the middle of that step) or `call` (a function below). Standard output: for each job a JSON list
with `status` and `stderr` of every rank.
"""

import contextlib
import importlib
import json
import os
import signal
import socket
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from optimizers.muon import MuonWithAuxAdam, TorchMuonWithAdamW
from tasks.runner import cli, sharding, training
from tasks.runner.config.compose import compose
from tasks.runner.loop import Trainer

# What the forks would import otherwise, each for itself.
PRELOADED = ("torch._dynamo", "torch.distributed.checkpoint", "timm", "sklearn.datasets")
CLASSES = {"muon": MuonWithAuxAdam, "muon_torch": TorchMuonWithAdamW}
# Tall, wide, square, convolution, fewer rows than ranks; one never gets a gradient.
SHAPES = ((7, 3), (3, 8), (5, 5), (6, 2, 3, 3), (2, 9))
UNUSED = 2
STEPS = 3


def matrices(count: int) -> nn.ParameterList:
    """Return the first `count` matrices and two vectors, seeded."""
    torch.manual_seed(0)
    return nn.ParameterList([torch.randn(shape) for shape in (*SHAPES[:count], (4,), (1,))])


def optimizer_of(parameters: nn.ParameterList, name: str) -> torch.optim.Optimizer:
    """Return Muon for the matrices (the last one in two blocks) and Adam for the vectors."""
    *whole, last = [p for p in parameters if p.ndim >= 2]
    vectors = [p for p in parameters if p.ndim < 2]
    muon = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1, "use_muon": True}
    adam = {"lr": 0.1, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.0, "use_muon": False}
    groups = [{**adam, "params": vectors}, {**muon, "params": whole}, {**muon, "params": [last]}]
    return CLASSES[name](groups, [(), (), (1, last.shape[0] - 1)], "keller_jordan")


def trained(count: int, name: str, sharded: bool) -> tuple[nn.ParameterList, torch.optim.Optimizer]:
    """Make some updates from seeded gradients."""
    parameters = matrices(count)
    if sharded:
        sharding.shard(parameters, torch.device("cpu"), "float32")
    optimizer = optimizer_of(parameters, name)
    for step in range(STEPS):
        torch.manual_seed(step + 1)
        gradients = [torch.randn(shape) for shape in (*SHAPES[:count], (4,), (1,))]
        for index, (parameter, gradient) in enumerate(zip(parameters, gradients, strict=True)):
            parameter.grad = None if index == UNUSED else sharding.placed_like(gradient, parameter.detach())
        optimizer.step()
    return parameters, optimizer


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole of a tensor."""
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def muon_updates(out: Path, rank: int) -> None:
    """Keep weights and momentum after some updates, for both classes, copies and shards."""
    found = {}
    several = dist.is_initialized()
    for count in (4, 5):
        for name in CLASSES:
            for kind in ("copies", "shards") if several else ("alone",):
                parameters, optimizer = trained(count, name, kind == "shards")
                momenta = {
                    str(i): whole(optimizer.state[p]["momentum_buffer"])
                    for i, p in enumerate(parameters)
                    if p.ndim >= 2 and optimizer.state[p]
                }
                weights = [whole(p) for p in parameters]
                found[f"{count} {name} {kind}"] = {"weights": weights, "momenta": momenta}
    torch.save(found, out / f"{rank}.pt")


def deliver(rank: int, step: int) -> None:
    """Let one rank get SIGTERM in the middle of a step."""
    update = Trainer.update

    def signalled(trainer: Trainer) -> tuple[float, float, float]:
        if trainer.step + 1 == step and trainer.ranks.rank == rank:
            os.kill(os.getpid(), signal.SIGTERM)
        return update(trainer)

    Trainer.update = signalled


def weights_of_each_rank(out: Path, rank: int) -> None:
    """Keep the weights that this process has at the end of a run."""
    work = training.work

    def keep(config, trainer, directory, display):
        result = work(config, trainer, directory, display)
        torch.save({n: whole(p) for n, p in trainer.plain_model.named_parameters()}, out / f"{rank}.pt")
        return result

    training.work = keep


def child(job: dict, rank: int, port: int, stderr: int) -> int:
    """Do one rank's part of a job and return its exit status."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(stderr, 2)
    count = job["processes"]
    os.environ["OMP_NUM_THREADS"] = "1"
    if count > 1:
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
        place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        os.environ.update({name: str(value) for name, value in place.items()})
    if "call" in job:
        if count > 1:
            dist.init_process_group("gloo")
        globals()[job["call"]](Path(job["out"]), rank)
        return 0
    if "signal" in job:
        deliver(*job["signal"])
    weights_of_each_rank(Path(job["out"]), rank)
    return cli.main(job["arguments"])


def fork(job: dict, rank: int, port: int, stderr: int) -> int:
    """Start one rank; return its process number."""
    process = os.fork()
    if process:
        return process
    status = 99
    try:
        status = child(job, rank, port, stderr)
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def run(job: dict) -> list[dict]:
    """Start all ranks of a job and wait for them; when one fails, the others' connections break."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    Path(job["out"]).mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as opened:
        files = [opened.enter_context(tempfile.TemporaryFile()) for _ in range(job["processes"])]
        processes = [fork(job, rank, port, file.fileno()) for rank, file in enumerate(files)]
        results = []
        for process, file in zip(processes, files, strict=True):
            _, code = os.waitpid(process, 0)
            file.seek(0)
            results.append({"status": os.waitstatus_to_exitcode(code), "stderr": file.read().decode()})
    return results


if __name__ == "__main__":
    torch.set_num_threads(1)
    for module in PRELOADED:
        importlib.import_module(module)
    compose(["experiment=text/tiny"])  # imports Hydra
    print(json.dumps([run(job) for job in json.load(sys.stdin)]))
