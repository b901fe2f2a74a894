"""Recorded outputs: the hooks by which transformers keeps hidden states, attentions and the logits of routers.

A model that is asked for them hangs these hooks on its modules in its first such call. That is a change that a proof
sees, and whole experts can't be proved beside one. So they are there before a call is recorded that asks for them.
"""

from __future__ import annotations

import sys
from collections.abc import Generator, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn

from tpplan.compat.hooks import note_forward_hooks

_MODULE = "transformers.utils.output_capturing"
_INSTALLED = "_output_capturing_hooks_installed"


@contextmanager
def recording_outputs(model: nn.Module, inputs: object, *, keep: bool = False) -> Generator[None]:
    """With the hooks that a call of `model` would hang; `keep` leaves them there, if nothing is raised.

    Args:
        model: of transformers, or with such inside of it; others stay as they are.
        inputs: of the call, of which keywords may ask for outputs, as the config may.
    """
    library: Any = sys.modules.get(_MODULE)  # no model of an older transformers, or of none, hangs them
    if library is None:
        yield
        return
    asking = list(_asking(model, inputs, library))
    with ExitStack() as put_back:
        if asking:
            put_back.callback(note_forward_hooks(model))
        for module in asking:
            library.maybe_install_capturing_hooks(module)
            put_back.callback(vars(module).pop, _INSTALLED, None)
        yield
        if keep:
            put_back.pop_all()


def _asking(model: nn.Module, inputs: object, library: Any) -> Iterator[nn.Module]:
    """The modules whose forward hangs hooks, of models that are asked for what these record."""
    given: Mapping[str, Any] = inputs if isinstance(inputs, Mapping) else {}  # pyright: ignore
    for module in model.modules():
        if getattr(module, _INSTALLED, False) or not _captures(getattr(type(module), "forward", None), library):
            continue
        config = getattr(module, "config", None)
        keys: Any = library._CAN_RECORD_REGISTRY.get(module) or ()
        if any(given.get(f"output_{key}", getattr(config, f"output_{key}", False)) for key in keys):
            yield module


def _captures(forward: Any, library: Any) -> bool:
    """Whether a `forward` is decorated by what hangs the hooks."""
    while forward is not None:
        if getattr(getattr(forward, "__code__", None), "co_filename", None) == library.__file__:
            return True
        forward = getattr(forward, "__wrapped__", None)
    return False


__all__ = ["recording_outputs"]
