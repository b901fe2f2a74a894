"""Compiled programs to verify, whole or with a bug planted in them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.models.tiny import tiny_model
from tests.models.torch_transformer import TorchTransformer
from tpplan.compiler.ir.program import ModuleProgram, ParameterPlacement, Program
from tpplan.compiler.pipeline import compile_call
from tpplan.compiler.request import Request
from tpplan.plan import load_plan

PLANS = Path(__file__).parents[2] / "plans"
Example = tuple[tuple[Any, ...], dict[str, Any]]


@functools.cache
def subject(plan: str, tp: int) -> tuple[nn.Module, Program, Example]:
    """A tiny model, its program under a shipped plan, and a call."""
    model, keywords = tiny_model(plan.removesuffix("-sequence"))
    program = compile_call(Request(model, load_plan(PLANS / f"{plan}.yaml"), tp, (), keywords)).program
    return model, program, ((), keywords)


def with_module(program: Program, name: str, change: Callable[[ModuleProgram], ModuleProgram]) -> Program:
    """The program with one module's entry changed."""
    assert name in {module.name for module in program.modules}
    return replace(program, modules=tuple(change(m) if m.name == name else m for m in program.modules))


def with_parameter(program: Program, name: str, change: Callable[[ParameterPlacement], ParameterPlacement]) -> Program:
    """The program with one parameter's entry changed."""
    assert name in {parameter.name for parameter in program.parameters}
    return replace(program, parameters=tuple(change(p) if p.name == name else p for p in program.parameters))


def torch_transformer() -> tuple[nn.Module, dict[str, Any]]:
    """What `--model` of the command line can name."""
    return TorchTransformer(), {"ids": torch.zeros((3, 12), dtype=torch.long)}


def half_baked() -> tuple[nn.Module, dict[str, Any]]:
    """A model that captures, and then raises when it's run."""
    model, keywords = torch_transformer()
    model.register_forward_pre_hook(_raise)
    return model, keywords


def _raise(module: nn.Module, arguments: object) -> None:
    if next(module.parameters()).data_ptr():
        raise ValueError("half-baked")
