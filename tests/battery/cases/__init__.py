"""All cases; importing a file registers its own."""

from tests.battery.case import CASES
from tests.battery.cases import backward, bodies, key

__all__ = ["CASES", "backward", "bodies", "key"]
