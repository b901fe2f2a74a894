import pickle

import pytest

from tpplan.plan import CompileError, Diagnostic, InternalError, PlanError, Severity, TpplanError, check_plan


def test_an_error_is_ordered_and_survives_another_process() -> None:
    _, findings = check_plan("version: 2\nmodules: {a: colwize}\n")
    error = CompileError([*findings[::-1], Diagnostic("TP104", "gathered", subject="lm_head")])
    assert [finding.code for finding in error.diagnostics] == ["TP006", "TP005", "TP104"]
    assert [finding.code for finding in error.errors] == ["TP006", "TP005"]
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is CompileError and copy.diagnostics == error.diagnostics and str(copy) == str(error)


def test_a_compile_error_is_a_plan_error_and_a_bug_is_not() -> None:
    assert issubclass(CompileError, PlanError) and issubclass(PlanError, TpplanError)
    assert issubclass(InternalError, TpplanError) and not issubclass(InternalError, PlanError)


def test_our_own_bug_says_that_it_is_ours() -> None:
    assert str(InternalError("no placement")) == (
        "TP199 internal-error: no placement\nThis is a bug in tpplan, not in your plan; please report it."
    )


def test_the_severity_is_the_catalogue_s_unless_given() -> None:
    assert Diagnostic("TP104", "x").severity is Severity.WARNING
    assert Diagnostic("TP104", "x", severity=Severity.NOTE).severity is Severity.NOTE
    assert Diagnostic("TP104", "x").name == "gathered-colwise"


def test_a_code_outside_the_catalogue_is_refused() -> None:
    with pytest.raises(KeyError):
        Diagnostic("TP999", "x")
