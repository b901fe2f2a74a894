import re
from pathlib import Path

import pytest

from tests.plan.toy import llama_modules
from tpplan.plan import CATALOGUE, CatalogueEntry, Severity, catalogue, check_plan, load_plan

ENTRIES = list(CATALOGUE.values())
PLANS = [entry for entry in ENTRIES if entry.bad.startswith(("version:", "modules:"))]
SELF_REFERENCE = {"TP011"}
NEED_THE_COMPILER = {entry.code for entry in ENTRIES if entry.code >= "TP100"}


def codes_of(text: str) -> set[str]:
    plan, diagnostics = check_plan(f"{text}\n")
    found = diagnostics + (plan.match(llama_modules()).diagnostics if plan else [])
    return {diagnostic.code for diagnostic in found}


def test_codes_are_in_order_and_names_are_unique() -> None:
    assert list(CATALOGUE) == sorted(CATALOGUE)
    assert len({entry.name for entry in ENTRIES}) == len(ENTRIES)


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.code)
def test_an_entry_says_what_is_wrong_and_what_to_do(entry: CatalogueEntry) -> None:
    assert re.fullmatch(r"TP\d{3}", entry.code)
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", entry.name)
    assert entry.summary.endswith(".") and "\n" not in entry.summary
    assert len(entry.explanation) > 100
    assert bool(entry.bad) >= bool(entry.good)


@pytest.mark.parametrize(
    "entry",
    [entry for entry in PLANS if entry.code not in NEED_THE_COMPILER | SELF_REFERENCE],
    ids=lambda entry: entry.code,
)
def test_the_wrong_example_has_the_mistake_and_the_right_one_does_not(entry: CatalogueEntry) -> None:
    assert entry.code in codes_of(entry.bad)
    assert entry.code not in codes_of(entry.good)


@pytest.mark.parametrize(
    "entry", [entry for entry in PLANS if entry.code not in SELF_REFERENCE], ids=lambda entry: entry.code
)
def test_the_right_example_is_a_valid_plan(entry: CatalogueEntry) -> None:
    assert load_plan(f"{entry.good}\n")


def test_only_what_still_yields_a_right_program_is_less_than_an_error() -> None:
    mild = {entry.code for entry in ENTRIES if entry.severity is not Severity.ERROR}
    assert mild == {
        "TP014",
        "TP104",
        "TP105",
        "TP120",
        "TP124",
        "TP125",
        "TP126",
        "TP132",
        "TP137",
        "TP147",
        "TP148",
        "TP150",
        "TP152",
        "TP153",
        "TP183",
        "TP186",
        "TP212",
        "TP213",
        "TP214",
    }


def test_no_code_is_in_two_files() -> None:
    files = Path(catalogue.__file__).parent.glob("*.toml")
    headings = [line for file in files for line in file.read_text(encoding="utf-8").splitlines() if line[:3] == "[TP"]
    assert sorted(headings) == [f"[{code}]" for code in CATALOGUE]
