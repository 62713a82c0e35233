"""Compiles every kernel for every GPU named, with no GPU, and prints what each takes, a JSON object a line.

Run as a program, without TRITON_INTERPRET: `python compile_kernels.py [--capability 80 ...] [--module norm ...]`.
"""

from __future__ import annotations

import argparse
import importlib
import json
import pkgutil
import re
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import octavo.kernels
import triton
from octavo.kernels.compile_case import CompileCase
from octavo.kernels.gluon_support import GLUON_KERNELS, gluon_serves
from octavo.kernels.overlap import compiles_follow
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime.jit import JITFunction

CAPABILITIES = (80, 86, 89, 90)
# Locals of the function that triton generates to bind a launch's arguments; a parameter of the name is lost there.
_BINDER_NAMES = frozenset({"params", "specialization", "options"})


def modules() -> dict[str, Any]:
    """The kernel modules by name."""
    names = {info.name for info in pkgutil.iter_modules(octavo.kernels.__path__)}
    if not gluon_serves():
        names -= set(GLUON_KERNELS)
    return {name: importlib.import_module(f"octavo.kernels.{name}") for name in sorted(names)}


def kernels(module: Any) -> set[str]:
    """Names of the kernels that a module defines."""
    return {
        name
        for name, value in vars(module).items()
        if isinstance(value, JITFunction) and name.endswith("_kernel") and value.fn.__module__ == module.__name__
    }


def compiled(case: CompileCase, capability: int) -> dict[str, Any]:
    """What one case takes on one GPU, or why it does not compile."""
    function = case.kernel
    signature = {name: case.arguments.get(name, "constexpr") for name in function.arg_names}
    constants = case.constants | ({"PDL": capability >= 90 and compiles_follow()} if "PDL" in signature else {})
    stray = (set(case.arguments) | set(constants)) ^ set(function.arg_names)
    report: dict[str, Any] = {"kernel": function.__name__, "capability": capability, "constants": str(case.constants)}
    if stray:
        return report | {"error": f"arguments that the case or the kernel lacks: {sorted(stray)}"}
    taken = _BINDER_NAMES & set(function.arg_names)
    if taken:
        return report | {"error": f"triton's launcher has variables of its own called {sorted(taken)}"}
    aligned = [
        index
        for index, name in enumerate(function.arg_names)
        if name in case.aligned or signature[name].startswith("*")
    ]
    source = (GluonASTSource if function.is_gluon() else ASTSource)(
        function,
        signature,
        constexprs={(function.arg_names.index(name),): value for name, value in constants.items()},
        attrs={(index,): [["tt.divisibility", 16]] for index in aligned},
    )
    options = {
        "num_warps": case.num_warps,
        "num_stages": case.num_stages,
        "enable_fp_fusion": case.enable_fp_fusion,
        "maxnreg": case.registers,
    }
    try:
        built = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    except Exception as error:  # the report is what the test reads
        return report | {"error": f"{type(error).__name__}: {error} {error.__cause__ or ''}"}
    taken = {"shared": built.metadata.shared} | resources(built.asm["cubin"])
    return report | taken | {"max_spilled": case.max_spilled}


def resources(cubin: bytes) -> dict[str, int]:
    """Registers and bytes of stack (where spilled registers go) of a thread."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(cubin)
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}
    return {"registers": found["REG"], "spilled": found["STACK"] + found["LOCAL"]}


def main() -> None:
    """Compile, two at a time, and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--capability", type=int, nargs="*", default=CAPABILITIES)
    parser.add_argument("--module", nargs="*")
    arguments = parser.parse_args()
    jobs = []
    for name, module in modules().items():
        if arguments.module and name not in arguments.module:
            continue
        missing = kernels(module)
        for capability in arguments.capability:
            cases = module.compile_cases(capability) if hasattr(module, "compile_cases") else []
            missing -= {case.kernel.__name__ for case in cases}
            jobs += [(case, capability) for case in cases]
        for kernel in sorted(missing):
            print(json.dumps({"kernel": kernel, "error": f"octavo.kernels.{name}.compile_cases has no case of it"}))
    with ThreadPoolExecutor(2) as pool:
        for report in pool.map(lambda job: compiled(*job), jobs):
            print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
