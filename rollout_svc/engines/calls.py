"""What passes between the service and a dialect: plain records, no HTTP library in sight."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NamedTuple, Self

import orjson

from rollout_svc.config import SamplingConfig
from rollout_svc.heavy import Heavy
from rollout_svc.segment import FinishReason, VersionSpan
from rollout_svc.tensors.experts import Layout, RawExperts

__all__ = [
    "LOADING",
    "Call",
    "Completion",
    "EngineInfo",
    "EngineProfile",
    "GenerateRequest",
    "Health",
    "Lift",
    "LogprobMeaning",
    "Reply",
    "WrittenIds",
]

LOADING: Final = "loading "
"""What a weight label begins with from before weights begin to load there until all of them are."""
LogprobMeaning = Literal["raw", "processed", "unknown"]
"""What an engine's logprobs are of: the model's own distribution, or the one sampled from (temperature, top-p, …)."""


class WrittenIds(NamedTuple):
    """Token ids as an engine is sent them.

    Attributes:
        text: JSON of a list, without its brackets.
        length: how many ids that is.
    """

    text: bytes
    length: int

    @classmethod
    def of(cls, ids: Sequence[int]) -> WrittenIds:
        """Write ids."""
        return cls(orjson.dumps(ids)[1:-1], len(ids))

    def plus(self, *more: list[int]) -> WrittenIds:
        """These, and more; what there is is copied once."""
        parts = [orjson.dumps(ids)[1:-1] for ids in more if ids]
        if not parts:
            return self
        text = b",".join((self.text, *parts) if self.length else parts)
        return WrittenIds(text, self.length + sum(map(len, more)))

    @property
    def json(self) -> orjson.Fragment:
        """The list."""
        return orjson.Fragment(b"[%b]" % self.text)

    @property
    def ids(self) -> list[int]:
        """Read back."""
        found: list[int] = orjson.loads(b"[%b]" % self.text)
        return found


class Lift(NamedTuple):
    """A value too big to be parsed with its body: it is taken out on the way in, and read off the loop.

    Attributes:
        key: its key in the answer; where there are several, the last that is not null counts.
        encoding: `base64` becomes bytes; `numbers`, nested lists of integers, an array; any other string is itself.
        max_bytes: of what it becomes; more is refused.
    """

    key: str
    encoding: Literal["base64", "numbers"]
    max_bytes: int


@dataclass(frozen=True, slots=True)
class Call:
    """One HTTP call to make.

    Attributes:
        method: HTTP method.
        path: below the worker's url.
        body: encoded JSON.
        admin: whether it needs the control key.
        lift: what is taken out of its answer on the way.
    """

    method: str
    path: str
    body: bytes | None = None
    admin: bool = False
    lift: Lift | None = None


class Reply(NamedTuple):
    """What came back.

    Attributes:
        status: of HTTP.
        body: its bytes; null stands where a value was lifted.
        retry_after_s: `Retry-After` in seconds, where it was sent.
        lifted: what was taken out: bytes-like, an array of three dimensions, or a string; None: there was none.
    """

    status: int
    body: bytes
    retry_after_s: float | None = None
    lifted: Any = None


@dataclass(slots=True)
class GenerateRequest:
    """One engine call.

    Attributes:
        request_id: the wire id, fixed width, new for every call.
        input_ids: prompt and prefix, token ids; or the JSON they were written as, once for all tries.
        max_tokens: what may still be generated, at least 1.
        sampling: the rest of the sampling settings.
        seed: of this sample's draws, or None.
        extra: opaque top-level keys from the prompt line.
        experts_from: routed experts are asked for, from this token on, which is one of `input_ids`; None: they are not.
        experts_max_bytes: of them; more is refused.
    """

    request_id: str
    input_ids: list[int] | orjson.Fragment
    max_tokens: int
    sampling: SamplingConfig
    seed: int | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    experts_from: int | None = None
    experts_max_bytes: int = 2**30


@dataclass(slots=True)
class Completion:
    """A valid answer to one call.

    Attributes:
        ids: new token ids only, never the prefix.
        logprobs: one natural-log probability for each.
        finish_reason: in our words.
        engine_finish_reason: in the engine's.
        spans: weight versions over `ids`, None where the label is no integer; empty where the engine said nothing: the
            pool stamps what it dispatched under.
        request_id: the wire id the engine says this answers; None where it does not say.
        labelled: the engine said which weights it has; a label that is no integer is version None.
        late: the lane's epoch closed before this was parsed.
        worker: id of the worker that answered.
        logprobs_mode: what its logprobs are of.
        raw_experts: routed experts as they came; None: there were none.
        experts: the routing of the whole sequence so far, owned by whoever has this completion; None: none was asked.
    """

    ids: list[int]
    logprobs: list[float]
    finish_reason: FinishReason
    engine_finish_reason: str
    spans: tuple[VersionSpan, ...]
    request_id: str | None = None
    labelled: bool = False
    late: bool = False
    worker: str = ""
    logprobs_mode: LogprobMeaning = "unknown"
    raw_experts: RawExperts | None = None
    experts: Heavy | None = None


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What an engine says of its weights now.

    Attributes:
        weight_label: as sent; None where it has none, and for several engines behind one worker that do not agree.
        process: what tells this process from the next one at the same address; None where it does not say.
        half_loaded: weights began to load there and never ended: what it has is no version of any.
        differing: what each of several engines that do not agree said, by url.
    """

    weight_label: str | None
    process: str | None = None
    half_loaded: bool = False
    differing: tuple[tuple[str, str | None], ...] = ()

    @classmethod
    def labelled(cls, label: object) -> Self:
        """Read the label an engine sent, of whatever JSON; null is none."""
        if label is None:
            return cls(weight_label=None)
        return cls(weight_label=str(label), half_loaded=str(label).startswith(LOADING))

    def __str__(self) -> str:
        if self.differing:
            return "different weights: " + ", ".join(f"{url} reports {label}" for url, label in self.differing)
        return "unlabelled weights" if self.weight_version is None else f"version {self.weight_version}"

    @property
    def versions(self) -> frozenset[int]:
        """Every version that is among the labels."""
        labels = [label for _, label in self.differing] or [self.weight_label]
        return frozenset(version for label in labels if (version := EngineInfo(label).weight_version) is not None)

    @property
    def weight_version(self) -> int | None:
        """The version the label means; None for labels that are no integer (a fresh SGLang says `default`)."""
        try:
            return None if self.weight_label is None else int(self.weight_label)
        except ValueError:
            return None


@dataclass(frozen=True, slots=True)
class EngineProfile:
    """What an engine is, asked once when its worker registers; None where it does not say.

    Attributes:
        dialect: name of the dialect it was recognised by.
        engine_version: the engine's own version.
        capabilities: what it can do, of `abort abort_all count disk flush freeze_keep_kv freeze_drop_kv set_version
            stream weight_version experts shm cuda_ipc distributed offload offload_kv weights_backup`: `offload`, memory
            can be given up; `offload_kv`, the cache alone; `weights_backup`, weights come back as they were.
        logprobs: what its logprobs are of.
        model: path or name of what it serves.
        tokenizer: path or name of its tokenizer.
        vocab_size: token ids it knows, 0 up to this.
        context: most tokens of a sequence, prompt included.
        max_running: requests it decodes together.
        weight_label: its label for the weights that are loaded.
        warnings: what will work, and should not be left so.
        experts: what is known of the routing of its model; None: nothing.
        ranks: tensor-parallel ranks, each of which is given weights of its own.
    """

    dialect: str
    engine_version: str | None = None
    capabilities: tuple[str, ...] = ()
    logprobs: LogprobMeaning = "unknown"
    model: str | None = None
    tokenizer: str | None = None
    vocab_size: int | None = None
    context: int | None = None
    max_running: int | None = None
    weight_label: str | None = None
    warnings: tuple[str, ...] = ()
    experts: Layout | None = None
    ranks: int = 1


class Health(NamedTuple):
    """What a probe found: somebody is there; it takes requests now; and why not."""

    alive: bool
    ready: bool
    reason: str = ""
