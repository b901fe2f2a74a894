"""The public functions: compile a plan, rewrite a model, and what goes around it."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tpplan.ambience import ambience
from tpplan.asked import AskedPlan, found_plan, known_plan, plan_of
from tpplan.asked import suggest_text as found_text
from tpplan.calls.guard import CallGuard
from tpplan.checkpoint.loading import load_weights
from tpplan.checkpoint.save import save_weights
from tpplan.compiler.ir.program import Program
from tpplan.compiler.pipeline import Compiled
from tpplan.compiler.request import Request
from tpplan.compiler.trace.skeleton import make_skeleton
from tpplan.forecast.measurement import Measurement
from tpplan.hf.recorded_outputs import recording_outputs
from tpplan.initialize import init_weights
from tpplan.parity import ParityReport, verify
from tpplan.plan import ArgumentError, CompileError, Plan, Severity, load_plan
from tpplan.plan.taken import FLAG, RANKS, optional, takes
from tpplan.plan.vocabulary import DEFAULT_AXIS
from tpplan.process import make_process_changes
from tpplan.rehearsal.dry_run import dry_run
from tpplan.rehearsal.prove import prove
from tpplan.runtime.around.handing_on import handing, refuse_disagreeing
from tpplan.runtime.compiled.compiled_before import bare
from tpplan.runtime.lower import lower, wrap_around
from tpplan.runtime.parameters.distribute import MeshDistributor, device_of_mesh
from tpplan.runtime.parameters.taken_apart import taken_apart
from tpplan.runtime.ranks.agreement import agree
from tpplan.runtime.ranks.board import exchange
from tpplan.runtime.ranks.lockstep import ranks_of
from tpplan.served import Served, names_for, served
from tpplan.taken_models import AXIS, DEVICE, INPUTS, MESH, MODEL, STAGES

__all__ = [
    "ParityReport",
    "Program",
    "check_stages",
    "compile_plan",
    "init_weights",
    "load_weights",
    "parallelize",
    "save_weights",
    "suggest_plan",
    "verify",
]

Inputs = Mapping[str, Any] | tuple[Any, ...] | torch.Tensor | None


@takes(model=MODEL, tp=RANKS, inputs=INPUTS, device=DEVICE, partial=FLAG)
def compile_plan(
    model: nn.Module,
    plan: AskedPlan,
    tp: int,
    inputs: Inputs = None,
    device: torch.device | str | None = None,
    *,
    partial: bool = False,
) -> Program:
    """Compile a plan for a model, without a process group or a GPU.

    Args:
        model: the stock model; on `meta` it takes no memory. It is not changed.
        plan: a plan, what `load_plan` takes, "auto" for what `suggest_plan` finds, or a dict of styles as torch's
            `parallelize_module` takes it.
        tp: number of ranks on the plan's axis.
        inputs: an example call: a dict of keywords, a tuple of positional arguments, or one tensor; fake or meta
            tensors will do. For a transformers model it is made up from the config.
        device: where the model will run, such as `"cuda"`, which needn't be there: code that asks for the device takes
            the path that it takes on that, and the sharded model runs once on fake tensors of it. None for where its
            parameters lie.
        partial: whether `model` may be a part of what the plan is for, such as a stage of a pipeline: rules that match
            nothing in it say nothing then, and `check_stages` tells whether they match in another. A tensor that goes
            to a module with `input: sequence` arrives as this rank's part; `inputs` has it whole.

    Returns:
        The program: what becomes of each module and parameter, every collective, and `diagnostics` with warnings.

    Raises:
        PlanError: the plan has mistakes.
        CompileError: plan and model don't fit together, or the model can't run on `device`; all findings are in
            `diagnostics`.
        ArgumentError: an argument is of another kind, `tp` is less than 1, or `device` is none of torch's.

    Example:
        >>> plan = {"version": 1, "modules": {"up": "colwise", "down": "rowwise"}}
        >>> program = tpplan.compile_plan(model, plan, tp=8, inputs=x)
        >>> program.count_collectives()
        Counter({'all-reduce': 1})
    """
    there = None if device is None else _device(device)
    with bare(model) as stock, recording_outputs(stock, inputs), taken_apart(stock):
        loaded, notes = plan_of(plan, stock, tp, inputs)
        inner = served(stock, loaded, tp, inputs, partial=partial)
        compiled = prove(Request(inner.model, inner.plan, tp, *inner.call, device=there))
        notes += () if there is None else tuple(dry_run(inner.model, compiled, *inner.call, there))
        measure = Measurement(inner.model, compiled, *inner.call)
    program = compiled.program
    return replace(program, diagnostics=(*program.diagnostics, *notes), measure=measure)


def _device(device: torch.device | str) -> torch.device:
    try:
        return torch.device(device)
    except RuntimeError:
        raise ArgumentError(f'{device!r} isn\'t a device of torch: write `"cuda"` for a GPU, or `"cpu"`') from None


@takes(model=MODEL, tp=RANKS, sequence_parallel=FLAG, inputs=INPUTS, training=FLAG)
def suggest_plan(
    model: nn.Module, tp: int, sequence_parallel: bool = False, inputs: Inputs = None, *, training: bool = False
) -> Plan:
    """Find a plan for a model: pairs of linear layers by the flow of the data, packs, heads, tables and norms.

    What the plan shards is proved by `compile_plan` at `tp` ranks; what can't be proved is left whole. `tpplan suggest`
    writes the same plan as a file, with comments that say why.

    Args:
        model: the stock model; on `meta` it takes no memory. It is not changed.
        tp: number of ranks.
        sequence_parallel: whether the stream between the blocks is to be split along the sequence.
        inputs: an example call; see `compile_plan`. If it computes a loss, the head's result stays split for it.
        training: whether to make up labels as well, where no inputs are given.

    Raises:
        CompileError: the model can't be captured, or nothing in it can be sharded over `tp` ranks.
        ArgumentError: an argument is of another kind.

    Example:
        >>> plan = tpplan.suggest_plan(model, tp=2, inputs=x)
        >>> plan.to_dict()["modules"]
        {'up': 'colwise', 'down': 'rowwise'}
    """
    return load_plan(suggest_text(model, tp, sequence_parallel, inputs, training=training))


def suggest_text(
    model: nn.Module, tp: int, sequence_parallel: bool = False, inputs: Inputs = None, *, training: bool = False
) -> str:
    """As `suggest_plan`, as the text of a plan file, with comments."""
    with bare(model) as stock, recording_outputs(stock, inputs), taken_apart(stock):
        return found_text(stock, tp, sequence_parallel, inputs, training=training)


def _tell(given: dict[str, Any], error: Exception) -> None:
    mesh, model, plan = given.get("mesh"), given["model"], None
    with suppress(Exception):  # no plan, as the call itself would go on
        plan, _ = known_plan(given["plan"], model if MODEL.fits(model) else None, axis_name(mesh))
    over = axis_mesh(mesh, None if plan is None else plan.axis, given.get("tp") if mesh is None else None)
    agree(over.get_group(), None, error)


@takes(_tell, model=MODEL, mesh=MESH, tp=optional(RANKS), broadcast=FLAG, partial=FLAG)
def parallelize(
    model: nn.Module,
    plan: AskedPlan,
    mesh: DeviceMesh | None = None,
    inputs: Inputs = None,
    *,
    tp: int | None = None,
    broadcast: bool = True,
    partial: bool = False,
) -> nn.Module:
    """Rewrite a stock model in place, so that it runs on this rank's shards.

    Every rank of the mesh must call this alike; the ranks compare their programs before any of them changes its model.

    Args:
        model: the stock model, materialised (all ranks then take the first rank's numbers) or on `meta`.
        plan: a plan, what `load_plan` takes, "auto" for what `suggest_plan` finds, or a dict of styles as torch's
            `parallelize_module` takes it.
        mesh: a device mesh with the plan's axis among its names, such as `mesh` or `mesh["tp"]` of a larger one; None
            takes torchrun's processes, on the GPUs if there are any, as one axis or in groups of `tp`.
        inputs: an example call; see `compile_plan`.
        tp: without a mesh, the number of ranks on the plan's axis, which divides that of the processes: the mesh is one
            of (`dp`, the plan's axis). Gradients aren't averaged over `dp`; DDP and FSDP2 do that.
        broadcast: whether all ranks take the first rank's parameters; False if they hold the same already.
        partial: whether `model` may be a part of what the plan is for; see `compile_plan`.

    Returns:
        `model` itself.

    Raises:
        PlanError: the plan has mistakes.
        CompileError: plan, model and mesh don't fit together, on this or on another rank; the model is unchanged.
        ArgumentError: an argument is of another kind.

    Example:
        >>> plan = {"version": 1, "modules": {"up": "colwise", "down": "rowwise"}}
        >>> model = tpplan.parallelize(model, plan, inputs=x)  # `torchrun --nproc-per-node=2`
        >>> model.up
        ColwiseLinear(in_features=8, out_features=32, bias=True, weight=S(0), bias=S(0))
    """
    with bare(model) as stock, recording_outputs(stock, inputs, keep=True), taken_apart(stock, keep=True) as forget:
        _parallelize(stock, plan, mesh, inputs, tp, broadcast, partial, forget)
    return model


@ambience()
def _parallelize(
    model: nn.Module,
    plan: AskedPlan,
    mesh: DeviceMesh | None,
    inputs: Inputs,
    tp: int | None,
    broadcast: bool,
    partial: bool,
    forget: Callable[[], None],
) -> None:
    """As `parallelize`, of a model in which nothing is compiled; `forget` lets go of whole weights."""
    loaded: Plan | None = None
    compiled: Compiled | None = None
    error: Exception | None = None  # whatever a rank fails with, the others must not wait for it
    inner: Served | None = None
    try:
        loaded, _ = known_plan(plan, model, axis_name(mesh))
    except Exception as raised:
        error = raised
    over = axis_mesh(mesh, None if loaded is None else loaded.axis, tp)
    group = over.get_group()
    if error is None:
        try:
            loaded = loaded or found_plan(model, over.size(), inputs, axis=axis_name(over))
            inner = served(model, loaded, over.size(), inputs, partial=partial)
            device = device_of_mesh(over)
            compiled = prove(Request(inner.model, inner.plan, over.size(), *inner.call, device=device))
        except Exception as raised:
            error = raised
    program = None if compiled is None else compiled.program
    draws = program is not None and any(module.random for module in program.modules)
    agree(group, None if compiled is None else compiled.digest, error, draws)
    assert loaded is not None and inner is not None and compiled is not None and program is not None
    axis = ranks_of(group)
    if program.one_shot:
        axis.sum_in_one_step(program.one_shot, device_of_mesh(over))
    if program.fused_overlap:
        axis.fuse_products(device_of_mesh(over))
    guard = CallGuard(make_skeleton(inner.model).model, inner.plan, compiled, *inner.call, axis)
    forget()
    lower(inner.model, program, MeshDistributor(over, axis, group if broadcast else None), guard)
    if inner.name:
        wrap_around(model, inner.name)
    make_process_changes(group)


def _tell_stages(given: dict[str, Any], error: Exception) -> None:
    agree(given["mesh"].get_group(), None, error)


@takes(_tell_stages, stages=STAGES, mesh=AXIS)
def check_stages(stages: nn.Module | Collection[nn.Module], plan: AskedPlan, mesh: DeviceMesh | None = None) -> None:
    """Raise if a pattern of a plan matches in none of the parts of a model, or these don't take what others hand on.

    `partial=True` lets a plan for the whole model have patterns that match nothing in one stage. Only who sees the
    names of all stages can tell which of them match nothing at all. Of stages after `parallelize` it is also compared
    whether each takes parts of a sequence where the one before returns them, in the order of their layers' numbers.

    Args:
        stages: the parts that this process has, before or after `parallelize`, on any device.
        plan: as for `parallelize`.
        mesh: the pipeline's axis, such as `mesh["pp"]`, whose ranks must all call this; None if all parts are here.

    Raises:
        PlanError: the plan has mistakes.
        CompileError: TP012 for each of these patterns, TP195 for stages that disagree, on all ranks.
        ArgumentError: an argument is of another kind.

    Example:
        >>> plan = {"version": 1, "modules": {"up": "colwise", "down": "rowwise"}}
        >>> tpplan.check_stages([model], plan)  # `[stage], plan, mesh["pp"]` in a pipeline
    """
    several = not isinstance(stages, nn.Module) or isinstance(stages, nn.ModuleList)
    own: list[nn.Module] = list(cast("Collection[nn.Module]", stages)) if several else [cast("nn.Module", stages)]
    loaded: Plan | None = None
    error: Exception | None = None
    try:
        loaded, _ = known_plan(plan, own[0] if own else None)
    except Exception as raised:
        error = raised  # the other ranks wait for this one
    group = None if mesh is None else mesh.get_group()
    if group is not None:
        agree(group, None, error)
    elif error is not None:
        raise error
    told = [(names_for(stage), handing(stage)) for stage in own]
    every = [held for there in exchange(group, "the comparison of a plan with all stages", told) for held in there]
    named = [names for names, _ in every]
    modules, parameters = (list(dict.fromkeys(name for names in named for name in names[kind])) for kind in (0, 1))
    found = () if loaded is None else loaded.match(modules, parameters).diagnostics
    unmatched = [held for held in found if held.code == "TP012" and held.severity is Severity.ERROR]
    if unmatched:
        raise CompileError(unmatched)
    refuse_disagreeing([held for _, held in every])


def axis_name(mesh: DeviceMesh | None) -> str:
    """The name of a mesh's one axis; `tp` where there are none or several."""
    names = mesh.mesh_dim_names if mesh is not None and mesh.ndim == 1 else None
    return names[0] if names else DEFAULT_AXIS


def axis_mesh(mesh: DeviceMesh | None, named: str | None, tp: int | None = None) -> DeviceMesh:
    """The mesh of one axis of a mesh; without a mesh, of all of torchrun's processes, or of each `tp` of them.

    Args:
        mesh: what the user gave.
        named: the axis; None for a mesh's own, if it has but one, else `tp`.
        tp: how many ranks the axis is to have.

    Raises:
        CompileError: TP115, if there is no such axis, or no torchrun, or another number of ranks.
    """
    axis = named or DEFAULT_AXIS
    if mesh is None:
        if not torch.distributed.is_initialized() and "WORLD_SIZE" not in os.environ:
            raise _mesh_error(
                "no mesh was given, and this process wasn't started by torchrun",
                "start it with `torchrun --nproc-per-node=N script.py`, or pass a DeviceMesh",
            )
        device = "cuda" if torch.cuda.is_available() else "cpu"
        if torch.distributed.is_initialized():
            size = torch.distributed.get_world_size()
        else:
            size = int(os.environ["WORLD_SIZE"])
        if tp in (None, size):
            return init_device_mesh(device, (size,), mesh_dim_names=(axis,))
        if size % tp:
            raise _mesh_error(
                f"`tp={tp}` doesn't divide the {size} processes", "start another number of them, or take another `tp`"
            )
        outer = "dp" if axis != "dp" else "replicas"
        return init_device_mesh(device, (size // tp, tp), mesh_dim_names=(outer, axis))[axis]
    if named is None and mesh.ndim == 1:
        axis = axis_name(mesh)
    names = mesh.mesh_dim_names
    if (names is None and mesh.ndim > 1) or (names is not None and axis not in names):
        shown = ", ".join(names) if names else "none"
        raise _mesh_error(
            f"the mesh has no axis `{axis}`; its axes are: {shown}",
            f"name an axis so: init_device_mesh(device, shape, mesh_dim_names=(…, {axis!r})), or write "
            "`axis:` in the plan",
        )
    over = mesh if mesh.ndim == 1 else mesh[axis]
    if tp not in (None, over.size()):
        raise _mesh_error(f"`tp={tp}`, but the mesh has {over.size()} ranks on `{axis}`", "leave out one of the two")
    return over


def _mesh_error(message: str, way_out: str) -> CompileError:
    return CompileError.of("TP115", message, help=way_out)
