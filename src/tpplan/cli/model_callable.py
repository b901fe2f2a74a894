"""The model that a `package.module:callable` or `FILE.py:callable` makes, on the meta device."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Mapping
from difflib import get_close_matches
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from tpplan.cli.model_problem import first_line, problem
from tpplan.plan import PlanError
from tpplan.plan.wording import all_of, with_article

if TYPE_CHECKING:
    from torch import nn

_NAME_A_MAKER = "name a function that makes a torch.nn.Module, or its class"
_LISTED = 5


def from_callable(module: str, name: str, overrides: dict[str, Any], reference: str) -> tuple[nn.Module, Any]:
    """Call `module:name` with the overrides; the model and its inputs, which are None if it doesn't give any."""
    make = _imported(module, name, reference)

    import torch
    from torch import nn

    if isinstance(make, nn.Module):
        raise problem(
            f"`{reference}` is a model already, {with_article(type(make).__name__)}",
            "name a function without arguments that makes it, so that it's built without memory for its numbers",
        )
    if not callable(make):
        raise problem(f"`{reference}` is {with_article(type(make).__name__)}", _NAME_A_MAKER)
    _check_arguments(make, overrides, reference)
    try:
        with torch.device("meta"):
            made: Any = make(**overrides)
    except Exception as error:
        message = f"`{reference}` raised {type(error).__name__}: {first_line(error)}"
        raise problem(message, "it's called under `torch.device('meta')`, where tensors have no numbers") from None
    pair: tuple[Any, ...] = made if isinstance(made, tuple) else (made, None)  # pyright: ignore
    if len(pair) != 2:
        raise problem(f"`{reference}` gave a tuple of {len(pair)}", "return a model, or a model and its inputs")
    if not isinstance(pair[0], nn.Module):
        what = "nothing" if made is None else f"{with_article(type(pair[0]).__name__)}, no module"
        raise problem(f"`{reference}` gave {what}", "return a torch.nn.Module, or one and its inputs")
    return pair[0], pair[1]


def require_module(module: str, name: str, reference: str) -> None:
    """Report a module that can't be there; nothing is imported."""
    if "" not in sys.path:
        sys.path.insert(0, "")
    if module.endswith(".py"):
        if not Path(module).is_file():
            raise problem(f"there is no file `{module}` to take `{name}` from", "name a file on this machine")
        return
    if "/" in module:
        raise problem(
            f"`{module}` is no module's name", f"write `package.module:{name}`, or a file: `{module}.py:{name}`"
        )
    outermost = module.partition(".")[0]
    if outermost not in sys.modules and (not outermost or find_spec(outermost) is None):
        raise _no_module(outermost, reference)


def _no_module(module: str, reference: str) -> PlanError:
    return problem(
        f"there is no module `{module}` to import `{reference}` from",
        "run tpplan in the folder that holds it, or put that folder on PYTHONPATH",
    )


def _imported(module: str, name: str, reference: str) -> Any:
    """What stands in a module under a name."""
    try:
        held = _of_file(Path(module)) if module.endswith(".py") else importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            message = f"importing `{module}` needs `{error.name}`, which isn't installed"
            raise problem(message, "install it, or run tpplan in the environment where it is") from None
        raise _no_module(error.name, reference) from None
    except Exception as error:  # whatever the module raises is the finding
        message = f"importing `{module}` raised {type(error).__name__}: {first_line(error)}"
        passes = f"python {module}" if module.endswith(".py") else f"python -c 'import {module}'"
        raise problem(message, f"mend it: `{passes}` must pass") from None
    if hasattr(held, name):
        return getattr(held, name)
    makers = [key for key, value in vars(held).items() if callable(value) and not key.startswith("_")]
    own = [key for key in makers if getattr(vars(held)[key], "__module__", None) == held.__name__]
    close = get_close_matches(name.removesuffix("()"), makers, 1)
    if close:
        way_out = f"did you mean `{module}:{close[0]}`?"
    else:
        way_out = f"it has {all_of(own[:_LISTED])}" if own else _NAME_A_MAKER
    raise problem(f"{'the file' if module.endswith('.py') else 'the module'} `{module}` has no `{name}`", way_out)


def _of_file(path: Path) -> ModuleType:
    """A file as a module, which finds those beside it, as a script does."""
    sys.path.insert(0, str(path.parent.resolve()))
    name = path.stem if path.stem not in sys.modules else f"_{path.stem}"
    spec = spec_from_file_location(name, path.resolve())
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _check_arguments(make: Any, overrides: Mapping[str, Any], reference: str) -> None:
    """Report arguments that the callable wants and --set doesn't give, and those that it doesn't take."""
    try:
        signature = inspect.signature(make)
    except (TypeError, ValueError):
        return
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    named = {key: p for key, p in signature.parameters.items() if p.kind not in kinds}
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in signature.parameters.values())
    for key in overrides if not takes_any else ():
        if key not in named:
            close = get_close_matches(key, list(named), 1)
            hint = f"it takes {all_of(named)}" if named else "it takes no arguments: remove --set"
            raise problem(f"`{reference}` takes no `{key}`", f"did you mean `{close[0]}`?" if close else hint)
    wanted = [key for key, p in named.items() if p.default is p.empty and key not in overrides]
    if wanted:
        given = " ".join(f"--set {key}=…" for key in wanted)
        message = f"`{reference}` can't be called without {all_of(wanted)}"
        raise problem(message, f"give {given}, or name a function without arguments that makes the model")


__all__ = ["from_callable", "require_module"]
