"""Attribute reads: which counts of a module, and of the settings that it holds, a run of the model looks at.

in:  the model, an example call, a module's name
out: the names of integer attributes that were read, as `integer_attributes` names them

    q.view(b, s, self.num_heads, self.config.size)   ->   num_heads, config.size
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from tpplan.compat.modules import derive_class, named_modules
from tpplan.compiler.bind.attributes import integer_attributes
from tpplan.compiler.ir.trace import Trace
from tpplan.compiler.trace.capture import Capture, record
from tpplan.compiler.trace.recorder import Recorder
from tpplan.compiler.trace.skeleton import make_skeleton
from tpplan.compiler.trace.surroundings import Surroundings


def attributes_read(
    model: nn.Module, trace: Trace, arguments: Sequence[Any], keywords: Mapping[str, Any], module: str
) -> frozenset[str]:
    """The counts of `module` that a run on whole tensors reads; all of them if none can be told from another."""
    known = frozenset(name for name, _ in integer_attributes(dict(named_modules(model))[module]))
    read: set[str] = set()
    around = Surroundings(model)
    try:
        skeleton = make_skeleton(model)
        _watch(dict(named_modules(skeleton.model))[module], known, read.add)
        record(skeleton, arguments, keywords, Capture(Recorder(trace.settings), leaves=False), around)
    except Exception:  # a class that can't be derived from, or a body that looks at classes: nothing is known then
        return known
    finally:
        around.restore()
    return frozenset(read)


def _watch(module: nn.Module, known: frozenset[str], note: Callable[[str], None]) -> None:
    """Let `note` hear of every count that is read from now on."""
    for holder in {name.rpartition(".")[0] for name in known} - {""}:
        settings = copy.copy(vars(module)[holder])
        keys = {name.rpartition(".")[2] for name in known if name.rpartition(".")[0] == holder}
        _derive(settings, keys, f"{holder}.", note)
        vars(module)[holder] = settings
    _derive(module, {name for name in known if "." not in name}, "", note)


def _derive(held: Any, keys: set[str], prefix: str, note: Callable[[str], None]) -> None:
    """Give `held` a class of its own, which tells what is read; by a name that stands for another, all of its value."""
    kind: type[object] = held.__class__
    counts: dict[str, int] = {key: vars(held)[key] for key in keys}

    def read(self: object, key: str) -> object:
        found = kind.__getattribute__(self, key)
        if self is held and type(found) is int:
            for name in [key] if key in counts else [n for n, count in counts.items() if count == found]:
                note(prefix + name)
        return found

    derive_class(held, {"__getattribute__": read})


__all__ = ["attributes_read"]
