"""Names of transformers' checkpoints, which often aren't those of the modules: experts one by one, other prefixes.

in:  a model of transformers, a checkpoint's tensors by their names there
out: the same tensors by the model's names; those that it has in one and the checkpoint in several, in pieces

transformers' own rules are asked, and its converters run on sketches: what stacks, joins and cuts tensors along a dim
is a list of boxes, which a rank reads its part of. What does anything else to them is refused.
"""

from __future__ import annotations

import copy
import importlib
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from tpplan.checkpoint.assembled import Source, Sources, assembled
from tpplan.checkpoint.files import finding, listed
from tpplan.checkpoint.sketch import Sketch
from tpplan.checkpoint.wanted import wanted_by
from tpplan.compat.modules import named_modules
from tpplan.plan import Diagnostic
from tpplan.runtime.modules.writes import stock_class

_AGAIN = (
    "load the folder into the stock model by transformers once, and write it by `tpplan.save_weights(model, folder)`, "
    "which stores tensors as the model has them"
)


def by_model_names(model: nn.Module, tensors: Sources) -> tuple[dict[str, Source], list[Diagnostic]]:
    """A checkpoint's tensors by the model's names, as transformers' `from_pretrained` makes them of the checkpoint's.

    Args:
        model: the model; of one that isn't transformers', the names are the checkpoint's.
        tensors: by the names in the checkpoint.

    Returns:
        The tensors, and errors: what can't be read so.
    """
    if not _is_pretrained(model):
        return dict(tensors), []
    rules = _Rules.of(model)
    found: dict[str, Source] = {}
    collected: dict[str, list[tuple[str, str]]] = {}
    origins: dict[str, list[str]] = {}
    for old in sorted(tensors, key=rules.order):
        new, pattern = rules.renamed(old)
        if pattern is not None and new in rules.names:
            collected.setdefault(new, []).append((pattern, old))
            continue
        new = old if pattern is not None else new
        origins.setdefault(new, []).append(old)
        found[new] = tensors[old]
    failed: dict[str, str] = {}
    for new, members in collected.items():
        try:
            made = rules.converted(new, [(pattern, tensors[old]) for pattern, old in members])
        except Exception as error:  # whatever transformers' converters raise where a tensor is only sketched
            failed[new] = f"`{new}`, of {listed([old for _, old in members])}: {error}"
            continue
        found |= made
        for name in made:
            origins.setdefault(name, []).append(members[0][1])
    return {n: t for n, t in found.items() if not rules.ignores(n)}, _problems(failed, origins)


def _problems(failed: Mapping[str, str], origins: Mapping[str, Sequence[str]]) -> list[Diagnostic]:
    found: list[Diagnostic] = []
    if failed:
        message = f"transformers converts {len(failed)} tensors of this checkpoint in ways that tpplan doesn't"
        found.append(finding(message, _AGAIN, *list(failed.values())[:10]))
    for new, olds in origins.items():
        if len(olds) > 1:
            message = f"the checkpoint has {listed(olds)}, of which transformers makes one tensor, `{new}`"
            found.append(finding(message, "remove one of them from the checkpoint"))
    return found


def _is_pretrained(model: nn.Module) -> bool:
    kind = getattr(sys.modules.get("transformers"), "PreTrainedModel", None)
    return kind is not None and isinstance(model, kind)


@dataclass(frozen=True, slots=True)
class _Rules:
    """What transformers says of a model's checkpoints.

    Attributes:
        model: the model.
        names: of its state_dict.
        library: transformers' module with the rules' classes.
        renamings, converters: in its order.
        prefix: of the base model within one with a head; None if there is none.
        unexpected: patterns of names that a checkpoint may have for nothing.
    """

    model: Any
    names: Mapping[str, bool]
    library: Any
    renamings: list[Any]
    converters: list[Any]
    prefix: str | None
    unexpected: tuple[re.Pattern[str], ...]

    @classmethod
    def of(cls, model: Any) -> _Rules:
        library = importlib.import_module("transformers.core_model_loading")
        mapping = importlib.import_module("transformers.conversion_mapping")
        every: list[Any] = mapping.get_model_conversion_mapping(_twin(model))
        names = {name: True for wanted in wanted_by(model) for name in wanted.names}
        return cls(
            model,
            names,
            library,
            [rule for rule in every if isinstance(rule, library.WeightRenaming)],
            [rule for rule in every if isinstance(rule, library.WeightConverter)],
            model.base_model_prefix or None,
            _unexpected(model),
        )

    def order(self, name: str) -> Any:
        """By which transformers sorts names, so that lists of tensors are in the order of their numbers."""
        return self.library.dot_natural_key(name)

    def renamed(self, old: str) -> tuple[str, str | None]:
        """The model's name for a tensor, and the pattern of the converter that it is for."""
        rename = self.library.rename_source_key
        new, pattern = rename(old, self.renamings, self.converters, self.prefix, self.names)
        if new not in self.names and old in self.names:
            new, pattern = rename(old, [], [], self.prefix, self.names)
        return new, pattern

    def converted(self, new: str, members: Sequence[tuple[str, Source]]) -> dict[str, Source]:
        """The tensors that a converter makes of others.

        Args:
            new: the first one's name.
            members: the others, with the patterns that they match.
        """
        held = next(rule for rule in reversed(self.converters) if members[0][0] in rule.source_patterns)
        converter = copy.deepcopy(held)
        for pattern, stored in members:
            converter.add_tensor(new, stored.name, pattern, Sketch.of(stored))
        made: dict[str, Any] = converter.convert(new, model=self.model, config=self.model.config)
        sketches: dict[str, Sketch] = {name: held[0] if type(held) is list else held for name, held in made.items()}
        return {name: assembled(name, held.shape, held.pieces) for name, held in sketches.items()}

    def ignores(self, name: str) -> bool:
        """Whether a tensor that the model doesn't have is none to speak of."""
        return name not in self.names and any(pattern.search(name) for pattern in self.unexpected)


def _unexpected(model: Any) -> tuple[re.Pattern[str], ...]:
    """As transformers has them: of a class, and of two buffers that older checkpoints have."""
    patterns: set[str] = set(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())
    buffers = [name for name, _ in model.named_buffers()]
    if any(name.endswith("rotary_emb.inv_freq") for name in buffers):
        patterns.add(r"rotary_emb\.inv_freq")
    if any(name.endswith("position_ids") for name in buffers):
        patterns.add(r"(^|\.)position_ids$")
    return tuple(re.compile(pattern) for pattern in sorted(patterns))


def _twin(model: nn.Module) -> Any:
    """The model as one of the stock class, with such submodules: rules are looked up by the classes' names."""
    kind = sys.modules["transformers"].PreTrainedModel
    twins = [(name, _of_stock_class(module)) for name, module in named_modules(model) if isinstance(module, kind)]
    twin = twins[0][1]
    twin.__dict__["named_modules"] = lambda: iter(twins)
    return twin


def _of_stock_class(module: nn.Module) -> Any:
    kind = stock_class(module)
    twin: Any = kind.__new__(kind)
    twin.__dict__.update(vars(module))
    return twin


__all__ = ["by_model_names"]
