"""Errors cross processes: every one is the same after a pickle, with all that it carries."""

from __future__ import annotations

import importlib
import pickle
import pkgutil
from collections.abc import Iterator

import pytest

import rollout_svc
from rollout_svc import errors
from rollout_svc.errors import ConfigError, NotNow, Problem, RolloutError, ServiceError

MADE = (
    ConfigError([Problem("a.b", "is wrong"), Problem("", "is worse")]),
    errors.InUse.at("buffer.path", "is in use"),
    NotNow("paused", "not now", detail={"ready": 1, "wanted": 4}, retry_after_s=2.5),
    errors.BadRequest.at("step", "expected a number"),
    errors.Conflict("an old ticket", type="ticket", detail={"ticket": 3}),
    errors.Unauthorized("no token"),
    errors.NotFound("no such"),
    errors.Gone("it is over"),
    errors.WorkerFailure("http_503", "busy", retry_after_s=1.0, hard=True, accepted=True, lingers=False),
    errors.NoWorker("none"),
    errors.SampleFailure("judge_timeout", "too long"),
    errors.JudgeFailed("unparseable", "no answer"),
    errors.ShardFailure("missing", "s1", ("s1", "s2")),
    errors.DrainFailed(["a did not", "b did not"], {"cleared": 3}),
    *(
        kind("what was seen")
        for kind in (
            errors.IllegalTransition,
            errors.StaleAttempt,
            errors.SpentHandle,
            errors.LedgerImbalance,
            errors.Interrupted,
            errors.Unreachable,
            ServiceError,
            RolloutError,
        )
    ),
)


def below(kind: type[RolloutError]) -> Iterator[type[RolloutError]]:
    """Yield a class and all that come from it."""
    yield kind
    for child in kind.__subclasses__():
        yield from below(child)


@pytest.mark.parametrize("error", MADE, ids=lambda error: type(error).__name__)
def test_an_error_is_the_same_elsewhere(error: RolloutError) -> None:
    """P35: class, text and every attribute survive, whatever the constructor takes."""
    again = pickle.loads(pickle.dumps(error))  # noqa: S301 - our own bytes
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert again.args == error.args
    assert vars(again) == vars(error)


def test_no_error_is_left_out() -> None:
    """The list above has every class of the tree, and no class of the package pickles itself in another way."""
    for module in pkgutil.walk_packages(rollout_svc.__path__, "rollout_svc."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    assert {kind for kind in below(RolloutError) if kind.__module__ == errors.__name__} == {type(e) for e in MADE}
    ours = [kind for kind in below(RolloutError) if kind.__module__.startswith("rollout_svc.")]
    assert [kind for kind in ours if kind.__reduce__ is not RolloutError.__reduce__] == []
