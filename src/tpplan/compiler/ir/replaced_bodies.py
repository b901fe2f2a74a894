"""What a program can have in place of a module's own forward: a norm, experts, a recurrent layer, or a record.

Plain data: lemmas and proofs make them, and the runtime makes functions of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

from tpplan.compiler.ir.layout import Layout, Pack
from tpplan.plan import Exchange


@dataclass(frozen=True, slots=True)
class SplitNorm:
    """A norm over features that are split: its statistic is summed over the ranks, and each normalizes its own part.

    Attributes:
        layout: of the features, in the input as in the result.
        centred: LayerNorm, whose mean is a statistic too; otherwise RMSNorm.
        eps, offset, cast: see `KernelUse`.
        weight, bias: the parameters by their qualified names, stored whole.
        gate: the argument whose silu gates it; None for a plain norm.
        gated_first: whether the input is gated, and not the result.
        narrows: whether the statistics are taken in float32, of an input in float64.
    """

    layout: Layout
    centred: bool
    eps: float
    offset: float
    cast: str
    weight: str | None
    bias: str | None
    gate: str | None = None
    gated_first: bool = False
    narrows: bool = False


@dataclass(frozen=True, slots=True)
class SharedExperts:
    """Whole experts, of which each rank runs its own.

    Attributes:
        owner: of an expert that is a module: the rank that holds it; None for a stack of experts.
        count: of a stack: how many experts there are on all ranks.
        tokens, chosen, weights: of a stack: the arguments with the tokens, with the numbers of the experts that were
            chosen for each, and with these choices' weights.
        ranks: of a stack: how many consecutive ranks share each expert, which is split inside over these.
        exchange: of a stack: `all-to-all` if each token goes to the ranks with its experts; None if all ranks have all
            tokens, and their results are summed. Until that is decided, what the plan asks for.
        sent: of a stack in a model whose sequence is split: the bytes that a rank sends in the example call and its
            backward, all-to-all and by sums.
    """

    owner: int | None = None
    count: int = 0
    tokens: str = ""
    chosen: str = ""
    weights: str = ""
    ranks: int = 1
    exchange: Exchange | None = None
    sent: tuple[int, int] | None = field(default=None, compare=False)

    @property
    def dispatches(self) -> bool:
        """Whether each token goes to the ranks with its experts."""
        return self.exchange is Exchange.ALL_TO_ALL


@dataclass(frozen=True, slots=True)
class Recurrence:
    """A recurrent layer, of whose hidden state each rank computes its features, and gathers it in each step.

    Attributes:
        mode: as torch names it: `LSTM`, `GRU`, `RNN_TANH` or `RNN_RELU`.
        features: of the hidden state, on all ranks.
        bias: whether it has biases.
        layers: how many; 1 of a cell.
        directions: 2 if it runs from both ends.
        batch_first: whether the batch is the first dim of input and output.
        dropout: between layers.
        cell: whether it computes a single step, as `nn.LSTMCell`.
    """

    mode: str
    features: int
    bias: bool = True
    layers: int = 1
    directions: int = 1
    batch_first: bool = False
    dropout: float = 0.0
    cell: bool = False

    @property
    def gates(self) -> int:
        """How many stretches, one for each gate, its parameters have along their first dim."""
        return {"LSTM": 4, "GRU": 3}.get(self.mode, 1)

    def suffixes(self) -> tuple[str, ...]:
        """What the names of its parameters end in, by layer and direction."""
        if self.cell:
            return ("",)
        ways = ("", "_reverse")[: self.directions]
        return tuple(f"_l{layer}{way}" for layer in range(self.layers) for way in ways)

    def parameters(self, suffix: str) -> tuple[str, ...]:
        """The names of the parameters of a layer's direction."""
        kinds = ("weight_ih", "weight_hh", "bias_ih", "bias_hh") if self.bias else ("weight_ih", "weight_hh")
        return tuple(f"{kind}{suffix}" for kind in kinds)


PathLayouts = tuple[tuple[tuple[str | int, ...], Layout], ...]


@dataclass(frozen=True, slots=True)
class MovedOperand:
    """An operand that is resharded before an operation of a body.

    Attributes:
        operation: the operator's name.
        number: how many such operations come before in the body.
        operand: which of its operands, each counted once.
        target: the layout after.
    """

    operation: str
    number: int
    operand: int
    target: Layout


@dataclass(frozen=True, slots=True)
class RecordedBody:
    """A body that runs from its record, since its own Python doesn't work on shards.

    Attributes:
        inputs: how its arguments lie on the inside, by path.
        calls: for each call inside the module's name there, the number of its calls before, and how its results lie.
        results: how its results lie on the inside, by path.
        heads: the numbers of heads, as packs, by which what it makes anew or repeats may be split.
        moves: operands that are resharded between its operations.
        passed: where there are any, how the arguments of its calls lie outside of these, as `calls`.
        partial: likewise, the parameters whose gradients are summed over the ranks, by their names in the module.
        averages: whether of means over split dims each rank makes its part.
        lengths: of arguments with a split dim that the axis doesn't divide, by path, its length.
        weights: the arguments that follow from parameters alone, by path.
        features: the numbers of features, likewise, by which what it makes anew may be split.
    """

    inputs: PathLayouts
    calls: tuple[tuple[str, int, PathLayouts], ...]
    results: PathLayouts
    heads: tuple[tuple[Pack, ...], ...] = ()
    moves: tuple[MovedOperand, ...] = ()
    passed: tuple[tuple[str, int, PathLayouts], ...] = ()
    partial: tuple[str, ...] = ()
    averages: bool = False
    lengths: tuple[tuple[tuple[str | int, ...], int], ...] = ()
    weights: tuple[tuple[str | int, ...], ...] = ()
    features: tuple[tuple[Pack, ...], ...] = ()


Body: TypeAlias = SplitNorm | RecordedBody | SharedExperts | Recurrence
"""What the program can have in place of a module's own forward, kernels apart."""

BODIES: dict[str, type[Body]] = {
    "split_norm": SplitNorm,
    "recorded": RecordedBody,
    "experts": SharedExperts,
    "recurrent": Recurrence,
}
"""By their keys in a program's JSON."""

__all__ = ["BODIES", "Body", "MovedOperand", "PathLayouts", "RecordedBody", "Recurrence", "SharedExperts", "SplitNorm"]
