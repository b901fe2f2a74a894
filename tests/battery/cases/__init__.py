"""All cases; importing a file registers its own."""

from tests.battery.case import CASES
from tests.battery.cases import backward, bodies, containers, key, layers, state

__all__ = ["CASES", "backward", "bodies", "containers", "key", "layers", "state"]
