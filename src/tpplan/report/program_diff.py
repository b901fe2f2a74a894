"""What changes from one program to another of the same model, as data; `program_compare.py` makes it."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from tpplan.cost.traffic import StepTraffic, reshard_traffic

if TYPE_CHECKING:
    from tpplan.compiler.ir.program import ParameterPlacement, Reshard


@dataclass(frozen=True, slots=True)
class ComparedReshard:
    """A reshard, without the reason for it, and how often a step calls its module."""

    reshard: Reshard
    calls: int
    size: int

    @property
    def traffic(self) -> StepTraffic:
        """What a rank sends in it."""
        return reshard_traffic(self.reshard, self.size, self.calls)

    @property
    def moved(self) -> str:
        """`P → R`."""
        return f"{self.reshard.source} → {self.reshard.target}"

    @property
    def ways(self) -> tuple[tuple[str, str, int, int], ...]:
        """Forward and backward: the collective or local operation, how often it runs, and bytes sent."""
        reshard, sent = self.reshard, self.traffic
        back = str(reshard.backward) if reshard.differentiable else "none"
        pairs = (("forward", str(reshard.forward), sent.forward), ("backward", back, sent.backward))
        return tuple((way, name, traffic.number, traffic.total) for way, name, traffic in pairs)

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        shown: dict[str, Any] = {"source": str(self.reshard.source), "target": str(self.reshard.target)}
        for way, name, count, sent in self.ways:
            shown[way] = {"collective": name, "count": count, "bytes": sent}
        return shown


@dataclass(frozen=True, slots=True)
class ParameterChange:
    """A parameter that is placed otherwise, in equal layers once.

    Attributes:
        name: `*` or the indices where the layers' index stands.
        count: how many there are.
        before, after: the first of them.
    """

    name: str
    count: int
    before: ParameterPlacement
    after: ParameterPlacement


@dataclass(frozen=True, slots=True)
class ReshardChange:
    """A reshard that comes, goes or changes, in equal layers once.

    Attributes:
        module: its module's name, `*` or the indices where the layers' index stands.
        count: how many there are.
        way: `in` at an argument, `mid` inside of the body, `out` at a result.
        path: of the tensor, as text.
        before, after: None where there is none.
    """

    module: str
    count: int
    way: str
    path: str
    before: ComparedReshard | None
    after: ComparedReshard | None


@dataclass(frozen=True, slots=True)
class DiffAmount:
    """A number of a rank in a step, before and after.

    Attributes:
        name: what is counted, such as `all-reduce, forward`.
        unit: "collectives", "bytes", "seconds" or "warnings".
        before, after: the number.
        judged: whether the change is for the worse where it grows; otherwise it is a part of one that is.
    """

    name: str
    unit: str
    before: float
    after: float
    judged: bool = False

    @property
    def worse(self) -> bool:
        """Whether it got worse."""
        return self.judged and self.after > self.before


@dataclass(frozen=True, slots=True)
class ProgramDiff:
    """What changes from one program to another.

    Attributes:
        model, size: of both.
        before, after: their names.
        gpu: for which times and memory are told; empty if they aren't.
        batch, sequence: of the step that they are of; 0 likewise.
        parameters, reshards: those that change.
        amounts: of a rank in a step.
        new_warnings, gone_warnings: a line each.
        others: what else differs, in words.
        notes: what couldn't be compared.
    """

    model: str
    size: int
    before: str
    after: str
    gpu: str
    batch: int
    sequence: int
    parameters: tuple[ParameterChange, ...]
    reshards: tuple[ReshardChange, ...]
    amounts: tuple[DiffAmount, ...]
    new_warnings: tuple[str, ...]
    gone_warnings: tuple[str, ...]
    others: tuple[str, ...]
    notes: tuple[str, ...] = ()

    @property
    def changed(self) -> bool:
        """Whether anything changes but names and reasons."""
        changes = (self.parameters, self.reshards, self.new_warnings, self.gone_warnings, self.others)
        return any(changes) or any(amount.before != amount.after for amount in self.amounts)

    @property
    def worse(self) -> tuple[str, ...]:
        """What got worse: names of amounts, and `warnings`."""
        return (*(a.name for a in self.amounts if a.worse), *(["warnings"] if self.new_warnings else []))

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        plain = {f.name: getattr(self, f.name) for f in fields(self)}
        parameters = [(c.name, c.count, _placed(c.before), _placed(c.after)) for c in self.parameters]
        reshards = [(c, c.before and c.before.to_dict(), c.after and c.after.to_dict()) for c in self.reshards]
        return plain | {
            "changed": self.changed,
            "worse": list(self.worse),
            "parameters": [{"name": n, "count": c, "before": b, "after": a} for n, c, b, a in parameters],
            "reshards": [
                {"module": c.module, "count": c.count, "way": c.way, "path": c.path, "before": b, "after": a}
                for c, b, a in reshards
            ],
            "amounts": [
                {"name": a.name, "unit": a.unit, "before": a.before, "after": a.after, "worse": a.worse}
                for a in self.amounts
            ],
        }

    def to_json(self, indent: int | None = 2) -> str:
        """As JSON text."""
        return json.dumps(self.to_dict(), indent=indent, ensure_ascii=False)


def _placed(held: ParameterPlacement) -> dict[str, Any]:
    return {
        "placement": str(held.layout),
        "summed": held.summed and held.trainable,
        "local_shape": list(held.local_shape),
        "bytes": held.local_bytes,
    }


__all__ = ["ComparedReshard", "DiffAmount", "ParameterChange", "ProgramDiff", "ReshardChange"]
