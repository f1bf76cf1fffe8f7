"""Building and caching of the C++ kernel: once, never hanging, never failing a run."""

import os
import stat
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from xsa_core.attention import cpu_kernel

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
    for _ in range(2):
        done = run(tmp_path / "cache", CXX=copying_compiler)
        assert done.stdout.strip() == "kernel", done.stderr
    assert (tmp_path / "calls").read_text().splitlines() == ["call"]
    assert not list((tmp_path / "cache").rglob("*.tmp"))


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


def test_a_lock_left_by_a_dead_process_does_not_hold_anyone_up(tmp_path, copying_compiler, monkeypatch):
    monkeypatch.setenv("CXX", copying_compiler)
    folder = tmp_path / "cache" / "kernels"
    folder.mkdir(parents=True)
    (folder / f"projection-{cpu_kernel.cache_key()}.lock").write_text("12345")
    assert run(tmp_path / "cache", CXX=copying_compiler).stdout.strip() == "kernel"


def test_a_broken_file_in_the_cache_is_built_anew(tmp_path, copying_compiler, monkeypatch):
    monkeypatch.setenv("CXX", copying_compiler)
    folder = tmp_path / "cache" / "kernels"
    folder.mkdir(parents=True)
    (folder / f"projection-{cpu_kernel.cache_key()}.so").write_bytes(b"cut short")
    assert run(tmp_path / "cache", CXX=copying_compiler).stdout.strip() == "kernel"


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


@pytest.mark.parametrize("environment", [{"CXX": "/nowhere/c++"}, {"XSA_CACHE": "/proc/nowhere"}], ids=str)
def test_no_compiler_or_no_cache_costs_one_warning(tmp_path, environment):
    done = run(tmp_path / "cache", **environment)
    assert done.stdout.strip() == "plain"
    assert done.stderr.count("RuntimeWarning") == 1


def test_switched_off_it_is_silent(tmp_path):
    done = run(tmp_path / "cache", XSA_CPU_KERNEL="0", CXX="/nowhere/c++")
    assert done.stdout.strip() == "plain"
    assert "Warning" not in done.stderr


def test_a_build_that_hangs_is_given_up(tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", script(tmp_path / "hanging", "exec sleep 60\n"))
    monkeypatch.setattr(cpu_kernel, "BUILD_TIMEOUT_S", 0.5)
    with pytest.raises(cpu_kernel.BuildError, match="took more than"):
        cpu_kernel.build(tmp_path / "kernel.so")
    assert [p.name for p in tmp_path.iterdir()] == ["hanging"]


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
