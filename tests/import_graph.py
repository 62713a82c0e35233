"""Import graphs of Python packages and Rust crates, and their cycles."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

Graph = dict[str, set[str]]

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "python" / "octavo"


def python_imports(folder: Path = PACKAGE) -> Graph:
    """The modules below a package's folder that each of them imports, in functions and under TYPE_CHECKING too."""
    files = {_module(folder, file): file for file in folder.rglob("*.py")}
    graph: Graph = {module: set() for module in files}
    for module, file in files.items():
        for name in _imported(ast.parse(file.read_text()), module, file.name == "__init__.py"):
            # A name may be a module, or something that a module holds; extension modules import nothing.
            found = next((known for known in (name, name.rpartition(".")[0]) if known in files), None)
            if found is not None and name != f"{folder.name}._core":
                graph[module].add(found)
        graph[module].discard(module)
    return graph


def _module(folder: Path, file: Path) -> str:
    parts = [folder.name, *file.relative_to(folder).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imported(tree: ast.Module, module: str, is_package: bool) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = module.split(".")[: None if is_package and node.level == 1 else -node.level + is_package]
                base = ".".join([*parents, *([base] if base else [])])
            yield from (f"{base}.{alias.name}" for alias in node.names)


def rust_imports(source: Path) -> Graph:
    """The modules of a crate that each of them names by `crate::` or `super::`, its tests apart."""
    files: dict[str, Path] = {}
    for file in source.rglob("*.rs"):
        parts = list(file.relative_to(source).with_suffix("").parts)
        files["::".join(parts[:-1] if parts[-1] == "mod" else parts)] = file
    graph: Graph = {module: set() for module in files}
    for module, file in files.items():
        text = re.sub(r"//[^\n]*", "", file.read_text())
        text = re.split(r"#\[cfg\(test\)\]\s*mod ", text)[0]
        for path in _rust_paths(text, module, file.name == "mod.rs"):
            parts = path.split("::")
            found = next(
                (known for end in range(len(parts), 0, -1) if (known := "::".join(parts[:end])) in files), None
            )
            if found is not None and found != module:
                graph[module].add(found)
    return graph


def _rust_paths(text: str, module: str, is_folder: bool) -> Iterator[str]:
    parent = module if is_folder else module.rpartition("::")[0]
    for prefix, rest in re.findall(r"\b(crate|super)::((?:[\w]+::)*(?:\w+|\{[^;]*?\}(?=;)))", text):
        base = "" if prefix == "crate" else parent
        for path in _expanded(rest):
            yield f"{base}::{path}" if base else path


def _expanded(path: str) -> Iterator[str]:
    """`a::{b, c::{d, e}}` as `a::b`, `a::c::d`, `a::c::e`."""
    head, brace, inner = path.partition("{")
    if not brace:
        yield path.split(" ")[0].strip()
        return
    depth, start = 0, 0
    inner = inner.rpartition("}")[0] + ","
    for place, letter in enumerate(inner):
        depth += (letter == "{") - (letter == "}")
        if letter == "," and depth == 0:
            part = inner[start:place].strip()
            start = place + 1
            if part:
                yield from (head.strip() + found for found in _expanded(part))


def cycles(graph: Graph) -> list[list[str]]:
    """Groups of modules that import each other in a circle."""
    found: list[list[str]] = []
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []

    def visit(module: str) -> None:
        index[module] = low[module] = len(index)
        stack.append(module)
        for target in sorted(graph.get(module, ())):
            if target not in index:
                visit(target)
                low[module] = min(low[module], low[target])
            elif target in stack:
                low[module] = min(low[module], index[target])
        if low[module] == index[module]:
            group = stack[stack.index(module) :]
            del stack[len(stack) - len(group) :]
            if len(group) > 1:
                found.append(sorted(group))

    for module in sorted(graph):
        if module not in index:
            visit(module)
    return found
