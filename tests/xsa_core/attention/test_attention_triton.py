"""The Triton kernels compiled for a GPU that need not be there: the interpreter checks no types."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]

PROGRAM = """
import re
import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from xsa_core.attention import kernels

TYPES = {torch.float64: "*fp64", torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16"}
COMPILED = []


class Compiling:
    '''Stands for a kernel: a launch compiles it for these very arguments instead of running it.'''

    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        return self.launch

    def launch(self, *args, num_warps, **constants):
        given = dict(zip(self.kernel.arg_names, args)) | constants
        signature, aligned = {}, {}
        for i, parameter in enumerate(self.kernel.params):
            value = given[parameter.name]
            if parameter.is_constexpr:
                signature[parameter.name] = "constexpr"
                continue
            signature[parameter.name] = (
                TYPES[value.dtype] if isinstance(value, torch.Tensor)
                else "fp32" if isinstance(value, float) else "i32"
            )
            # As a launch would find it: pointers and multiples of 16 are known as such.
            if isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0):
                aligned[(i,)] = [["tt.divisibility", 16]]
        fixed = {(self.kernel.arg_names.index(k),): x for k, x in constants.items()}
        source = ASTSource(self.kernel, signature, fixed, aligned)
        made = compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": num_warps})
        COMPILED.append(len(made.asm["cubin"]))
        print(*sorted(set(re.findall(r"[ls][dt][.]global[.]v[.\\w]*", made.asm["ptx"]))))


for name in ("_forward_kernel", "_backward_kernel"):
    setattr(kernels, name, Compiling(getattr(kernels, name)))
for dtype, D, with_strength in ((torch.bfloat16, 80, True),):
    acc = torch.float32
    y, _, v = torch.zeros(2, 16, 8, D, dtype=dtype).split([4, 2, 2], dim=2)
    strength = torch.ones(4, dtype=acc).expand(2, 16, 4) if with_strength else None
    z, c = kernels.exclude(y, v, 1.0, strength)
    kernels.exclude_backward(y, z, v, c, 1.0, strength, with_strength)
assert len(COMPILED) == 2 and all(COMPILED)
"""


def test_the_kernels_compile_for_a_hopper_gpu_with_wide_memory_access():
    pytest.importorskip("triton")
    settings = os.environ | {"PYTHONPATH": str(ROOT), "TRITON_INTERPRET": "0", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=settings,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    for line in done.stdout.splitlines():  # a launch each
        assert "ld.global.v4.b32" in line
        assert "st.global.v4.b32" in line
