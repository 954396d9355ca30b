"""Where in a placement group of Ray a launched engine has to make its workers."""

from typing import Final, Self

from pydantic import Field, ValidationError, model_validator
from pydantic_core import InitErrorDetails, PydanticCustomError

from rollout_svc.config.base import Count, Listed, Settings

__all__ = ["BUNDLES_VARIABLE", "PlacementConfig"]

BUNDLES_VARIABLE: Final = "LMDEPLOY_RAY_EXTERNAL_PG_BUNDLES"
"""What LMDeploy reads the bundles from, in their order, where it runs inside a placement group that it did not make."""


class PlacementConfig(Settings):
    """Bundles of a placement group that the trainer owns: the engine's rank r goes to the r-th of them."""

    bundles: Listed[int]
    """Their indices, in the trainer's order, which is kept: ranks of engine and trainer belong together."""
    tensor_parallel: Count
    """Workers the engine makes; there must be a bundle for each."""
    group: str | None = Field(None, min_length=1)
    """Name of the group, or its id in hexadecimal; it is looked up on the Ray cluster at `experts.ray_address`."""
    device: str = Field("GPU", min_length=1)
    """The resource each of the bundles has to hold: `GPU`, `NPU`, or another name."""
    owns_group: bool = False
    """The engine makes a group of its own: all of this is ignored, with a remark."""

    @model_validator(mode="after")
    def _each_its_own_and_enough(self) -> Self:
        if self.owns_group:
            return self
        found: list[tuple[tuple[str | int, ...], str]] = []
        for place, bundle in enumerate(self.bundles):
            first = self.bundles.index(bundle)
            if bundle < 0:
                found.append((("bundles", place), f"bundles are counted from 0, there is no {bundle}"))
            elif first != place:
                found.append((("bundles", place), f"bundle {bundle} is already bundles.{first}"))
        distinct = len({bundle for bundle in self.bundles if bundle >= 0})
        if distinct < self.tensor_parallel:
            words = f"{distinct} different bundles for {self.tensor_parallel} workers (tensor_parallel)"
            found.append((("bundles",), words))
        if self.group is None:
            found.append((("group",), "name the placement group that the bundles are of (or say owns_group: true)"))
        if found:
            raise ValidationError.from_exception_data("config", [_detail(path, words) for path, words in found])
        return self


def _detail(path: tuple[str | int, ...], words: str) -> InitErrorDetails:
    return InitErrorDetails(type=PydanticCustomError("rule", "{message}", {"message": words}), loc=path, input=None)
