"""Shared features: which of a layer's features each rank has, where parts like those of `torch.chunk` won't do.

in:  what the trace does with the features that a plan splits, and the number of ranks
out: parts by which grouped products have rows that start aligned, and no rank is left without features

    2880 features of experts in bfloat16 on 16 ranks   ->   360 units of 8: 184 on 8 of the ranks, 176 on the others
    100 features between two linear layers, 16 ranks   ->   7 on 4 of the ranks, 6 on the others, in place of 7, …, 2, 0
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from tpplan.compiler.bind.bind import Bound
from tpplan.compiler.bind.linear import LinearForm, Product
from tpplan.compiler.bind.shared_heads import Body, Use
from tpplan.compiler.ir.heads import ROW_BYTES, Parts, even_parts
from tpplan.compiler.ir.layout import Pack
from tpplan.plan import Diagnostic, Pin, Style

_NARROW = ROW_BYTES // 2  # entries of two bytes, in which autocast and FSDP may compute what is stored wider


@dataclass(frozen=True, slots=True)
class Units:
    """The features of one body that grouped products make and contract.

    Attributes:
        features: how many features the parameters have that these products read.
        number: into how many units each of their stretches falls.
        parts: which of the units a rank has; empty if there are fewer than ranks.
    """

    features: frozenset[int]
    number: int
    parts: Parts

    def packs(self, use: Use) -> list[Pack]:
        """How a parameter's features are shared out; empty if they aren't such features."""
        found = [Pack(self.number, parts=self.parts).scaled(n // self.number, 1) for n in _stretches(use)]
        return [] if use.features not in self.features else [pack for pack in found if pack is not None]


@dataclass(frozen=True, slots=True)
class SharedFeatures:
    """How features are shared out.

    Attributes:
        size: the number of ranks.
        units: by body, those of grouped products that single features would cut.
        filled: numbers of features that are contracted, of which `torch.chunk` would leave a rank without any.
    """

    size: int
    units: Mapping[Body, Units]
    filled: Collection[int]

    def refined(self, bound: Bound, use: Use) -> Bound | Diagnostic:
        """A layer with such parts, if its features are shared out so."""
        rows = None if use.reader is None else self.units.get(use.reader)
        if rows is not None:
            if not rows.parts:
                return _too_few(bound, rows, self.size) if use.unit > 1 else bound
            packs = rows.packs(use)
        else:
            plain = bound.packs or (Pack(use.features),)
            chunked = bound.output is not Pin.SHARD and all(
                pack == Pack(pack.size) and pack.size in self.filled for pack in plain
            )
            packs = [Pack(n, parts=even_parts(n, self.size)) for n, *_ in plain] if chunked else []
        return replace(bound, packs=tuple(packs)) if packs else bound


def shared_features(modules: Mapping[str, Bound], uses: Mapping[str, Use], size: int) -> SharedFeatures:
    """How the features of layers and parameters, by name, are shared out over `size` ranks."""
    contracted = {use.features for name, use in uses.items() if _contracts(modules[name])}
    filled = {n for n in contracted if n >= size and -(-n // size) * (size - 1) >= n}
    return SharedFeatures(size, _units_of(uses.values(), size), filled)


def _contracts(bound: Bound) -> bool:
    form = bound.form
    product = isinstance(form, LinearForm) or (isinstance(form, Product) and form.given_dim is None)
    return product and bound.style is Style.ROWWISE


def _units_of(uses: Iterable[Use], size: int) -> dict[Body, Units]:
    """By body, the units of features that `size` ranks would cut if they shared out single features."""
    products: dict[Body, list[Use]] = {}
    for use in uses:
        if use.reader is not None and use.unit > 1:
            products.setdefault(use.reader, []).append(use)
    found: dict[Body, Units] = {}
    for body, held in products.items():
        counts = {n: use.unit for use in held for n in _stretches(use)}
        if any(n % size or n // size % unit for n, unit in counts.items()):
            tried = [_number(counts, _NARROW), _number(counts, 0)]
            number = next((n for n in tried if n >= size), tried[-1])
            whole = frozenset(use.features for use in held)
            if number:
                found[body] = Units(whole, number, even_parts(number, size) if number >= size else ())
    return found


def _number(counts: Mapping[int, int], least: int) -> int:
    """The largest number of units into which all counts fall, each of whole rows; 0 if they fall into none."""
    number = min(n // max(unit, least) for n, unit in counts.items())
    fits = number and all(n % number == 0 and n // number % max(unit, least) == 0 for n, unit in counts.items())
    return number if fits else 0


def _stretches(use: Use) -> Sequence[int]:
    """The stretches of a parameter's features that a body takes apart by themselves."""
    taken = use.taken
    whole = taken is not None and not any(taken.heads) and sum(taken.stretches) == use.features
    return taken.stretches if taken is not None and whole else (use.features,)


def _too_few(bound: Bound, held: Units, size: int) -> Diagnostic:
    """TP102 for fewer units than ranks."""
    return Diagnostic(
        code="TP102",
        message=f"`{bound.name}` can't be split: rows of a grouped product are multiples of {ROW_BYTES} bytes, and its "
        f"features make {held.number} of these for {size} ranks",
        span=bound.rule.style_span,
        label=f"{held.number} rows of {ROW_BYTES} bytes / {size} ranks",
        help=f"use at most {held.number} ranks, give each rank whole experts by `experts`, or remove the rule",
        subject=bound.name,
    )


__all__ = ["SharedFeatures", "Units", "shared_features"]
