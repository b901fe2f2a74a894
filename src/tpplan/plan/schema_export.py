"""The JSON Schema of a plan file, by pydantic; apart, since importing that takes longer than reading a plan."""

from __future__ import annotations

from typing import Any, Final

from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import core_schema

from tpplan.plan.written import SCHEMA_ID

_DIALECT: Final = "https://json-schema.org/draft/2020-12/schema"


class _AbsentMeansNone(GenerateJsonSchema):
    """A field that's None by default may be left out, but never be written as null."""

    def nullable_schema(self, schema: core_schema.NullableSchema) -> JsonSchemaValue:
        return self.generate_inner(schema["schema"])

    def default_schema(self, schema: core_schema.WithDefaultSchema) -> JsonSchemaValue:
        return self.generate_inner(schema["schema"])


def export(plan_file: type) -> dict[str, Any]:
    """The JSON Schema of the dataclass `plan_file`."""
    schema = TypeAdapter(plan_file).json_schema(schema_generator=_AbsentMeansNone)
    schema["title"] = "tpplan plan"
    return {"$schema": _DIALECT, "$id": SCHEMA_ID, **schema}
