"""What every part of the settings is made of.

Invariants:

- Types are strict: a quoted number is a string, `true` is not 1. YAML already knows the types.
- Unknown keys are refused.
"""

from collections.abc import Callable, Sequence
from typing import Annotated, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import InitErrorDetails, PydanticCustomError

__all__ = [
    "Count",
    "EntryPoint",
    "Listed",
    "Seconds",
    "Secret",
    "Settings",
    "refuse",
    "refuse_repeats",
]

T = TypeVar("T")
Listed = Annotated[tuple[T, ...], Field(strict=False)]
"""A YAML list, kept as a tuple."""
Seconds = Annotated[float, Field(gt=0, le=31_536_000)]
"""A positive time, a year at most."""
Count = Annotated[int, Field(ge=1, le=1_000_000)]
"""A number of things of which there must be at least one."""
Secret = Annotated[str, Field(pattern=r"^[\x21-\x7e]+$")]
"""Goes into an HTTP header: printable ASCII without blanks."""
EntryPoint = Annotated[str, Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_][\w.]*$")]
"""`module:attr`."""


def refuse(path: tuple[str | int, ...], message: str) -> ValidationError:
    """Make a validation error at a path of our choice, below the model or field being validated."""
    kind = PydanticCustomError("rule", "{message}", {"message": message})
    return ValidationError.from_exception_data("config", [InitErrorDetails(type=kind, loc=path, input=None)])


def refuse_repeats(
    values: Sequence[T | None], field: tuple[str, ...], noun: str, same: Callable[[T], object] = lambda value: value
) -> None:
    """Refuse a value that a field of an earlier item has already; None is no value.

    Args:
        values: of each item.
        field: where it stands there.
        noun: what the items are.
        same: equal for values that mean the same.
    """
    meant = [None if value is None else same(value) for value in values]
    for index, value in enumerate(values):
        first = meant.index(meant[index])
        if first != index and value is not None:
            raise refuse((index, *field), f"{value!r} is already the {'.'.join(field)} of {noun} {first}")


class Settings(BaseModel):
    """What every group of settings has in common."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        hide_input_in_errors=True,
    )
