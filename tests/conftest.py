"""Settings that must hold before anything imports triton."""

import os

# One thread a test process: pytest-xdist already runs one process per core, and threads that wait for each
# other on a busy core cost many times what they save.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

# Triton's interpreter runs the CUDA kernels on the CPU; it is chosen when triton is first imported.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
