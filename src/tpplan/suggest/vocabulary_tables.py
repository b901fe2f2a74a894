"""Tables: embedding tables that can be split by rows, and the heads that share their numbers.

in:  a subject and the linear layers that could be gathered heads
out: groups: a table by itself, a head by itself, or both where they are one parameter

    embed_tokens(input_ids), lm_head tied to it   ->   {embed_tokens: vocab, lm_head: colwise, gathered}
    positions(arange(…)), 1024 rows               ->   {positions: vocab}
    EmbeddingBag(1000000, 64)                     ->   {…: colwise, gathered}
    EmbeddingBag(1000000, 1)                      ->   {…: vocab}
    embedding(input_ids, self.table)              ->   {table: vocab}
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from torch import nn

from tpplan.compiler.ir.trace import Frame, Trace
from tpplan.compiler.queries import BareTable
from tpplan.plan import Pin, Rule, Style
from tpplan.plan.pattern import Pattern
from tpplan.suggest.roles import RoleGroup, RoleSetting
from tpplan.suggest.subject import SuggestSubject

_ROWS_PER_RANK = 8  # smaller tables (segments, languages) aren't worth an all-reduce
_COMPUTED_PER_RANK = 64  # nor are those of positions or distances, which may be tables by head
_MOVES = (
    "reshape", "alias", "slice", "copy", "cast", "expand", "unsqueeze", "squeeze", "select", "detach", "transposition",
)  # fmt: skip


def find_tables(
    subject: SuggestSubject, heads: Mapping[str, RoleSetting], taken: Collection[str]
) -> tuple[tuple[RoleGroup, ...], dict[str, str]]:
    """The groups of tables and heads, the heaviest first; and why other tables stay whole.

    Args:
        subject: the model.
        heads: linear layers whose results are worth gathering.
        taken: what has a role already, such as tables of biases by head.
    """
    inputs = _moved_inputs(subject.trace)
    by_input = _looked_up_by_input(subject, inputs)
    by_number = [
        name
        for name, table in subject.tables.items()
        if name not in by_input and name not in taken and _is_large(table, subject.size)
    ]
    looked_up, reasons = _splittable(subject, [*(name for name in by_input if name in subject.tables), *by_number])
    tied = {name: names for names in subject.trace.parameters.values() for name in names}
    groups: list[RoleGroup] = []
    paired: set[str] = set()
    bare = {
        n: t for n, t in subject.bare.items() if n not in taken and _is_worth_rows(t, t.ids in inputs, subject.size)
    }
    for head, setting in heads.items():
        names = tied.get(f"{head}.weight", ())
        partners = [n.removesuffix(".weight") for n in names if n.removesuffix(".weight") in looked_up]
        partners += [n for n in names if n in bare]
        settings = {name: RoleSetting(Style.VOCAB) for name in partners} | {head: setting}
        paired |= set(partners)
        what = "the table of tokens by rows, and with it the head" if partners else "the head by columns"
        form = subject.layers[head]
        groups.append(RoleGroup(f"{what}, whose result is gathered", settings, form.inputs * form.outputs))
    for name in looked_up:
        table = subject.tables[name]
        small = table.num_embeddings < _ROWS_PER_RANK * subject.size
        if small and name not in paired:
            reasons[name] = f"with {table.num_embeddings} rows it isn't worth an all-reduce"
        elif name not in paired:
            weight = table.num_embeddings * table.embedding_dim
            groups.append(RoleGroup("a table by rows", {name: RoleSetting(Style.VOCAB)}, weight))
    for name, table in subject.bare.items():
        if name not in bare and name not in taken:
            reasons[name] = f"with {table.rows} rows it isn't worth an all-reduce"
    for name, table in bare.items():
        if name not in paired:
            groups.append(RoleGroup("a table by rows", {name: RoleSetting(Style.VOCAB)}, table.rows * table.features))
    other = {n: subject.tables[n] for n in (*by_input, *by_number) if n in subject.tables and n not in looked_up}
    bags = {name: table for name, table in subject.bags.items() if name in by_input}
    for name, table in (other | subject.bags).items():
        rows_per_rank = _ROWS_PER_RANK if name in bags else _COMPUTED_PER_RANK
        if table.num_embeddings < rows_per_rank * subject.size:
            reasons.setdefault(name, f"with {table.num_embeddings} rows it isn't worth a collective")
            continue
        weight = table.num_embeddings * table.embedding_dim
        if table.embedding_dim >= subject.size:
            columns = {name: RoleSetting(Style.COLWISE, Pin.REPLICATE)}
            groups.append(RoleGroup("a table by columns, whose result is gathered", columns, weight))
        elif name in subject.bags:
            groups.append(RoleGroup("a table by rows", {name: RoleSetting(Style.VOCAB)}, weight))
    return tuple(sorted(groups, key=lambda group: (-group.weight, next(iter(group.settings))))), reasons


def _splittable(subject: SuggestSubject, names: list[str]) -> tuple[list[str], dict[str, str]]:
    """Those of the tables that the compiler can split by rows, and what it says of the others."""
    problems = subject.study.refused([Rule(Pattern.parse(name), Style.VOCAB) for name in names])
    small = "its indices are no input of the model, and it is small"
    reasons = {name: small for name in subject.tables if name not in names}
    reasons |= {name: problems[name] for name in names if name in problems}
    return [name for name in names if name not in problems], reasons


def _is_large(table: nn.Embedding | nn.EmbeddingBag, size: int) -> bool:
    return table.num_embeddings >= _COMPUTED_PER_RANK * size


def _is_worth_rows(table: BareTable, by_input: bool, size: int) -> bool:
    """Whether a bare table is large enough to be split; one of computed rows has to have more than are looked up."""
    if by_input:
        return table.rows >= _ROWS_PER_RANK * size
    return table.rows >= max(_COMPUTED_PER_RANK * size, table.count)


def _looked_up_by_input(subject: SuggestSubject, moved: set[int]) -> list[str]:
    """Tables whose indices are an input of the model as it came, not positions or buckets that are computed."""
    found = [
        frame.module
        for frame in subject.trace.root.walk()
        if (frame.module in subject.tables or frame.module in subject.bags)
        and frame.entries
        and frame.entries[0].source in moved
    ]
    return list(dict.fromkeys(found))


def _moved_inputs(trace: Trace) -> set[int]:
    moved = {i for i in trace.inputs if not trace.values[i].dtype.is_floating_point}

    def visit(frame: Frame) -> None:
        moved.update(c.target for c in frame.entries if c.source in moved)
        for node in frame.body:
            if isinstance(node, Frame):
                visit(node)
            elif node.is_a(*_MOVES) and node.inputs[0] in moved:
                moved.update(o for o in node.outputs if o is not None)
        moved.update(c.target for c in frame.exits if c.source in moved)

    visit(trace.root)
    return moved
