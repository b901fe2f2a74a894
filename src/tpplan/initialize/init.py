"""The initialisation of a sharded model: recorded, agreed on by all ranks, replayed."""

from __future__ import annotations

import functools
import random
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from tpplan.checkpoint.agreed import AgreeingRanks, Report, Words
from tpplan.checkpoint.wanted import Wanted, wanted_by
from tpplan.compat.dtensors import local_of
from tpplan.compat.dynamo import uncompiled
from tpplan.initialize.construction import Construction
from tpplan.initialize.construction_replay import replay
from tpplan.initialize.findings import APART, UNKNOWN, InitializationError, finding
from tpplan.initialize.recipe import construction_of
from tpplan.initialize.targets import misfits, taken
from tpplan.plan import Diagnostic
from tpplan.plan.taken import FLAG, takes
from tpplan.plan.warned import warn_user
from tpplan.runtime.parameters.distribute import device_of_mesh
from tpplan.taken_models import BUILD, DEVICE, MODEL


@takes(model=MODEL, build=BUILD, device=DEVICE, missing=FLAG)
def init_weights(
    model: nn.Module,
    *,
    build: Callable[[], nn.Module] | None = None,
    device: torch.device | str | None = None,
    missing: bool = False,
) -> nn.Module:
    """Initialise a parallelized (or a stock) model, in place, as its stock model is initialised from the same seed.

    The stock model is built once more without memory, by its constructor, and what that does is recorded. The record
    is then replayed: random numbers are drawn in the stock model's order, and each tensor is made whole, cut, and
    dropped. A rank needs memory for its shards and for one whole tensor. Afterwards torch's generator is where the
    construction of the stock model leaves it. Every rank that holds a part of the model must call this, seeded alike.

    Tensors on `meta` are made on their mesh's device; the numbers of others are overwritten.

    Args:
        model: the model.
        build: makes the stock model: `lambda: Model(layers=12)`. Not needed for models of transformers, which are
            built of their config, and for models whose modules are all torch's own, with constructors that only put
            them together: these are reset one after the other.
        device: where the stock model would be built, as CPU and GPU draw different numbers; None for the mesh's device.
        missing: whether to initialise only what is on `meta`, as what a checkpoint hadn't is after `load_weights`.

    Returns:
        `model` itself.

    Warns:
        UserWarning: the stock model leaves tensors without numbers.

    Raises:
        InitializationError: TP143 to TP145: which modules can't be initialised as the stock model's, and why; or the
            ranks would not initialise alike. The same on all ranks, and no model has changed.

    Example:
        >>> with torch.device("meta"):
        ...     model = MLP()
        >>> model = tpplan.parallelize(model, "auto", inputs=x)
        >>> torch.manual_seed(0) and None
        >>> model = tpplan.init_weights(model, build=MLP)
        >>> model.up.weight.is_meta
        False
    """
    bare = uncompiled(model)
    ranks = AgreeingRanks(bare, words=_WORDS)
    own = device_of_mesh(ranks.meshes[0]) if ranks.meshes else torch.device("cpu")
    stock: Construction | None = None
    targets: list[Wanted] = []
    filled: dict[int, Tensor] = {}
    findings: list[Diagnostic] = []
    error: Exception | None = None  # whatever a rank fails with, the others must not wait for it

    def take(place: int, whole: Tensor) -> None:
        filled[place] = taken(targets[place], whole, own)

    with _python_randomness():
        try:
            stock = construction_of(bare, build, own if device is None else torch.device(device))
            targets = wanted_by(bare, every=True)
            findings = misfits(targets, stock)
            if missing:
                targets = [target for target in targets if local_of(target.tensor).is_meta]
        except Exception as raised:
            error = raised
        source, digest = ("", None) if stock is None else (stock.seeds, stock.seeds + stock.digest)
        warned = ranks.settle(source, digest, findings, error)
        assert stock is not None
        try:
            replay(stock, {target.names[0]: functools.partial(take, place) for place, target in enumerate(targets)})
        except Exception as raised:
            error = raised
        ranks.settle(source, digest, (), error)
    for place, target in enumerate(targets):
        target.put(filled[place])
    if ranks.speaks:
        for held in warned:
            warn_user(held.text)
    return model


@contextmanager
def _python_randomness() -> Generator[None]:
    """Where the block fails, Python's and NumPy's generators are as they were before."""
    numpy = sys.modules.get("numpy")
    state, others = random.getstate(), None if numpy is None else numpy.random.get_state()
    try:
        yield
    except BaseException:
        random.setstate(state)
        if numpy is not None:
            numpy.random.set_state(others)
        raise


def _apart(one: Report, other: Report) -> Diagnostic:
    where = f"rank {one.rank} and rank {other.rank}"
    if one.source != other.source:
        return finding(
            APART,
            f"the random generators of {where} are in different states, so that they would draw different numbers",
            "call torch.manual_seed with one seed on all ranks, right before `init_weights`",
        )
    return finding(
        APART,
        f"{where} would initialise different models",
        "give all ranks the same config or `build`, without anything that depends on the rank",
    )


_WORDS = Words(
    doing="the initialisation",
    finding=functools.partial(finding, UNKNOWN),
    error=InitializationError,
    apart=_apart,
)

__all__ = ["init_weights"]
