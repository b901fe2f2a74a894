"""Roles: who splits its output features, who contracts them, and who stays whole.

in:  a subject
out: `Roles`: groups of columns and rows that belong together, gathered heads, and a reason for every other linear layer

    {q, k, v} -> o        {gate, up} -> down        lm_head (gathered)        router: whole, since …

Every linear layer is a column at first, unless split features reach it: then it is a row. Columns that run into an
operation that needs all features become whole, and the walk starts again, until nothing is refused.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from tpplan.compiler.queries import Rules
from tpplan.plan import Pin, Style
from tpplan.plan.rules import NamedPack
from tpplan.suggest.flow import Flow, flow
from tpplan.suggest.patterns import is_repeated, shape_of
from tpplan.suggest.subject import Column, SuggestSubject, columns_with_packs, pack_names
from tpplan.suggest.twins import Twins


@dataclass(frozen=True, slots=True)
class RoleSetting:
    """What a plan says of a module."""

    style: Style
    output: Pin | None = None
    packed: tuple[NamedPack, ...] | None = None


@dataclass(frozen=True, slots=True)
class RoleGroup:
    """Modules whose settings make sense only together.

    Attributes:
        title: what it is, for the plan's comments.
        settings: by module, in the model's order.
        weight: the number of parameters in it.
    """

    title: str
    settings: Mapping[str, RoleSetting]
    weight: int


@dataclass(frozen=True, slots=True)
class Roles:
    """What was found.

    Attributes:
        groups: columns with their rows, the heaviest first.
        heads: columns whose result is gathered.
        reasons: why the other linear layers stay whole.
        sources: the columns whose features each row contracts.
        before_groups: the rows whose sums reach a convolution in groups, channel by channel.
        joins: whether split features are concatenated along their dim.
    """

    groups: tuple[RoleGroup, ...]
    heads: dict[str, RoleSetting] = field(default_factory=dict[str, RoleSetting])
    reasons: dict[str, str] = field(default_factory=dict[str, str])
    sources: Mapping[str, set[str]] = field(default_factory=dict[str, set[str]])
    before_groups: frozenset[str] = frozenset()
    joins: bool = False


def find_roles(
    subject: SuggestSubject,
    rules: Rules,
    lenient: bool,
    left: Mapping[str, str] | None = None,
    across_norms: frozenset[str] = frozenset(),
    exchanges: bool = False,
    apart: bool = False,
) -> Roles:
    """Give every linear layer its role, none of `left` (with a reason) as a column; see `flow` for the others."""
    reasons = dict(subject.unsplittable)
    columns = {name: ways[0] for name, ways in subject.columns.items() if lenient or not ways[0].is_whole(subject.size)}
    reasons |= {n: "it makes a single head, which every rank needs" for n in subject.columns if n not in columns}
    for name, reason in (left or {}).items():
        columns.pop(name, None)
        reasons[name] = reason
    read: set[str] = set()
    joins = False
    starved: dict[str, frozenset[str]] = {}
    across: dict[str, frozenset[str]] = {}
    stopped: set[str] = set()  # columns that meet something else than the stream which they are to make
    twins = Twins(subject.root)
    while True:
        found = flow(subject, rules, columns, lenient, across_norms, exchanges, apart)
        twins.tell(found, columns)
        joins |= found.joins
        read |= found.read
        across |= found.across
        for name, sources in found.starved.items():
            layers = sources & subject.weights.keys()  # what follows a table is the stream itself
            if layers and not sources & starved.keys():
                starved.setdefault(name, layers)
        fed = {name for sources in found.rows.values() for name in sources}
        news = found.refused or {name: _unread(name, found) for name in sorted(found.columns - fed)}
        if not news:
            break
        stopped |= found.refused.keys() - found.joining
        instead = columns_with_packs(subject, found.wanted) if found.wanted else {}
        for name, reason in news.items():
            ways = subject.columns[name]
            held = columns.pop(name)
            after = ways.index(held) + 1 if held in ways else len(ways)
            if name in instead:
                columns[name] = instead[name]
            elif after < len(ways):
                columns[name] = ways[after]
            else:
                reasons[name] = reason
    whole = {name for name in across if name not in found.rows and name not in found.columns}
    if whole - across_norms:  # they would be whole in any case, as would the columns before them
        return find_roles(subject, rules, lenient, left, across_norms | whole, exchanges, apart)
    for name in found.rows:
        reasons.pop(name, None)
    for name in (reasons.keys() & starved.keys()) - stopped:
        whole = starved[name] - found.rows.keys() - found.columns
        reasons[name] = _starved(whole) if whole else reasons[name]
    heads = {name: held for name, held in _heads(subject).items() if name not in read and name in reasons}
    reasons = {name: reason for name, reason in reasons.items() if name not in heads}
    return Roles(_groups(subject, found, columns), heads, reasons, found.rows, frozenset(found.before_groups), joins)


def _unread(name: str, found: Flow) -> str:
    if name in found.leaving:
        return "its result leaves the model, and would have to be gathered"
    return "no linear layer takes its result feature by feature"


def _starved(sources: Iterable[str]) -> str:
    *others, last = sorted(f"`{name}`" for name in sources)
    first = f"{', '.join(others)} and {last}, which stay" if others else f"{last}, which stays"
    return f"it would contract the features of {first} whole"


def _heads(subject: SuggestSubject) -> dict[str, RoleSetting]:
    """Linear layers outside the repeated blocks that widen: if no other reads their result, it is worth gathering."""
    return {
        name: RoleSetting(Style.COLWISE, output=Pin.REPLICATE)
        for name, form in subject.layers.items()
        if form.outputs > form.inputs
        and not is_repeated(name)
        and name in subject.columns
        and subject.columns[name][0].packed is None
    }


def _groups(subject: SuggestSubject, found: Flow, columns: Mapping[str, Column]) -> tuple[RoleGroup, ...]:
    settings: dict[str, RoleSetting] = {}
    families = _Families()
    for row, sources in found.rows.items():
        packs = found.row_packs.get(row)
        settings[row] = RoleSetting(Style.ROWWISE, packed=pack_names(packs) if packs else None)
        for name in sorted(sources):
            settings[name] = _split(subject, name, columns[name])
            families.join(_key(row, settings), _key(name, settings))
    for addend, name in found.addends.items():
        if name in settings and addend.rpartition(".")[0] != name:  # a layer's own goes by its rule
            sizes = tuple(part.outputs for part in subject.addends[addend].parts)
            packs = settings[name].packed or (pack_names(sizes) if sizes[1:] else None)
            settings[addend] = replace(settings[name], packed=packs)
            families.join(_key(name, settings), _key(addend, settings))
    for parameter, (name, packs) in found.beside.items():
        of_layer = parameter.rpartition(".")[0] in (name, *found.beside)  # it goes by its layer's rule
        if parameter not in settings and name in settings and not of_layer:
            settings[parameter] = RoleSetting(Style.COLWISE, packed=pack_names(packs, True) if len(packs) > 1 else None)
            families.join(_key(name, settings), _key(parameter, settings))
    order = [name for name in (*subject.tables, *subject.weights, *subject.addends) if name in settings]
    members: defaultdict[object, list[str]] = defaultdict(list)
    for name in order:
        members[families.of(_key(name, settings))].append(name)
    groups = [_group(subject, names, settings) for names in members.values()]
    return tuple(sorted(groups, key=lambda group: (-group.weight, next(iter(group.settings)))))


def _split(subject: SuggestSubject, name: str, column: Column) -> RoleSetting:
    if name in subject.tables:  # of biases by head: each rank takes those of its heads
        return RoleSetting(Style.REPLICATE, output=Pin.SHARD)
    return RoleSetting(Style.COLWISE, packed=column.packed)


def _group(subject: SuggestSubject, names: Iterable[str], settings: Mapping[str, RoleSetting]) -> RoleGroup:
    held = {name: settings[name] for name in names}
    columns, rows = (
        ", ".join(dict.fromkeys(f"`{shape_of(n).rpartition('.')[2]}`" for n, s in held.items() if s.style is style))
        for style in (Style.COLWISE, Style.ROWWISE)
    )
    weight = sum(subject.weights.get(name, 0) for name in held)
    return RoleGroup(f"{columns} by columns, {rows} by rows", held, weight)


def _key(name: str, settings: Mapping[str, RoleSetting]) -> object:
    """Equal layers are treated alike."""
    return (shape_of(name), settings[name].style)


class _Families:
    """Disjoint sets of keys."""

    def __init__(self) -> None:
        self._above: dict[object, object] = {}

    def of(self, key: object) -> object:
        while key in self._above:
            key = self._above[key]
        return key

    def join(self, one: object, other: object) -> None:
        first, second = self.of(one), self.of(other)
        if first != second:
            self._above[second] = first
