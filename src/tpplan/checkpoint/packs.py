"""How a parallelized module's parameters are packed, for those who read and write them whole."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from tpplan.compiler.ir.layout import Layout
from tpplan.runtime.modules import RUNTIME, ModuleRuntime


def packs_of(module: nn.Module) -> Mapping[str, Layout]:
    """The layouts of a module's own parameters that pack several stretches; none for a stock module."""
    runtime = vars(module).get(RUNTIME)
    return runtime.packs if isinstance(runtime, ModuleRuntime) else {}
