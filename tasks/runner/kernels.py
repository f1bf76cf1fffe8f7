"""The CPU kernel, made ready while the data is: compiled once per machine, it takes some fifteen seconds."""

import threading

import torch

from tasks.runner.progress import Display


class KernelBuild:
    """Loads the compiled kernel in the background, building it on first use."""

    def __init__(self, device: torch.device) -> None:
        self.thread: threading.Thread | None = None
        if device.type == "cpu":
            from xsa_core.attention import cpu_kernel

            self.thread = threading.Thread(target=cpu_kernel.ready, name="cpu-kernel", daemon=True)
            self.thread.start()

    def wait(self, display: Display) -> None:
        """Wait until the kernel is ready or known to be unavailable, and say so if that takes time."""
        if self.thread is None:
            return
        self.thread.join(timeout=1.0)
        if self.thread.is_alive():
            display.note("compiling the CPU kernel (once on this machine)")
            self.thread.join()
