"""Every error the service raises, as one tree.

    RolloutError
    ├── ConfigError             settings that cannot be used; carries every `Problem`, with its dotted path
    │   └── InUse               what they name is another process's now, and may be free later
    ├── IllegalTransition       a sample or group was asked for a move its state forbids
    ├── StaleAttempt            a write came with a revoked attempt (counted late_discarded)
    ├── SpentHandle             a tensor handle was used after it was taken or released; says by whom
    ├── LedgerImbalance         an account would go below zero: a bug, never data
    ├── Interrupted             the gate closed under a call; its sample goes back unfinished
    ├── WorkerFailure           a worker, not the sample, failed: retried on another worker
    │   └── NoWorker            no worker is in traffic: the producer waits
    ├── SampleFailure           this sample's own failure: counted against max_attempts
    ├── JudgeFailed             a judger's own word that it has no verdict; ends as the sample's `judge_error`
    ├── ShardFailure            a remote tensor could not be kept, reached or read: which one, and why
    ├── DrainFailed             processes did not let go of shards, in two steps: who, and how many ids
    ├── Unreachable             a client got no answer from the service: refused, lost, or too late
    └── ServiceError            an answer to a caller, with an HTTP status
        ├── BadRequest   400    the body or argument is wrong; says which field
        ├── Unauthorized 401    the token is missing or wrong
        ├── NotFound     404
        ├── Conflict     409    right request, wrong state
        ├── Gone         410    it was there, and is over
        └── NotNow       503    may work later; says why and when to retry

Foreign exceptions are mapped at the boundary that met them; nothing above a boundary sees an aiohttp error.

Invariant: every one survives a pickle with all that it carries, whatever its constructor takes: calls cross processes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Literal, Self

__all__ = [
    "ADMIN_KEY",
    "BadRequest",
    "ConfigError",
    "Conflict",
    "DrainFailed",
    "Gone",
    "IllegalTransition",
    "InUse",
    "Interrupted",
    "JudgeFailed",
    "LedgerImbalance",
    "NoWorker",
    "NotFound",
    "NotNow",
    "NotNowType",
    "Problem",
    "RolloutError",
    "SampleFailure",
    "ServiceError",
    "ShardFailure",
    "SpentHandle",
    "StaleAttempt",
    "Unauthorized",
    "Unreachable",
    "WorkerFailure",
]

ADMIN_KEY: Final = "admin_key_refused"
"""Kind of the failure of an engine that let the data key in, and not the control key."""


def _restored(kind: type[RolloutError], args: tuple[Any, ...], carried: dict[str, Any]) -> RolloutError:
    """Make an error that was raised elsewhere; its constructor had its say there."""
    error = kind.__new__(kind)
    error.args = args
    error.__dict__.update(carried)
    return error


class RolloutError(Exception):
    """Base of every error raised on purpose by this package.

    Attributes:
        again_in_s: seconds until what failed is tried again, whoever asks; None: it is not.
    """

    again_in_s: float | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (type(self), self.args, dict(self.__dict__))


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing wrong with a configuration, and where.

    Attributes:
        path: dotted path of the field (`workers.0.url`), or `file:line:column` for a syntax error.
        message: what is wrong, in one line.
    """

    path: str
    message: str

    def __str__(self) -> str:
        return f"{self.path}: {self.message}" if self.path else self.message


class ConfigError(RolloutError):
    """Raised when a configuration cannot be used; it carries every problem found, not only the first."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))

    @classmethod
    def at(cls, path: str, message: str) -> Self:
        """Make the error for a single problem."""
        return cls((Problem(path, message),))


class InUse(ConfigError):
    """Raised when what a configuration names is another process's now: a journal, a port. It may be free later."""


class IllegalTransition(RolloutError):
    """Raised when a sample or group is asked for a move that its state forbids."""


class StaleAttempt(RolloutError):
    """Raised when a write carries an attempt that was revoked; the write changed nothing."""


class SpentHandle(RolloutError):
    """Raised when a tensor handle is read or taken after it was taken or released: a bug of whoever still has it."""


class LedgerImbalance(RolloutError):
    """Raised when an account would go below zero or the sum does not hold."""


class Interrupted(RolloutError):
    """Raised when the right of a call to start or to go on was withdrawn (gate closed, shutdown)."""


class WorkerFailure(RolloutError):
    """Raised when a worker failed a request through no fault of the sample.

    Args:
        kind: short word for logs and metrics (`connection`, `http_503`, `unauthorized`, ...).
        message: what was seen.
        retry_after_s: the engine's own wish, seconds, or None.
        hard: the worker itself is at fault for certain (connection, keys), so one sample's say is enough.
        accepted: the request may still run at the engine.
        lingers: it may at one of several engines, whatever the others said; None: as `accepted`.

    Attributes:
        message: what was seen, without the kind: for whoever says that in words of their own.
    """

    def __init__(
        self,
        kind: str,
        message: str,
        *,
        retry_after_s: float | None = None,
        hard: bool = False,
        accepted: bool = False,
        lingers: bool | None = None,
    ) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind = kind
        self.message = message
        self.retry_after_s = retry_after_s
        self.hard = hard
        self.accepted = accepted
        self.lingers = accepted if lingers is None else lingers


class NoWorker(WorkerFailure):
    """Raised when no worker may take the request now."""

    def __init__(self, message: str) -> None:
        super().__init__("no_worker", message)


class SampleFailure(RolloutError):
    """Raised when a sample failed by its own doing: bad body, agent or judger error, timeout, poison.

    Args:
        reason: the typed reason kept on the sample (`invalid_response`, `judge_timeout`, ...).
        message: what was seen, for people.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(f"{reason}: {message}")
        self.reason = reason
        self.message = message


class JudgeFailed(RolloutError):
    """Raised when a judger has no verdict, by the judger itself; the sample has no reward then, and never 0.

    Args:
        reason: short word of the judger's own (`unparseable`, `no_route`, ...), told before the message.
        message: what was seen, for people.
    """

    def __init__(self, reason: str, message: str = "") -> None:
        super().__init__(f"{reason}: {message}" if message else reason)
        self.reason = reason
        self.message = message


class ShardFailure(RolloutError):
    """Raised when a remote tensor could not be kept, reached or read.

    Args:
        reason: `full`, `invalid` when it is to be kept; `missing`, `too_big`, `unreachable`, `unauthorized`, `timeout`,
            `invalid` when it is to be fetched.
        message: what was seen, for people; names the shard.
        ids: the shards it is about.
    """

    def __init__(self, reason: str, message: str, ids: tuple[str, ...] = ()) -> None:
        super().__init__(f"{reason}: {message}")
        self.reason = reason
        self.message = message
        self.ids = ids


class DrainFailed(RolloutError):
    """Raised when processes did not let go of shards in the step they belong to, nor in the next one.

    Everything else was drained before; none of what is named here is tried again.

    Args:
        failures: who did not do what with how many ids, one line each.
        cleared: what became of the clear that found it out (`tensors.clearing.Cleared`).
    """

    def __init__(self, failures: Iterable[str], cleared: Any = None) -> None:
        self.failures = tuple(failures)
        self.cleared = cleared
        super().__init__("; ".join(self.failures))


class Unreachable(RolloutError):
    """Raised when a client got no answer from the service: connection refused or lost, or nothing in time.

    The call may have taken effect.
    """


class ServiceError(RolloutError):
    """Raised when a call of the public API cannot be answered; carries what HTTP needs."""

    status: ClassVar[int] = 500
    default_type: ClassVar[str] = "internal"

    def __init__(self, message: str, *, type: str | None = None, detail: Any = None) -> None:  # noqa: A002
        super().__init__(message)
        self.message = message
        self.type = type or self.default_type
        self.detail = detail

    def as_json(self) -> dict[str, Any]:
        """Return the error body of every way in."""
        return {"error": {"type": self.type, "message": self.message, "detail": self.detail}}


class BadRequest(ServiceError):
    """Raised when an argument is wrong; `detail` lists `{path, message}`."""

    status = 400
    default_type = "bad_request"

    @classmethod
    def at(cls, path: str, message: str) -> Self:
        """Make the error for a single problem."""
        return cls.of((Problem(path, message),))

    @classmethod
    def of(cls, problems: Iterable[Problem]) -> Self:
        """Make the error for several."""
        told = tuple(problems)
        detail = [{"path": problem.path, "message": problem.message} for problem in told]
        return cls("; ".join(map(str, told)), detail=detail)


class Unauthorized(ServiceError):
    """Raised when the bearer token of a call is missing or wrong."""

    status = 401
    default_type = "unauthorized"


class NotFound(ServiceError):
    """Raised when the named thing does not exist."""

    status = 404
    default_type = "not_found"


class Conflict(ServiceError):
    """Raised when the request is well-formed but the state forbids it; `detail` holds both sides."""

    status = 409
    default_type = "conflict"


class Gone(ServiceError):
    """Raised when what was asked for was there, and is over; asking again does not help."""

    status = 410
    default_type = "session_over"


NotNowType = Literal[
    "not_enough",
    "paused",
    "exhausted",
    "failed",
    "starting",
    "stopping",
    "update_failed",
    "checkpoint_failed",
    "no_sample",
]


class NotNow(ServiceError):
    """Raised when the call may succeed later; `retry_after_s` goes out as `Retry-After`."""

    status = 503
    default_type = "not_enough"

    def __init__(self, type: NotNowType, message: str, *, detail: Any = None, retry_after_s: float = 1.0) -> None:  # noqa: A002
        super().__init__(message, type=type, detail=detail)
        self.retry_after_s = retry_after_s
