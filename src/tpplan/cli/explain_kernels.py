"""What `tpplan explain` says of kernels on this machine: from which size on each pays, and who says so."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from tpplan.plan import KernelKind

if TYPE_CHECKING:
    from tpplan.compiler.ir.program import KernelUse, Program


def where_it_pays(use: KernelUse) -> str:
    """Where `auto` takes a kernel: "at any size (a guess)", "from 65,536 elements on (measured on …, 2026-11-27)"."""
    from tpplan.kernels.kinds import KINDS
    from tpplan.kernels.thresholds import elements_text, minimum_elements, origin

    kernel, wide = KINDS[KernelKind(use.kind)].threshold(use), use.dtype == "float32"
    forward, step = (elements_text(minimum_elements(kernel, wide, way, None)) for way in (False, True))
    return f"{forward if forward == step else f'{forward}, with a backward {step}'} ({origin(kernel)})"


def tell_of_kernels(program: Program) -> None:
    """What the choice of kernels comes to here, on stderr."""
    uses = [use for use in program.kernels if not use.refused]
    if not uses:
        return
    import torch

    from tpplan.kernels import available
    from tpplan.kernels.kinds import KINDS
    from tpplan.kernels.thresholds import origin

    here = available("cuda" if torch.cuda.is_available() else "cpu")
    if here.name == "torch":
        print(f"Here every module keeps its own operations: {here.reason}.", file=sys.stderr)
    elif any(use.choice == "auto" and origin(KINDS[KernelKind(use.kind)].threshold(use)) == "a guess" for use in uses):
        print("Sizes from which kernels pay are guesses: `tpplan bench kernels --tune` measures them.", file=sys.stderr)
