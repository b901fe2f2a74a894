"""Loading plans: from a path, a shipped plan's name, YAML text or plain data, with what they extend merged in."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final, NamedTuple

from tpplan.plan.diagnostic import Diagnostic
from tpplan.plan.exceptions import PlanError
from tpplan.plan.locate import find_plan, shown_path
from tpplan.plan.nodes import Node, ScalarNode, nodes_from_data, shorten
from tpplan.plan.plan import Plan
from tpplan.plan.problems import Problems, Stop
from tpplan.plan.read_plan import Document, read_document
from tpplan.plan.rules import KernelRule, Rule
from tpplan.plan.shipped import shipped_help
from tpplan.plan.taken import PLAN_SOURCE, takes
from tpplan.plan.vocabulary import DEFAULT_AXIS, OverlapWord
from tpplan.plan.yaml_source import MAX_BYTES, compose, decode

PlanSource = str | os.PathLike[str] | Mapping[str, object]

MAX_EXTENDS: Final = 16


@takes(source=PLAN_SOURCE)
def load_plan(source: PlanSource) -> Plan:
    """Load a plan from a path, a shipped plan's name (`llama`), YAML text (a string with a line break) or a mapping.

    Raises:
        PlanError: the plan has mistakes; every one of them is in `diagnostics`.
        ArgumentError: `source` is none of these.

    Example:
        >>> plan = tpplan.load_plan("llama")
        >>> plan.rules[0].pattern.text, plan.rules[0].style.value
        ('model.embed_tokens', 'vocab')
    """
    plan, diagnostics = check_plan(source)
    if plan is None:
        raise PlanError(diagnostics)
    return plan


@takes(source=PLAN_SOURCE)
def check_plan(source: PlanSource) -> tuple[Plan | None, list[Diagnostic]]:
    """Load a plan without raising: the plan, or None if it has errors, and every finding in the file's order.

    Example:
        >>> plan, findings = tpplan.check_plan({"version": 1, "modules": {"up": "colwize"}})
        >>> plan is None, [found.code for found in findings]
        (True, ['TP005'])
    """
    problems = Problems()
    plan = _Loader(problems).plan(source)
    diagnostics = sorted(dict.fromkeys(problems.diagnostics), key=lambda diagnostic: diagnostic.sort_key)
    return (None if problems.failed else plan), diagnostics


class _Origin(NamedTuple):
    """Where a document is read from: its name in messages, and its path if it's a file."""

    shown: str
    path: Path | None = None

    @property
    def folder(self) -> Path:
        return self.path.parent if self.path else Path()

    @property
    def identity(self) -> str:
        return str(self.path.resolve()) if self.path else self.shown


class _Loader:
    """Reads a document and everything that it extends."""

    def __init__(self, problems: Problems) -> None:
        self.problems = problems

    def plan(self, source: PlanSource) -> Plan | None:
        """The merged plan; None if it can't be read at all."""
        try:
            origin, root = self.read(source)
        except Stop:
            return None
        document = read_document(root, origin.shown, self.problems)
        if document is None:
            return None
        merged, sources = self.extended(document, (origin,))
        stem = origin.path.stem if origin.path else "plan"
        return Plan(
            name=document.name or stem,
            axis=merged.axis or DEFAULT_AXIS,
            rules=merged.rules,
            kernels=merged.kernels,
            operators=merged.operators,
            one_shot=merged.one_shot or 0,
            overlap=OverlapWord.NONE if merged.overlap is None else merged.overlap,
            chunks=merged.chunks,
            recompute_gather=bool(merged.recompute_gather),
            fused_overlap=bool(merged.fused_overlap),
            option_spans=merged.option_spans,
            sources=tuple(item.shown for item in sources),
        )

    def read(self, source: PlanSource) -> tuple[_Origin, Node | None]:
        """The source's nodes, and where they're from."""
        if isinstance(source, Mapping):
            return _Origin("<plan>"), self.data(source)
        text = os.fspath(source)
        if "\n" in text:
            origin = _Origin("<text>")
            return origin, self.text(text.encode("utf-8", "surrogatepass"), origin)
        path = find_plan(text)
        if path is None:
            raise self.not_found(text)
        origin = _Origin(shown_path(path), path)
        return origin, self.file(origin)

    def data(self, source: Mapping[str, object]) -> Node:
        """The nodes of plain data."""
        root = nodes_from_data(source)
        if root is None:
            raise self.problems.stop("TP004", "a plan holds only mappings, lists, text and numbers, not nested deep")
        return root

    def text(self, data: bytes, origin: _Origin) -> Node | None:
        """The nodes of YAML text."""
        source = decode(data, origin.shown, self.problems)
        return compose(source, data.decode("utf-8-sig"), self.problems)

    def file(self, origin: _Origin) -> Node | None:
        """The nodes of a file."""
        assert origin.path is not None
        try:
            with origin.path.open("rb") as stream:
                data = stream.read(MAX_BYTES + 1)
        except OSError as error:
            message = f"the file can't be read: {error.strerror or error}"
            self.problems.add("TP019", message, subject=origin.shown, help="check its permissions")
            raise Stop from None
        return self.text(data, origin)

    def not_found(self, text: str) -> Stop:
        """Report a path or name that leads nowhere."""
        shown = shorten(text, 200) or "''"
        if text and _is_folder(text):
            message, way_out = "is a folder, not a plan file", f"name the plans in it: `{Path(text) / '*.yaml'}`"
        else:
            message, way_out = "there is no such file", shipped_help(text)
        self.problems.add("TP019", message, subject=shown, help=way_out)
        return Stop()

    def extended(self, document: Document, chain: tuple[_Origin, ...]) -> tuple[Document, tuple[_Origin, ...]]:
        """The document with what it extends merged in, and every file read on the way."""
        token = document.extends
        if token is None:
            return document, chain
        origin = self.base(token, chain)
        if origin is None:
            return document, chain
        try:
            root = self.file(origin)
        except Stop:
            return document, chain
        base = read_document(root, origin.shown, self.problems)
        if base is None:
            return document, (*chain, origin)
        merged, sources = self.extended(base, (*chain, origin))
        return _merge(merged, document), sources

    def base(self, token: ScalarNode, chain: tuple[_Origin, ...]) -> _Origin | None:
        """The file that an `extends` token means, unless it's missing or leads back to where it came from."""
        path = find_plan(token.text, chain[-1].folder)
        if path is None:
            message = f"`{shorten(token.text)}` is neither a file nor a plan that ships with tpplan"
            notes = (f"a path is taken from the folder of {chain[-1].shown}",)
            help_text = shipped_help(token.text)
            self.problems.add("TP010", message, token, label="not found", help=help_text, notes=notes)
            return None
        origin = _Origin(shown_path(Path(os.path.normpath(path))), path)
        visited = [item.identity for item in chain]
        if origin.identity in visited or len(chain) >= MAX_EXTENDS:
            trail = " → ".join(item.shown for item in (*chain, origin))
            cyclic = origin.identity in visited
            message = "the plan extends itself" if cyclic else f"more than {MAX_EXTENDS} plans extend one another"
            help_text = "remove one of the `extends`"
            self.problems.add("TP011", message, token, label="leads back", help=help_text, notes=(trail,))
            return None
        return origin


def _merge(base: Document, child: Document) -> Document:
    """The child's rules and kernel choices over the base's; an equal pattern is replaced where it stands."""
    own = {rule.pattern.text: rule for rule in child.rules}
    inherited = {rule.pattern.text for rule in base.rules}
    kept = [replace(own[text], overrides=True) if (text := rule.pattern.text) in own else rule for rule in base.rules]
    added = [rule for rule in child.rules if rule.pattern.text not in inherited]
    return Document(
        name=child.name,
        axis=child.axis or base.axis,
        extends=child.extends,
        rules=tuple[Rule, ...]((*kept, *added)),
        kernels=_merge_kernels(base.kernels, child.kernels),
        operators=tuple({rule.name: rule for rule in (*base.operators, *child.operators)}.values()),
        one_shot=base.one_shot if child.one_shot is None else child.one_shot,
        overlap=base.overlap if child.overlap is None else child.overlap,
        chunks=base.chunks if child.chunks is None else child.chunks,
        option_spans={**base.option_spans, **child.option_spans},
        recompute_gather=base.recompute_gather if child.recompute_gather is None else child.recompute_gather,
        fused_overlap=base.fused_overlap if child.fused_overlap is None else child.fused_overlap,
    )


def _merge_kernels(base: tuple[KernelRule, ...], child: tuple[KernelRule, ...]) -> tuple[KernelRule, ...]:
    merged = {(str(rule.pattern), rule.kind): rule for rule in base}
    merged |= {(str(rule.pattern), rule.kind): rule for rule in child}
    return tuple(merged.values())


def _is_folder(text: str) -> bool:
    try:
        return Path(text).is_dir()
    except (OSError, ValueError):
        return False


__all__ = ["PlanSource", "check_plan", "load_plan"]
