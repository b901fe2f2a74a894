"""All cases; importing a file registers its own."""

from tests.battery.case import CASES
from tests.battery.cases import (
    backward,
    bodies,
    branches,
    changes,
    containers,
    crashes,
    devices,
    key,
    layers,
    rules,
    state,
)

__all__ = [
    "CASES",
    "backward",
    "bodies",
    "branches",
    "changes",
    "containers",
    "crashes",
    "devices",
    "key",
    "layers",
    "rules",
    "state",
]
