"""Settings that must hold before anything imports triton."""

import os

import torch

# Triton's interpreter runs the CUDA kernels on the CPU; it is chosen when triton is first imported.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
