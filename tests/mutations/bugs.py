"""The bugs to plant: plain data. A text that isn't in its file exactly once is an error, so that no bug gets lost."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Bug:
    """A change to one file.

    Attributes:
        name: what breaks.
        file: below `src/tpplan`.
        text, replacement: the exact text, found once, and what takes its place.
        tests: the test files, below `tests`, that should notice.
    """

    name: str
    file: str
    text: str
    replacement: str
    tests: tuple[str, ...]


_GUARD = ("runtime/test_guard.py", "runtime/test_key.py", "runtime/test_calls.py")
_PARITY = ("parity/test_parity.py",)

BUGS = (
    # What is proved once, for several calls and layers.
    Bug("the check's memo forgets the fingerprint", "compiler/check/local_run.py",
        "key = (id(region), layouts, self._fingerprints.of(module))", "key = (id(region), layouts)",
        ("compiler/test_check.py",)),
    Bug("the check's memo forgets what a call is told", "compiler/check/local_run.py",
        "key = (*key, self._fingerprints.passed(passed, module, self.modules[module]),", "key = (*key,",
        ("parity/test_chosen_by_size.py",)),
    Bug("the check's memo forgets which code a layer's place chooses", "compiler/check/local_run.py",
        "(*key, _lines(instance.frame))", "key", ("parity/test_chosen_by_size.py",)),
    Bug("which tensors a call gets that isn't looked at again isn't compared", "compiler/check/local_run.py",
        "found += _compare_left_out(", "_compare_left_out(", ("parity/test_chosen_by_size.py",)),
    Bug("which tensors come out isn't compared", "compiler/check/local_run.py",
        "if returned else []", "if False else []", ("parity/test_chosen_by_size.py",)),
    Bug("calls inside of one that isn't looked at again aren't counted", "compiler/trace/capture.py",
        "state.calls[module] = state.calls.get(module, 0) + 1", "pass", ("parity/test_repeated_calls.py",)),
    Bug("a gradient is expected of each call", "compiler/ir/program.py",
        "forward - self.without_gradient if", "forward if", ("parity/test_repeated_calls.py",)),
    Bug("the guard forgets the numbers that steer", "calls/steering.py",
        "if all(each.hold(held) for each in facts)", "if facts", ("runtime/test_values.py",)),
    Bug("a write to what is known isn't seen", "compiler/trace/known.py",
        "self._numbers.pop(value, None)", "pass", ("runtime/test_values.py",)),
    Bug("the guard forgets requires_grad", "calls/key.py",
        "held.dim(), self._recorded and held.requires_grad)", "held.dim())", _GUARD),
    Bug("the guard forgets dtypes", "calls/key.py",
        "found: Part = (held.dtype, held.dim(),", "found: Part = (held.dim(),", _GUARD),
    Bug("the guard forgets the mode", "calls/key.py",
        "found: list[object] = [training, *more,", "found: list[object] = [*more,", _GUARD),
    Bug("the guard forgets autocast", "calls/key.py",
        ", *map(_autocast, self.devices)]", "]", _GUARD),
    Bug("a form forgets flags", "calls/repeat.py",
        """        self._require(f"plain == {self._named(plain)}")\n""", "", ("runtime/test_repeat.py",)),
    Bug("a form forgets sizes", "calls/repeat.py",
        "(*map(shape, tensors), *lengths)", "(*lengths,)", ("runtime/test_repeat.py",)),
    Bug("a direct gather joins the ranks' parts in another order", "runtime/communicator.py",
        "        return gathered if dim == 0 else torch.cat(gathered.chunk(self.size), dim)\n\n    def _meet",
        "        return gathered if dim == 0 else torch.cat(gathered.chunk(self.size)[::-1], dim)\n\n    def _meet",
        ("runtime/test_direct.py",)),
    Bug("suggested plans may exchange whatever they want", "suggest/search.py",
        " and exchanges_little(exchanging.verdict.program)", "", ("parity/test_gathers.py",)),
    Bug("direct forwards stay in the model", "runtime/direct.py",
        "                del own[_FORWARD]\n", "                pass\n", ("runtime/test_direct.py",)),
    Bug("direct forwards stay for torch", "runtime/direct.py",
        "                own[COMPILED_CALL] = None\n", "                pass\n", ("runtime/test_direct.py",)),
    Bug("a direct look-up keeps what other ranks hold", "runtime/direct.py",
        ".masked_fill_(outside, 0)", "", ("runtime/test_direct.py",)),
    Bug("the guard forgets aliases", "calls/key.py",
        "        found.append(seen.aliases())\n", "", _GUARD),
    Bug("the guard forgets local attributes", "calls/proofs.py",
        "        and ours.local_attributes == other.local_attributes\n", "", _GUARD),
    Bug("the guard forgets parameter layouts", "calls/proofs.py",
        "if any(placed.get(p.names) != p.layout for p in other.parameters if read.intersection(p.names)):",
        "if False:", _GUARD),
    Bug("the guard forgets gradient sums", "calls/proofs.py",
        "if summed != {p.name for p in other.summed_parameters}:", "if False:", _GUARD),
    # What a rank computes.
    Bug("a rowwise product isn't reduced", "runtime/layers.py",
        "        if runtime.exits:\n            result = runtime.exits[0].step(result)\n        return result if bias",
        "        return result if bias", _PARITY),
    Bug("a rowwise bias is added twice", "runtime/layers.py",
        "return result if bias is None else result + bias.to(result.dtype)",
        "return result if bias is None else result + 2 * bias.to(result.dtype)", _PARITY),
    Bug("a bias counted once is added on every rank", "runtime/parameters.py",
        "return _apply_counted_once(self._read(parameter), self._rank)",
        "return _apply_counted_once(self._read(parameter), 0)", ("parity/test_bare_parameters.py",)),
    Bug("a reshard's backward is left out", "runtime/reshard.py",
        "            return self.backward(gradient)\n", "            return gradient\n", _PARITY),
    Bug("gradient sums are left out", "runtime/parameters.py",
        "flat = axis.all_reduce(torch.cat([part.reshape(-1) for part in parts]))",
        "flat = torch.cat([part.reshape(-1) for part in parts])", _PARITY),
    Bug("a split norm's eps is another", "runtime/split_norm.py",
        "/ count + eps)", "/ count + 2 * eps)", ("parity/test_split_norms.py",)),
    Bug("a split norm's statistics are a rank's own", "runtime/split_norm.py",
        "reduce(wide.square().sum(-1, keepdim=True))", "size * wide.square().sum(-1, keepdim=True)",
        ("parity/test_split_norms.py",)),
    Bug("a parameter's gradient isn't summed", "runtime/parameters.py",
        "functools.partial(_apply_summed_shards, self.summing))", "_apply_local_shards)", _PARITY),
    Bug("gradients of rows are those of other rows", "runtime/dispatch.py",
        ".move([held for held, asked", ".move([held.flip(0) for held, asked", ("parity/test_dispatch.py",)),
    Bug("pairs arrive in another order than their experts' numbers", "runtime/dispatch.py",
        "own.repeat_interleave(arrived.view(-1), output_size=sum(received))",
        "own.repeat_interleave(arrived.view(-1), output_size=sum(received)).flip(0)", ("parity/test_dispatch.py",)),
    Bug("every operator is linear in partial values", "compiler/rules/propagate.py",
        "return operator.takes_partial(tuple(layouts[i].forward == \"P\" for i in inputs))", "return True",
        ("compiler/test_propagate.py",)),
    # Who holds what.
    Bug("shared heads go to other ranks", "compiler/ir/layout.py",
        "start = min(place // self.replicas * longest, self.size)",
        "start = min((ranks - 1 - place) // self.replicas * longest, self.size)",
        ("compiler/test_layout.py", "parity/test_grouped_projections.py")),
    Bug("key heads aren't shared", "compiler/bind/shared_heads.py",
        "return Pack(count, self.size // heads) if queries else Pack(count)", "return Pack(count)",
        ("parity/test_rotary_pairs.py",)),
    Bug("pairs of features are taken for heads", "compiler/bind/readers.py",
        "if len(after) > 1 and self._picked(after[-1], 0):", "if False:", ("parity/test_rotary_pairs.py",)),
    Bug("a dim named from behind picks elsewhere", "compiler/rules/packed.py",
        "return arguments[1] % rank", "return arguments[1]", ("parity/test_taken_apart.py",)),
    Bug("a whole value is sliced for other heads", "compiler/rewrite/localise.py",
        "*packs[0].part(size, rank))", "*packs[0].part(size, size - 1 - rank))", ("parity/test_slices.py",)),
    # Recurrent layers.
    Bug("two gates are taken for each other", "runtime/recurrent.py",
        "i, f, g, o = (from_input", "f, i, g, o = (from_input", ("parity/test_recurrent.py",)),
    Bug("the way back goes forwards", "runtime/recurrent.py",
        "made[::-1] if backwards else made", "made", ("parity/test_recurrent.py",)),
    Bug("every rank starts with the first features", "runtime/recurrent.py",
        "state.narrow(-1, self._start, self._count)", "state.narrow(-1, 0, self._count)",
        ("parity/test_recurrent.py",)),
    Bug("a frozen layer's states reduce no gradient", "runtime/bodies.py",
        "steps(replace(held, backward=Collective.REDUCE_SCATTER))", "steps(held)", ("parity/test_recurrent.py",)),
    Bug("ranks drop other features of a gathered state", "compiler/emit/emit.py",
        'random = "same"  # the body', "pass  # the body", ("parity/test_recurrent.py",)),
    Bug("the proof of a recurrent layer looks at no operands", "compiler/check/recurrent.py",
        "node.target is its.target and _renamed(its, ours) == _told(node)", "node.target is its.target",
        ("parity/test_recurrent.py",)),
    Bug("what is written to isn't exchanged again", "compiler/rewrite/localise.py",
        "            moved.clear()\n", "            pass\n", ("parity/test_gathers.py",)),
    Bug("a part of a mean is divided by the part's count", "runtime/inside.py",
        "torch.sum(tensor, dims, keepdim, dtype=dtype) / count", "stock(tensor, dims, keepdim, dtype=dtype)",
        ("parity/test_gathers.py",)),
    Bug("an exchange covers a plan that cuts a projection", "compiler/rules/moves.py",
        "not node.overwritten and node.name not in _TAKES_APART", "not node.overwritten", ("parity/test_gathers.py",)),
    Bug("an exchange inside counts for nothing", "compiler/emit/emit.py",
        "for move in calls[0].moves if not move.again)", "for move in calls[0].moves[:0] if not move.again)",
        ("parity/test_gathers.py",)),
    # State.
    Bug("what ranks share is counted on each", "runtime/pieces.py",
        "own, owned = pack.owned(ranks, place)", "own, owned = start, length", ("runtime/test_packed.py",)),
    Bug("shared packs of a gradient aren't summed", "runtime/parameters.py",
        "if pack.is_shared:", "if False:", ("parity/test_grouped_projections.py",)),
    Bug("operands that lie otherwise are taken as parts", "runtime/packed_operations.py",
        "return owner.part.of(operand.expand(owner.shape))", "return operand", ("runtime/test_packed.py",)),
    # What verify sees.
    Bug("buffers stay as the unsharded run left them", "parity/reference.py",
        "seen = observe(copy_structure(model), call, cotangent)", "seen = observe(model, call, cotangent)",
        ("parity/test_false_alarms.py",)),
    Bug("buffers aren't compared", "parity/compare.py",
        ", *_buffers(reference, ranks, tolerance.outputs))", ",)", ("parity/test_false_alarms.py",)),
    Bug("input gradients aren't compared", "parity/compare.py",
        "errors = [relative_error(whole, torch.zeros_like(whole) if part is None else part, scale) for part in parts]",
        "errors = [0.0 for part in parts]", ("parity/test_planted_bugs.py",)),
)  # fmt: skip
