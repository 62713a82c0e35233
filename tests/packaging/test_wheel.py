"""The wheel holds what an installation needs, kernels included (maturin drops a symlinked folder without a word)."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

# Cargo builds one thing at a time in a folder.
pytestmark = pytest.mark.xdist_group("wheel")

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "maturin", "build", "--quiet", "--release", "--out", str(out)]
    subprocess.run([*command, "--compatibility", "linux"], cwd=ROOT, check=True, timeout=280)
    (path,) = out.glob("*.whl")
    return path


def test_the_wheel_serves_every_python_from_3_10(wheel: Path) -> None:
    assert "-cp310-abi3-" in wheel.name


def test_the_wheel_holds_every_source_file_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    expected = {
        str(path.relative_to(ROOT / "python"))
        for path in (ROOT / "python").rglob("*")
        if path.suffix in {".py", ".pyi", ".typed"} and "__pycache__" not in path.parts
    }
    expected |= {f"octavo/kernels/{path.relative_to(ROOT / 'kernels')}" for path in (ROOT / "kernels").rglob("*.py")}
    expected |= {"octavo/py.typed"}
    shipped = {name for name in names if name.startswith("octavo/") and not name.endswith(".so")}
    assert shipped == expected
    assert "octavo/kernels/__init__.py" in shipped
    assert sum(name.endswith(".so") for name in names) == 1


def test_the_wheel_runs_without_the_checkout(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    script = (
        "import pathlib, sys, octavo, octavo.kernels; from octavo import _core; "
        f"assert pathlib.Path(octavo.__file__).is_relative_to({str(tmp_path)!r}), octavo.__file__; "
        f"assert pathlib.Path(octavo.kernels.__file__).is_relative_to({str(tmp_path)!r}); print(_core.__version__)"
    )
    shown = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path)},
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert shown.stdout.strip() == wheel.name.split("-")[1]
