"""Make the environment on first use, then run the command in it. Standard library only.

`./xsa` starts this file with whatever Python 3.11 to 3.13 it found. The environment lies in `.venv`
(or XSA_VENV) and carries a stamp: the hash of requirements.lock and the Python it was made with. As
long as the stamp holds, nothing is installed.
"""

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LOCK = ROOT / "requirements.lock"
STAMP = "xsa-environment"
MINE = "xsa-environment-begun"  # written first: a directory without it is not ours to replace
DISK_NEEDED = 8.5e9  # bytes; torch with its CUDA libraries is most of it
# What a user may have set for pip that a virtual environment cannot take.
PIP_SETTINGS = {"PIP_USER": "0", "PIP_TARGET": "", "PIP_PREFIX": "", "PIP_REQUIRE_VIRTUALENV": "0"}


def say(line: str) -> None:
    """Print one line about what the launcher does, on standard error."""
    print(f"xsa: {line}", file=sys.stderr, flush=True)


def fail(line: str) -> None:
    """Print one line about what went wrong and exit with status 2."""
    say(f"error: {line}")
    sys.exit(2)


def wants_no_environment(arguments: list[str]) -> bool:
    """Tell whether the command only prints help or the version, which must work before installing."""
    if not arguments or arguments[0] in {"help", "--version"}:
        return True
    ours = arguments[: arguments.index("--")] if "--" in arguments else arguments
    return any(word in {"-h", "--help"} for word in ours)


def environment_directory() -> Path:
    """Return where the environment lies: XSA_VENV, or `.venv` beside the launcher."""
    return Path(os.environ.get("XSA_VENV") or ROOT / ".venv").absolute()


def wanted_stamp() -> str:
    """Return the text the environment's stamp must hold: lock, Python version and location."""
    digest = hashlib.sha256(LOCK.read_bytes()).hexdigest()
    version = ".".join(map(str, sys.version_info[:3]))
    return f"lock {digest}\npython {version}\n"


@contextlib.contextmanager
def only_one(venv: Path) -> Iterator[None]:
    """Hold the installation lock, so that two first runs at once build one environment."""
    try:
        venv.parent.mkdir(parents=True, exist_ok=True)
        handle = (venv.parent / f"{venv.name}.lock").open("w")
    except OSError as error:
        fail(f"{venv} cannot be made ({error.strerror}); name another place in XSA_VENV")
    with handle:
        # Installers inherit the lock: should this process be killed, no other starts beside them.
        os.set_inheritable(handle.fileno(), True)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("waiting for another process that is installing")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def is_ready(venv: Path, stamp: str) -> bool:
    """Tell whether the environment exists, is whole, and was made from this lock and Python."""
    try:
        return (venv / STAMP).read_text() == stamp and os.access(venv / "bin" / "python", os.X_OK)
    except OSError:
        return False


def make_environment(venv: Path, stamp: str) -> None:
    """Build the environment anew from the lock; the stamp is written last."""
    count = sum(1 for line in LOCK.read_text().splitlines() if "==" in line and not line.startswith("#"))
    uv = shutil.which("uv")
    why = (
        "first run"
        if not venv.exists()
        else "requirements.lock or Python changed, or an install was cut short"
    )
    clear(venv)
    free = shutil.disk_usage(venv.parent).free
    if free < DISK_NEEDED:
        say(
            f"warning: {free / 1e9:.1f} GB free at {venv.parent}, "
            f"the packages need about {DISK_NEEDED / 1e9:.1f} GB"
        )
    python = ".".join(map(str, sys.version_info[:3]))
    say(
        f"making {venv} ({why}; Python {python}, {count} packages of requirements.lock, "
        f"with {'uv' if uv else 'pip, then uv'})"
    )
    start = time.monotonic()
    if uv:
        run(
            [uv, "venv", "--quiet", "--allow-existing", "--python", sys.executable, str(venv)],
            "uv could not make a virtual environment",
        )
    else:
        run(
            [sys.executable, "-m", "venv", str(venv)],
            "python -m venv failed; install this Python's venv module (on Debian and Ubuntu: python3-venv)",
        )
        uv = bootstrap_uv(venv)
    if not (uv and install_with_uv(uv, venv)):
        install_with_pip(venv)
    write_stamp(venv, stamp)
    say(f"environment ready after {time.monotonic() - start:.0f} s")


def clear(venv: Path) -> None:
    """Remove an environment of ours, whole or half-made, and begin a new one; never anything else."""
    if venv.exists() and not venv.is_dir():
        fail(f"{venv} is a file, expected a directory for the environment; name another in XSA_VENV")
    ours = any((venv / name).exists() for name in (STAMP, MINE))
    if venv.is_dir() and not ours and any(venv.iterdir()):
        fail(f"{venv} is not an environment of this suite and is left alone; name another in XSA_VENV")
    try:
        if venv.exists():
            shutil.rmtree(venv)
        venv.mkdir()
        (venv / MINE).touch()
    except OSError as error:
        fail(f"{error.filename}: {error.strerror}; the environment cannot be made there, set XSA_VENV")


def write_stamp(venv: Path, stamp: str) -> None:
    """Write the stamp whole: under a temporary name, then renamed."""
    temporary = venv / f"{STAMP}.tmp"
    temporary.write_text(stamp)
    temporary.replace(venv / STAMP)


def run(command: list[str], on_failure: str) -> None:
    """Run one installation command; on failure exit with the given line."""
    if call(command):
        fail(on_failure)


def call(command: list[str], environment: dict[str, str] | None = None) -> int:
    """Run an installation command on standard error, holding the lock with us; return its status."""
    environment = {**(environment or os.environ), **PIP_SETTINGS}
    for name in [name for name, value in PIP_SETTINGS.items() if not value]:
        environment.pop(name)
    return subprocess.run(
        command, stdout=sys.stderr, env=environment, close_fds=False, check=False
    ).returncode


def bootstrap_uv(venv: Path) -> str | None:
    """Install the lock's own uv (same version, same hashes) into the new environment with pip."""
    stanza = lock_stanza("uv")
    if stanza is None:
        return None
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write(stanza)
        file.flush()
        pip = [str(venv / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        status = call([*pip, "--no-deps", "--require-hashes", "-r", file.name])
    return str(venv / "bin" / "uv") if status == 0 else None


def lock_stanza(package: str) -> str | None:
    """Return the lock's lines for one package: the requirement and its hashes."""
    lines = LOCK.read_text().splitlines()
    for first, line in enumerate(lines):
        if line.startswith(f"{package}=="):
            last = first
            while lines[last].endswith("\\"):
                last += 1
            return "\n".join(lines[first : last + 1]) + "\n"
    return None


def install_with_uv(uv: str, venv: Path) -> bool:
    """Install the lock with uv; False where that fails, so that pip can try."""
    environment = {**os.environ, "VIRTUAL_ENV": str(venv)}
    # uv does not read pip's configuration: pass on the index a user has set for pip.
    for ours, theirs in (("PIP_INDEX_URL", "UV_DEFAULT_INDEX"), ("PIP_EXTRA_INDEX_URL", "UV_INDEX")):
        if os.environ.get(ours) and not os.environ.get(theirs):
            environment[theirs] = os.environ[ours]
    # On a terminal uv shows how far the download is; elsewhere it would fill the log.
    quiet = [] if sys.stderr.isatty() else ["--quiet"]
    if (
        call([uv, "pip", "install", *quiet, "--no-deps", "--require-hashes", "-r", str(LOCK)], environment)
        == 0
    ):
        return True
    say("uv could not install the lock; trying pip, which takes minutes longer")
    return False


def install_with_pip(venv: Path) -> None:
    """Install the lock with plain pip. The lock is complete, so pip need not resolve anything."""
    python = str(venv / "bin" / "python")
    if subprocess.run([python, "-m", "pip", "--version"], stdout=subprocess.DEVNULL, check=False).returncode:
        run([python, "-m", "ensurepip"], "this Python has no pip; install it, or install uv")
    run(
        [
            python,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--disable-pip-version-check",
            "--no-deps",
            "--require-hashes",
            "-r",
            str(LOCK),
        ],
        "pip could not install requirements.lock (its message stands above); run the command again",
    )


def main(arguments: list[str]) -> None:
    """Run the command: help in this interpreter, everything else in the environment."""
    sys.path.insert(0, str(ROOT))
    from tasks.errors import UserError
    from tasks.runner import cli

    if wants_no_environment(arguments):
        sys.exit(cli.main(arguments))
    try:
        cli.parse(arguments)  # a misspelt command or option must not install 8 GB first
    except UserError as error:
        fail(str(error))
    venv, stamp = environment_directory(), wanted_stamp()
    if not is_ready(venv, stamp):
        with only_one(venv):
            if not is_ready(venv, stamp):
                make_environment(venv, stamp)
    python = str(venv / "bin" / "python")
    os.environ["VIRTUAL_ENV"] = str(venv)
    os.environ["PATH"] = f"{venv / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}"
    # -P: the working directory is not searched for packages; a `tasks` or `torch.py` there is the user's.
    os.execv(python, [python, "-P", "-m", "tasks", *arguments])


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except KeyboardInterrupt:
        say("stopped; run the same command again to go on")
        sys.exit(130)
