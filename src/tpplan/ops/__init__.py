"""Operators: the registry of those that the compiler knows, and the rules of the user's, with the trial of each."""

from tpplan.ops.declared import OperatorRuleError
from tpplan.ops.functions import operator, register_operator

__all__ = ["OperatorRuleError", "operator", "register_operator"]
