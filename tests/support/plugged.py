"""Things a configuration may name, rightly or wrongly."""

from typing import Any

__all__ = ["INSTANCE", "Outer", "Picky", "Plain", "Refuses"]


class Plain:
    """Takes no options."""


class Picky:
    """Takes two."""

    def __init__(self, *, need: int, want: list[Any] | None = None) -> None:
        self.need = need
        self.want = want


class Refuses:
    """Takes an option and does not like it."""

    def __init__(self, *, need: int) -> None:
        raise ValueError(f"{need} will not do")


class Outer:
    """Holds another."""

    class Inner:
        """Is held."""


INSTANCE = Plain()
