"""A model of the zoo from outside of transformers' text models: how it is made, and what it is called with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from tests.zoo.torchvision_operators import declare_operators

declare_operators()

Inputs = dict[str, Any] | tuple[Any, ...]


@dataclass(frozen=True)
class Subject:
    """How to build a tiny model.

    Attributes:
        make: makes the model, with numbers.
        inputs: makes the keywords or the positional arguments of a call; `number` tells calls with other numbers apart.
        package: what has to be installed, as it is imported; "" for nothing but torch.
    """

    make: Callable[[], nn.Module]
    inputs: Callable[[int], Inputs]
    package: str = field(default="transformers")

    @property
    def installed(self) -> bool:
        """Whether the package is there."""
        return not self.package or find_spec(self.package) is not None

    def build(self) -> nn.Module:
        """The model in evaluation mode, the same each time."""
        with torch.random.fork_rng([]):
            torch.manual_seed(0)
            return self.make().eval()

    def call(self, number: int = 0) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Positional arguments and keywords."""
        held = self.inputs(number)
        return (held, {}) if isinstance(held, tuple) else ((), held)


def numbers(*shape: int, seed: int = 1) -> Tensor:
    """Normal numbers, the same each time."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def tokens(vocabulary: int, *shape: int, seed: int = 0, least: int = 10) -> Tensor:
    """Tokens, none of them special, the same each time."""
    return torch.randint(least, vocabulary, shape, generator=torch.Generator().manual_seed(seed))


def of_transformers(kind: str, maker: str, inputs: Callable[[int], Inputs], /, **settings: Any) -> Subject:
    """A model of transformers: its model type, the name of its class, and the fields of its config."""

    def make() -> nn.Module:
        import transformers

        return getattr(transformers, maker)(transformers.AutoConfig.for_model(kind, **settings))

    return Subject(make, inputs)


def steady(given: Inputs) -> Callable[[int], Inputs]:
    """The same arguments for each call."""
    return lambda _: given
