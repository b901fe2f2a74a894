"""The report of a verification: plain data."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from tpplan.parity.tolerance import Tolerance


@dataclass(frozen=True, slots=True)
class TensorParity:
    """How far one tensor strays.

    Attributes:
        name: the output's path, or the parameter's name; an input's gradient is called `inputs.NAME`.
        error: the largest difference on any rank, relative to the tensor's scale; inf for another shape or for NaNs.
        tolerance: what it may be.
    """

    name: str
    error: float
    tolerance: float

    @property
    def ok(self) -> bool:
        """Whether the error is within the tolerance."""
        return self.error <= self.tolerance


@dataclass(frozen=True, slots=True)
class Divergence:
    """Where the sharded run first departs from the unsharded one.

    Attributes:
        module: the module's qualified name; "" is the model.
        what: `output` or `gradient`.
        error: how far.
    """

    module: str
    what: str
    error: float


@dataclass(frozen=True, slots=True)
class ParityReport:
    """The outcome of a verification.

    Attributes:
        plan, model, size: what was verified.
        dtype: the numbers' type, such as `float64`.
        ranks: `simulated` or `processes`.
        seed: of weights, inputs and cotangents, where these were made up.
        tolerance: what errors may be, and why.
        outputs, gradients: every output and every gradient, in the model's order; a buffer that a forward writes to is
            an output called `buffers.NAME`.
        divergence: the first one; None if there is none, or if it can't be told.
        modules_compared: how many module calls were compared.
        collectives, predicted: how often each collective ran on a rank, and how often the program says it does.
        least: how often it says each does where no module is called that data may pick.
        problems: everything that is wrong, in words.
        notes: what is worth knowing beside, such as collectives that ran less often than predicted, or that numbers
            which differ do so by no more than roundings move them.
        assumed: rules of the user's operators that couldn't be tried, each with the reason.
    """

    plan: str
    model: str
    size: int
    dtype: str
    ranks: str
    seed: int
    tolerance: Tolerance
    outputs: tuple[TensorParity, ...]
    gradients: tuple[TensorParity, ...]
    divergence: Divergence | None
    modules_compared: int
    collectives: dict[str, int]
    predicted: dict[str, int]
    least: dict[str, int]
    problems: tuple[str, ...]
    notes: tuple[str, ...] = ()
    assumed: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether the sharded program computes what the model does."""
        return not self.problems

    @property
    def max_error(self) -> float:
        """The largest relative error of an output or a gradient."""
        return max((held.error for held in (*self.outputs, *self.gradients)), default=0.0)

    @property
    def first_divergence(self) -> str | None:
        """The qualified name of the module where the sharded run first departs; "" is the model itself."""
        return None if self.divergence is None else self.divergence.module

    def to_dict(self) -> dict[str, Any]:
        """Nested plain data that JSON can hold; an infinite error is None."""
        plain = asdict(self)
        for held in (*plain["outputs"], *plain["gradients"]):
            held["ok"] = held["error"] <= held["tolerance"]
            held["error"] = _finite(held["error"])
        if plain["divergence"] is not None:
            plain["divergence"]["error"] = _finite(plain["divergence"]["error"])
        plain |= {"outputs": list(plain["outputs"]), "gradients": list(plain["gradients"])}
        first = {"ok": self.ok, "max_error": _finite(self.max_error), "first_divergence": self.first_divergence}
        listed = {name: list(plain[name]) for name in ("problems", "notes", "assumed")}
        return first | plain | listed

    def __str__(self) -> str:
        """The verdict in a line, and each problem in one."""
        subject = f"{self.plan} for {self.model} at tp={self.size}, {self.dtype}, {self.ranks} ranks"
        verdict = "computes the same" if self.ok else "diverges"
        assumed = (f"assumed: {rule}" for rule in self.assumed)
        lines = [f"{subject}: {verdict} (largest relative error {self.max_error:.1e})"]
        return "\n".join([*lines, *(f"  {line}" for line in (*self.problems, *self.notes, *assumed))])


def _finite(error: float) -> float | None:
    return error if math.isfinite(error) else None
