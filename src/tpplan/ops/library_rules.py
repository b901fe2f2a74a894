"""Rules of operators that others define, and whose kernels run on a GPU alone: attention as people run it.

in:  the name of an operator
out: its rule, as `tpplan.register_operator` would give it; a rule of the user's goes before it

    torch_attn::_varlen_attn          torch.nn.attention.varlen
    flash_attn::_flash_attn_forward   flash-attn 2.7 and newer; transformers' `flash_attention_2`

Nothing is tried: ends of sequences that are drawn at random would have a kernel read beyond its memory. So a program
assumes these rules, and says so. The backward passes are operators as well; where ranks share a key, each makes the
terms of its own queries.
"""

from __future__ import annotations

import functools
from dataclasses import replace

from tpplan.plan.operator_rule import OperatorRule, read_rule

_QUERY, _KEY, _STATISTICS = "b s! (k g) d!", "b t! k d!", "b (k g) s!"
_ROWS, _KEY_ROWS, _ROW_STATISTICS = "s! (k g) d!", "t! k d!", "(k g) s!"  # of sequences one behind the other
_HEADS, _ENDS = "(k g)", "n!, m!"
_FORWARD: dict[str, tuple[str, frozenset[int], bool]] = {
    # The rule; which results have sizes of their own, or say nothing of the call; whether it may draw random numbers.
    "torch_attn::_varlen_attn": (
        f"{_ROWS}, {_KEY_ROWS}, {_KEY_ROWS}, {_ENDS} -> {_ROWS}, {_ROW_STATISTICS}, ()", frozenset((2,)), False
    ),
    "flash_attn::_flash_attn_forward": (
        f"{_QUERY}, {_KEY}, {_KEY}, {_HEADS} -> {_QUERY}, {_STATISTICS}, (), ()", frozenset((2, 3)), True
    ),
    "flash_attn::_flash_attn_varlen_forward": (
        f"{_ROWS}, {_KEY_ROWS}, {_KEY_ROWS}, {_ENDS}, {_HEADS} -> {_ROWS}, {_ROW_STATISTICS}, (), ()",
        frozenset((2, 3)), True,
    ),
}  # fmt: skip
_BACKWARD: dict[str, tuple[str, frozenset[int]]] = {
    "torch_attn::_varlen_attn_backward": (
        f"{_ROWS}, {_ROWS}, {_KEY_ROWS}, {_KEY_ROWS}, {_ROWS}, {_ROW_STATISTICS}, {_ENDS}, _ -> "
        f"{_ROWS}, {_KEY_ROWS}, {_KEY_ROWS}", frozenset(),
    ),
    "flash_attn::_flash_attn_backward": (
        f"{_QUERY}, {_QUERY}, {_KEY}, {_KEY}, {_QUERY}, {_STATISTICS}, {_QUERY}, {_KEY}, {_KEY}, {_HEADS}, _ -> "
        f"{_STATISTICS}", frozenset((0,)),
    ),
    "flash_attn::_flash_attn_varlen_backward": (
        f"{_ROWS}, {_ROWS}, {_KEY_ROWS}, {_KEY_ROWS}, {_ROWS}, {_ROW_STATISTICS}, {_ROWS}, {_KEY_ROWS}, {_KEY_ROWS}, "
        f"{_ENDS}, {_HEADS}, _ -> {_ROW_STATISTICS}", frozenset((0,)),
    ),
}  # fmt: skip


@functools.cache
def library_rule(name: str) -> OperatorRule | None:
    """The rule of an operator, by the name `my::attn`; None if there is none here."""
    if name in _FORWARD:
        text, own, random = _FORWARD[name]
        return replace(read_rule(text), own=own, random=random, audit=False)
    if name in _BACKWARD:
        text, own = _BACKWARD[name]
        return replace(read_rule(text), own=own, derived=True)
    return None


__all__ = ["library_rule"]
