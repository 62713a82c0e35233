"""What keeps the sources readable: no import circles, short functions, short files."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from import_graph import ROOT, cycles, python_imports, rust_imports

MAX_FUNCTION_LINES = 60
MAX_FILE_LINES = 400
CRATES = sorted(path.parent for path in ROOT.glob("rust/*/Cargo.toml"))


def sources() -> Iterator[Path]:
    """Python and Rust of the product, tables of measured values apart."""
    for folder, suffix in (("python/octavo", "py"), ("kernels", "py"), ("rust", "rs")):
        for path in ROOT.joinpath(folder).rglob(f"*.{suffix}"):
            is_source = folder != "rust" or "src" in path.parts
            if is_source and "kernels" not in path.relative_to(ROOT).parts[1:] and not path.stem.endswith("_tables"):
                yield path


def lines_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function, without its docstring and decorators."""
    first, end = function.body[0], function.end_lineno or function.lineno
    docstring = 0
    if ast.get_docstring(function, clean=False) is not None:
        docstring = (first.end_lineno or first.lineno) - first.lineno + 1
    return end - function.lineno + 1 - docstring


def is_device_function(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any("jit" in ast.unparse(decorator) for decorator in function.decorator_list)


def test_no_python_import_circle() -> None:
    assert cycles(python_imports()) == []


@pytest.mark.parametrize("crate", CRATES, ids=lambda path: path.name)
def test_no_rust_import_circle(crate: Path) -> None:
    assert cycles(rust_imports(crate / "src")) == []


def test_functions_are_short() -> None:
    long = {
        f"{path.relative_to(ROOT)}:{function.name}": lines_of(function)
        for path in sources()
        if path.suffix == ".py"
        for function in ast.walk(ast.parse(path.read_text()))
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        and not is_device_function(function)
        and lines_of(function) > MAX_FUNCTION_LINES
    }
    assert long == {}


def test_files_are_short() -> None:
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in sources()}
    assert {path: length for path, length in lengths.items() if length > MAX_FILE_LINES} == {}
