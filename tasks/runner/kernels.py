"""The CPU kernel, made ready while the data is: compiled once per machine, it takes some fifteen seconds."""

import os
import threading
import warnings

import torch

from tasks.runner.progress import Display


class KernelBuild:
    """Loads the compiled kernel in the background, building it on first use."""

    def __init__(self, device: torch.device) -> None:
        self.thread: threading.Thread | None = None
        if device.type == "cpu":
            from xsa_core.attention import cpu_kernel

            # The library warns when it does without its kernel; here the display says it, in its own line.
            warnings.filterwarnings("ignore", message="xsa_core runs without its CPU kernel")
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
        from xsa_core.attention import cpu_kernel

        if not cpu_kernel.ready() and os.environ.get("XSA_CPU_KERNEL") != "0":
            display.note("training without the CPU kernel, exact but slower; ./xsa info says why")
