"""Inference: what a plan costs where nothing is trained: a prompt, and the token after it.

in:  a model, a plan, the example call of a prompt
out: `Inference`

What a call leaves to the next, such as keys and values, is no part of a program, since caches are objects of the
model's own. So the stock model and the sharded one are run on shapes, the latter as each kind of rank, and what they
leave and send is measured. A call leaves whatever goes by an argument's name among its results, and what it puts into
lists and dicts among its arguments. Nothing is known of attention, heads or windows here. As at run time, the token
runs by the program of the prompt, or by that with whole sequences, since the ranks can't share a single token.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from tpplan.ambience import ambience
from tpplan.calls.call_arguments import without_opaque
from tpplan.calls.proofs import cache_difference
from tpplan.calls.storage import Forgetful, FusedAttention, StorageMeter
from tpplan.compiler.ir.hidden import hidden_tensors
from tpplan.compiler.ir.observations import CaptureSettings
from tpplan.compiler.ir.program import Program, dtype_name
from tpplan.compiler.ir.pytree import leaves, tensors_of, with_tensors
from tpplan.compiler.ir.trace import Path
from tpplan.compiler.later import placement_difference
from tpplan.compiler.pipeline import Compiled, compile_call
from tpplan.compiler.request import Request
from tpplan.compiler.trace.capture import on_shapes
from tpplan.compiler.trace.signatures import argument_names
from tpplan.compiler.trace.skeleton import make_skeleton
from tpplan.compiler.trace.surroundings import Surroundings
from tpplan.cost.traffic import Traffic, module_traffic
from tpplan.plan import CompileError, Plan, TpplanError
from tpplan.rehearsal.rehearse import ShapeCommunicator, cannot_run, lowered_on_shapes, naming_failures
from tpplan.report.inference_tables import Inference, Kept, KeptTensor

Call = tuple[tuple[Any, ...], dict[str, Any]]
_GENERATING = {"use_cache": True, "logits_to_keep": 1}
"""What `generate` of transformers calls a model with."""
_NO_CACHE = (
    "No cache: the call returns nothing that goes by the name of one of its arguments, and puts no tensor into one."
)


@ambience()
def inference(
    model: nn.Module, plan: Plan, size: int, arguments: Sequence[Any], keywords: Mapping[str, Any]
) -> Inference:
    """What `plan` makes a prompt, and the token after it, cost each of `size` ranks.

    Args:
        model: the stock model; on `meta` it takes no memory. It is not changed.
        plan: the plan.
        size: number of ranks.
        arguments, keywords: a call with the prompt; only the tensors' geometry counts.

    Raises:
        CompileError: plan and model don't fit together.
    """
    settings = _settings(model)
    positional, named = without_opaque(arguments, keywords)
    call: Call = (positional, {**settings, **named})
    compiled = _compile_prompt(Request(model, plan, size, *call, training=False))
    program = compiled.program
    cut = {name for placement in program.parameters for name in placement.names}
    whole = (buffer for name, buffer in model.named_buffers() if name not in cut)
    buffers = {id(buffer): buffer.numel() * buffer.itemsize for buffer in whole}
    known = Inference(
        program=program,
        settings={name: value for name, value in settings.items() if name not in named},
        buffers=sum(buffers.values()),
        prefill=_traffic(program),
        decode=None,
        kept=None,
        unknown={},
    )
    try:
        prompt = _Prompt(model, compiled, call)
    except CompileError:
        raise
    except Exception as error:  # whatever the model's code can't do without numbers
        return replace(known, unknown={"cache": f"The cache can't be told without numbers: {_said(error)}."})
    temporary = (prompt.stock.temporary, *(prompt.ranks[kind].temporary for kind in prompt.kind_of))
    known = replace(known, prefill=prompt.ranks[0].sent, kept=prompt.kept(), temporary=temporary)
    if known.kept is None:
        return replace(known, unknown={"cache": _NO_CACHE})
    return _with_next_token(known, plan, prompt)


def _settings(model: nn.Module) -> dict[str, Any]:
    if not hasattr(getattr(model, "config", None), "to_dict"):
        return {}
    accepted = inspect.signature(type(model).forward).parameters
    return {name: value for name, value in _GENERATING.items() if name in accepted}


def _compile_prompt(request: Request) -> Compiled:
    """The program of the prompt; with its sequence whole if the ranks can't share it, as at run time."""
    try:
        return compile_call(request)
    except CompileError:
        whole = request.plan.with_whole_sequences()
        if whole == request.plan:
            raise
        try:
            return compile_call(replace(request, plan=whole))
        except CompileError:
            pass
        raise


def _traffic(program: Program) -> Traffic:
    step = module_traffic(program.modules, program.size)
    return step.forward + step.backward if program.takes_gradients else step.forward


# -- runs on shapes -----------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class _Left:
    """What a run leaves: its tensors' shapes and dtypes by path, and the bytes of the memory behind them."""

    tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
    storage: int

    @property
    def bytes(self) -> int:
        return sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in self.tensors.values())


@dataclass(frozen=True, slots=True)
class _InferenceRun:
    """A run of a call: its result, what it leaves, what a rank sends, and the most bytes that there are meanwhile."""

    result: Any
    left: _Left
    sent: Traffic
    peak: int

    @property
    def temporary(self) -> int:
        """The bytes at the peak that aren't left."""
        return self.peak - self.left.bytes


class _Prompt:
    """The runs of the prompt: of the stock model, and of the sharded one as each kind of rank."""

    def __init__(self, model: nn.Module, compiled: Compiled, call: Call) -> None:
        """Run it."""
        self.model = model
        self.compiled = compiled
        self.names = argument_names(type(model).forward)
        self.call = call
        kinds: dict[int, int] = {}
        self.kind_of = [kinds.setdefault(id(compiled.streams[rank]), rank) for rank in range(compiled.program.size)]
        self.stock = self.run(compiled, None, call)
        self.ranks = {rank: self.run(compiled, rank, call) for rank in kinds.values()}

    def run(self, compiled: Compiled, rank: int | None, call: Call) -> _InferenceRun:
        """Run a call without gradients, as a rank of a program or, for None, unsharded."""
        program, axis = compiled.program, ShapeCommunicator(1, 0)
        if rank is None:
            model = make_skeleton(self.model).model.eval()
        else:
            model, axis = lowered_on_shapes(self.model, program, rank)
        taken = frozenset(a.location for a in compiled.assumptions if a.taken and a.location is not None)
        arguments, keywords = with_tensors(*call, self.names, _on_meta)
        before = [weakref.ref(item) for _, item in leaves((arguments, keywords)) if isinstance(item, Tensor)]
        around, meter = Surroundings(model), StorageMeter(_behind((arguments, keywords)))
        try:
            device = torch.device(program.device)
            settings = CaptureSettings(model.training, taken, device, picking=compiled.settings.picking)
            with (
                naming_failures(model),
                on_shapes(model, settings, Forgetful),
                torch.no_grad(),
                meter,
                FusedAttention(),
            ):
                result = model(*arguments, **keywords)
        except TpplanError:
            raise
        except Exception as error:
            if rank is None:
                raise
            raise CompileError([cannot_run(error, rank)]) from error
        finally:
            around.restore()
        passed = {id(tensor) for held in before if (tensor := held()) is not None}
        found = dict(self._left_by(result, (arguments, keywords), passed))
        behind = {id(storage): storage for storage in (tensor.untyped_storage() for tensor in found.values())}
        shapes = {path: (tuple(tensor.shape), tensor.dtype) for path, tensor in found.items()}
        storage = sum(held.nbytes() for held in behind.values())
        return _InferenceRun(result, _Left(shapes, storage), Traffic(axis.counts, axis.sent), meter.peak)

    def _left_by(self, result: Any, call: Call, before: set[int]) -> Iterator[tuple[str, Tensor]]:
        """The tensors that a call leaves to the next, but numbers, each once."""
        seen = set(before)
        results = [(path, item) for path, item in leaves(result) if path and path[0] in self.names]
        for path, item in (*results, *tensors_of(*call, self.names)):
            inside = [("", item)] if isinstance(item, Tensor) else reversed([*hidden_tensors(item)])
            for name, tensor in inside:
                if tensor.dim() and id(tensor) not in seen:
                    seen.add(id(tensor))
                    yield ".".join([*map(str, path), *([name] if name else [])]), tensor

    def kept(self) -> Kept | None:
        """What the prompt leaves, unsharded and on each rank; None if that is nothing."""
        by_rank = [self.ranks[kind].left for kind in self.kind_of]
        tensors = tuple(
            KeptTensor(path, dtype_name(dtype), dtype.itemsize, shape, tuple(left.tensors[path][0] for left in by_rank))
            for path, (shape, dtype) in self.stock.left.tensors.items()
        )
        return Kept(tensors, tuple(left.storage for left in by_rank)) if tensors else None


def _behind(call: Call) -> Iterator[Tensor]:
    """The tensors in objects that are passed: in caches, which a call may replace."""
    for _, item in leaves(call):
        if not isinstance(item, Tensor):
            yield from (tensor for _, tensor in hidden_tensors(item))


def _on_meta(_: Path, tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


# -- the next token -----------------------------------------------------------------------------------------------
def _with_next_token(known: Inference, plan: Plan, prompt: _Prompt) -> Inference:
    """With what a call with one token more costs, and adds to what is kept; or with why that isn't known."""
    assert known.kept is not None

    def unknown(reason: str) -> Inference:
        return replace(known, unknown={"decode": f"What one token more costs isn't known: {reason}."})

    example = _next_call(prompt.stock.result, prompt.call)
    if example is None:
        return unknown("such a call is made up for transformers' language models alone")
    after: dict[int, _InferenceRun] = {}
    try:
        compiled = _for_one_token(prompt, plan)
        for rank, run in prompt.ranks.items():
            state = {name: run.result[name] for name in prompt.names if run.result.get(name) is not None}
            after[rank] = prompt.run(compiled, rank, (example[0], {**example[1], **state}))
    except CompileError as error:
        return unknown(error.diagnostics[0].message)
    except Exception as error:  # as for the prompt
        return unknown(f"without numbers it raises {_said(error)}")
    growth = [after[kind].left.bytes - prompt.ranks[kind].left.bytes for kind in prompt.kind_of]
    later = tuple(after[kind].temporary for kind in prompt.kind_of)
    kept = replace(known.kept, growth=tuple(growth))
    return replace(known, decode=after[0].sent, kept=kept, temporary_for_one=later)


def _for_one_token(prompt: _Prompt, plan: Plan) -> Compiled:
    """The program that a call with a single token runs by.

    Raises:
        CompileError: there is none, or it can't read what that of the prompt keeps.
    """
    program = prompt.compiled.program
    if not program.sequence_lengths:
        return prompt.compiled
    members = prompt.compiled.members
    request = Request(prompt.model, plan.with_whole_sequences(), program.size, *prompt.call, False, members=members)
    compiled = compile_call(request)
    difference = placement_difference(program, compiled.program) or cache_difference(program, compiled.program)
    if difference:
        raise CompileError.of("TP118", f"with whole sequences, {difference}")
    return compiled


def _next_call(result: Any, call: Call) -> Call | None:
    """The call with one token for each sequence, as `generate` makes it, without what the first call has left."""
    arguments, keywords = call
    ids, decoded = keywords.get("input_ids"), keywords.get("decoder_input_ids")
    mask = keywords.get("attention_mask")
    if arguments or not isinstance(result, Mapping):
        return None
    settings = {name: value for name, value in keywords.items() if not isinstance(value, Tensor)}
    fields = cast("Mapping[str, Any]", result)
    encoded = fields.get("encoder_last_hidden_state")
    if isinstance(decoded, Tensor) and isinstance(encoded, Tensor):
        settings |= {} if mask is None else {"attention_mask": mask}
        return (), {**settings, "encoder_outputs": (encoded,), "decoder_input_ids": decoded.new_empty(len(decoded), 1)}
    if not isinstance(ids, Tensor) or decoded is not None:
        return None
    longer = {} if mask is None else {"attention_mask": mask.new_empty(len(mask), mask.shape[1] + 1)}
    return (), {**settings, "input_ids": ids.new_empty(len(ids), 1), **longer}


def _said(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}{': ' + lines[0].rstrip('.') if lines else ''}"


__all__ = ["inference"]
