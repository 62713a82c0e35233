"""Kernels that are compiled ahead are those that service launches."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from octavo.errors import ConfigError
from octavo.kernels.launch import compiling
from octavo.runner.kernel_warmup import KernelCompiler


def run(case: str, caches: Path) -> tuple[dict[str, Any], str]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(caches)
    program = Path(__file__).with_name("kernel_warmup_process.py")
    done = subprocess.run(
        [sys.executable, str(program), case], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


def test_what_is_compiled_ahead_is_what_is_launched(tmp_path: Path) -> None:
    # Two dtypes, two blocks, a count that 16 divides and one that it does not.
    expected = {
        "error": "NoneType",
        "found": 8,
        "binaries": 8,
        "found_in_service": 0,
        "compiled_in_service": 0,
    }
    assert run("right", tmp_path)[0] == expected
    # A second process finds all of them on the disk.
    stamps = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.cubin")}
    assert run("right", tmp_path)[0] == expected
    assert stamps == {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.cubin")}


def test_a_kernel_that_does_not_compile_is_told_and_hinders_no_other(tmp_path: Path) -> None:
    report, log = run("wrong", tmp_path)
    assert report["error"] == "CompilationError"
    assert report["binaries"] == 8
    assert "compiling them ahead failed" in log
    assert "there_is_no_such_value" in log


def test_calls_are_made_in_a_thread_that_only_compiles() -> None:
    seen: list[tuple[bool, bool]] = []
    compiler = KernelCompiler(
        lambda: seen.append((compiling(), threading.current_thread() is threading.main_thread())), None
    )
    compiler.wait()
    assert seen == [(True, False)]
    assert compiler.error is None
    assert compiler.num_kernels == 0


def test_calls_that_fail_are_told(caplog: pytest.LogCaptureFixture) -> None:
    def calls() -> None:
        raise ValueError("a wrapper's mistake")

    compiler = KernelCompiler(calls, None)
    compiler.wait()
    assert isinstance(compiler.error, ValueError)
    assert "a wrapper's mistake" in caplog.text


@pytest.mark.parametrize("compiler", [None, "false"], ids=["none", "failing"])
def test_without_a_c_compiler_the_remedy_is_named(
    compiler: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from triton.runtime.build import compile_module_from_src

    if compiler is None:
        monkeypatch.delenv("CC", raising=False)
        monkeypatch.setenv("PATH", "")
    else:
        monkeypatch.setenv("CC", compiler)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    ahead = KernelCompiler(lambda: compile_module_from_src("int x;", "module"), None)
    with pytest.raises(ConfigError, match="install gcc and python3-dev"):
        ahead.wait()
    assert not caplog.text


@pytest.mark.parametrize("which", ["TRITON_CACHE_DIR", "CC"])
def test_without_a_cache_or_the_compiler_that_is_named_the_remedy_is_named(
    which: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from triton.runtime.build import compile_module_from_src

    (tmp_path / "file").touch()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv(which, str(tmp_path / "file/nope"))
    ahead = KernelCompiler(lambda: compile_module_from_src("int x;", "module"), None)
    with pytest.raises(ConfigError, match=r"^device: .*TRITON_CACHE_DIR .*HOME .*CC, or use `cpu` \(.*nope") as caught:
        ahead.wait()
    assert isinstance(caught.value.__cause__, OSError)
    assert not caplog.text


def test_a_kernel_whose_cache_cannot_be_written_ends_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    report, log = run("refused", tmp_path / "file/nope")
    assert "TRITON_CACHE_DIR" in report["refused"]
    assert not log


def test_an_error_that_follows_a_missing_file_is_its_own() -> None:
    def calls() -> None:
        try:
            Path("/there/is/no/such/file").read_text()
        except FileNotFoundError:
            raise ValueError("a wrapper's mistake")  # noqa: B904

    compiler = KernelCompiler(calls, None)
    compiler.wait()
    assert isinstance(compiler.error, ValueError)


@pytest.mark.gpu
def test_on_a_gpu_kernels_are_loaded_and_products_started() -> None:
    import torch
    from octavo.kernels.norm import rms_norm

    def norm(device: str) -> torch.Tensor:
        x = torch.ones(3, 208, dtype=torch.bfloat16, device=device)
        weight, out = torch.ones(208, device=device), torch.empty_like(x)
        rms_norm(x, weight, out, 0.0, 3)
        return out

    compiler = KernelCompiler(lambda: norm("meta"), torch.cuda.current_device())
    compiler.wait()
    assert compiler.error is None
    assert compiler.num_kernels == 1
    assert torch.equal(norm("cuda"), torch.ones(3, 208, dtype=torch.bfloat16, device="cuda"))
