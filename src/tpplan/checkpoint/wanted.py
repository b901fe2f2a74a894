"""Which tensors a model wants, which of a checkpoint's they are, and why some can't be loaded."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tpplan.checkpoint.assembled import Source, Sources
from tpplan.checkpoint.files import finding, listed
from tpplan.compat.dtensors import local_of
from tpplan.compat.modules import named_modules, own_buffers, own_parameters, transient_buffers
from tpplan.plan import Diagnostic, Severity
from tpplan.runtime.parameters.distribute import device_of_mesh

_NOTES = 20
_UNUSED = 5


@dataclass(frozen=True, slots=True)
class Wanted:
    """A tensor of a model.

    Attributes:
        tensor: the tensor.
        names: all that it goes by.
        holders: the modules that have it, and what they call it.
    """

    tensor: Tensor
    names: tuple[str, ...]
    holders: tuple[tuple[nn.Module, str], ...]

    def with_memory(self, device: torch.device) -> Tensor:
        """The tensor; one that is on `meta` as an empty one on its mesh's device, or on `device` without a mesh."""
        held = self.tensor.detach()
        if not local_of(held).is_meta:
            return held
        return torch.empty_like(held, device=device_of_mesh(held.device_mesh) if isinstance(held, DTensor) else device)

    def put(self, filled: Tensor) -> None:
        """Give a tensor that was on `meta` to all that hold it."""
        if not local_of(self.tensor).is_meta:
            return
        if isinstance(self.tensor, nn.Parameter):
            filled = nn.Parameter(filled, requires_grad=self.tensor.requires_grad)
        for module, name in self.holders:
            setattr(module, name, filled)


@dataclass(frozen=True, slots=True)
class Match:
    """What of a checkpoint goes into a model.

    Attributes:
        pairs: what is loaded, and from where.
        missing: the model's tensors that the checkpoint hasn't.
        unexpected: the checkpoint's that the model hasn't.
        findings: why it can't be loaded, and what should be known; errors and warnings.
    """

    pairs: tuple[tuple[Wanted, Source], ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    findings: tuple[Diagnostic, ...]


def wanted_by(model: nn.Module, every: bool = False) -> list[Wanted]:
    """Every distinct tensor of the model's state_dict.

    Args:
        model: the model.
        every: whether also to find buffers that aren't in it, and plain attributes on `meta`.
    """
    found: dict[int, Wanted] = {}
    for prefix, module in named_modules(model, remove_duplicate=False):
        transient = () if every else transient_buffers(module)
        registered = {**own_parameters(module), **own_buffers(module)}
        plain = vars(module).items() if every else ()
        plain = {leaf: held for leaf, held in plain if isinstance(held, Tensor) and held.is_meta}
        for leaf, tensor in (registered | plain).items():
            if tensor is None or leaf in transient:
                continue
            held = found.get(id(tensor), Wanted(tensor, (), ()))
            name = f"{prefix}.{leaf}" if prefix else leaf
            found[id(tensor)] = replace(held, names=(*held.names, name), holders=(*held.holders, (module, leaf)))
    return list(found.values())


def renamed(tensors: Sources, rename: Mapping[str, str]) -> tuple[dict[str, Source], tuple[Diagnostic, ...]]:
    """The checkpoint's tensors under the names that the patterns make of theirs.

    Args:
        tensors: by their names in the checkpoint.
        rename: regular expressions and what replaces every match, as `re.sub` does; each sees what the last has made.
    """
    findings: list[Diagnostic] = []
    names = {name: name for name in tensors}
    for pattern, replacement in rename.items():
        try:
            changed = {old: re.sub(pattern, replacement, new) for old, new in names.items()}
            idle = not any(re.search(pattern, name) for name in names.values())
        except (re.error, IndexError) as error:
            findings.append(
                finding(
                    f"`rename` has {pattern!r}: {replacement!r}, which isn't a regular expression and a replacement: "
                    f"{error}",
                    "write them as for `re.sub`; `.` matches any character, a dot is `\\.`",
                )
            )
            continue
        if idle:
            message = f"`rename` has {pattern!r}, which matches no name in the checkpoint"
            findings.append(finding(message, f"its names are like {listed(sorted(tensors))}"))
        names = changed
    by_name: dict[str, list[str]] = {}
    for old, new in names.items():
        by_name.setdefault(new, []).append(old)
    for new, olds in by_name.items():
        if len(olds) > 1:
            findings.append(finding(f"`rename` makes `{new}` of {listed(olds)}", "make the patterns narrower"))
    return {new: tensors[olds[0]] for new, olds in by_name.items()}, tuple(findings)


def match(model: nn.Module, tensors: Sources, strict: bool, partial: bool = False) -> Match:
    """Find each of the model's tensors in a checkpoint, with its shape and a dtype that can be cast.

    Args:
        model: the model.
        tensors: of the checkpoint, by the model's names.
        strict: whether a missing tensor is an error.
        partial: whether the model may be a part of what is there.
    """
    wanted = wanted_by(model)
    pairs: list[tuple[Wanted, Source]] = []
    missing: list[str] = []
    shapes: list[str] = []
    kinds: list[str] = []
    for held in wanted:
        name = next((n for n in held.names if n in tensors), None)
        if name is None:
            missing.append(held.names[0])
            continue
        stored, tensor = tensors[name], held.tensor
        if stored.shape != tuple(tensor.shape):
            shapes.append(f"`{name}` has shape {list(stored.shape)} there and {list(tensor.shape)} in the model")
        elif not _casts(stored.torch_dtype, tensor.dtype):
            kinds.append(f"`{name}` is {stored.dtype} there and {_shown(tensor.dtype)} in the model")
        else:
            pairs.append((held, stored))
    known = {name for held in wanted for name in held.names} | _transient(model)
    unexpected = sorted(tensors.keys() - known)
    findings = [*_misfits(missing if strict else [], shapes, len(wanted), unexpected), *_of_kinds(kinds)]
    if not findings:
        findings = _left(missing, [] if partial else unexpected)
    return Match(tuple(pairs), tuple(missing), tuple(unexpected), tuple(findings))


def _transient(model: nn.Module) -> set[str]:
    """The names of buffers that no checkpoint has; older ones did, and their numbers are the model's own anyway."""
    return {
        f"{prefix}.{leaf}" if prefix else leaf
        for prefix, module in named_modules(model, remove_duplicate=False)
        for leaf in transient_buffers(module)
    }


def _casts(source: torch.dtype | None, target: torch.dtype) -> bool:
    """Whether numbers may change their dtype: floats, and integers that all have a place; never what is quantised."""
    if source is None or torch.bool in (source, target) or source == target:
        return source == target
    kinds = {(dtype.is_complex, dtype.is_floating_point) for dtype in (source, target)}
    if kinds != {(False, False)}:
        return len(kinds) == 1 and min(source.itemsize, target.itemsize) > 1
    ours, theirs = torch.iinfo(target), torch.iinfo(source)
    return ours.min <= theirs.min and ours.max >= theirs.max


def _misfits(missing: Sequence[str], shapes: Sequence[str], count: int, unexpected: Sequence[str]) -> list[Diagnostic]:
    notes = [*(f"`{name}` is not in the checkpoint" for name in missing), *shapes]
    if not notes:
        return []
    more = [f"the checkpoint has `{name}`, which the model doesn't" for name in unexpected[:_UNUSED]]
    more += _prefix(missing, unexpected)
    return [
        finding(
            f"{len(notes)} of the model's {count} tensors can't be loaded from the checkpoint",
            "load it into the class that it was saved from: a model with a head and the bare model name their "
            "parameters differently, which `rename` can mend",
            *_cut(notes),
            *more,
        )
    ]


def _prefix(missing: Sequence[str], unexpected: Sequence[str]) -> list[str]:
    """What `rename` would mend, where the names on one side are those of the other with something in front."""
    for ours, theirs, cut in ((missing, unexpected, True), (unexpected, missing, False)):
        if not ours:
            continue
        every = set(theirs)
        for longer in theirs:
            prefix = longer.removesuffix(f".{ours[0]}")
            if prefix != longer and all(f"{prefix}.{name}" in every for name in ours):
                rename = f'{{"^{re.escape(prefix)}\\\\.": ""}}' if cut else f'{{"^": "{prefix}."}}'
                return [f"with `rename={rename}` the names are equal"]
    return []


def _of_kinds(kinds: Sequence[str]) -> list[Diagnostic]:
    if not kinds:
        return []
    return [
        finding(
            f"{len(kinds)} of the checkpoint's tensors hold numbers of another kind than the model's; quantised and "
            "whole numbers aren't cast",
            "load a checkpoint that isn't quantised; of a quantised folder with a config.json, "
            "`tpplan.from_pretrained(folder, dequantize=True)` makes the numbers that the model wants",
            *_cut(kinds),
        )
    ]


def _left(missing: Sequence[str], unexpected: Sequence[str]) -> list[Diagnostic]:
    """What a load leaves as it is; warnings."""
    found: list[Diagnostic] = []
    if missing:
        message = f"{len(missing)} of the model's tensors are not in the checkpoint, and stay as they are"
        notes = _cut([f"`{name}`" for name in missing])
        way_out = "initialise them: `tpplan.init_weights(model, missing=True)` gives numbers to those on `meta`"
        found.append(finding(message, way_out, *notes, severity=Severity.WARNING))
    if unexpected:
        message = f"the checkpoint has {len(unexpected)} tensors that the model doesn't, which aren't loaded"
        way_out = "nothing, if the model is meant to have less; else load it into the class that it was saved from"
        notes = _cut([f"`{name}`" for name in unexpected])
        found.append(finding(message, way_out, *notes, severity=Severity.WARNING))
    return found


def _cut(notes: Iterable[str]) -> list[str]:
    every = list(notes)
    return every if len(every) <= _NOTES else [*every[:_NOTES], f"and {len(every) - _NOTES} more"]


def _shown(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


__all__ = ["Match", "Wanted", "match", "renamed", "wanted_by"]
