"""Builds the C++ projection once, keeps it in the user's cache, and loads it.

A missing compiler, a failed or hanging build and a broken file cost one warning; the plain torch version then
serves. ``XSA_CPU_KERNEL=0`` turns the kernel off; ``XSA_CACHE`` names another cache folder.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch

from xsa_core.attention.constants import compile_time_constant

SOURCE = Path(__file__).with_name("csrc") / "projection.cpp"
BUILD_TIMEOUT_S = 300.0
LOCK_TIMEOUT_S = 330.0

# What at::vec needs to pick its vector width: the macro of torch's own build and its instruction sets.
_VECTOR_FLAGS = {
    "AVX512": "-DCPU_CAPABILITY=AVX512 -DCPU_CAPABILITY_AVX512 "
    "-mavx512f -mavx512dq -mavx512vl -mavx512bw -mavx2 -mfma -mf16c",
    "AVX2": "-DCPU_CAPABILITY=AVX2 -DCPU_CAPABILITY_AVX2 -mavx2 -mfma -mf16c",
}

_log = logging.getLogger(__name__)
_ready: bool | None = None


class BuildError(RuntimeError):
    """The kernel could not be built or loaded here; the message is one line.

    ``lasting``: the same build would fail again, so it is noted and not tried anew. An interrupt, a full disk
    or a machine too busy is not.
    """

    def __init__(self, message: str, lasting: bool = True) -> None:
        super().__init__(message)
        self.lasting = lasting


def cache_dir() -> Path:
    """Folder of built kernels: ``$XSA_CACHE``, else ``xsa`` in ``$XDG_CACHE_HOME`` or ``~/.cache``."""
    if own := os.environ.get("XSA_CACHE"):
        return Path(own) / "kernels"
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "xsa" / "kernels"


def compiler() -> list[str]:
    """The C++ compiler as a command: ``$CXX``, else c++, g++ or clang++.

    Raises:
        BuildError: if there is none.
    """
    if named := os.environ.get("CXX"):
        return shlex.split(named)
    for name in ("c++", "g++", "clang++"):
        if path := shutil.which(name):
            return [path]
    raise BuildError("no C++ compiler found (c++, g++, clang++ or $CXX)")


def flags() -> list[str]:
    """Compiler flags for this CPU and this torch."""
    return [
        *["-O3", "-fPIC", "-shared", "-fopenmp", "-fno-math-errno", "-fno-trapping-math"],
        "-std=c++17" if torch.__version__ < "2.11" else "-std=c++20",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        *_VECTOR_FLAGS.get(torch.backends.cpu.get_cpu_capability(), "").split(),
    ]


def build_command(output: Path) -> list[str]:
    """The one compiler call that makes ``output``, against torch's own headers and libraries."""
    # Its import looks for a CUDA toolkit and complains where it finds one without a device.
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    from torch.utils import cpp_extension

    includes = [word for path in cpp_extension.include_paths("cpu") for word in ("-isystem", path)]
    libraries = [f"-L{path}" for path in cpp_extension.library_paths("cpu")]
    return [
        *compiler(),
        *flags(),
        *includes,
        str(SOURCE),
        *libraries,
        *["-lc10", "-ltorch_cpu", "-o"],
        str(output),
    ]


def cache_key() -> str:
    """Hash of all that the built file depends on: source, flags of this CPU, torch, compiler."""
    command = compiler()
    version = subprocess.run([*command, "--version"], capture_output=True, text=True, timeout=30, check=False)
    sources = [path.read_text() for path in sorted(SOURCE.parent.iterdir())]
    parts = [*sources, torch.__version__, platform.machine(), *command, version.stdout, *flags()]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:20]


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Exclusive between processes; the system releases it when its holder dies, so it is never stale."""
    with path.open("w") as handle:
        deadline = time.monotonic() + LOCK_TIMEOUT_S
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    reason = f"another process has been building for {LOCK_TIMEOUT_S:.0f} s"
                    raise BuildError(reason) from None
                time.sleep(0.2)
            except OSError:  # a file system without locks: two builds at once are wasteful, not wrong
                break
        yield


def build(target: Path) -> None:
    """Compile to a temporary name beside ``target`` and rename.

    Raises:
        BuildError: with the first line of the compiler's complaint.
    """
    _log.info("building the CPU kernel of the exclusion once, about half a minute: %s", target)
    handle, name = tempfile.mkstemp(prefix=target.stem, suffix=".tmp", dir=target.parent)
    os.close(handle)
    try:
        done = subprocess.run(
            build_command(Path(name)),
            capture_output=True,
            text=True,
            timeout=BUILD_TIMEOUT_S,
            check=False,
            start_new_session=True,  # Ctrl-C in the terminal must not look like a compiler that fails
        )
        if done.returncode:
            lines = done.stderr.splitlines() or [f"exit status {done.returncode}"]
            killed = done.returncode < 0 or "No space left" in done.stderr or "Killed" in done.stderr
            complaint = next((line for line in lines if "error" in line), lines[0])
            raise BuildError(f"the compiler failed: {complaint}", lasting=not killed)
        Path(name).chmod(0o755)  # a cache may be shared
        Path(name).replace(target)
    except subprocess.TimeoutExpired:
        raise BuildError(f"the compiler took more than {BUILD_TIMEOUT_S:.0f} s", lasting=False) from None
    finally:
        Path(name).unlink(missing_ok=True)


def load() -> Path:
    """Load the kernel, building it first where the cache has none that loads; returns its file.

    Raises:
        BuildError: if it can be neither built nor loaded.
    """
    try:
        folder = cache_dir()
        folder.mkdir(parents=True, exist_ok=True)
        target = folder / f"projection-{cache_key()}.so"
        if target.exists() and _why_not_loaded(target) is None:
            return target
        with _lock(target.with_suffix(".lock")):
            if target.exists() and _why_not_loaded(target) is None:  # another process was faster
                return target
            _build_and_load(target)
        return target
    except (OSError, subprocess.SubprocessError) as error:
        raise BuildError(str(error).splitlines()[0] if str(error) else type(error).__name__) from error


def _build_and_load(target: Path) -> None:
    """Build ``target``; a failure is written beside it, so that the next process does not build in vain too.

    Raises:
        BuildError: if it fails, or failed before.
    """
    failure = target.with_suffix(".failed")
    if failure.exists():
        raise BuildError(f"{failure.read_text().strip()} (noted in {failure}; delete that file to try again)")
    try:
        target.unlink(missing_ok=True)
        build(target)
        if reason := _why_not_loaded(target):
            raise BuildError(f"the built file does not load: {reason}")
    except BuildError as error:
        if error.lasting:
            failure.write_text(f"{error}\n")
        raise


def _why_not_loaded(path: Path) -> str | None:
    """Load the library, which registers its functions; None when that worked, else the linker's reason."""
    try:
        ctypes.CDLL(str(path))
    except OSError as error:
        return str(error).splitlines()[0]
    return None


@compile_time_constant
def ready() -> bool:
    """Whether the C++ kernel serves in this process. The first call loads it, and builds it if need be."""
    global _ready
    if _ready is None:
        if os.environ.get("XSA_CPU_KERNEL", "1") == "0":
            _ready = False
        else:
            try:
                load()
                _ready = True
            except BuildError as error:
                _ready = False
                warnings.warn(
                    f"xsa_core runs without its CPU kernel, exact but slower: {error}; set XSA_CPU_KERNEL=0 "
                    "to silence this",
                    RuntimeWarning,
                    stacklevel=2,
                )
    return _ready
