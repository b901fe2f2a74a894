import ast
import pickle
import re
from pathlib import Path

import pytest

import tpplan
from tpplan.plan import CompileError, Diagnostic, InternalError, PlanError, Severity, TpplanError, check_plan
from tpplan.runtime.ranks.reshard import SecondDerivativeError


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
        "TP199 internal-error: no placement\n  help: this is a bug in tpplan, not in your plan; please report it"
    )


def test_the_severity_is_the_catalogue_s_unless_given() -> None:
    assert Diagnostic("TP104", "x").severity is Severity.WARNING
    assert Diagnostic("TP104", "x", severity=Severity.NOTE).severity is Severity.NOTE
    assert Diagnostic("TP104", "x").name == "gathered-colwise"


def test_a_code_outside_the_catalogue_is_refused() -> None:
    with pytest.raises(KeyError):
        Diagnostic("TP999", "x")


def test_a_runtime_error_has_its_finding_as_data() -> None:
    error = SecondDerivativeError()
    (finding,) = error.diagnostics
    assert (error.code, error.severity, finding.name) == ("TP138", Severity.ERROR, "second-derivative")
    assert finding.help is not None and finding.help.startswith("take the gradient with")
    assert str(error).startswith(f"{finding.title}: {finding.message}")
    noted = TpplanError.of("TP176", "a gather failed", help="look there", notes=["rank 1 has ended", "at step 3"])
    assert noted.diagnostics[0].notes == ("rank 1 has ended", "at step 3")
    assert str(noted) == (
        "TP176 lost-rank: a gather failed\n  help: look there\n  note: rank 1 has ended\n  note: at step 3"
    )
    copy = pickle.loads(pickle.dumps(noted))
    assert copy.diagnostics == noted.diagnostics and str(copy) == str(noted)
    assert InternalError("no layout").code == "TP199"
    assert (TpplanError("a wrong argument").code, TpplanError("a wrong argument").diagnostics) == (None, ())


def test_an_error_whose_class_takes_other_arguments_is_pickled_as_it_is() -> None:
    made = SecondDerivativeError()
    made.add_note("in a backward")
    copy = pickle.loads(pickle.dumps(made))
    assert type(copy) is SecondDerivativeError and str(copy) == str(made) and copy.__notes__ == ["in a backward"]
    bug = pickle.loads(pickle.dumps(InternalError("no layout")))
    assert bug.code == "TP199" and str(bug) == str(InternalError("no layout"))


def test_a_compile_error_has_the_code_of_its_first_error() -> None:
    raised = CompileError([Diagnostic("TP104", "gathered"), Diagnostic("TP101", "no linear layer", subject="model.up")])
    assert raised.code == "TP101" and len(raised.diagnostics) == 2


def test_an_error_tells_what_it_comes_from_after_its_own_way_out() -> None:
    why = CompileError([Diagnostic("TP104", "gathered"), Diagnostic("TP101", "no linear layer", help="remove it")])
    error = TpplanError.of("TP117", "another call: it can't be proved", help="pass `inputs=`", cause=why)
    assert [finding.code for finding in error.diagnostics] == ["TP117", "TP101", "TP104"] and error.code == "TP117"
    assert str(error) == (
        "TP117 unproved-call: another call: it can't be proved\n  help: pass `inputs=`\n"
        "TP101 style-mismatch: no linear layer\n  help: remove it\nwarning TP104 gathered-colwise: gathered"
    )


def test_no_text_of_a_finding_is_made_by_hand() -> None:
    """So that what is raised or warned of with a code has it as an attribute, and one form."""
    for path in Path(tpplan.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                assert not re.match(r"TP\d{3} [a-z]+(-[a-z]+)+: ", node.value), f"{path}:{node.lineno}"
