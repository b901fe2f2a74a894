"""Served: the model that a plan means, inside of one that wraps it, and the call that reaches it.

in:  a model, a plan, an example call
out: the model whose modules the plan names, and what it is called with

    PeftModel(LoraModel(LlamaForCausalLM)), plans/llama.yaml   ->   the LlamaForCausalLM, with its adapters

What wraps it stays as it is, and runs around it on whole tensors: so a wrapper's `generate`, `save_pretrained` and the
like do what they do with the unsharded model. A plan whose names start from the wrapper is a plan for the wrapper.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn

from tpplan.ambience import ambience
from tpplan.compiler.bind.bind import stored_tensors
from tpplan.compiler.bind.inner_models import wrapped_models
from tpplan.compiler.ir.objects import is_object, is_opaque
from tpplan.compiler.ir.observations import CaptureSettings
from tpplan.compiler.ir.pytree import tensors_in, with_tensors
from tpplan.compiler.ir.trace import Path
from tpplan.compiler.trace.capture import on_shapes, tell_inputs
from tpplan.compiler.trace.device import device_of
from tpplan.compiler.trace.preconditions import unfit_findings
from tpplan.compiler.trace.signatures import argument_names, takes_keywords
from tpplan.compiler.trace.skeleton import make_skeleton
from tpplan.inputs import Call, example_call
from tpplan.plan import CompileError, Diagnostic, Plan


@dataclass(frozen=True, slots=True)
class Served:
    """The model that a plan means.

    Attributes:
        name: its name in the model that wraps it; "" for that one itself.
        model: the model.
        plan: the plan, with names that start from there.
        arguments, keywords: an example call of it.
    """

    name: str
    model: nn.Module
    plan: Plan
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]

    @property
    def call(self) -> Call:
        """The example call."""
        return self.arguments, self.keywords


@ambience()
def served(
    model: nn.Module, plan: Plan | None, size: int, inputs: object = None, *, partial: bool = False, **sizes: Any
) -> Served:
    """The model that `plan` means: `model`, or one that it only wraps; without a plan, the innermost that gets calls.

    With `partial` that may be a part of what the plan is for.

    Raises:
        CompileError: TP111, if there are no inputs; TP160, if a call of the wrapper doesn't reach the wrapped model.
    """
    wrong = [held for held in unfit_findings(model) if held.code in ("TP108", "TP110")]  # of what wraps the model, too
    if wrong:
        raise CompileError(wrong)
    arguments, keywords = example_call(model, size, inputs, **sizes)
    name, own = _meant(model, Plan() if plan is None else plan)
    inner = model.get_submodule(name)
    own = own.part(*_names_in(inner)) if partial else own
    return Served(name, inner, own, *(_inner_call(model, name, arguments, keywords) if name else (arguments, keywords)))


def _names_in(model: nn.Module) -> tuple[list[str], list[str]]:
    """The names of a model's modules but its own, and of its parameters and buffers: what patterns match."""
    modules = [str(name) for name, _ in cast("Any", model).named_modules(remove_duplicate=False) if name]
    return modules, [name for name, _ in stored_tensors(model)]


def names_for(model: nn.Module) -> tuple[list[str], list[str]]:
    """The names that patterns match, also of the models that this one wraps, which start from these."""
    held = [_names_in(inner) for inner in (model, *(inner for _, inner in wrapped_models(model)))]
    return [n for modules, _ in held for n in modules], [n for _, parameters in held for n in parameters]


def _meant(model: nn.Module, plan: Plan) -> tuple[str, Plan]:
    """The name of the model that a plan means, and the plan as one for that."""
    wrapped = list(wrapped_models(model))
    if not wrapped:
        return "", plan
    name = plan.base_among([name for name, _ in wrapped], *_names_in(model))
    if name:
        return name, plan
    outer, own = model, plan
    for inner_name, inner in wrapped:  # those that pass on whatever they get
        within = plan.within(inner_name)
        if within is None or not takes_keywords(type(outer).forward):
            break
        name, own, outer = inner_name, within, inner
    return name, own


class _ReachedError(BaseException):
    """The wrapped model is called."""

    def __init__(self, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        super().__init__()
        self.call = (arguments, keywords)


def _inner_call(model: nn.Module, name: str, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Call:
    """What a wrapped model is called with when the wrapper is called so; tensors that are passed on are the same."""
    skeleton, names = make_skeleton(model).model, argument_names(type(model).forward)
    originals: dict[int, tuple[Tensor, Tensor]] = {}

    def shown(path: Path, tensor: Tensor) -> Tensor:
        made = torch.empty_like(tensor, device="meta", requires_grad=tensor.requires_grad)
        originals[id(made)] = (made, tensor)
        return made

    example = with_tensors(arguments, keywords, names, shown)
    inner = skeleton.get_submodule(name)
    inner.forward = _reached  # also met where a wrapper calls `forward` itself, as peft's AdaLoRA does
    reached: _ReachedError | None = None
    settings = CaptureSettings(skeleton.training, device=device_of(model), values=True)
    with on_shapes(skeleton, settings) as recorder:
        tell_inputs(recorder, (arguments, keywords), example, names)
        try:
            skeleton(*example[0], **example[1])
        except _ReachedError as told:
            reached = told
        except Exception as error:  # whatever the wrapper raises
            raise CompileError([_unreached(model, name, f": {type(error).__name__}: {error}")]) from error
    if reached is None:
        raise CompileError([_unreached(model, name, "")])

    def passed(path: Path, tensor: Tensor) -> Tensor:
        if id(tensor) in originals:
            return originals[id(tensor)][1]
        numbers = None if tensor.is_floating_point() else recorder.numbers.of(tensor)
        return tensor.detach().requires_grad_(tensor.requires_grad) if numbers is None else numbers

    _refuse_caches(model, name, reached.call)
    return with_tensors(*reached.call, argument_names(type(inner).forward), passed)


def _reached(*arguments: Any, **keywords: Any) -> NoReturn:
    raise _ReachedError(arguments, keywords)


def _refuse_caches(model: nn.Module, name: str, call: Call) -> None:
    """TP160 for keys and values that a wrapper makes itself, of which each rank would need those of its heads."""
    objects = [held for held in (*call[0], *call[1].values()) if is_object(held)]
    cache = next((held for held in objects if is_opaque(held) or any(tensors_in(held, objects=True))), None)
    if cache is None:
        return
    message = f"`{type(model).__name__}` passes a `{type(cache).__name__}` with tensors of its own to `{name}`"
    raise CompileError.of(
        "TP160",
        f"{message}: each rank would need the part of its heads, and no proof can see into it",
        help="use adapters inside of the layers (LoRA), or a learnt prompt (prompt tuning), not a prefix",
        subject=name,
    )


def _unreached(model: nn.Module, name: str, why: str) -> Diagnostic:
    kind = type(model).__name__
    accepted = ", ".join(f"`{a}`" for a in list(inspect.signature(type(model).forward).parameters)[1:])
    return Diagnostic(
        code="TP160",
        message=f"the plan is for `{name}`, which `{kind}` wraps, but the example call doesn't reach it{why}",
        help=f"pass `inputs=` as for a call of `{kind}`, which takes {accepted}; or parallelize `model.{name}` itself",
        subject=name,
    )


__all__ = ["Served", "names_for", "served"]
