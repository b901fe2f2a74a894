"""Fitness: whether a model can be compiled at all, before anything is asked of a plan.

in:  a model
out: TP108 if it is parallel already; TP110 if it can't be captured; TP112 if a `forward` on an instance would hide what
     tpplan puts into the class, if an attribute hides a tensor or a module, if there are hooks on parameters, which are
     replaced, if tensors are of classes that compute otherwise than plain ones, or if a tensor that is no parameter
     requires grad
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Set

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from tpplan.compat.hooks import has_gradient_hooks, hooks_of
from tpplan.compat.modules import hidden_names, named_modules, own_buffers, own_parameters
from tpplan.compat.subclasses import computes_otherwise
from tpplan.compiler.ir.assembly import UNFROZEN, Assembly
from tpplan.compiler.ir.kept_tensors import WrapperError
from tpplan.compiler.ir.trace import Path
from tpplan.compiler.trace.slots import hook_name
from tpplan.plan import Diagnostic
from tpplan.plan.wording import with_article
from tpplan.state.content import Reader
from tpplan.state.parts import UnseenError, is_users_code, own_bases
from tpplan.state.reads import global_content, marks_on, read_of_classes, shown, space_of

MARK = "_tpplan"
WANTS_GRADIENT = "requires grad, and isn't a parameter, so that no sum over the ranks is placed for its gradient"
NO_PARAMETER = "make it an `nn.Parameter`"
_HIDDEN = "is hidden by an attribute of the same name in the `__dict__` of its module"
_SHOW = "delete it from `vars(module)`, or set the parameter, the buffer or the module instead"
_HOOKED = "has a hook on its gradient, which would be lost with the parameter that is replaced"
_HOOK_LATER = "parallelize first, and register the hook on the parameter that the model has then"
_STOCK = frozenset(vars(nn.Module()))


def unseen_findings(model: nn.Module, reads: Set[str], passed: Iterable[tuple[Path, Tensor]]) -> list[Diagnostic]:
    """Findings about what bodies read, and nobody can compare or copy as it is.

    Args:
        model: that is compiled.
        reads: by what names bodies ask for something.
        passed: the tensors of the call, by path.
    """
    findings: list[Diagnostic] = []

    def look(subject: str, place: str, read: Callable[[], object]) -> None:
        try:
            read()
        except UnseenError as error:
            finding = Diagnostic(
                code="TP129",
                message=f"what the model computes can't be told from what it reads: `{place}` is or holds {error}",
                help="keep what steers a forward in attributes of modules: numbers, texts, containers or plain objects",
                subject=subject,
            )
            findings.append(finding)

    for path, tensor in passed:
        look("", ".".join(map(str, path)), functools.partial(marks_on, tensor, reads))
    modules = list(named_modules(model))
    reader = Reader({module: name for name, module in modules})
    for name, module in modules:
        for leaf in vars(module).keys() & reads - _STOCK:
            look(name, f"{name}.{leaf}".lstrip("."), functools.partial(reader, vars(module)[leaf]))
        for leaf, tensor in (*own_parameters(module).items(), *own_buffers(module).items(), *vars(module).items()):
            if isinstance(tensor, Tensor):
                look(name, f"{name}.{leaf}".lstrip("."), functools.partial(marks_on, tensor, reads))
        for number, hook in enumerate(hooks_of(module) if name else ()):
            if is_users_code(hook):
                look(name, hook_name(name, number), functools.partial(reader, hook))
    kinds = dict.fromkeys(kind for _, module in modules for kind in own_bases(type(module)))
    for kind, leaf in read_of_classes(kinds, reads):
        look("", f"{shown(kind)}.{leaf}", functools.partial(reader, vars(kind)[leaf]))
    for name in sorted(read for read in reads if ":" in read):
        space, leaf = space_of(name), name.partition(":")[2]
        look("", name.replace(":", "."), functools.partial(global_content, space, vars(space).get(leaf), reader))
    return findings


def unfit_findings(model: nn.Module) -> list[Diagnostic]:
    """What stands in the way of compiling `model`."""
    unset = next((name for name, held in _own_tensors(model) if is_lazy(held)), None)
    if unset is not None:
        return [_uninitialised(unset)]
    scripted = next((name for name, held in named_modules(model) if isinstance(held, torch.jit.ScriptModule)), None)
    if scripted is not None:
        return [
            Diagnostic(
                code="TP110",
                message=f"`{scripted or type(model).__name__}` was compiled by TorchScript, and shows no Python",
                help="shard the module that it was made of, before `torch.jit.script` or `torch.jit.trace`",
                subject=scripted or None,
            )
        ]
    findings: list[Diagnostic] = []
    for name, module in named_modules(model):
        shown = name or type(model).__name__
        if MARK in vars(module):
            return [_already_parallel(f"`{shown}` was parallelized by tpplan before", name)]
        if isinstance(module, DistributedDataParallel):
            return [_already_parallel(f"`{shown}` is a DistributedDataParallel", name, _INSIDE)]
        if "forward" in vars(module):
            findings.append(
                Diagnostic(
                    code="TP112",
                    message=f"`{shown}` has a `forward` set on the instance, which hides the class's",
                    help="parallelize first, and wrap the forward afterwards (accelerate's hooks do this: remove them "
                    "with accelerate.hooks.remove_hook_from_module)",
                    subject=name,
                )
            )
    findings += [
        _unsupported(f"{name}.{leaf}".lstrip("."), _HIDDEN, _SHOW)
        for name, module in named_modules(model)
        for leaf in hidden_names(module)
    ]
    findings += [
        _unsupported(name, _HOOKED, _HOOK_LATER)
        for name, parameter in model.named_parameters()
        if has_gradient_hooks(parameter)
    ]
    findings += [
        _unsupported(name, WANTS_GRADIENT, NO_PARAMETER)
        for name, held in _other_tensors(model)
        if held.requires_grad and held.is_leaf and not isinstance(held, nn.Parameter)
    ]
    held = next((name for name, tensor in _own_tensors(model) if isinstance(tensor, DTensor)), None)
    if held is not None:
        findings.append(_already_parallel(f"`{held}` is a DTensor already", held))
    return [*findings, *_of_other_classes(model)]


def _unsupported(name: str, what: str, way_out: str) -> Diagnostic:
    """TP112 for what a module has by a name."""
    return Diagnostic("TP112", f"`{name}` {what}", help=way_out, subject=name.rpartition(".")[0])


def _of_other_classes(model: nn.Module) -> Iterator[Diagnostic]:
    """TP112 for tensors whose class says what is computed with them, and that weren't taken apart."""
    for name, tensor in (*model.named_parameters(), *_other_tensors(model)):
        if computes_otherwise(type(tensor)):
            reason = _whole_for(tensor)
            yield Diagnostic(
                code="TP112",
                message=f"`{name}` is {with_article(f'{type(tensor).__module__}.{type(tensor).__name__}')}, a tensor "
                "whose class says itself what operations on it compute, and what is proved of plain tensors doesn't "
                f"hold for it: {reason}",
                help=_UNGATHERED
                if _gathers_itself(tensor)
                else f"call `requires_grad_(False)` on `{name}` before, which isn't trained then, as quantised weights "
                "mostly aren't"
                if reason == UNFROZEN
                else f"keep plain numbers in `{name}`, such as weights "
                "that aren't quantised, or quantised numbers and their scales as plain tensors with which the layer's "
                "own forward computes",
                subject=name.rpartition(".")[0] or name,
            )
        elif tensor.is_quantized or tensor.layout not in _LAYOUTS[: 1 if isinstance(tensor, nn.Parameter) else None]:
            yield Diagnostic(
                code="TP112",
                message=f"`{name}` is {with_article(str(tensor.dtype if tensor.is_quantized else tensor.layout))} "
                "tensor, which can't be cut into parts, nor recorded on shapes",
                help=f"keep dense numbers in `{name}`; what isn't trained may be `torch.sparse_coo`",
                subject=name.rpartition(".")[0] or name,
            )


_UNGATHERED = (
    "convert the model without it, as by torchao's `enable_fsdp_float8_all_gather=False`: FSDP2 gathers plain weights, "
    "and the layers round them after that by the largest entry of all ranks"
)


def _gathers_itself(tensor: Tensor) -> bool:
    return tensor.requires_grad and hasattr(tensor, "fsdp_pre_all_gather")


def _whole_for(tensor: Tensor) -> str:
    """Why a tensor wasn't taken apart."""
    if _gathers_itself(tensor):
        return (
            "it says itself what FSDP2 gathers of it (`fsdp_pre_all_gather`): of a rank's part numbers that are "
            "rounded by the largest entry of that part"
        )
    try:
        Assembly.of(tensor, "")
    except WrapperError as error:
        return str(error)
    return "only parameters of modules are taken apart, whose parts' names, such as `_weight_codes`, are free there"


def _other_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Buffers, and tensors in attributes."""
    for at, module in named_modules(model):
        for name, held in (*own_buffers(module).items(), *vars(module).items()):
            if isinstance(held, Tensor):
                yield f"{at}.{name}" if at else name, held


def _own_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _uninitialised(name: str) -> Diagnostic:
    owner = name.rpartition(".")[0]
    return Diagnostic(
        code="TP110",
        message=f"`{name}` has no shape yet: it belongs to a lazy module that was never called",
        help="call the model once, on inputs like those that it will get, before it is sharded",
        subject=owner or None,
    )


_LAYOUTS = (torch.strided, torch.sparse_coo)
_ONCE = "parallelize the stock model, once; build it anew to shard it otherwise"
_INSIDE = "parallelize the model inside of it, built anew, and put the DistributedDataParallel around that"


def _already_parallel(message: str, name: str, way_out: str = _ONCE) -> Diagnostic:
    return Diagnostic(code="TP108", message=message, help=way_out, subject=name or None)
