"""The plan language: reading plans, matching them to modules, and saying what's wrong with them. Imports no torch."""

from __future__ import annotations

from tpplan.plan.catalogue import CATALOGUE, CatalogueEntry, Severity
from tpplan.plan.diagnostic import Diagnostic
from tpplan.plan.exceptions import ArgumentError, CompileError, InternalError, PlanError, TpplanError
from tpplan.plan.load import PlanSource, check_plan, load_plan
from tpplan.plan.locate import find_plan, shipped_plan_directory, shipped_plan_names
from tpplan.plan.match import Matched
from tpplan.plan.pattern import Pattern, PatternError, Specificity
from tpplan.plan.plan import Plan
from tpplan.plan.positions import Position, SourceText, Span
from tpplan.plan.rules import KernelRule, NamedPack, Rule
from tpplan.plan.vocabulary import Exchange, KernelChoice, KernelKind, OverlapUnit, OverlapWord, Pin, Style

__all__ = [
    "CATALOGUE",
    "ArgumentError",
    "CatalogueEntry",
    "CompileError",
    "Diagnostic",
    "Exchange",
    "InternalError",
    "KernelChoice",
    "KernelKind",
    "KernelRule",
    "Matched",
    "NamedPack",
    "OverlapUnit",
    "OverlapWord",
    "Pattern",
    "PatternError",
    "Pin",
    "Plan",
    "PlanError",
    "PlanSource",
    "Position",
    "Rule",
    "Severity",
    "SourceText",
    "Span",
    "Specificity",
    "Style",
    "TpplanError",
    "check_plan",
    "find_plan",
    "load_plan",
    "shipped_plan_directory",
    "shipped_plan_names",
]
