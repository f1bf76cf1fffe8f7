"""Building and caching of the C++ kernel: once, never hanging, never failing a run."""

import ctypes
import os
import stat
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest
import torch

from xsa_core.attention import cpu_kernel, exclude, kernel_cache

ROOT = Path(__file__).parents[3]

PROGRAM = """
import sys, warnings, torch
warnings.simplefilter("always")
from xsa_core.attention import cpu_kernel, exclude
y, v = torch.arange(24.0).reshape(1, 2, 2, 6), torch.ones(1, 2, 1, 6)
y.requires_grad_()
z = exclude(y, v)
z.sum().backward()
assert z.detach().sum(-1).abs().max() < 1e-4, z
assert y.grad.abs().max() < 1e-5, y.grad
print("kernel" if cpu_kernel.ready() else "plain")
"""


ANNOUNCED = "xsa_core: compiling the attention kernel for this CPU, once, about half a minute\n"


def run(cache, **environment):
    """The program in a process of its own; its stdout and stderr."""
    settings = {k: x for k, x in os.environ.items() if k not in ("XSA_CPU_KERNEL", "CXX")}
    settings |= {"XSA_CACHE": str(cache), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | environment
    return subprocess.run(
        [sys.executable, "-c", PROGRAM], env=settings, capture_output=True, text=True, timeout=120, check=True
    )


def script(path, body):
    path.write_text("#!/bin/sh\n" + textwrap.dedent(body))
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


@pytest.fixture
def copying_compiler(tmp_path):
    """A compiler that notes each call and delivers the kernel built before; a real build takes too long."""
    if not cpu_kernel.ready():
        pytest.skip("no C++ compiler here")
    body = f"""\
        case "$*" in *--version*) echo copying 1.0; exit 0;; esac
        echo call >> {tmp_path}/calls
        sleep ${{XSA_TEST_SLEEP:-0}}
        for last; do :; done
        cp {cpu_kernel.load()} "$last"
    """
    return script(tmp_path / "copying", body)


def test_one_build_serves_later_processes(tmp_path, copying_compiler):
    for use in range(2):
        done = run(tmp_path / "cache", CXX=copying_compiler)
        assert done.stdout.strip() == "kernel", done.stderr
        assert done.stderr.count(ANNOUNCED) == (use == 0), "the build is announced, a second use is not"
    assert (tmp_path / "calls").read_text().splitlines() == ["call"]
    left = {p.suffix for p in (tmp_path / "cache" / "kernels").iterdir()}
    assert left == {".so", cpu_kernel.SEAL}


def test_two_processes_at_once_build_once(tmp_path, copying_compiler):
    settings = os.environ | {
        "XSA_CACHE": str(tmp_path / "cache"),
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
    }
    settings |= {"CXX": copying_compiler, "XSA_TEST_SLEEP": "2", "XSA_CPU_KERNEL": "1"}
    command = [sys.executable, "-c", PROGRAM]
    both = [subprocess.Popen(command, env=settings, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert [p.communicate(timeout=120)[0].strip() for p in both] == ["kernel", "kernel"]
    assert (tmp_path / "calls").read_text().splitlines() == ["call"]


def test_a_lock_left_by_a_dead_process_does_not_hold_anyone_up(tmp_path):
    path = tmp_path / "x.lock"
    path.write_text("12345")
    with kernel_cache.lock(path, 0.0):
        assert path.exists()
    assert not path.exists()


def test_a_broken_file_in_the_cache_is_built_anew(tmp_path, copying_compiler, monkeypatch):
    monkeypatch.setenv("CXX", copying_compiler)
    target = tmp_path / "cache" / "kernels" / f"projection-{cpu_kernel.cache_key()}.so"
    target.parent.mkdir(parents=True)
    whole = cpu_kernel.load().read_bytes()
    target.write_bytes(whole[: len(whole) // 2])
    target.with_suffix(cpu_kernel.SEAL).write_text(cpu_kernel._seal(cpu_kernel.load()))
    done = run(tmp_path / "cache", CXX=copying_compiler)
    assert done.stdout.strip() == "kernel"
    assert "Warning" not in done.stderr
    assert target.read_bytes() == whole


@pytest.mark.parametrize("damage", ["cut", "changed", "empty", "gone", "unsealed", "seal cut"])
def test_a_damaged_file_is_noticed_before_it_is_mapped(tmp_path, monkeypatch, damage):
    """Mapping a file that was cut short can end the process, so the loader must not see it."""
    target, seal = tmp_path / "kernel.so", tmp_path / f"kernel{cpu_kernel.SEAL}"
    content = bytes(range(256)) * 64
    target.write_bytes(content)
    seal.write_text(cpu_kernel._seal(target))
    mapped = []
    monkeypatch.setattr(ctypes, "CDLL", mapped.append)
    assert cpu_kernel._why_not_loaded(target) is None
    assert mapped.pop() == str(target)
    {
        "cut": lambda: target.write_bytes(content[:5000]),
        "changed": lambda: target.write_bytes(content[:-100] + bytes(1) + content[-99:]),
        "empty": lambda: target.write_bytes(b""),
        "gone": target.unlink,
        "unsealed": seal.unlink,
        "seal cut": lambda: seal.write_text(seal.read_text()[:20]),
    }[damage]()
    assert cpu_kernel._why_not_loaded(target) is not None
    assert not mapped


def aged(path, seconds=10_000):
    path.write_text("")
    then = path.stat().st_mtime - seconds
    os.utime(path, (then, then))
    return path


def test_what_killed_builds_left_is_removed_and_what_is_in_use_is_not(tmp_path):
    gone = [
        aged(tmp_path / name) for name in ("projection-0.so1.tmp", ".projection-0.so.9.a.tmp", "dead.lock")
    ]
    fresh = aged(tmp_path / ".projection-1.so.9.b.tmp", seconds=1)
    kept = [aged(tmp_path / name) for name in ("projection-0.so", "projection-0.sealed", "x.failed")]
    with kernel_cache.lock(aged(tmp_path / "held.lock"), 1.0):
        kernel_cache.tidy(tmp_path, older_than_s=600)
        assert (tmp_path / "held.lock").exists()
    assert not any(path.exists() for path in (*gone, tmp_path / "held.lock"))
    assert all(path.exists() for path in (fresh, *kept))


def test_a_lock_that_its_holder_removed_is_not_mistaken_for_the_new_one(tmp_path):
    path = tmp_path / "x.lock"
    with kernel_cache.lock(path, 1.0):
        path.unlink()  # as the holder does at its end, while another process has the old file open
        with kernel_cache.lock(path, 1.0), pytest.raises(TimeoutError), kernel_cache.lock(path, 0.0):
            pass
    assert not path.exists()


@pytest.mark.parametrize(
    ("environment", "reason"),
    [
        ({"CXX": 'g++ "-O2'}, 'CXX=g\\+\\+ "-O2 is not a command: No closing quotation'),
        ({"CXX": "/nowhere/c++"}, "the compiler /nowhere/c\\+\\+ does not start: No such file"),
        ({"CXX": "/"}, "the compiler / does not start: Permission denied"),
        (
            {"XSA_CACHE": "/proc/nowhere"},
            "cannot keep kernels in /proc/nowhere/kernels: .*; set XSA_CACHE to",
        ),
        ({"XSA_CACHE": "~nobodyhere/x"}, "home directory.*Set XSA_CACHE"),
    ],
    ids=str,
)
def test_what_prevents_a_build_is_one_warning_with_the_reason(monkeypatch, environment, reason):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("XSA_CPU_KERNEL", raising=False)
    monkeypatch.setattr(cpu_kernel, "_ready", None)
    with pytest.warns(RuntimeWarning, match=reason) as caught:
        ready = [cpu_kernel.ready(), cpu_kernel.ready()]
    assert ready == [False, False]
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert "\n" not in str(caught[0].message)


def test_a_blank_compiler_is_none_named(monkeypatch):
    monkeypatch.setenv("CXX", "  ")
    blank = cpu_kernel.compiler()
    monkeypatch.delenv("CXX")
    assert blank == cpu_kernel.compiler()


def test_a_compiler_may_say_what_is_no_text(tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", script(tmp_path / "binary", "printf 'error: \\377\\376\\n'; exit 1\n"))
    with pytest.raises(cpu_kernel.BuildError, match="the compiler failed: error"):
        cpu_kernel.build(tmp_path / "kernel.so")


@pytest.mark.parametrize("end", ["kill -INT $$", "echo 'error: No space left on device' >&2; exit 1"])
def test_a_compiler_that_was_stopped_is_asked_again_next_time(tmp_path, end):
    stopped = script(
        tmp_path / "stopped", f"echo call >> {tmp_path}/calls; case $1 in --version) exit 0;; esac; {end}\n"
    )
    for _ in range(2):
        assert run(tmp_path / "cache", CXX=stopped).stdout.strip() == "plain"
    assert not list((tmp_path / "cache").rglob("*.failed"))


def test_a_failing_compiler_costs_one_warning_and_is_not_asked_again(tmp_path):
    failing = script(
        tmp_path / "failing", f"echo call >> {tmp_path}/calls; echo 'error: no luck' >&2; exit 1\n"
    )
    for _ in range(2):
        done = run(tmp_path / "cache", CXX=failing)
        assert done.stdout.strip() == "plain"
        assert done.stderr.count("RuntimeWarning") == 1
        assert "error: no luck" in done.stderr
    builds = (tmp_path / "calls").read_text().splitlines()
    assert len(builds) == 3  # the version twice, the build once


def test_switched_off_it_is_silent(tmp_path):
    done = run(tmp_path / "cache", XSA_CPU_KERNEL="0", CXX="/nowhere/c++")
    assert done.stdout.strip() == "plain"
    assert "Warning" not in done.stderr


def test_a_compiler_that_writes_nothing_is_said_to(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("CXX", script(tmp_path / "idle", "exit 0\n"))
    with pytest.raises(cpu_kernel.BuildError, match="idle produced no file"):
        cpu_kernel.build(tmp_path / "kernel.so")
    assert capfd.readouterr().err == ANNOUNCED


def test_a_build_in_the_background_leaves_the_terminal_alone(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("CXX", script(tmp_path / "copying", 'for last; do :; done; echo x > "$last"\n'))
    thread = threading.Thread(target=cpu_kernel.build, args=(tmp_path / "kernel.so",), daemon=True)
    thread.start()
    thread.join()
    assert (tmp_path / "kernel.so").exists()
    assert capfd.readouterr().err == ""


def test_who_waits_for_another_process_is_told_once(tmp_path):
    path, told = tmp_path / "x.lock", []
    with kernel_cache.lock(path, 1.0), pytest.raises(TimeoutError):  # noqa: SIM117 - the order matters
        with kernel_cache.lock(path, 0.5, lambda: told.append(1)):
            pass
    assert told == [1]


def test_the_warning_points_at_the_line_that_called_the_library(monkeypatch):
    monkeypatch.setenv("CXX", "/nowhere/c++")
    monkeypatch.delenv("XSA_CPU_KERNEL", raising=False)
    monkeypatch.setattr(cpu_kernel, "_ready", None)
    x = torch.ones(1, 2, 2, 4, requires_grad=True)
    with pytest.warns(RuntimeWarning, match="without its CPU kernel") as caught:
        exclude(x, x)
    assert caught[0].filename == __file__


def test_a_build_that_hangs_is_given_up(tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", script(tmp_path / "hanging", "exec sleep 60\n"))
    monkeypatch.setattr(cpu_kernel, "BUILD_TIMEOUT_S", 0.5)
    with pytest.raises(cpu_kernel.BuildError, match="took more than"):
        cpu_kernel.build(tmp_path / "kernel.so")
    assert [p.name for p in tmp_path.iterdir()] == ["hanging"]


def test_a_build_that_is_given_up_leaves_no_process_behind(tmp_path, monkeypatch):
    """A compiler is a driver with children, which hold its output open."""
    body = f"sleep 300 &\necho $! > {tmp_path}/child\nwait\n"
    monkeypatch.setenv("CXX", script(tmp_path / "driver", body))
    monkeypatch.setattr(cpu_kernel, "BUILD_TIMEOUT_S", 2.0)
    with pytest.raises(cpu_kernel.BuildError, match="took more than"):
        cpu_kernel.build(tmp_path / "kernel.so")
    child = Path("/proc") / (tmp_path / "child").read_text().strip()
    assert not child.exists() or "State:\tZ" in (child / "status").read_text()


@pytest.mark.parametrize("changed", ["compiler", "torch", "flags"])
def test_the_cache_key_follows_what_the_file_depends_on(tmp_path, monkeypatch, changed):
    monkeypatch.setenv("CXX", script(tmp_path / "one", "echo one 1.0\n"))
    before = cpu_kernel.cache_key()
    assert before == cpu_kernel.cache_key()
    if changed == "compiler":
        script(tmp_path / "one", "echo one 2.0\n")
    elif changed == "torch":
        monkeypatch.setattr(torch, "__version__", "2.10.1")
    else:
        monkeypatch.setattr(cpu_kernel, "flags", lambda: ["-O3"])
    assert cpu_kernel.cache_key() != before
