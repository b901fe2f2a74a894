"""Flow: what becomes of column-split results on their way through the model, operation by operation.

in:  a subject, and how its linear layers are to be split by columns
out: `Flow`: the columns, the linear layers that would contract their features (rows), and where columns run into
     something that needs all features

    q: S(2) -> view -> S(2, heads) -> bmm -> … -> view -> S(2) -> o_proj   ->   o_proj is a row of {q, k, v}
    dense: S(2) -> add(R)                                                  ->   dense is refused at `aten.add.Tensor`

The rules are the compiler's own. Nothing is known here of names or architectures.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace

from tpplan.compiler.ir.layout import REPLICATED, REPLICATED_PARTIAL, UNKNOWN, Layout, Pack, packed, sharded
from tpplan.compiler.ir.region import Instance, OperationNode
from tpplan.compiler.ir.trace import Frame, quoted
from tpplan.compiler.queries import (
    Outcome,
    Product,
    Refusal,
    Rules,
    channel_norm_weight,
    convolution_weight,
    is_grouped_convolution,
    is_norm,
    keeps_channels,
)
from tpplan.ops.dim_map import dim_of
from tpplan.suggest.subject import Column, SuggestSubject

Names = frozenset[str]
_NONE: Names = frozenset()
_RESHAPES = ("reshape", "unsqueeze", "squeeze")


@dataclass(slots=True)
class Flow:
    """What one walk found.

    Attributes:
        columns: modules whose output features were split.
        rows: modules that contract split features, with the columns that these come from.
        row_packs: the packs of a row's input features, where they are several.
        refused: columns that ran into an operation that needs all features, with the reason.
        places: of refused columns, the module whose body has that operation, or the layer that would contract them.
        read: columns whose result reaches a linear layer, in whatever way.
        leaving: columns whose split result leaves the model.
        mixed: modules that take split features in one call and whole ones in another.
        addends: parameters that are added to what a column or a row makes, with that column's or row's name.
        beside: parameters that stand beside what a column makes, feature by feature or head by head, with its name
            and the sizes of the packs, where they are several.
        wanted: refused columns of one stretch that met packs, with the sizes of the packs that they would need.
        starved: linear layers that would read what becomes of refused columns, with these.
        across: linear layers that a norm over the features of refused columns keeps from being rows, with these.
        joining: refused columns whose result is combined with a whole value that depends on data, as a stream is.
        before_groups: rows whose sums reach a convolution in groups, channel by channel.
        joins: whether split features are concatenated to others along their dim.
    """

    columns: set[str] = field(default_factory=set[str])
    rows: dict[str, set[str]] = field(default_factory=lambda: defaultdict[str, set[str]](set))
    row_packs: dict[str, tuple[int, ...]] = field(default_factory=dict[str, tuple[int, ...]])
    refused: dict[str, str] = field(default_factory=dict[str, str])
    places: dict[str, str] = field(default_factory=dict[str, str])
    read: set[str] = field(default_factory=set[str])
    leaving: set[str] = field(default_factory=set[str])
    addends: dict[str, str] = field(default_factory=dict[str, str])
    beside: dict[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict[str, tuple[str, tuple[int, ...]]])
    starved: dict[str, Names] = field(default_factory=dict[str, Names])
    wanted: dict[str, tuple[int, ...]] = field(default_factory=dict[str, tuple[int, ...]])
    mixed: set[str] = field(default_factory=set[str])
    across: dict[str, Names] = field(default_factory=dict[str, Names])
    joining: set[str] = field(default_factory=set[str])
    before_groups: set[str] = field(default_factory=set[str])
    joins: bool = False


def flow(
    subject: SuggestSubject,
    rules: Rules,
    columns: Mapping[str, Column],
    lenient: bool,
    across_norms: Names = _NONE,
    exchanges: bool = False,
    apart: bool = False,
) -> Flow:
    """Walk the trace once.

    Args:
        subject: the model.
        rules: the compiler's rules for the subject's number of ranks.
        columns: how linear layers are split by columns; those that aren't named stay whole.
        lenient: whether a value that wants no gradient (a mask), or depends on no data (a table of biases by head), may
            be sliced to stand beside a sharded one; the compiler then has the last word.
        across_norms: the linear layers that may be rows although a norm over split features stands before them.
        exchanges: whether a module's body may make split operands whole before an operation that needs them so.
        apart: whether features stay whole that are concatenated to others along the dim that would be split.
    """
    walk = _FlowWalk(subject, rules, columns, lenient, across_norms, exchanges, apart)
    walk.frame(subject.root)
    for crossing in subject.root.frame.exits:
        walk.found.leaving |= walk.sources.get(crossing.target, _NONE)
    for name in walk.found.mixed:
        for column in walk.found.rows.pop(name, ()):
            walk.found.refused.setdefault(column, f"`{name}` takes its result in one call and a whole value in another")
    return walk.found


class _FlowWalk:
    def __init__(
        self,
        subject: SuggestSubject,
        rules: Rules,
        columns: Mapping[str, Column],
        lenient: bool,
        across_norms: Names,
        exchanges: bool,
        apart: bool,
    ) -> None:
        self.subject = subject
        self.rules = rules
        self.columns = columns
        self.lenient = lenient
        self.across_norms = across_norms
        self.exchanges = exchanges
        self.apart = apart
        self.found = Flow()
        self.layouts: dict[int, Layout] = {}  # of sharded and unknown values; all others are replicated
        self.sources: dict[int, Names] = {}
        self.dynamic: set[int] = set(subject.trace.inputs)  # values that depend on the call's data
        self.poisoned: set[int] = set()  # values after a refusal: what follows says nothing
        self.unsure: set[int] = set()  # made of poisoned values by what may be a column: whole for now
        self.whole_inputs: set[str] = set()
        self.norms: dict[int, bool] = {}
        self.shared: dict[int, Names] = {}  # of single heads that every rank holds
        self.normed: set[int] = set()  # split values that come out of a norm
        self.sums: dict[int, Names] = {}  # of whole values: the rows whose sums they are, channel by channel
        self.reduced: dict[int, Names] = {}  # of whole values that rows make: the rows, and the columns before them
        self.calls = Counter(frame.module for frame in subject.trace.root.walk())
        self.makers: dict[int, str] = {}  # of the values that products make, before anything is done with them
        self.products = {
            part.made: (n, part) for n, product in subject.products.items() for part in (*product.parts, *product.alike)
        }
        self.products |= {part.made: (name, part) for name, parts in subject.turned.items() for part in parts}
        self.joined: dict[int, tuple[int, ...]] = {}  # of what vectors are joined to: these
        self.addends = {
            part.made: n
            for n, addend in subject.addends.items()
            for part in addend.parts
            if part.made is not None and part.is_added
        }

    def frame(self, instance: Instance) -> None:
        """Walk a call: cross into it, through its body, and out."""
        frame = instance.frame
        for crossing in frame.entries:
            self._copy(crossing.source, crossing.target)
        if frame.module in self.subject.linears and (not frame.exits or self._linear(frame)):
            return  # without exits, nobody reads the result
        if self._norm(instance):
            return
        children = iter(instance.children)
        for node in instance.region.nodes:
            if isinstance(node, OperationNode):
                self._operation(instance, node)
            else:
                self.frame(next(children))
        for crossing in frame.exits:
            self._copy(crossing.source, crossing.target)
        if frame.module in self.subject.tables and frame.exits and frame.exits[0].target not in self.dynamic:
            made = frame.exits[0].target
            self._column(frame.module, made, len(self.subject.trace.values[made].shape) - 1)

    def _norm(self, instance: Instance) -> bool:
        """A norm over split features keeps their layout: its statistics are summed over the ranks."""
        frame, region = instance.frame, instance.region
        if len(frame.entries) not in (1, 2) or len(frame.exits) != 1:
            return False
        given, made = frame.entries[0].target, frame.exits[0].target
        gated = len(frame.entries) == 2
        held = self.layouts.get(given)
        if gated and self.layouts.get(frame.entries[1].target) != held:
            return False
        if held is None or held.dim != len(self.subject.trace.values[given].shape) - 1 or held.within:
            return False
        if id(region) not in self.norms:
            self.norms[id(region)] = is_norm(region)
        if self.norms[id(region)]:
            self._copy(given, made)
            self.sources[made] = frozenset().union(*(self.sources[c.target] for c in frame.entries))
            if not gated:
                self.normed.add(made)
        return self.norms[id(region)]

    def _copy(self, source: int, target: int) -> None:
        for held in (self.layouts, self.sources, self.shared, self.reduced, self.sums):
            if source in held:
                held[target] = held[source]  # pyright: ignore
        for marked in (self.dynamic, self.poisoned, self.unsure, self.normed):
            if source in marked:
                marked.add(target)

    # -- products in bodies -------------------------------------------------------------------------------------------
    def _is_vector(self, value: int) -> bool:
        return value in self.subject.trace.stored and len(self.subject.trace.values[value].shape) == 1

    def _product(self, inputs: list[int], made: int) -> bool:
        """A product with a bare parameter, or what is added to one. False for any other operation."""
        if made in self.products:
            name, product = self.products[made]
            self.makers[made] = name
            if made in self.addends:
                self.found.addends[self.addends[made]] = name
            self._joined_bias(name, inputs)
            return self._contract(name, product.given, made, product.made_dim, self._factor_dim(product))
        if made not in self.addends:
            return False
        before = next((i for i in inputs if i in self.makers), None)
        if before is None:
            return False
        self.found.addends[self.addends[made]] = self.makers[made] = self.makers[before]
        self._copy(before, made)
        return True

    def _joined_bias(self, name: str, inputs: list[int]) -> None:
        """Vectors that a body joins to the bias of a packed product go with its packs, one with each."""
        column = self.columns.get(name)
        packs = () if column is None else tuple(pack.size for pack in column.stretches)
        for parts in (self.joined[i] for i in inputs if i in self.joined):
            if packs == tuple(self.subject.trace.values[part].shape[0] for part in parts):
                held = (self.subject.trace.stored[part][0] for part in parts)
                self.found.beside |= {vector: (name, ()) for vector in held}

    def _factor_dim(self, product: Product) -> int:
        """The dim of the other factor that is contracted: the last, or the one before where that one stands right."""
        if product.given_dim is not None:
            return product.given_dim
        last = len(self.subject.trace.values[product.given].shape) - 1
        made_last = len(self.subject.trace.values[product.made].shape) - 1
        return last if product.made_dim == made_last else last - 1

    # -- linear layers ------------------------------------------------------------------------------------------------
    def _linear(self, frame: Frame) -> bool:
        """A linear layer: a row, a column or whole. False if its body has to be walked."""
        given, made = frame.entries[0].target, frame.exits[0].target
        values = self.subject.trace.values
        return self._contract(frame.module, given, made, len(values[made].shape) - 1, len(values[given].shape) - 1)

    def _contract(self, name: str, given: int, made: int, made_dim: int, given_dim: int) -> bool:
        self.dynamic |= {made} if given in self.dynamic else set()
        held = self.layouts.get(given)
        normed = given in self.normed and name not in self.across_norms
        if held is not None and held.dim == given_dim and normed:
            # To sum the statistics, and the products as well, would cost more than to keep the first layer whole, as
            # long as this one is a column.
            self.found.across[name] = self.sources[given]
            for column in self.sources[given] - self.found.refused.keys():
                self.found.refused[column] = f"a norm stands between it and `{name}`"
                self.found.places[column] = name
            self._poison([made], self.sources[given])
            return True
        if held is not None and held.dim == given_dim:
            self._row(name, held, self.sources[given])
            self.reduced[made] = self.sources[given] | {name}
            self.sums[made] = frozenset((name,))
            return True
        if held is not None:
            return False
        if given in self.poisoned:
            self.found.starved[name] = self.sources.get(given, _NONE)
            self.found.read |= self.found.starved[name]
            if self.calls[name] > 1:  # what it makes of another value may meet this
                self._poison([made], self.found.starved[name])
            elif name in self.columns:
                self.unsure.add(made)
            return True
        if given in self.unsure:  # it may be a row of what may be a column
            self.unsure.add(made)
            return True
        if name in self.found.rows:
            self.found.mixed.add(name)
        self.whole_inputs.add(name)
        self._column(name, made, made_dim)
        return True

    def _column(self, name: str, made: int, dim: int) -> None:
        column = self.columns.get(name)
        if column is None:
            return
        self.found.columns.add(name)
        stretches = self._of_part(name, made, column.stretches)
        product = self.subject.products.get(name)
        if product is not None and product.times > 1 and not stretches:
            stretches = (Pack(self.subject.trace.values[made].shape[dim] // product.times),) * product.times
        count, outputs = self.subject.trace.values[made].shape[dim], sum(pack.size for pack in stretches)
        if stretches and count > outputs and count % outputs == 0:  # of heads that the product has joined to features
            stretches = tuple(pack.scaled(count // outputs, 1) or pack for pack in stretches)
        self.layouts[made] = packed(dim, stretches) if stretches else sharded(dim)
        self.sources[made] = frozenset((name,))

    def _of_part(self, name: str, made: int, stretches: tuple[Pack, ...]) -> tuple[Pack, ...]:
        """Of a column's stretches those that this product makes, where the parameter is taken apart before."""
        product = self.subject.products.get(name)
        if product is None or len(product.parts) == 1:
            return stretches
        sizes = [part.outputs for part in product.parts]
        place = [part.made for part in product.parts].index(made)
        begin, end = sum(sizes[:place]), sum(sizes[: place + 1])
        edges = [sum(p.size for p in stretches[:i]) for i in range(len(stretches))]
        return tuple(p for p, edge in zip(stretches, edges, strict=True) if begin <= edge < end)

    def _row(self, name: str, held: Layout, sources: Names) -> None:
        packs = tuple(p.size for p in held.packs) if len(held.packs) > 1 else ()  # one is heads, and no plan names it
        product = self.subject.products.get(name)
        if product is not None and sum(packs) != product.inputs:
            packs = ()  # of dims that are joined, the parameter has these by themselves
        clash = name in self.found.rows and self.found.row_packs.get(name, ()) != packs
        if name in self.whole_inputs or clash or held.has_replicas:
            self.found.mixed.add(name)
        if packs:
            self.found.row_packs[name] = packs
        self.found.rows[name] |= sources
        self.found.read |= sources

    # -- operations ---------------------------------------------------------------------------------------------------
    def _operation(self, instance: Instance, node: OperationNode) -> None:
        outer = instance.values
        inputs = [outer[i] for i in dict.fromkeys((*node.inputs, *node.overwritten))]
        outputs = [outer[o] for o in node.outputs if o is not None]
        if node.is_a("new"):
            return
        if node.is_a("join") and all(self._is_vector(outer[i]) for i in node.inputs):
            self.joined[outputs[0]] = tuple(outer[i] for i in node.inputs)
        if any(i in self.dynamic for i in inputs):
            self.dynamic.update(outputs)
        if len(outputs) == 1 and self._product(inputs, outputs[0]):
            return
        if node.is_a(*_RESHAPES, "transposition") and inputs[0] in self.makers:
            self.makers |= dict.fromkeys(outputs, self.makers[inputs[0]])
        sources = frozenset[str]().union(*(self.sources.get(i, _NONE) for i in inputs))
        if any(i in self.poisoned for i in inputs):
            self._poison(outputs, sources)
            return
        unsure = any(i in self.unsure for i in inputs)
        if unsure:
            self.unsure.update(outputs)
        if not any(i in self.layouts for i in inputs):
            self._of_shared(instance, node)
            self._of_reduced(node, inputs, outputs)
            self._of_sums(node, inputs, outputs)
            return
        answer = self._ask(instance, node, {})
        if isinstance(answer, Refusal):
            slid = self._beside_slices(instance, node) if self.lenient else None
            tries = self.lenient and slid is None and not unsure
            branch = self._beside_branch(instance, node, sources) if tries else None
            answer = slid or branch or self._beside_parts(instance, node) or answer
        answer = self._kept_apart(instance, node, answer)
        if isinstance(answer, Refusal) or any(held.forward == "P" for held in answer.outputs):
            if self.exchanges and instance.frame.module:
                return
            reason = answer.reason if isinstance(answer, Refusal) else "sums over the split features"
            if not unsure:
                self._refuse(instance, node, sources, reason)
            self._poison(outputs, sources)
            return
        for output, held in zip(node.outputs, answer.outputs, strict=True):
            if output is not None and (held.is_sharded or held == UNKNOWN):
                for value in (outer[output], *(outer[i] for i in node.overwritten)):
                    self.layouts[value] = held
                    self.sources[value] = sources
                    if node.is_a("arithmetic of two") and not self.normed.isdisjoint(inputs):
                        self.normed.add(value)  # as where what it is conditioned on shifts and scales
            elif output is not None and held == REPLICATED_PARTIAL:
                self.shared[outer[output]] = sources

    def _kept_apart(self, instance: Instance, node: OperationNode, answer: Outcome | Refusal) -> Outcome | Refusal:
        """Note what is concatenated along the split dim, or keep it apart."""
        if not node.is_a("join") or isinstance(answer, Refusal):
            return answer
        rank = len(instance.region.values[node.inputs[0]].shape)
        if dim_of(node.target, node.arguments, rank) != answer.outputs[0].dim:
            return answer
        self.found.joins = True
        return Refusal("communication", "concatenates values along the sharded dim", ()) if self.apart else answer

    def _of_shared(self, instance: Instance, node: OperationNode) -> None:
        """What becomes of a head that all ranks hold: where it is repeated for many heads, each rank needs its own."""
        outer = instance.values
        sources = frozenset[str]().union(*(self.shared.get(outer[i], _NONE) for i in node.inputs))
        if not sources:
            return
        by_heads = self.rules.splitting(self.subject.heads)
        outcomes = by_heads.outcomes(node, instance.region.values, lambda i: self._assumed(instance, i))
        split = [o for o in outcomes if o.outputs[0].is_sharded] if not isinstance(outcomes, Refusal) else []
        for position, output in enumerate(node.outputs):
            if output is not None and split:
                self.layouts[outer[output]], self.sources[outer[output]] = split[0].outputs[position], sources
            elif output is not None:
                self.shared[outer[output]] = sources

    def _assumed(self, instance: Instance, number: int) -> Layout:
        """The layout of a value that isn't split."""
        value = instance.region.values[number]
        return REPLICATED_PARTIAL if value.differentiable and value.parameter is None else REPLICATED

    def _poison(self, outputs: list[int], sources: Names) -> None:
        self.poisoned.update(outputs)
        self.sources.update(dict.fromkeys(outputs, sources))

    def _ask(
        self, instance: Instance, node: OperationNode, instead: dict[int, Layout], slices: bool = False
    ) -> Outcome | Refusal:
        values = [*instance.region.values]
        for i, held in instead.items():
            if instance.values[i] in self.subject.trace.buffers:  # as where a rule splits it
                values[i] = replace(values[i], parameter=held)

        def layout(i: int) -> Layout:
            return instead.get(i) or self.layouts.get(instance.values[i]) or self._assumed(instance, i)

        recorded = bool(instance.frame.module)  # the body of the root has no record, in which it could compare
        rules = self.rules.splitting(frozenset(), slices=slices, extremes=recorded)
        answer = rules.outcomes(node, values, layout)
        return answer if isinstance(answer, Refusal) else answer[0]

    def _beside_slices(self, instance: Instance, node: OperationNode) -> Outcome | None:
        """The outcome if values that need no data, or that repeat along the dim, are sliced to fit sharded operands."""
        values = instance.region.values
        known = [(i, self.layouts[instance.values[i]]) for i in node.inputs if instance.values[i] in self.layouts]
        split = [(i, held) for i, held in known if held.is_sharded]
        instead = self._with_channels(instance, node)
        for i in (*node.inputs, *node.overwritten):
            outer = instance.values[i]
            if outer in self.layouts or node.is_a("convolution"):
                continue
            for j, held in split:
                assert held.dim is not None
                dim = held.dim - len(values[j].shape) + len(values[i].shape)
                if dim < 0 or values[i].shape[dim] != values[j].shape[held.dim]:
                    continue
                wanted = replace(held, dim=dim)
                free = outer not in self.dynamic or not values[i].differentiable
                if free or values[i].stride[dim] == 0:
                    instead[i] = wanted
        answer = self._ask(instance, node, instead) if instead else None
        if answer is None or isinstance(answer, Refusal):
            return None
        for i, held in instead.items():
            for name, dim in self.subject.beside.get(instance.values[i], {}).items():
                if dim == held.dim:
                    source = min(self.sources[instance.values[split[0][0]]])
                    self.found.beside[name] = (source, tuple(pack.size for pack in held.packs))
        return answer

    def _of_reduced(self, node: OperationNode, inputs: list[int], outputs: list[int]) -> None:
        """Note what rows make through what is done with it entry by entry. A stream that is added isn't theirs."""
        rows = [self.reduced[i] for i in inputs if i in self.reduced]
        entrywise = node.is_a("arithmetic of two", "reshape", "cast", "copy", "alias")
        if rows and len(outputs) == 1 and entrywise and not any(map(self._has_features, set(inputs) - {*self.reduced})):
            self.reduced[outputs[0]] = _NONE.union(*rows)

    def _has_features(self, value: int) -> bool:
        """Whether a value depends on data, and has features of its own, unlike a gate of each token."""
        held = self.subject.trace.values[value]
        return value in self.dynamic and bool(held.shape) and held.shape[-1] > 1 and held.stride[-1] != 0

    def _of_sums(self, node: OperationNode, inputs: list[int], outputs: list[int]) -> None:
        """Note what rows make through what is done with each channel by itself, up to a convolution in groups."""
        rows = _NONE.union(*(self.sums[i] for i in inputs if i in self.sums))
        if rows and is_grouped_convolution(node):
            self.found.before_groups |= rows
        elif rows and outputs and keeps_channels(node):
            self.sums[outputs[0]] = rows

    def _beside_branch(self, instance: Instance, node: OperationNode, sources: Names) -> Outcome | None:
        """The outcome if a whole value beside split features were split like these, as its last layer can do.

        The layers of that branch are a pair of column and row, such as those of an adapter. Without its column the row
        is a column, too. So the column stays whole, if all of the branch weighs less than what it stands beside.
        """
        held = next((self.layouts[instance.values[i]] for i in node.inputs if instance.values[i] in self.layouts), None)
        whole = [i for i in node.inputs if instance.values[i] in self.reduced]
        branch = _NONE.union(*(self.reduced[instance.values[i]] for i in whole))
        if not branch or held is None or sum(map(self._weight, branch)) >= sum(map(self._weight, sources)):
            return None
        answer = self._ask(instance, node, dict.fromkeys(whole, held))
        if isinstance(answer, Refusal):
            return None
        for column in branch & self.found.columns:
            self.found.refused.setdefault(column, "it is part of a smaller branch beside a layer that is split")
        return answer

    def _beside_parts(self, instance: Instance, node: OperationNode) -> Outcome | None:
        """The outcome if the body, running from its record, takes parts of whole values beside split heads."""
        answer = self._ask(instance, node, {}, slices=True) if instance.frame.module else None
        return None if isinstance(answer, Refusal) else answer

    def _with_channels(self, instance: Instance, node: OperationNode) -> dict[int, Layout]:
        """The layouts of the weight and the bias of a convolution or of a norm of channels, if split like these."""
        held = self.layouts.get(instance.values[node.inputs[0]]) if node.inputs else None
        if not node.is_a("convolution"):
            beside = None if held is None else channel_norm_weight(node, held)
            return {} if beside is None else dict.fromkeys(node.inputs[1:], beside)
        weights = [i for i in node.inputs[1:] if instance.values[i] in self.subject.beside]
        split = None if held is None else convolution_weight(node, instance.region, held, self.rules.size)
        return {} if split is None else dict.fromkeys(weights, split)

    def _refuse(self, instance: Instance, node: OperationNode, sources: Names, reason: str) -> None:
        place = f" ({node.location.short})" if node.location is not None else ""
        text = f"{quoted(instance.frame.module)} needs its result whole: `{node.name}` {reason}{place}"
        wanted = self._packs_wanted(instance, node)
        if wanted:
            self.found.wanted |= wanted
            self._note(wanted.keys(), instance, text)
            return
        culprits = self._culprits(instance, node) or sources
        if self._joins_whole(instance, node):
            self.found.joining |= culprits - self.found.refused.keys()
        self._note(culprits, instance, text)

    def _note(self, columns: AbstractSet[str], instance: Instance, text: str) -> None:
        for column in columns - self.found.refused.keys():
            self.found.refused[column] = text
            self.found.places[column] = instance.frame.module

    def _joins_whole(self, instance: Instance, node: OperationNode) -> bool:
        """Whether the operation combines split features with a whole value that depends on data."""
        whole = [i for i in node.inputs if instance.values[i] not in self.layouts]
        values = instance.region.values
        return node.is_a("arithmetic of two") and any(
            instance.values[i] in self.dynamic and values[i].differentiable for i in whole
        )

    def _packs_wanted(self, instance: Instance, node: OperationNode) -> dict[str, tuple[int, ...]]:
        """The packs by which columns of one stretch could go on beside packed values along the same dim."""
        split = [i for i in dict.fromkeys(node.inputs) if instance.values[i] in self.layouts]
        held = {i: self.layouts[instance.values[i]] for i in split}
        times = max(
            h.interleave for h in held.values()
        )  # of a batch that is flattened with heads, the packs come so often
        rows = [h.packs[: len(h.packs) // times] for h in held.values() if len(h.packs) > times]
        ratios = {tuple(pack.size / sum(p.size for p in row) for pack in row) for row in rows}
        if len(ratios) != 1 or node.is_a(*_RESHAPES):
            return {}
        found: dict[str, tuple[int, ...]] = {}
        for name in {n for i in split if not held[i].packs for n in self.sources[instance.values[i]]}:
            column, form = self.columns.get(name), self.subject.linears.get(name) or self.subject.products.get(name)
            sizes = () if form is None else tuple(round(part * form.outputs) for part in min(ratios))
            if column is not None and form is not None and len(column.stretches) < 2 and sum(sizes) == form.outputs:
                found[name] = sizes
        return found

    def _culprits(self, instance: Instance, node: OperationNode) -> Names:
        """Of columns from several modules, those without which the operation would go on; the smallest such set."""
        split = [i for i in dict.fromkeys(node.inputs) if instance.values[i] in self.layouts]
        held = {i: self.sources[instance.values[i]] for i in split}
        if len(split) < 2 or len(set(held.values())) < 2:
            return _NONE
        fitting: list[Names] = []
        for i in split:
            answer = self._ask(instance, node, {i: REPLICATED_PARTIAL})
            if not isinstance(answer, Refusal):
                fitting.append(held[i])
        return min(fitting, key=lambda names: (sum(map(self._weight, names)), sorted(names)), default=_NONE)

    def _weight(self, name: str) -> int:
        return self.subject.weights.get(name, 0)
