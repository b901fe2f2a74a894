"""A compiler for tensor parallelism in PyTorch: a YAML plan in, a stock module rewritten in place out."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tpplan import generation, loss
    from tpplan.api import (
        Program,
        compile_plan,
        init_weights,
        load_weights,
        parallelize,
        save_weights,
        suggest_plan,
        verify,
    )
    from tpplan.calls.alike import DifferentInputsError
    from tpplan.calls.errors import UnprovedCallError
    from tpplan.calls.warm import warm_up
    from tpplan.checkpoint.files import CheckpointError
    from tpplan.compiler.ir.script import ReplayError
    from tpplan.compiler.search import UnplacedError
    from tpplan.initialize.findings import InitializationError
    from tpplan.kernels.errors import KernelArgumentError
    from tpplan.loss import LossError
    from tpplan.ops import OperatorRuleError, operator, register_operator
    from tpplan.parity.errors import (
        RankError,
        RanksDisagreeError,
        RankTimeoutError,
        TooLargeError,
        UnshardedError,
        VerifyError,
    )
    from tpplan.plan import (
        CompileError,
        Diagnostic,
        InternalError,
        Plan,
        PlanError,
        TpplanError,
        check_plan,
        load_plan,
    )
    from tpplan.pretrained import from_pretrained
    from tpplan.process import follow_training_loops, process_changes, undo_process_changes
    from tpplan.runtime.around import ChangedAroundError
    from tpplan.runtime.averaging import DataParallelError
    from tpplan.runtime.class_scope import ClassCallError
    from tpplan.runtime.clipping import clip_grad_norm_
    from tpplan.runtime.compiled import CompiledCallError
    from tpplan.runtime.faults import LostRankError
    from tpplan.runtime.lockstep import WatchError
    from tpplan.runtime.observe import ObserveError, observe
    from tpplan.runtime.onlookers import ChangedByToolError, ChangingHookError
    from tpplan.runtime.randomness import RandomnessError
    from tpplan.runtime.recent import RecomputeError
    from tpplan.runtime.reshard import SecondDerivativeError, TailError, UnevenShardError
    from tpplan.runtime.results import UnlikeResultsError
    from tpplan.runtime.sharded import StateError
    from tpplan.runtime.standalone import AloneError
    from tpplan.training.sharding import TrainingError

    __version__: str

__all__ = [
    "AloneError",
    "ChangedAroundError",
    "ChangedByToolError",
    "ChangingHookError",
    "CheckpointError",
    "ClassCallError",
    "CompileError",
    "CompiledCallError",
    "DataParallelError",
    "Diagnostic",
    "DifferentInputsError",
    "InitializationError",
    "InternalError",
    "KernelArgumentError",
    "LossError",
    "LostRankError",
    "ObserveError",
    "OperatorRuleError",
    "Plan",
    "PlanError",
    "Program",
    "RandomnessError",
    "RankError",
    "RankTimeoutError",
    "RanksDisagreeError",
    "RecomputeError",
    "ReplayError",
    "SecondDerivativeError",
    "StateError",
    "TailError",
    "TooLargeError",
    "TpplanError",
    "TrainingError",
    "UnevenShardError",
    "UnlikeResultsError",
    "UnplacedError",
    "UnprovedCallError",
    "UnshardedError",
    "VerifyError",
    "WatchError",
    "__version__",
    "check_plan",
    "clip_grad_norm_",
    "compile_plan",
    "follow_training_loops",
    "from_pretrained",
    "generation",
    "init_weights",
    "load_plan",
    "load_weights",
    "loss",
    "observe",
    "operator",
    "parallelize",
    "process_changes",
    "register_operator",
    "save_weights",
    "suggest_plan",
    "undo_process_changes",
    "verify",
    "warm_up",
]

_API = frozenset(
    {
        "Program",
        "compile_plan",
        "init_weights",
        "load_weights",
        "parallelize",
        "save_weights",
        "suggest_plan",
        "verify",
    }
)

# Where the rest is, beside `tpplan.plan`: most of it are errors that a user may catch.
_ELSEWHERE = {
    "from_pretrained": "tpplan.pretrained",
    "follow_training_loops": "tpplan.process",
    "process_changes": "tpplan.process",
    "undo_process_changes": "tpplan.process",
    "AloneError": "tpplan.runtime.standalone",
    "ChangedAroundError": "tpplan.runtime.around",
    "CheckpointError": "tpplan.checkpoint.files",
    "DataParallelError": "tpplan.runtime.averaging",
    "clip_grad_norm_": "tpplan.runtime.clipping",
    "DifferentInputsError": "tpplan.calls.alike",
    "InitializationError": "tpplan.initialize.findings",
    "ClassCallError": "tpplan.runtime.class_scope",
    "KernelArgumentError": "tpplan.kernels.errors",
    "LossError": "tpplan.loss",
    "CompiledCallError": "tpplan.runtime.compiled",
    "RandomnessError": "tpplan.runtime.randomness",
    "RankError": "tpplan.parity.errors",
    "RankTimeoutError": "tpplan.parity.errors",
    "RanksDisagreeError": "tpplan.parity.errors",
    "ReplayError": "tpplan.compiler.ir.script",
    "StateError": "tpplan.runtime.packed",
    "TooLargeError": "tpplan.parity.errors",
    "TrainingError": "tpplan.training.sharding",
    "SecondDerivativeError": "tpplan.runtime.reshard",
    "ChangedByToolError": "tpplan.runtime.onlookers",
    "ChangingHookError": "tpplan.runtime.onlookers",
    "TailError": "tpplan.runtime.reshard",
    "UnevenShardError": "tpplan.runtime.reshard",
    "UnlikeResultsError": "tpplan.runtime.results",
    "UnplacedError": "tpplan.compiler.search",
    "UnprovedCallError": "tpplan.calls.errors",
    "UnshardedError": "tpplan.parity.errors",
    "VerifyError": "tpplan.parity.errors",
    "LostRankError": "tpplan.runtime.faults",
    "ObserveError": "tpplan.runtime.observe",
    "observe": "tpplan.runtime.observe",
    "OperatorRuleError": "tpplan.ops.declared",
    "operator": "tpplan.ops.functions",
    "register_operator": "tpplan.ops.functions",
    "RecomputeError": "tpplan.runtime.recent",
    "WatchError": "tpplan.runtime.lockstep",
    "warm_up": "tpplan.calls.warm",
}


def __getattr__(name: str) -> object:
    """Import what's asked for only then: torch takes over a second, and reading a plan needs none of it."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "__version__":
        value: object = _installed_version()
    elif name in ("generation", "loss"):
        value = import_module(f"tpplan.{name}")
    else:
        value = getattr(import_module("tpplan.api" if name in _API else _ELSEWHERE.get(name, "tpplan.plan")), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _installed_version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("tpplan")
    except PackageNotFoundError:
        return "0+uninstalled"
