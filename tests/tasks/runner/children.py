"""Runs command lines of the suite, each in a forked process that may kill itself at a chosen point.

Standard input: a JSON list of {"arguments": [...], "kill": point or null, "step": n, "signal": number}.
Standard output: a JSON list of {"status", "signal", "stdout", "stderr"}. One import of torch serves them all;
the children use one thread, which is what makes a fork after that import safe.

Points: "update" (step n is made but not yet counted), "gradient" (before its optimizer step), "half-file"
(while the file of the checkpoint at step n is half written), "no-manifest" (its file is renamed, its manifest
not yet written), "before-record" (everything is done but the record).
"""

import json
import os
import signal
import sys
import tempfile

import torch
import torch._dynamo  # the first optimizer imports it: once here instead of in every child

from tasks.runner import checkpoint, cli, training
from tasks.runner.config.compose import compose
from tasks.runner.loop import Trainer


def arm(point: str, step: int, number: int) -> None:
    """Make this process send itself signal `number` at the point."""

    def now(*arguments: object, **keywords: object) -> None:
        os.kill(os.getpid(), number)

    if point == "update":
        update = Trainer.update

        def counted(trainer: Trainer) -> tuple[float, float, float]:
            result = update(trainer)
            if trainer.step + 1 == step:
                now()
            return result

        Trainer.update = counted
    elif point == "gradient":
        update = Trainer.update

        def cut(trainer: Trainer) -> tuple[float, float, float]:
            if trainer.step + 1 == step:
                trainer.optimizer.step = now
            return update(trainer)

        Trainer.update = cut
    elif point == "before-record":
        training.finish = now
    else:
        arm_write(point, step, now)


def arm_write(point: str, step: int, now: object) -> None:
    """Stop in the middle of writing the checkpoint of `step`."""
    write = checkpoint.write_whole
    name = f"step-{step:08d}"

    def cut(path, content) -> None:
        if point == "half-file" and path.name == f"{name}.pt":

            def half(temporary) -> None:
                content(temporary)
                os.truncate(temporary, temporary.stat().st_size // 2)
                now()

            write(path, half)
        if point == "no-manifest" and path.name == f"{name}.json":
            now()
        write(path, content)

    checkpoint.write_whole = cut


def child(job: dict, stdout: int, stderr: int) -> None:
    """Run one command line and exit with its status."""
    os.dup2(stdout, 1)
    os.dup2(stderr, 2)
    if job.get("kill"):
        arm(job["kill"], job["step"], job.get("signal", signal.SIGKILL))
    status = cli.main(job["arguments"])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def run(job: dict) -> dict:
    """Fork for one job and wait for it."""
    with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
        process = os.fork()
        if process == 0:
            try:
                child(job, stdout.fileno(), stderr.fileno())
            finally:
                import traceback

                traceback.print_exc()
                sys.stderr.flush()
                os._exit(99)
        _, code = os.waitpid(process, 0)
        texts = []
        for stream in (stdout, stderr):
            stream.seek(0)
            texts.append(stream.read().decode())
    killed = os.WIFSIGNALED(code)
    return {
        "status": None if killed else os.WEXITSTATUS(code),
        "signal": os.WTERMSIG(code) if killed else None,
        "stdout": texts[0],
        "stderr": texts[1],
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    compose(["experiment=text/tiny"])  # imports Hydra
    print(json.dumps([run(job) for job in json.load(sys.stdin)]))
