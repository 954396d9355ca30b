"""What all records of the control API are made of."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

__all__ = ["Natural", "Record", "Seconds"]

Natural = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(ge=0)]


class Record(BaseModel):
    """What all records have in common."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)
