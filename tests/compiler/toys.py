"""Small modules, each with one trait that a pass has to see."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import tpplan
from tpplan.compiler.bind.bind import Binding, bind
from tpplan.compiler.ir.observations import CaptureSettings
from tpplan.compiler.ir.trace import Frame, Operation, Trace
from tpplan.compiler.trace.capture import Capture, record
from tpplan.compiler.trace.recorder import Recorder
from tpplan.compiler.trace.skeleton import make_skeleton

HIDDEN = 16
X = (3, 12, HIDDEN)
MLP: dict[str, Any] = {"up": "colwise", "down": "rowwise"}
ATTENTION: dict[str, Any] = {"{q,k,v}": "colwise", "o": "rowwise"}


def x_BSH(*shape: int) -> Tensor:
    """An activation without numbers."""
    return torch.empty(shape or X, device="meta")


def plan_of(modules: Mapping[str, Any], **more: Any) -> tpplan.Plan:
    return tpplan.load_plan({"version": 1, "modules": dict(modules), **more})


def compiled(model: nn.Module, modules: Mapping[str, Any], *inputs: Any, tp: int = 2) -> tpplan.Program:
    """The program for a call with `inputs`, or with one activation that wants a gradient."""
    return tpplan.compile_plan(model, plan_of(modules), tp, inputs or (x_BSH().requires_grad_(),))


def reshards(program: tpplan.Program) -> list[str]:
    """Every reshard, such as `mlp.down (): P -> R`."""
    return [
        f"{module.name or '<root>'} {'.'.join(map(str, reshard.path)) or '()'}: {reshard.source} -> {reshard.target}"
        for module, reshard in program.reshards()
    ]


def codes(error: tpplan.CompileError) -> list[str]:
    return [finding.code for finding in error.diagnostics]


def traced(model: nn.Module, *arguments: Any, training: bool = True, **keywords: Any) -> Trace:
    return record(make_skeleton(model), arguments, keywords, Capture(Recorder(CaptureSettings(training))))


def bound(model: nn.Module, modules: Mapping[str, Any], size: int = 2) -> Binding:
    binding, findings = bind(model, plan_of(modules), size)
    assert not findings, findings
    return binding


def frame_of(trace: Trace, module: str, call: int = 0) -> Frame:
    return next(f for f in trace.root.walk() if (f.module, f.call) == (module, call))


def operations(frame: Frame) -> list[str]:
    """The names of a frame's own operations, without `aten.` and the overload."""
    return [node.name.split(".")[1] for node in frame.body if isinstance(node, Operation)]


class Mlp(nn.Module):
    """up, GELU, down."""

    def __init__(self, bias: bool = True, intermediate: int = 32) -> None:
        super().__init__()
        self.up = nn.Linear(HIDDEN, intermediate, bias)
        self.down = nn.Linear(intermediate, HIDDEN, bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(functional.gelu(self.up(x)))


class Attention(nn.Module):
    """Self-attention that counts its heads by an attribute."""

    def __init__(self, num_heads: int = 4, bias: bool = True) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(HIDDEN, HIDDEN, bias) for _ in range(4))
        self.num_heads = num_heads
        self.head_dim = HIDDEN // num_heads

    def forward(self, x: Tensor) -> Tensor:
        batch, sequence, _ = x.shape
        shape = (batch, sequence, self.num_heads, self.head_dim)
        q, k, v = (layer(x).view(shape).transpose(1, 2) for layer in (self.q, self.k, self.v))
        mixed = functional.scaled_dot_product_attention(q, k, v)
        return self.o(mixed.transpose(1, 2).reshape(batch, sequence, -1))


class Block(nn.Module):
    """A pre-norm block around a body."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(self.norm(x))


class Normed(nn.Module):
    """A norm, then whatever a subclass does with its result `h`."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.proj = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Any:
        return self.after(self.norm(x), x)

    def after(self, h: Tensor, x: Tensor) -> Any:
        return self.proj(h)


SEQUENCE: dict[str, Any] = {"norm": "sequence"}
