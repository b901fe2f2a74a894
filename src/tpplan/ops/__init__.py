"""Operators of the user's: rules that say how they work on parts of their arguments, and the trial of each rule."""

from tpplan.ops.declared import OperatorRuleError
from tpplan.ops.functions import operator, register_operator

__all__ = ["OperatorRuleError", "operator", "register_operator"]
