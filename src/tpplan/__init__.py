"""A compiler for tensor parallelism in PyTorch: a YAML plan in, a stock module rewritten in place out."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tpplan import generation, loss
    from tpplan.api import (
        Program,
        check_stages,
        compile_plan,
        init_weights,
        load_weights,
        parallelize,
        save_weights,
        suggest_plan,
        verify,
    )
    from tpplan.calls.alike import DifferentInputsError
    from tpplan.calls.call_errors import UnprovedCallError
    from tpplan.calls.warm import warm_up
    from tpplan.checkpoint.files import CheckpointError
    from tpplan.compiler.ir.script import ReplayError
    from tpplan.compiler.ladder import UnplacedError
    from tpplan.cost.advice import Advice, AdviceRow
    from tpplan.cost.cluster import Cluster
    from tpplan.cost.cost_errors import CostError
    from tpplan.cost.estimates import Estimate
    from tpplan.forecast.degrees import advise
    from tpplan.forecast.estimate import estimate
    from tpplan.initialize.findings import InitializationError
    from tpplan.kernels.kernel_errors import KernelArgumentError
    from tpplan.loss import LossError
    from tpplan.ops import OperatorRuleError, operator, register_operator
    from tpplan.parity.parity_errors import (
        RankError,
        RanksDisagreeError,
        RankTimeoutError,
        TooLargeError,
        UnshardedError,
        VerifyError,
    )
    from tpplan.plan import (
        ArgumentError,
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
    from tpplan.report.program_compare import ComparisonError
    from tpplan.runtime.around.adapters import ChangedAroundError
    from tpplan.runtime.around.observe import ObserveError, observe
    from tpplan.runtime.around.onlookers import ChangedByToolError, ChangingHookError
    from tpplan.runtime.around.recent import RecomputeError
    from tpplan.runtime.around.results import UnlikeResultsError
    from tpplan.runtime.around.standalone import AloneError
    from tpplan.runtime.classes.class_scope import ClassCallError
    from tpplan.runtime.compiled.compiled_calls import CompiledCallError
    from tpplan.runtime.data_parallel.averaging import DataParallelError
    from tpplan.runtime.data_parallel.clipping import clip_grad_norm_
    from tpplan.runtime.parameters.sharded_operations import UnprovedModuleError
    from tpplan.runtime.parameters.sharded_tensors import StateError
    from tpplan.runtime.random.randomness import RandomnessError
    from tpplan.runtime.ranks.faults import LostRankError
    from tpplan.runtime.ranks.lockstep import WatchError
    from tpplan.runtime.ranks.reshard import SecondDerivativeError, TailError, UnevenShardError
    from tpplan.training.sharding import TrainingError

    __version__: str

__all__ = [
    "Advice",
    "AdviceRow",
    "AloneError",
    "ArgumentError",
    "ChangedAroundError",
    "ChangedByToolError",
    "ChangingHookError",
    "CheckpointError",
    "ClassCallError",
    "Cluster",
    "ComparisonError",
    "CompileError",
    "CompiledCallError",
    "CostError",
    "DataParallelError",
    "Diagnostic",
    "DifferentInputsError",
    "Estimate",
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
    "UnprovedModuleError",
    "UnshardedError",
    "VerifyError",
    "WatchError",
    "__version__",
    "advise",
    "check_plan",
    "check_stages",
    "clip_grad_norm_",
    "compile_plan",
    "estimate",
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
        "check_stages",
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
    "Advice": "tpplan.cost.advice",
    "AdviceRow": "tpplan.cost.advice",
    "Cluster": "tpplan.cost.cluster",
    "ComparisonError": "tpplan.report.program_compare",
    "CostError": "tpplan.cost.cost_errors",
    "Estimate": "tpplan.cost.estimates",
    "advise": "tpplan.forecast.degrees",
    "estimate": "tpplan.forecast.estimate",
    "AloneError": "tpplan.runtime.around.standalone",
    "ChangedAroundError": "tpplan.runtime.around.adapters",
    "CheckpointError": "tpplan.checkpoint.files",
    "DataParallelError": "tpplan.runtime.data_parallel.averaging",
    "clip_grad_norm_": "tpplan.runtime.data_parallel.clipping",
    "DifferentInputsError": "tpplan.calls.alike",
    "InitializationError": "tpplan.initialize.findings",
    "ClassCallError": "tpplan.runtime.classes.class_scope",
    "KernelArgumentError": "tpplan.kernels.kernel_errors",
    "LossError": "tpplan.loss",
    "CompiledCallError": "tpplan.runtime.compiled.compiled_calls",
    "RandomnessError": "tpplan.runtime.random.randomness",
    "RankError": "tpplan.parity.parity_errors",
    "RankTimeoutError": "tpplan.parity.parity_errors",
    "RanksDisagreeError": "tpplan.parity.parity_errors",
    "ReplayError": "tpplan.compiler.ir.script",
    "StateError": "tpplan.runtime.parameters.packed_tensors",
    "TooLargeError": "tpplan.parity.parity_errors",
    "TrainingError": "tpplan.training.sharding",
    "SecondDerivativeError": "tpplan.runtime.ranks.reshard",
    "ChangedByToolError": "tpplan.runtime.around.onlookers",
    "ChangingHookError": "tpplan.runtime.around.onlookers",
    "TailError": "tpplan.runtime.ranks.reshard",
    "UnevenShardError": "tpplan.runtime.ranks.reshard",
    "UnlikeResultsError": "tpplan.runtime.around.results",
    "UnplacedError": "tpplan.compiler.ladder",
    "UnprovedCallError": "tpplan.calls.call_errors",
    "UnprovedModuleError": "tpplan.runtime.parameters.sharded_operations",
    "UnshardedError": "tpplan.parity.parity_errors",
    "VerifyError": "tpplan.parity.parity_errors",
    "LostRankError": "tpplan.runtime.ranks.faults",
    "ObserveError": "tpplan.runtime.around.observe",
    "observe": "tpplan.runtime.around.observe",
    "OperatorRuleError": "tpplan.ops.declared",
    "operator": "tpplan.ops.functions",
    "register_operator": "tpplan.ops.functions",
    "RecomputeError": "tpplan.runtime.around.recent",
    "WatchError": "tpplan.runtime.ranks.lockstep",
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
