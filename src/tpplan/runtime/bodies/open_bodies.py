"""Open bodies: those that run at the moment, one inside of the other, of which only the innermost sees what it does."""

from __future__ import annotations

from typing import Generic, Protocol, TypeVar


class Seeing(Protocol):
    """A mode that sees what one run of a body does."""

    def go_on(self) -> None:
        """See it again."""
        ...

    def pause(self) -> None:
        """See nothing."""
        ...


Seer = TypeVar("Seer", bound=Seeing)


class OpenBodies(Generic[Seer]):
    """The bodies that run at the moment, innermost last: the mode of each, or None for one that needs none."""

    def __init__(self) -> None:
        """Begin with none."""
        self._held: list[Seer | None] = []

    @property
    def innermost(self) -> Seer | None:
        """The mode of the innermost body, if it needs one."""
        return self._held[-1] if self._held else None

    def __bool__(self) -> bool:
        """Whether any is open."""
        return bool(self._held)

    def enter(self, mode: Seer | None) -> None:
        """Open a body inside of the others."""
        if self.innermost is not None:
            self.innermost.pause()
        self._held.append(mode)
        if mode is not None:
            mode.go_on()

    def leave(self) -> None:
        """Close the innermost body."""
        mode = self._held.pop()
        if mode is not None:
            mode.pause()
        if self.innermost is not None:
            self.innermost.go_on()


__all__ = ["OpenBodies"]
