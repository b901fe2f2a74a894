"""Compiling a kernel for a Hopper GPU that isn't there, and reading off what the assembler made of it."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

HOPPER = GPUTarget("cuda", 90, 32)
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


@dataclass(frozen=True)
class Binary:
    """A compiled kernel: registers a thread, bytes spilled to local memory, and its PTX."""

    registers: int
    stack: int
    local: int
    ptx: str


def compile_for_hopper(kernel: Any, types: dict[str, str | None], constants: dict[str, Any], warps: int) -> Binary:
    """Compile as Triton would at a first launch.

    Args:
        kernel: the jit function.
        types: Triton's types of the arguments that aren't constants, by name: "*bf16", "i64"; None for a tensor that is
            None. Pointers and integers are taken as divisible by 16, as contiguous tensors have them.
        constants: the values of the constants, by name.
        warps: how many.
    """
    names = kernel.arg_names
    held = {name: None for name, kind in types.items() if kind is None} | constants
    signature = {name: "constexpr" if name in held else types[name] for name in names}
    aligned = {
        (names.index(name),): [["tt.divisibility", 16]]
        for name, kind in types.items()
        if kind is not None and (kind.startswith("*") or (kind.startswith("i") and name != "rows"))
    }
    source = ASTSource(kernel, signature, {(names.index(name),): value for name, value in held.items()}, aligned)
    compiled = triton.compile(source, target=HOPPER, options={"num_warps": warps})
    return Binary(*_resources(compiled.asm["cubin"]), compiled.asm["ptx"])


def _resources(cubin: bytes) -> tuple[int, int, int]:
    file = Path(subprocess.run(["mktemp"], capture_output=True, text=True, check=True).stdout.strip())
    try:
        file.write_bytes(cubin)
        dump = [str(CUOBJDUMP), "--dump-resource-usage", str(file)]
        said = subprocess.run(dump, capture_output=True, text=True, check=True).stdout
    finally:
        file.unlink()
    found = {name: int(value) for name, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", said)}
    return found["REG"], found["STACK"], found["LOCAL"]
