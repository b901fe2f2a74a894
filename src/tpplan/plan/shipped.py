"""What the plans that ship with tpplan are for, from the comments at their heads."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path

from tpplan.plan.diagnostic import Diagnostic
from tpplan.plan.locate import shipped_plan_names, shipped_plan_paths
from tpplan.plan.nearest import nearest_words
from tpplan.plan.vocabulary import AUTO
from tpplan.plan.wording import all_of, one_of

_CLASS = re.compile(r"\b(?!AutoModel)[A-Z]\w*(?:Model|For[A-Z]\w*|Transformer\w*)\b")


@dataclass(frozen=True, slots=True)
class ShippedPlan:
    """A plan that ships.

    Attributes:
        name: as `load_plan` takes it, such as `llama`.
        path: its file.
        model: the class that it's for, such as `LlamaForCausalLM`; for a model without one, what it is called.
        summary: what it does, from the first sentence of its comment.
    """

    name: str
    path: Path
    model: str
    summary: str

    def matches(self, wanted: str) -> bool:
        """Whether a glob, or a part of a word, in any case, fits the name or the model."""
        text = wanted.lower()
        pattern = text if any(sign in text for sign in "*?[") else f"*{text}*"
        return any(fnmatchcase(word.lower(), pattern) for word in (self.name, self.model))


@cache
def shipped_plans() -> tuple[ShippedPlan, ...]:
    """All of them, by name."""
    return tuple(map(_described, shipped_plan_paths()))


def naming_shipped(findings: Sequence[Diagnostic], kind: str, model_type: object, used: str) -> list[Diagnostic]:
    """`findings`, where a pattern matches nothing with a note of the plans that ship for the model, if there are any.

    Args:
        findings: of a plan and a model.
        kind, model_type: the model's class, and the name of its architecture, if it has one.
        used: the plan's own name.
    """
    first = next((place for place, found in enumerate(findings) if found.code == "TP012"), None)
    if first is None:
        return list(findings)
    suited = (p for p in shipped_plans() if p.model == kind or p.name.removesuffix("-sequence") == model_type)
    names = [plan.name for plan in suited if plan.name != used]
    if not names:
        return list(findings)
    note = f"for {kind} tpplan ships {all_of(names)}"
    return [replace(f, notes=(*f.notes, note)) if place == first else f for place, f in enumerate(findings)]


def shipped_help(text: str) -> str:
    """What to do where `text` is no plan: the nearest shipped ones, and how to list them."""
    if text == AUTO:
        return "`auto` is found for a model: name one, or write it down by `tpplan suggest --model REF -o FILE`"
    if text.lower() == AUTO:
        return "did you mean `auto`? It is found for a model"
    names = shipped_plan_names()
    if not names:
        return "check the path"
    near = nearest_words(Path(text[:200]).stem, names) if text else []
    if near:
        return f"did you mean the shipped plan {one_of(near)}? `tpplan plans` lists them all"
    return "give a file, or the name of a shipped plan: `tpplan plans` lists them"


def _described(path: Path) -> ShippedPlan:
    text = " ".join(_comment(path))
    sentence = text.partition(". ")[0].partition(" (")[0].rstrip(".")
    called, sign, rest = re.split(r"([:,]) ", sentence, maxsplit=1)
    found = _CLASS.search(text)
    kind = found[0] if found else called
    return ShippedPlan(path.stem, path, kind, rest if called == kind or sign == "," else sentence)


def _comment(path: Path) -> Iterator[str]:
    """The lines of the comment at a file's head, but for what an editor reads."""
    with path.open(encoding="utf-8") as stream:
        for line in stream:
            if not line.startswith("#"):
                return
            if "yaml-language-server" not in line:
                yield line.lstrip("# ").rstrip()


__all__ = ["ShippedPlan", "naming_shipped", "shipped_help", "shipped_plans"]
