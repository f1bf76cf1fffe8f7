"""Builds the C++ projection once, keeps it in the user's cache, and loads it.

The build takes about half a minute of the first call on the CPU, and says so on stderr. A missing compiler, a
failed or hanging build and a broken file cost one warning; the plain torch version then serves.
``XSA_CPU_KERNEL=0`` turns the kernel off; ``XSA_CACHE`` names another cache folder.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import logging
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import torch

from xsa_core.attention import kernel_cache
from xsa_core.attention.constants import compile_time_constant
from xsa_core.files import cache_root, whole

SOURCE = Path(__file__).with_name("csrc") / "projection.cpp"
SEAL = ".sealed"
VERSION_TIMEOUT_S = 30.0
BUILD_TIMEOUT_S = 900.0  # a build that shares a core with much else is slow, not stuck
LOCK_TIMEOUT_S = 930.0

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


def compiler() -> list[str]:
    """The C++ compiler as a command: ``$CXX``, else c++, g++ or clang++.

    Raises:
        BuildError: if there is none, or ``$CXX`` cannot be read as a command.
    """
    if named := os.environ.get("CXX", "").strip():
        try:
            return shlex.split(named)
        except ValueError as error:
            raise BuildError(f"CXX={named} is not a command: {error}; quote it as a shell would") from None
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
    torch_home = Path(torch.__file__).parent
    headers = torch_home / "include"
    includes = [
        word for path in (headers, headers / "torch/csrc/api/include") for word in ("-isystem", str(path))
    ]
    libraries = [f"-L{torch_home / 'lib'}", "-lc10", "-ltorch_cpu"]
    return [*compiler(), *flags(), *includes, str(SOURCE), *libraries, "-o", str(output)]


def cache_key() -> str:
    """Hash of all that the built file depends on: source, flags of this CPU, torch, compiler.

    Raises:
        BuildError: if the compiler does not run.
    """
    command = compiler()
    code, version = _run([*command, "--version"], VERSION_TIMEOUT_S)
    sources = [path.read_text() for path in sorted(SOURCE.parent.iterdir())]
    answer = version if code == 0 else str(code)
    parts = [*sources, torch.__version__, platform.machine(), *command, answer, *flags()]
    return hashlib.sha256("\0".join(parts).encode(errors="replace")).hexdigest()[:20]


def _run(command: list[str], timeout: float) -> tuple[int, str]:
    """Exit status and output of a compiler call; after `timeout` seconds, or at an interrupt, it and all that
    it started are killed.

    Raises:
        BuildError: if it cannot be started or takes too long.
    """
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,  # Ctrl-C in the terminal must not look like a compiler that fails
        )
    except OSError as error:
        raise BuildError(f"the compiler {command[0]} does not start: {error.strerror}") from None
    try:
        output, _ = process.communicate(timeout=timeout)
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        if isinstance(error, subprocess.TimeoutExpired):
            raise BuildError(f"the compiler took more than {timeout:.0f} s", lasting=False) from None
        raise
    return process.returncode, output


def build(target: Path) -> None:
    """Compile to a temporary name beside ``target`` and rename; its size and hash go into a file beside it.

    Raises:
        BuildError: with the first line of the compiler's complaint.
    """
    _announce("compiling the attention kernel for this CPU, once, about half a minute")
    with whole(target) as temporary:
        code, output = _run(build_command(temporary), BUILD_TIMEOUT_S)
        if code:
            lines = output.splitlines() or [f"exit status {code}"]
            killed = code < 0 or "No space left" in output or "Killed" in output
            complaint = next((line for line in lines if "error" in line), lines[0])
            raise BuildError(f"the compiler failed: {complaint}", lasting=not killed)
        if not temporary.exists():
            raise BuildError(f"the compiler {compiler()[0]} produced no file")
        temporary.chmod(0o755)  # a cache may be shared
        seal = _seal(temporary)
    with whole(target.with_suffix(SEAL)) as temporary:
        temporary.write_text(seal)


def _announce(message: str) -> None:
    """One line on stderr before a wait that would look like a hang. A daemon thread works in the background:
    whoever waits for it has a place of its own to say so."""
    _log.info(message)
    if not threading.current_thread().daemon:
        print(f"xsa_core: {message}", file=sys.stderr, flush=True)


def _seal(path: Path) -> str:
    """Size and sha256 of a file."""
    content = path.read_bytes()
    return f"{len(content)} {hashlib.sha256(content).hexdigest()}\n"


def _folder() -> Path:
    try:
        return cache_root() / "kernels"
    except RuntimeError as error:  # neither a cache nor a home directory is known
        raise BuildError(f"{error} Set XSA_CACHE to a directory for built kernels") from None


def load() -> Path:
    """Load the kernel, building it first where the cache has none that is whole and loads; returns its file.

    Raises:
        BuildError: if it can be neither built nor loaded.
    """
    folder = _folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        target = folder / f"projection-{cache_key()}.so"
        kernel_cache.tidy(folder, older_than_s=2 * LOCK_TIMEOUT_S)
        if _why_not_loaded(target) is None:
            return target
        wait = functools.partial(
            _announce, "waiting for another process that is compiling the attention kernel"
        )
        with kernel_cache.lock(target.with_suffix(".lock"), LOCK_TIMEOUT_S, wait):
            if _why_not_loaded(target) is not None:  # else another process was faster
                _build_and_load(target)
        return target
    except TimeoutError as error:
        raise BuildError(str(error), lasting=False) from None
    except OSError as error:
        where = f"cannot keep kernels in {folder}: {error.strerror or error}"
        raise BuildError(f"{where}; set XSA_CACHE to a directory that can be written") from error


def _build_and_load(target: Path) -> None:
    """Build ``target``; a failure is written beside it, so that the next process does not build in vain too.

    Raises:
        BuildError: if it fails, or failed before.
    """
    failure = target.with_suffix(".failed")
    if failure.exists():
        raise BuildError(f"{failure.read_text().strip()} (noted in {failure}; delete that file to try again)")
    try:
        build(target)
        if reason := _why_not_loaded(target):
            raise BuildError(f"the built file does not load: {reason}")
    except BuildError as error:
        if error.lasting:
            with whole(failure) as temporary:
                temporary.write_text(f"{error}\n")
        raise


def _why_not_loaded(path: Path) -> str | None:
    """Load the library, which registers its functions; None when that worked, else the reason.

    A file cut short or damaged can crash the process that maps it, so its hash is compared first.
    """
    try:
        if _seal(path) != path.with_suffix(SEAL).read_text():
            return "it is damaged"
        ctypes.CDLL(str(path))
    except OSError as error:
        return str(error).splitlines()[0]
    return None


def _callers_level() -> int:
    """The `stacklevel` of a warning of :func:`ready` that points at the user's line, past this library and
    torch."""
    inside = tuple(str(Path(module.__file__).parent) + os.sep for module in (torch, sys.modules["xsa_core"]))
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(inside):
        level, frame = level + 1, frame.f_back
    return level


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
                    stacklevel=_callers_level(),
                )
    return _ready
