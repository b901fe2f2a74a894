"""The recording of one run: a dispatch mode that turns aten calls on meta tensors into trace operations.

in:  aten calls, as torch issues them below autograd
out: `Operation`s appended to the frame that is open, and a value for every tensor seen

    x.mul(2)   ->   Operation(aten.mul.Tensor, (Reference(3), 2), outputs=(4,))
"""

from __future__ import annotations

import functools
import inspect
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path as FilePath
from typing import Any, cast

import torch
from torch import Tensor

from tpplan.compat.autograd import PythonNode, inside_transform, packs_saved_tensors
from tpplan.compat.dynamo import run_as_written, runs_as_written
from tpplan.compat.generators import random_state, set_random_state
from tpplan.compat.modes import RecordingMode, Unwatched
from tpplan.compat.modules import BATCH_NORM_FORWARD
from tpplan.compat.schemas import (
    OpOverload,
    schema_argument_names,
    schema_mutates,
    schema_returns_view,
    sizes_by_numbers,
    written_tensors,
    written_values,
)
from tpplan.compat.tensors import storage_key
from tpplan.compiler.ir.kept_tensors import is_wrapper
from tpplan.compiler.ir.objects import note_alike
from tpplan.compiler.ir.trace import (
    Assumption,
    Crossing,
    Geometry,
    Location,
    Operation,
    Reference,
    Sides,
    Trace,
    Value,
    operator_name,
)
from tpplan.compiler.trace.chance import TORCH, Chances
from tpplan.compiler.trace.choices import (
    choices_of,
    found_among,
    found_count,
    has_boolean_rows,
    with_numbered_rows,
)
from tpplan.compiler.trace.counts import RowCount, is_counts
from tpplan.compiler.trace.known import Known
from tpplan.compiler.trace.noted import Aside, NotedFunction, NotedHook, OpenFrame, UnfollowedError
from tpplan.compiler.trace.random_draws import is_draw
from tpplan.compiler.trace.statistics import statistic_of
from tpplan.ops.registry import has_role, lookup

INTERNAL = (str(FilePath(torch.__file__).parent), str(FilePath(__file__).parents[2]))
_META = torch.device("meta")
_PLAIN = frozenset(
    (int, float, bool, complex, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
)
_ORDINARY: object = cast("Any", Tensor).__torch_dispatch__
_MOST_KNOWN = 1 << 16
_known_results: dict[object, tuple[object, list[Geometry]]] = {}
_default_dtype = torch.get_default_dtype

_OWN_DRAWS = torch.Generator().manual_seed(0x7EA51DE5).get_state()


class DataDependentError(Exception):
    """The model asked for the number inside a tensor, which a capture on meta tensors doesn't have.

    Attributes:
        absent: the input of the example that has no numbers, from which it would follow; "" if it follows from others.
        counts: whether it is of those by which rows are split, and was asked for something else.
        among: of how many numbers it is one of the places where these aren't zero; 0 if it is none.
    """

    absent: str = ""
    counts: bool = False
    among: int = 0


class Recorder(RecordingMode):
    """Records operations and values; see the module's docstring.

    Results of functional operators are memoised by the geometry of their operands, for all records: meta kernels that
    are written in Python are slower than everything else in a capture.
    """

    def __init__(
        self,
        taken: frozenset[Location] = frozenset(),
        device: torch.device | None = None,
        reducing: frozenset[str] = frozenset(),
        values: bool = False,
        looking: frozenset[str] = frozenset(),
        picking: frozenset[tuple[int, int]] = frozenset(),
        replays: bool = False,
        records: bool = True,
    ) -> None:
        """Start a record.

        Args:
            taken: where branches on data go to their true side; elsewhere they go to their false one.
            device: where bodies are told that their tensors lie; None for the CPU.
            reducing: modules whose bodies' reductions are recorded as functions over classes.
            values: whether bodies may read the numbers that follow from the example's inputs and from constants.
            looking: modules whose bodies' look-ups are recorded as functions over the rows of their tables.
            picking: of how many numbers bodies pick something by those that aren't zero, with how many are found.
            replays: whether the numbers that Python draws are those of the call.
            records: whether autograd records.
        """
        super().__init__()
        self.chances = Chances()
        self.replays, self.records = replays, records
        self.known = Known() if values else None
        self.reads: dict[tuple[str, int], list[object]] = {}  # what bodies were told of numbers, by call
        self.device = device
        self.reducing = reducing
        self.looking = looking
        self.picking = dict(picking)
        self.changing: set[int] = set()  # ids of real tensors that each call changes, and of what is made of them
        self.picked: set[int] = set()  # ids of real tensors that may only pick, and of what is made of them
        self.indexing: type | None = None  # of which class the index is, while torch indexes a tensor
        self.blurred: set[int] = set()  # values whose numbers each call changes
        self.steering: list[Location | None] = []  # where their values are read
        self.unreadable: list[tuple[DataDependentError, OpenFrame]] = []  # values that bodies wanted to read
        self.containers: frozenset[int] = frozenset()  # how many alike the lists of modules hold
        self.stacks: dict[str, frozenset[int]] = {}  # how many matrices each module's own tensors stack
        self.missed = 0  # of what may be picked by number, how many of the first aren't found
        self.chosen: set[tuple[str, int]] = set()  # frames that look for entries that aren't zero
        self.functions: dict[int, NotedFunction] = {}  # whose backward is written in Python
        self.hooks: list[NotedHook] = []
        self.beside: Aside | None = None
        self.takes_gradients = False
        self.asked_memory: set[str] = set()  # methods by which a body asks how a tensor lies in memory
        self.asked_flags: set[int] = set()  # parameters whose `requires_grad` a body reads
        self.asked_settings: set[str] = set()  # of torch, which bodies ask for
        self.twice = False  # whether a gradient is taken that is differentiated again
        self.whole = True  # whether autograd's record reaches across modules, as no reshard cuts it
        self.unused: dict[tuple[str, int, int], list[bool]] = {}  # of inner gradients: which are None
        self.taken = taken if isinstance(taken, Sides) else Sides(taken)
        self._met: Counter[object] = Counter()  # tests of branches, by line, and by call and line
        self.tests: list[tuple[Location, bool]] = []  # all of them, with their sides
        self.tests_in: list[tuple[str, int]] = []  # the calls in which they were met
        self.last_test: Location | None = None
        self._packing = packs_saved_tensors()
        self._random = random_state()
        self.familiar: set[int] | None = None  # ids of tensors from before the run; None while any may be met
        # Where tensors were met that no operation made, and whether inside of a transform such as `vmap`.
        self.unfamiliar: list[tuple[str, Location | None, bool]] = []
        self._redrawn: dict[int, Tensor] = {}  # memory of real tensors that the run has written to, with one of each
        self.seeded: set[int] = set()  # random numbers drawn after the body has set the generator
        self.given: set[int] = set()  # what the call is passed, and what follows from that
        self.drawn: set[int] = set()  # random numbers, and what is made of them alone
        self.tested: dict[int, Location | None] = {}  # values that the model branches on
        self.listening = False  # whether the steps of bodies are wanted
        self.modules: dict[int, str] = {}  # the first names of modules, by id
        self.values: list[Value] = []
        self.assumptions: list[Assumption] = []
        self.frames: list[OpenFrame] = []
        self.effects: set[int] = set()  # results of operations that write to what outlives the run
        self._outliving: set[int] = set()
        self.gradless: set[int] = set()
        self.passed: set[int] = set()  # to modules, with gradients off
        self.surprising: set[int] = set()  # they have a gradient that no operation gave them; see gradient_flow
        self._identity: dict[int, int] = {}
        self._alive: list[Tensor] = []  # ids are only unique while their objects live
        self._storage: list[int] = []
        self._members: dict[int, list[int]] = {}
        self._inside_kernel = False
        self._meta_copies: dict[int, Tensor] = {}

    @classmethod
    def like(cls, trace: Trace) -> Recorder:
        """One that answers as that of a trace did."""
        values = trace.facts is not None
        made = cls(trace.taken, trace.device, trace.reducing, values, trace.looking, trace.picking)
        made.records = trace.records
        return made

    # -- values ---------------------------------------------------------------------------------------------------
    def value_of(self, tensor: Tensor) -> int:
        """The value that `tensor` stands for; a tensor never seen before becomes a constant."""
        found = self._identity.get(id(tensor))
        if found is None:
            if self.familiar is not None and tensor.is_meta and id(tensor) not in self.familiar:
                self.unfamiliar.append((self.frames[-1].module, self.location(), inside_transform()))
            return self.new_value(tensor, tensor.requires_grad)
        if tensor.requires_grad:
            if isinstance(tensor.grad_fn, PythonNode):
                self.note_function(tensor, tensor.grad_fn, found)
            if not self.values[found].differentiable:
                self.surprising.add(found)
                self.values[found] = replace(self.values[found], differentiable=True)
        return found

    def note_function(self, tensor: Tensor, node: Any, value: int) -> None:
        """Say that `tensor`, which is `value`, is a result of a function whose backward is written in Python."""
        if self.frames:
            noted = self.functions.setdefault(id(node), NotedFunction(node, self.location(), {}))
            noted.outputs.setdefault(tensor.output_nr, value)

    def tensors(self) -> Iterator[tuple[Tensor, int]]:
        """Every tensor that the run has made or read, with the value that it stands for at last."""
        return ((tensor, self._identity[id(tensor)]) for tensor in self._alive)

    @contextmanager
    def aside(self) -> Generator[Aside]:
        """Record what is no part of the run."""
        before, outer, assumed, aside = self.frames, self.beside, len(self.assumptions), Aside()
        self.frames, self.beside = [OpenFrame("", 0, [])], aside
        try:
            yield aside
        finally:
            aside.body, aside.branches = self.frames[-1].body, len(self.assumptions) > assumed
            del self.assumptions[assumed:]
            self.frames, self.beside = before, outer

    def new_value(
        self, tensor: Tensor, differentiable: bool, storage_of: int | None = None, numbers: Tensor | None = None
    ) -> int:
        """Give `tensor` a fresh value, also if it had one before."""
        return self._new_value(tensor, _geometry_of(tensor), differentiable, storage_of, numbers)

    def _new_value(
        self,
        tensor: Tensor,
        geometry: Geometry,
        differentiable: bool,
        storage_of: int | None,
        numbers: Tensor | None = None,
    ) -> int:
        identifier = len(self.values)
        self.values.append(Value(identifier, *geometry, differentiable, numbers))
        if storage_of is None:
            self._storage.append(identifier)
            self._members[identifier] = [identifier]
        else:
            storage = self._storage[storage_of]
            self._storage.append(storage)
            self._members[storage].append(identifier)
        self._identity[id(tensor)] = identifier
        self._alive.append(tensor)
        if self.known is not None and numbers is not None:
            self.known.take(identifier, numbers)
        return identifier

    def outlives(self, tensor: Tensor) -> None:
        """Say that `tensor`, such as a buffer, is read again after the run: writing to it is an effect."""
        self._outliving.add(self._storage[self.value_of(tensor)])

    def held_value(self, tensor: Tensor) -> int | None:
        """The value that `tensor` stands for, if the run has made it."""
        return self._identity.get(id(tensor))

    def cross(self, tensor: Tensor) -> tuple[Tensor, int, int]:
        """An alias of `tensor` with a value of its own: (alias, value outside, value inside)."""
        if type(tensor) is not Tensor and is_wrapper(tensor):
            raise UnfollowedError(
                f"a module is passed, or returns, a `{type(tensor).__name__}` that keeps its tensors",
                "pass plain tensors between modules",
            )
        if self.is_redrawn(tensor):
            tensor = self._meta_copy(tensor)
        with Unwatched():
            outside = self.value_of(tensor)
            alias = torch.ops.aten.alias.default(tensor)
            if tensor.__dict__:
                note_alike(alias, tensor)
            inside = self.new_value(alias, self.values[outside].differentiable, outside)
            self.follow_given((outside,), (inside,))
            if self.known is not None:
                self.known.alias(inside, outside)
            return alias, outside, inside

    def add(self, operation: Operation) -> None:
        """Add an operation to the body that runs."""
        self.frames[-1].body.append(operation)
        self.follow_given(operation.inputs, (*operation.outputs, *operation.overwritten))

    def follow_given(self, inputs: Iterable[int], outputs: Iterable[int | None]) -> None:
        """Note whether these values, made of others, follow from what the call is passed."""
        if not self.given.isdisjoint(inputs):
            self.given.update(output for output in outputs if output is not None)

    def is_given(self, tensor: Tensor) -> bool:
        """Whether a tensor follows from what the call is passed, and not from what is there before it alone."""
        return self._identity.get(id(tensor)) in self.given

    def is_one_storage(self, value: int, other: int) -> bool:
        """Whether two values lie in the same memory."""
        return self._storage[value] == self._storage[other]

    # -- operations -----------------------------------------------------------------------------------------------
    def indexed(self, tensor: Tensor, result: Any) -> Any:
        """What a body is handed of an indexed tensor."""
        return result

    def meet(self) -> None:
        """Hear of a function of torch that a body calls, before it runs."""

    def __torch_dispatch__(
        self, func: OpOverload, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        keywords = kwargs or {}
        if not self.frames:
            return func(*args, **keywords)
        if func is torch.ops.aten._local_scalar_dense.default and _weighs_an_average():
            return self.count_of_calls()
        if func is torch.ops.aten._embedding_bag_forward_only.default:  # of a frozen table; it computes the same
            func = torch.ops.aten._embedding_bag.default
        if func is torch.ops.aten._to_copy.default and packs_saved_tensors(True) is not None:
            keywords = {**keywords, "device": None}  # `save_on_cpu`, of what has no numbers to save
        if _is_written_out(func, self._inside_kernel):
            return self._written_out(func, args, keywords)
        operands = _tensors((*args, *keywords.values()))
        if any([type(operand) is not Tensor and is_wrapper(operand) for operand in operands]):
            return NotImplemented  # its class says what it does, in operations on what it keeps
        on_meta = [operand.is_meta or self.is_redrawn(operand) for operand in operands]
        if not any(on_meta):
            if is_draw(func, args, keywords) and not (operands and keywords.get("generator") is not None):
                # A number that each run draws anew is no constant.
                if operands:
                    args, keywords = self._drawing(func, args, keywords, operands)
                    operands = _tensors((*args, *keywords.values()))
                else:
                    keywords = {**keywords, "device": _META}
            elif operands or not _is_meta_device(keywords.get("device")):
                if not operands or not _is_meta_device(keywords.get("device")):
                    result = func(*args, **keywords)  # real constants stay real: the model may read their values
                    if self.changing or self.picked:
                        self._follow(func, operands, result)
                    return result
                if func is torch.ops.aten._to_copy.default:
                    result = func(*args, **keywords)
                    self.new_value(result, False, numbers=operands[0].to(result.dtype))
                    return result
                args, keywords = self._constants_to_meta(args, keywords)
                operands = _tensors((*args, *keywords.values()))
        elif not all([operand.is_meta for operand in operands]):
            for target in _written_by(func, args, keywords):
                self._redraw(target)
            args, keywords = self._constants_to_meta(args, keywords)
            operands = _tensors((*args, *keywords.values()))
        if func is torch.ops.aten._local_scalar_dense.default:
            return self._assume(operands[0])
        if self.known is not None:
            found = self._by_numbers(func, args, keywords, operands)
            if found is not None:
                return found
        if func is torch.ops.aten.nonzero.default:
            return self._find(func, args, operands)
        if func is torch.ops.aten._unique2.default and (distinct := self._distinct(args, operands)) is not None:
            return distinct
        if has_role(operator_name(func), "indexing") and has_boolean_rows(args):
            with self:
                return func(*with_numbered_rows(args), **keywords)
        if (steps := statistic_of(func, args, keywords)) is not None and not any(map(self.is_given, operands)):
            with self:
                return steps()
        return self._record(func, args, keywords, operands)

    def _written_out(self, func: OpOverload, args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """Record what the kernel of an operator calls."""
        outermost, self._inside_kernel = not self._inside_kernel, True
        try:
            with self:
                return run_as_written(func, args, keywords)
        finally:
            self._inside_kernel = not outermost

    def _record(self, func: OpOverload, args: tuple[Any, ...], keywords: dict[str, Any], operands: list[Tensor]) -> Any:
        packing = packs_saved_tensors()
        if packing is not None and packing is not self._packing:
            raise UnfollowedError(
                "it runs under `saved_tensors_hooks`, which may change what the backward reads",
                "put the hooks around the call of the model, where they see what a rank saves",
            )
        inputs = tuple([self.value_of(operand) for operand in operands])
        arguments = tuple([self._refer(argument) for argument in args])
        named = {name: self._refer(argument) for name, argument in keywords.items() if name != "device"}
        written, view, detached, kept = _traits(func)
        result, made = self._run(func, args, keywords, memoise=not written and not view)
        numbers: Sequence[Any] | None = None
        if self.known is not None and not kept:
            held = dict(zip(map(id, operands), inputs, strict=True))
            numbers = self.known.computed(func, args, keywords, held, [g for _, g in made], bool(written))
        differentiable = (
            not detached
            and torch.is_grad_enabled()
            and any([self.values[identifier].differentiable for identifier in inputs])
        )
        targets = _written_by(func, args, keywords) if written else []
        base = inputs[0] if (view or written) and inputs else None
        bases = [base if len(kept) < len(written) or not kept else None for _ in made]
        if kept:  # what it writes to and doesn't return is another value from there on, of the same memory
            beside = written_values(func, args, keywords)
            bases += [self.value_of(held) if isinstance(held, Tensor) else None for held in beside]
            made = [*made, *((held, _geometry_of(held) if isinstance(held, Tensor) else None) for held in beside)]
        overwritten = self._aliases_of(targets)
        outputs: list[int | None] = []
        for (item, geometry), base in zip(made, bases, strict=True):
            if geometry is None:
                outputs.append(None)
                continue
            dtype = geometry[2]
            grad = differentiable and (dtype.is_floating_point or dtype.is_complex)
            outputs.append(self._new_value(item, geometry, grad, base))
        if self.known is not None:
            if numbers is not None:
                self.known.note(inputs, outputs, numbers)
            elif written:
                self.known.forget([v for t in targets for v in self._members[self._storage[self.value_of(t)]]])
            self.known.follow_absent(inputs, outputs)
        if any(self._storage[self.value_of(target)] in self._outliving for target in targets):
            self.effects.update(output for output in outputs if output is not None)
        if self.drawn.issuperset(inputs) if inputs else is_draw(func, args, keywords):
            self.drawn.update(output for output in outputs if output is not None)
        if is_draw(func, args, keywords) and self._is_seeded():
            self.seeded.update(output for output in outputs if output is not None)
        if self.frames[-1].differentiates and not torch.is_grad_enabled():
            self.gradless.update(output for output in outputs if output is not None)
        self.add(Operation(func, arguments, named, inputs, tuple(outputs), overwritten, self.location()))
        return result  # pyright: ignore[reportUnknownVariableType]

    @property
    def reduces(self) -> bool:
        """Whether reductions of the body that runs are recorded as functions over classes."""
        return bool(self.reducing) and bool(self.frames) and self.frames[-1].module in self.reducing

    @property
    def looks_up(self) -> bool:
        """Whether look-ups of the body that runs are recorded as functions over the rows of their tables."""
        return bool(self.looking) and bool(self.frames) and self.frames[-1].module in self.looking

    def record_whole(self, target: OpOverload, arguments: tuple[Any, ...], run: Callable[[], Any]) -> Any:
        """Record a call of torch as one operation, `target`, whatever it consists of."""
        operands = _tensors(arguments)
        if self.beside is not None or not self.frames or not any(operand.is_meta for operand in operands):
            return run()
        with self.aside():
            result = run()
        with Unwatched():
            arguments, _ = self._constants_to_meta(arguments, {})
            inputs = tuple(self.value_of(operand) for operand in _tensors(arguments))
            differentiable = torch.is_grad_enabled() and any(self.values[value].differentiable for value in inputs)
            made = tuple(
                self._new_value(t, _geometry_of(t), differentiable and t.is_floating_point(), None)
                for t in _tensors((result,))
            )
            if self.drawn.issuperset(inputs):
                self.drawn.update(made)
            if self.frames[-1].differentiates and not torch.is_grad_enabled():
                self.gradless.update(made)
            references = tuple(map(self._refer, arguments))
        self.add(Operation(target, references, {}, inputs, made, (), self.location()))
        return result

    def begin_draws(self) -> None:
        """Put the generator of random numbers where no body's seed puts it: one that sets it is noticed by that."""
        with Unwatched():
            set_random_state(_OWN_DRAWS)
        self._random = _OWN_DRAWS

    def _is_seeded(self) -> bool:
        """Whether the body has set the generator of random numbers: a capture doesn't draw from it."""
        with Unwatched():
            return not torch.equal(self._random, random_state())

    def _aliases_of(self, targets: list[Tensor]) -> tuple[int, ...]:
        found: list[int] = []
        for target in targets:
            own = self.value_of(target)
            found.extend(other for other in self._members[self._storage[own]] if other != own)
        return tuple(found)

    def _run(
        self, func: OpOverload, args: tuple[Any, ...], keywords: dict[str, Any], memoise: bool
    ) -> tuple[Any, list[tuple[Any, Geometry | None]]]:
        """The result, and each item of it with its geometry, where it is a tensor."""
        if not memoise:
            return _with_geometry(func(*args, **keywords))
        if func in _SHAPES:
            return _with_geometry(_SHAPES[func](*args, **keywords))
        try:
            key = (func, _default_dtype(), *map(_geometry, args), *[(n, _geometry(a)) for n, a in keywords.items()])
            known = _known_results.get(key)
        except TypeError:
            return _with_geometry(func(*args, **keywords))
        if known is None:
            result, made = _with_geometry(func(*args, **keywords))
            if made and all(geometry is not None and item.is_meta for item, geometry in made):
                if len(_known_results) >= _MOST_KNOWN:
                    _known_results.clear()
                _known_results[key] = (type(result), [geometry for _, geometry in made if geometry is not None])
            return result, made
        container, geometries = known
        items = [torch.empty_strided(g[0], g[1], dtype=g[2], device=_META) for g in geometries]
        whole = container(items) if container is tuple or container is list else items[0]  # pyright: ignore
        return whole, list(zip(items, geometries, strict=True))  # pyright: ignore[reportUnknownVariableType]

    def _refer(self, argument: Any) -> Any:
        if isinstance(argument, Tensor):
            known = self._identity.get(id(argument))
            return Reference(self.value_of(argument) if known is None else known)
        if isinstance(argument, (list, tuple)):
            return tuple(self._refer(item) for item in argument)  # pyright: ignore[reportUnknownVariableType]
        return argument

    def _constants_to_meta(
        self, args: tuple[Any, ...], keywords: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        def convert(argument: Any) -> Any:
            if isinstance(argument, Tensor) and not argument.is_meta:
                return self._meta_copy(argument)
            if isinstance(argument, (list, tuple)):
                return type(argument)(convert(item) for item in argument)  # pyright: ignore
            return argument

        return tuple(convert(a) for a in args), {name: convert(a) for name, a in keywords.items()}

    def _meta_copy(self, constant: Tensor) -> Tensor:
        """What stands for a real tensor in the record."""
        copy = self._meta_copies.get(id(constant))
        if copy is not None:
            return copy
        self._alive.append(constant)
        whole = self._redrawn.get(storage_key(constant), constant) if self._redrawn else constant
        if whole is not constant:
            copy = self._meta_copies[id(constant)] = self._part_of(whole, constant)
            return copy
        copy = self._meta_copies[id(constant)] = torch.empty_strided(
            constant.shape, constant.stride(), dtype=constant.dtype, device="meta"
        )
        numbers = None if id(constant) in self.picked else constant
        made = self.new_value(copy, False, storage_of=self.value_of(constant), numbers=numbers)
        if id(constant) in self.changing:
            self.blurred.add(made)
        return copy

    def _part_of(self, whole: Tensor, part: Tensor) -> Tensor:
        """A view of what stands for a real tensor, where another one lies in its memory."""
        offset = part.storage_offset() - whole.storage_offset()
        fits = part.dtype is whole.dtype and whole.is_contiguous() and offset >= 0
        last = offset + sum((n - 1) * step for n, step in zip(part.shape, part.stride(), strict=True))
        if not fits or last >= whole.numel():
            raise UnfollowedError(
                "it writes to a tensor of which it holds other parts, and which it has made without a `device`",
                "make it on the device of what is written to it, as by `device=x.device`",
            )
        base = self._meta_copy(whole)
        with self:
            return torch.as_strided(base, part.shape, part.stride(), offset)

    def is_redrawn(self, tensor: Tensor) -> bool:
        """Whether a real tensor's numbers aren't what they would be in a call, as the run has written to it."""
        return bool(self._redrawn) and not tensor.is_meta and storage_key(tensor) in self._redrawn

    def _redraw(self, tensor: Tensor) -> None:
        """Take a real tensor, and all others in its memory, for no constants from here on."""
        if tensor.is_meta or self.is_redrawn(tensor):
            return
        whole = tensor if tensor._base is None else tensor._base
        self._meta_copy(whole)
        self._redrawn[storage_key(whole)] = whole
        for other in self._alive:  # what stands for a part has to be one of what stands for the whole
            if other is not whole and self.is_redrawn(other):
                self._meta_copies.pop(id(other), None)

    def _drawing(
        self, func: OpOverload, args: tuple[Any, ...], keywords: dict[str, Any], operands: list[Tensor]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of an operation that draws by constants, on `meta`; what it writes to is no constant then."""
        if _traits(func)[0]:
            self._redraw(operands[0])
        args, keywords = self._constants_to_meta(args, keywords)
        if _traits(func)[0]:
            written = self.value_of(args[0])
            self.values[written] = replace(self.values[written], numbers=None)  # it reads none of them
        return args, keywords

    def _assume(self, tensor: Tensor) -> Any:
        """What Python is told of a tensor with one entry: its number if that is known, else the side of a branch."""
        value = self.value_of(tensor)
        if tensor.dtype is not torch.bool or (self.known is not None and value in self.known):
            return self.read(tensor).item()
        location, taken = self._tested()
        drawn = value in self.drawn
        if drawn:
            self.chances.drawn.add(TORCH)
        self.assumptions.append(Assumption(self.frames[-1].module, location, taken, drawn))
        self.tested.setdefault(value, location)
        return taken

    def compared(self, found: bool) -> bool:
        """What Python is told of a comparison with a random number that it has drawn; `found` is what holds of that."""
        location, taken = self._tested(found if self.replays else None)
        self.assumptions.append(Assumption(self.frames[-1].module, location, taken, True))
        return taken

    def note_test(self, found: bool) -> None:
        """Count a test of what is known, as a call counts all of them."""
        self._tested(found)

    def _tested(self, found: bool | None = None) -> tuple[Location | None, bool]:
        """The line of a test, and the side that it takes."""
        location, call = self.location(), (self.frames[-1].module, self.frames[-1].call)
        self.last_test = location
        if location is None:
            return None, bool(found)
        number, there = self._met[location], self._met[*call, location]
        self._met[location] = number + 1
        self._met[*call, location] = there + 1
        taken = self.taken.side(location, number, call, there) if found is None else found
        self.tests.append((location, taken))
        self.tests_in.append(call)
        return location, taken

    def _follow(self, func: OpOverload, operands: list[Tensor], result: Any) -> None:
        """Follow real tensors that each call changes, or that may only pick, up to where their values are read."""
        reads = func is torch.ops.aten._local_scalar_dense.default
        for held in (self.changing, self.picked):
            if held.isdisjoint(map(id, operands)):
                continue
            if reads and held is self.changing:
                self.steering.append(self.location())
            elif reads and not self.indexing:
                raise self.refuse_value()
            for made in _tensors(_results(result)):
                held.add(id(made))
                self._alive.append(made)

    def read(self, tensor: Tensor) -> Tensor:
        """The numbers of a tensor that a body reads, if they are known; an error to raise if they aren't."""
        value = self.value_of(tensor)
        if self.known is None or not self.known.is_readable(value):
            raise self.refuse_value(value)
        numbers = self.known.read(value)
        self._note_read([value], numbers.tolist())  # pyright: ignore
        return numbers

    def count_of_calls(self) -> int:
        """What a batch norm of torch is told of how often it was called, which each call changes.

        It is one part of so many in an average that each rank makes of its own channels, and steers nothing.
        """
        return 1

    def counts_of(self, tensor: Tensor) -> list[RowCount] | None:
        """What a body is told of numbers that aren't known and may count rows; None if they are known, or may not."""
        value = self.value_of(tensor)
        if self.known is None or value in self.known or self.known.absent.get(value) or not is_counts(tensor):
            return None
        self.note_found()
        self._note_read([value], "counts")
        return [RowCount(self._refuse_count) for _ in range(len(tensor))]

    def _refuse_count(self) -> DataDependentError:
        error = self.refuse_value()
        error.counts = True
        return error

    def note_found(self) -> None:
        """Note that the body that runs depends on what is found in a tensor, in its sizes alone."""
        self.chosen.add((self.frames[-1].module, self.frames[-1].call))

    def numbers_of(self, tensor: Tensor) -> Tensor | None:
        """The numbers of a tensor that the run has met; None if they aren't known."""
        value = self.held_value(tensor)
        return None if self.known is None or value is None else self.known.of(value)

    def _note_read(self, values: Sequence[int], shown: object) -> None:
        self.reads.setdefault((self.frames[-1].module, self.frames[-1].call), []).append(shown)
        for value in values:
            self.tested.setdefault(value, self.location())

    def refuse_value(self, value: int | None = None) -> DataDependentError:
        """Note that a body reads a value, as it may swallow the error; returns the error to raise."""
        error = DataDependentError(f"reads the value of a tensor at {self.location()}")
        if self.known is not None and value is not None:
            error.absent = self.known.absent.get(value, "")
        if value is not None:
            error.among = found_among(self.frames[-1].body, value, self.values)
        self.unreadable.append((error, self.frames[-1]))
        return error

    def _by_numbers(
        self, func: OpOverload, args: tuple[Any, ...], keywords: dict[str, Any], operands: list[Tensor]
    ) -> Any:
        """The result of an operation that shows numbers, or whose sizes do, where they are known; None otherwise."""
        known, values = self.known, [self.value_of(operand) for operand in operands]
        assert known is not None
        if func is torch.ops.aten.masked_select.default and values[1] in known:
            shape = torch.broadcast_shapes(*(operand.shape for operand in operands))
            with self:
                return torch.ops.aten.index.Tensor(operands[0].expand(shape), [operands[1].expand(shape)])
        held = dict(zip(map(id, operands), values, strict=True))
        if func is torch.ops.aten.equal.default and all(value in known for value in values):
            one, other = map(self.read, operands)
            return bool(torch.equal(one, other))
        if not sizes_by_numbers(func):
            return None
        if func is torch.ops.aten.nonzero.default and not known.has_room(operands[0].numel() * operands[0].dim() * 8):
            return self._count(operands[0], values[0])
        numbers = known.computed(func, args, keywords, held, None, False)
        if numbers is None:
            return None
        found = [torch.empty_strided(n.shape, n.stride(), dtype=n.dtype, device=_META) for n in numbers]
        made = tuple(self.new_value(item, False) for item in found)
        known.note(values, made, numbers)
        for number in numbers:
            known.count(number)
        self._note_read(values, [tuple(number.shape) for number in numbers])
        self._record_found(func, args, keywords, tuple(values), made)
        return found[0] if len(found) == 1 else tuple(found)

    def _count(self, tensor: Tensor, value: int) -> Tensor | None:
        """The entries of a large tensor that aren't zero, of which only the number is known."""
        known, counting = self.known, torch.ops.aten.count_nonzero.default
        assert known is not None
        numbers = known.computed(counting, (tensor,), {}, {id(tensor): value}, [((), (), torch.int64)], False)
        if numbers is None:
            return None
        count = known.seen(numbers[0]).item()
        self._note_read([value], count)
        found = torch.empty(int(count), tensor.dim(), dtype=torch.int64, device=_META)
        self._record_found(torch.ops.aten.nonzero.default, (tensor,), {}, (value,), (self.new_value(found, False),))
        return found

    def _record_found(
        self,
        func: OpOverload,
        args: tuple[Any, ...],
        keywords: dict[str, Any],
        inputs: tuple[int, ...],
        made: tuple[int, ...],
    ) -> None:
        """Record an operation whose results show numbers: what is made of these doesn't show that they are read."""
        self.effects.update(made)
        named = {name: self._refer(argument) for name, argument in keywords.items() if name != "device"}
        self.add(Operation(func, tuple(map(self._refer, args)), named, inputs, made, (), self.location()))

    def _find(self, func: OpOverload, args: tuple[Any, ...], operands: list[Tensor]) -> Tensor:
        """Where a tensor isn't zero: all of it, in numbers, if that may pick modules; else so many places."""
        (tensor,) = operands
        counts = self.containers | self.stacks.get(self.frames[-1].module, frozenset())
        picked = self.picking.get(len(tensor)) if tensor.dim() == 1 else None
        picks = picked is not None or (tensor.dim() == 1 and len(tensor) in counts)
        count = picked or (max(1, len(tensor) - self.missed) if picks else found_count(tensor.numel()))
        found = torch.empty(count, tensor.dim(), dtype=torch.int64, device=_META)
        self._record_found(func, args, {}, (self.value_of(tensor),), (self.new_value(found, False),))
        self.note_found()
        if not picks:
            return found
        first = 0 if picked is not None else len(tensor) - count
        places = torch.arange(first, first + count)[:, None]
        self._meta_copies[id(places)] = found
        if picked is not None:
            self.picked.add(id(places))
        self._alive.append(places)
        return places

    def _distinct(self, args: tuple[Any, ...], operands: list[Tensor]) -> tuple[Tensor, Tensor, Tensor] | None:
        """The different numbers in a tensor that names the best of several: what isn't zero of a table of these."""
        count = choices_of(self.frames[-1].body, self.value_of(operands[0]), self.values)
        counts = self.containers | self.stacks.get(self.frames[-1].module, frozenset())
        if count not in counts or any(args[2:]):
            return None
        with self:
            ids = operands[0].reshape(-1)
            places = torch.zeros(count, dtype=torch.int64, device=_META).scatter(0, ids, 1).nonzero()
        return places.flatten(), torch.empty(0), torch.empty(0)

    @staticmethod
    def location() -> Location | None:
        """The line of the model's source that is running."""
        frame = inspect.currentframe()
        while frame is not None:
            name = frame.f_code.co_filename
            internal = _internal.get(name)
            if internal is None:
                internal = _internal[name] = name.startswith((*INTERNAL, "<"))
            if not internal:
                return _location_at(name, frame.f_lineno)
            frame = frame.f_back
        return None


def _weighs_an_average() -> bool:
    """Whether the forward of torch's batch norms asks for a number: that of its calls, for the weight of this one."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_filename.startswith(INTERNAL[1]):
        frame = frame.f_back
    return frame is not None and frame.f_code is BATCH_NORM_FORWARD


_internal: dict[str, bool] = {}


@functools.cache
def _location_at(file: str, line: int) -> Location:
    return Location(file, line)


def _written_tensors(positions: Iterable[int], args: tuple[Any, ...]) -> list[Tensor]:
    return _tensors(args[position] for position in positions if position < len(args))


def _written_by(func: OpOverload, args: tuple[Any, ...], keywords: dict[str, Any]) -> list[Tensor]:
    """The tensors that an operation writes to."""
    names, written = schema_argument_names(func), _traits(func)[0]
    return [*_written_tensors(written, args), *_tensors(keywords[names[n]] for n in written if names[n] in keywords)]


def _grouped_product(*args: Any, **keywords: Any) -> Tensor:
    """The product of grouped rows. On meta tensors torch takes bfloat16 alone, elsewhere float32 as well."""
    rows, matrices = args[:2]
    ends = keywords.get("offs", args[2] if len(args) > 2 else None)
    if rows.dim() == 2 and rows.dtype != torch.bfloat16 and not keywords.get("out_dtype"):
        for tensor in (rows, matrices):
            _check_alignment(tensor)
        groups = () if matrices.dim() == 3 or ends is None else (ends.shape[0],)  # of what both are contracted by
        return torch.empty(*groups, rows.shape[0], matrices.shape[-1], dtype=rows.dtype, device="meta")
    coarse = tuple(a.to(torch.bfloat16) if isinstance(a, Tensor) and a.is_floating_point() else a for a in args)
    made = torch.ops.aten._grouped_mm.default(*coarse, **keywords)
    return torch.empty_strided(made.shape, made.stride(), dtype=rows.dtype, device="meta")


def _aligned_losses(log_probs: Tensor, targets: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    """A loss for each sequence, and what its backward reads, of which the last dim is twice the longest target."""
    length, batch = log_probs.shape[:2]
    return log_probs.new_empty(batch), log_probs.new_empty(batch, length, 2 * targets.shape[-1] + 1)


def _aligned_losses_gradient(gradient: Tensor, log_probs: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(log_probs)


# Operators of which torch has no shapes, or not for all dtypes.
_SHAPES: dict[Any, Callable[..., Any]] = {
    torch.ops.aten._grouped_mm.default: _grouped_product,
    torch.ops.aten._ctc_loss.default: _aligned_losses,
    torch.ops.aten._ctc_loss.Tensor: _aligned_losses,
    torch.ops.aten._ctc_loss_backward.default: _aligned_losses_gradient,
    torch.ops.aten._ctc_loss_backward.Tensor: _aligned_losses_gradient,
}


class AlignmentError(RuntimeError):
    """An operator of torch doesn't take sizes like a rank's."""


def _check_alignment(tensor: Tensor) -> None:
    """What torch asks of the factors: the one of the last two dims whose entries don't lie together starts aligned."""
    stride = max(tensor.stride()[-2:])
    if stride * tensor.itemsize % 16:
        raise AlignmentError(
            f"torch's product of grouped rows takes rows of a multiple of 16 bytes, not of {stride * tensor.itemsize}"
        )


def _traits(func: OpOverload) -> tuple[tuple[int, ...], bool, bool, tuple[int, ...]]:
    """What it writes to; whether it returns a view, or cuts the gradient off; the tensors that it writes and keeps."""
    # An operator lives as long as the process, and its own hash is computed in Python.
    found = _known_traits.get(id(func))
    if found is None:
        detached = func.name() in _WITHOUT_GRADIENT
        found = (schema_mutates(func), schema_returns_view(func), detached, written_tensors(func))
        _known_traits[id(func)] = found
    return found


_known_traits: dict[int, tuple[tuple[int, ...], bool, bool, tuple[int, ...]]] = {}
_WITHOUT_GRADIENT = frozenset(
    f"aten::{name}" for name in ("detach", "detach_", "new_empty", "new_full", "new_ones", "new_zeros")
)
"""Operators that cut the gradient off, or read no number of what they are given."""


def _is_written_out(func: OpOverload, inside: bool) -> bool:
    """Whether an operator that no rule is for is recorded as what it calls."""
    found = _written_out.get((id(func), inside))
    if found is None:
        found = lookup(operator_name(func)) is None and runs_as_written(func, inside)
        _written_out[id(func), inside] = found
    return found


_written_out: dict[tuple[int, bool], bool] = {}


def _results(result: Any) -> list[Any]:
    return list(result) if isinstance(result, (tuple, list)) else [result]  # pyright: ignore[reportUnknownArgumentType]


def _is_meta_device(device: object) -> bool:
    return device is not None and torch.device(device).type == "meta"  # pyright: ignore[reportArgumentType]


def _tensors(arguments: Iterable[Any]) -> list[Tensor]:
    found: list[Tensor] = []
    for argument in arguments:
        if isinstance(argument, Tensor):
            found.append(argument)
        elif isinstance(argument, (list, tuple)):
            found.extend(item for item in argument if isinstance(item, Tensor))  # pyright: ignore
    return found


def _geometry_of(tensor: Tensor) -> Geometry:
    return tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype


def _with_geometry(result: Any) -> tuple[Any, list[tuple[Any, Geometry | None]]]:
    return result, [(item, _geometry_of(item) if isinstance(item, Tensor) else None) for item in _results(result)]


def _geometry(argument: Any) -> object:
    """What shapes of results depend on; TypeError for objects, and for tensors that say it themselves."""
    if isinstance(argument, Tensor):
        if cast("Any", type(argument)).__torch_dispatch__ is not _ORDINARY:
            raise TypeError
        return (tuple(argument.shape), argument.stride(), argument.dtype)
    if isinstance(argument, (list, tuple)):
        return tuple(map(_geometry, argument))  # pyright: ignore[reportUnknownArgumentType]
    if type(argument) not in _PLAIN:
        raise TypeError
    return (type(argument).__name__, argument)


__all__ = ["AlignmentError", "Crossing", "DataDependentError", "OpenFrame", "Recorder"]
