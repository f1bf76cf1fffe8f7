"""Everything that needs a GPU, in one script of at most eight minutes: `./xsa bench gpu`.

Needs torch, triton, einops and numpy alone; xformers is measured where it is installed. On a machine with
no more than that: `python -m tasks.bench.gpu --out bench-gpu.json` writes the same record. Correctness
comes first: a wrong kernel has no speed. A part stops before the next piece would exceed its time; what the
targets are stated for comes first.

Axis legend: B batch, T tokens, H heads, Hkv key/value heads, D channels of a head, C width.
"""

import argparse
import json
import math
import platform
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tasks.bench import attention, gpu_cases, peers, roofline, step
from tasks.bench.timing import interleave
from xsa_core import GPT, GPTConfig, exclusive_attention, initialize
from xsa_core.attention import exclusive_attention as specification
from xsa_core.attention.backends import backend_matrix

MINUTES = 8.0
ENDS = {
    "checks": 0.3,
    "blocks": 0.5,
    "operator": 0.9,
}  # of the whole time; the step takes a minute in between
# The floor of a check in eps. float32 kernels of the GPU multiply in three TF32 parts.
FLOORS = {"float32": 64, "bfloat16": 8, "float16": 8}
BLOCKS = {  # the paper's sizes (section 4); the target is stated for the first
    "1.4B block": {"d_model": 2048, "n_heads": 24, "head_dim": 128},
    "0.7B block": {"d_model": 1536, "n_heads": 6, "head_dim": 256},
}
GPT_124M = {"vocab_size": 50304, "n_layers": 12, "n_heads": 12, "d_model": 768, "max_seq_len": 1024}
DEFAULTS = {"reference", "sdpa"}
Rows = list[dict[str, Any]]


class WrongKernelError(RuntimeError):
    """A kernel whose numbers differ from float64 by more than its dtype allows."""


class Clock:
    """Time until a part must end; knows the longest piece so far, to start none that would not fit."""

    def __init__(self, end: float) -> None:
        self.end, self.longest = end, 0.0
        self.started: float | None = None

    def room(self) -> bool:
        """Whether one more piece fits; call it before each one, which also takes the time of the last."""
        now = time.monotonic()
        if self.started is not None:
            self.longest = max(self.longest, now - self.started)
        self.started = now
        return now + self.longest < self.end


def usable_backends(device: torch.device) -> list[str]:
    """Return the backends that can run here."""
    return [
        str(row["name"]) for row in backend_matrix() if row["available"] and device.type in row["devices"]
    ]


def check(case: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Compare output and gradients of one case with float64 autograd.

    The error may be a number of eps of the largest entry, and for q, k and v twice that of the two lines in
    that dtype besides. A backend that refuses the case, or fails in it, has no numbers: `ok` is None and
    `note` says why.
    """
    dtype = getattr(torch, case["dtype"])
    made, upstream = gpu_cases.tensors(case)
    given = [tensor.to(device, dtype) for tensor in made]

    def exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *extra: torch.Tensor) -> torch.Tensor:
        options = gpu_cases.options(case, extra, q.device)
        return specification(q, k, v, backend="reference", **options)

    def ours(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *extra: torch.Tensor) -> torch.Tensor:
        return exclusive_attention(q, k, v, backend=case["backend"], **gpu_cases.options(case, extra, device))

    rounded = [tensor.to(dtype).double() for tensor in made]
    wanted = with_gradients(exact, rounded, upstream.to(dtype).double())
    try:
        found = with_gradients(ours, given, upstream.to(device, dtype))
    except Exception as error:  # whatever a kernel may raise on a machine nobody has seen
        failed = not isinstance(error, ValueError)
        line = (str(error).splitlines() or [""])[0]
        return {**case, "ok": None, "failed": failed, "note": f"{type(error).__name__}: {line}"}
    plain = wanted
    if case["kind"] == "causal":
        plain = with_gradients(peers.two_line_attention, given, upstream.to(device, dtype))
    floor = FLOORS[case["dtype"]] * torch.finfo(dtype).eps
    errors, limits = [], []
    for a, b, c in zip(found, plain, wanted, strict=True):
        size = c.abs().max().clamp_min(1.0)  # inputs are of that order; the output for T = 1 is zero
        errors.append(((a.double().cpu() - c).abs().max() / size).item())
        limits.append(2 * ((b.double().cpu() - c).abs().max() / size).item() + floor)
    ok = all(error <= limit for error, limit in zip(errors, limits, strict=True))
    worst = max(errors) if all(math.isfinite(error) for error in errors) else None  # JSON has no NaN
    return {**case, "ok": ok, "worst_error": worst, "limit": max(limits)}


def with_gradients(
    function: Callable[..., torch.Tensor], inputs: list[torch.Tensor], upstream: torch.Tensor
) -> list[torch.Tensor]:
    """Return the output and the gradients of the inputs, NaN for one that is missing."""
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    output = function(*leaves)
    output.backward(upstream)
    return [output.detach(), *(torch.full_like(x, torch.nan) if x.grad is None else x.grad for x in leaves)]


def operator_rows(
    device: torch.device, clock: Clock, rounds: int, lengths: list[int], tokens: int, backends: set[str]
) -> Rows:
    """Measure the operator over sequence lengths at fixed tokens, and those of `backends` that auto may
    choose."""
    rows: Rows = []
    for head_dim in (128, 64):
        for length in lengths:
            if not clock.room():
                return rows
            heads = 16
            shape = attention.Shape(
                "fixed tokens", max(1, tokens // length), length, heads, head_dim, "bfloat16"
            )
            extra = {name: attention.by_backend(name) for name in sorted(backends & {"xformers", "flex"})}
            found = attention.candidates(device.type == "cuda", extra)
            flops = roofline.attention_flops(shape.batch, length, heads, head_dim)
            for row in attention.measure(shape, device, rounds, found):
                rows.append(
                    {**row, "part": "operator", "flops_per_second": flops / row["milliseconds"] * 1e3}
                )
    return rows


class Block(nn.Module):
    """One Transformer block of the paper's decoder as a one-layer GPT without embedding or head."""

    def __init__(self, sizes: dict[str, int], variant: str, length: int) -> None:
        super().__init__()
        config = GPTConfig(vocab_size=8, n_layers=1, max_seq_len=length, variant=variant, **sizes)
        self.gpt = GPT(config)
        initialize(self.gpt, 0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`B T C -> B T C`."""
        return self.gpt.hidden(embeddings=x)


def block_rows(device: torch.device, clock: Clock, rounds: int, length: int, batch: int) -> Rows:
    """Measure forward and backward of the paper's blocks in bf16: plain, two lines, fused."""
    rows: Rows = []
    for name, sizes in BLOCKS.items():
        if not clock.room():
            return rows
        x = torch.randn(
            batch, length, sizes["d_model"], device=device, dtype=torch.bfloat16, requires_grad=True
        )
        models = {
            "plain": Block(sizes, "sa", length),
            "two lines": Block(sizes, "sa", length),
            "fused": Block(sizes, "xsa", length),
        }
        peers.with_two_lines(models["two lines"].gpt)
        for model in models.values():
            model.to(device, torch.bfloat16)

        def both(model: nn.Module, x: torch.Tensor = x) -> None:
            model.zero_grad(set_to_none=True)
            x.grad = None
            model(x).sum().backward()

        calls = {key: (lambda model=model: both(model)) for key, model in models.items()}
        for key, timing in interleave(calls, rounds, "plain", device).items():
            low, high = timing.interval
            row = {"part": "block", "model": name, "batch": batch, "length": length, "precision": "bfloat16"}
            ratio = {"ratio": timing.ratio, "ratio_low": low, "ratio_high": high, "rounds": rounds}
            rows.append({**row, "attention": key, "milliseconds": 1e3 * timing.median_seconds, **ratio})
    return rows


def run(device: torch.device, minutes: float = MINUTES, small: bool = False) -> dict[str, Any]:
    """Run all parts; return {"rows": [...], "summary": {...}}. `small`: tiny sizes, no time limit.

    A backend that gave wrong numbers or failed is not measured; its checks say so in the record.

    Raises:
        WrongKernelError: this happened to a kernel that runs by default; nothing is measured then.
    """
    start, rounds = time.monotonic(), 3 if small else 15
    seconds = math.inf if small else 60 * minutes
    clocks = {part: Clock(start + seconds * share) for part, share in ENDS.items()}
    checks = []
    for case in gpu_cases.cases(usable_backends(device), device):
        # The default kernels are always checked; the others while there is time, and if not are not measured.
        if case["backend"] in DEFAULTS or clocks["checks"].room():
            checks.append(check(case, device))
    wrong = [case for case in checks if case["ok"] is False or case.get("failed")]
    if fatal := [case for case in wrong if case["backend"] in DEFAULTS]:
        raise WrongKernelError(f"{len(fatal)} of {len(checks)} checks failed, first: {fatal[0]}")
    sound = {case["backend"] for case in checks} - {case["backend"] for case in wrong}
    size = 1 << (22 if small else 30)
    summary: dict[str, Any] = {
        "checks": len(checks),
        "checks_refused": sum(case["ok"] is None for case in checks),
        "checks_failed": len(wrong),
        "copy_bytes_per_second": roofline.copy_bandwidth(device, size),
        "matrix_flops_per_second": roofline.matrix_rate(device, 256 if small else 8192, torch.bfloat16),
    }
    rows: Rows = [{"part": "check", **case} for case in checks]
    length, batch = (32, 1) if small else (2048, 8)
    rows += block_rows(device, clocks["blocks"], rounds, length, batch)
    sizes = {**GPT_124M, "n_layers": 1, "d_model": 96, "max_seq_len": 64} if small else GPT_124M
    for row in step.measure(sizes, 1 if small else 16, "bfloat16", device, rounds):
        rows.append({"part": "step", **row})
    lengths = [64, 128] if small else [2048, 512, 8192, 1024, 4096, 16384]
    tokens = 256 if small else 32768
    rows += operator_rows(device, clocks["operator"], rounds, lengths, tokens, sound)
    fused = {row["model"]: row["ratio"] for row in rows if row.get("model") and row["attention"] == "fused"}
    summary |= {f"fused_over_plain {name}": ratio for name, ratio in fused.items()}
    return {"rows": rows, "summary": summary}


def record(device: torch.device, minutes: float, small: bool) -> dict[str, Any]:
    """Return the record of a whole run as plain data, in the schema of `results.record.BenchRecord`."""
    started = datetime.now(UTC).isoformat(timespec="microseconds")
    found = run(device, minutes, small)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor()
    return {
        "schema_version": 1,
        "kind": "bench",
        "run_id": "",
        "name": "gpu",
        "config": {"minutes": minutes, "small": small},
        "environment": {
            "python": platform.python_version(),
            "platform": f"{platform.system()}-{platform.machine()}",
            "cpu": platform.processor() or platform.machine(),
            "threads": torch.get_num_threads(),
            "versions": {"torch": str(torch.__version__)},
            "device": str(device),
            "device_name": name,
            "precision": "bfloat16",
        },
        "rows": found["rows"],
        "summary": found["summary"],
        "started_at": started,
        "finished_at": datetime.now(UTC).isoformat(timespec="microseconds"),
    }


def main() -> None:
    """Run as a script: measure and write one JSON file."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="file to write")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--minutes", type=float, default=MINUTES)
    parser.add_argument("--small", action="store_true", help="tiny sizes, to try the script out")
    options = parser.parse_args()
    content = record(torch.device(options.device), options.minutes, options.small)
    temporary = options.out.with_name(f".{options.out.name}.tmp")
    temporary.write_text(json.dumps(content, indent=1))
    temporary.replace(options.out)
    print(json.dumps(content["summary"], indent=1))


if __name__ == "__main__":
    main()
