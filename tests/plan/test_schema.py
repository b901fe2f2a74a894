"""The JSON Schema, and that it and the reader agree."""

import json
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from tests.plan.test_emit import PLANS
from tpplan.plan import check_plan
from tpplan.plan.plan_keys import PlanFile, json_schema

COMMITTED = Path(__file__).parents[2] / "plans" / "plan.schema.json"
ADAPTER = TypeAdapter(PlanFile)
# What one file's shape doesn't show, so that the schema can't tell.
BEYOND_THE_SCHEMA = {"TP007", "TP008", "TP009", "TP010", "TP011", "TP020", "TP021"}


def fits_the_schema(data: object) -> bool:
    try:
        ADAPTER.validate_python(data, strict=False)
    except ValidationError:
        return False
    return True


def test_the_committed_schema_is_fresh() -> None:
    assert json.loads(COMMITTED.read_text()) == json_schema(), "run `make docs`"


def test_every_field_is_described_and_none_may_be_null() -> None:
    schema = json_schema()
    for document in (schema, schema["$defs"]["RuleOptions"]):
        assert document["additionalProperties"] is False
        assert all(field["description"] for field in document["properties"].values())
    assert "null" not in json.dumps(schema)


@given(PLANS)
def test_the_schema_accepts_what_the_reader_accepts(data: dict[str, object]) -> None:
    assert check_plan(data)[0] is not None
    assert fits_the_schema(data)


@given(PLANS, st.data())
def test_the_schema_refuses_what_the_reader_finds_misspelt(plan: dict[str, object], data: st.DataObject) -> None:
    key = data.draw(st.sampled_from(["modul", "styles", "version", "modules"]))
    damaged = {**plan, key: data.draw(st.sampled_from(["x", 2, ["x"], {"a": "colwize"}, {"a": {"stile": "colwise"}}]))}
    found = {finding.code for finding in check_plan(damaged)[1]}
    assert fits_the_schema(damaged) == (found <= BEYOND_THE_SCHEMA - {"TP007"})
