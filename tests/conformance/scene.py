"""A service in front of one site, and what holds of every pause it makes there."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final

import orjson
import pytest

from rollout_svc.engines.updates.protocol import WAYS
from rollout_svc.events import SampleFailed
from rollout_svc.pause.report import PauseReport
from tests.conformance.site import Site
from tests.support.recorded import RecordedTransport
from tests.support.stage import Stage, stage

__all__ = ["Scene", "scene", "skip_unshown"]

_QUARANTINE_S: Final = 0.3

_OTHERS = {"experts", *WAYS, "offload", "offload_kv", "weights_backup"}


class Scene:
    """A service in front of one site."""

    def __init__(self, site: Site, made: Stage, transport: RecordedTransport) -> None:
        self.site = site
        self.made = made
        self.transport = transport
        self._registering = len(transport.sent)  # a dialect may look for an abort's route by calling it

    @property
    def load(self) -> int:
        """Requests under way in a full site: half of them run, half are in its queue."""
        return _load(self.site)

    @property
    def aborts(self) -> int:
        """Calls to abort that were sent so far."""
        dialect = self.site.dialect
        paths = {call.path for call in (*dialect.abort(None), *dialect.abort(["0" * 32]))}
        return sum(call.path in paths for call in self.transport.sent[self._registering :])

    async def pause(self, deadline_s: float = 10.0, **rest: Any) -> PauseReport:
        """Pause, with a deadline at the site's pace."""
        return await self.made.pause(deadline_s * self.site.pace, **rest)

    async def until(self, holds: Callable[[], bool]) -> None:
        """Wait as long as the site may take."""
        await self.made.until(holds, timeout_s=self.site.wait_s)

    async def full(self) -> None:
        """Have the site hold as many requests as make its load."""
        await self.made.push(self.load)
        await self.site.wait_inside(self.load)

    async def stopped(self, report: PauseReport) -> None:
        """Check what a pause in mode `abort` that was obeyed has to say, and that it is true."""  # P8 P9
        tally = report.workers["w0"]
        assert report.clean
        assert not report.abandoned
        assert tally.in_flight == tally.answered + tally.cancelled
        assert tally.residual == (0 if "count" in self.site.capabilities else None)
        assert await self.site.own_count() == 0
        assert self.made.samples("in_flight") == 0

    def kept(self) -> dict[str, list[int]]:
        """What the service holds of every unfinished answer, by prompt."""
        samples = {group.prompt.prompt_id: group.samples[0] for group in self.made.live_groups()}
        return {
            prompt_id: sample.response_ids if sample.packed is None else orjson.loads(sample.packed)["response_ids"]
            for prompt_id, sample in samples.items()
        }

    async def whole(self, prompts: int | None = None) -> dict[str, dict[str, Any]]:
        """Let everything end, and take it: by prompt, checked to be whole, with nothing lost and nothing too much."""
        self.site.finish()
        batch = await self.made.take(0, prompts or self.load, self.site.wait_s)
        records = {group["prompt"]["id"]: group["samples"][0] for group in batch["groups"]}
        assert len(records) == (prompts or self.load)
        for record in records.values():
            assert len(record["response_ids"]) == self.site.sampling["max_tokens"]  # P6
            assert len(record["logprobs"]) == len(record["response_ids"])
            assert (record["status"], record["finish_reason"]) == ("COMPLETED", "length")
        assert not self.made.of(SampleFailed)
        return records

    def whole_evaluation(self, samples: Sequence[Mapping[str, Any]], prompts: int) -> None:
        """Check an evaluation's answers: all there, whole, and of the fleet's weights."""
        assert len(samples) == prompts
        version = self.made.parts.fleet.version
        for sample in samples:
            assert (sample["status"], sample["finish_reason"]) == ("COMPLETED", "length")
            assert len(sample["response_ids"]) == self.site.sampling["max_tokens"]
            assert {span["version"] for span in sample["weight_versions"]} == {version}  # P7


@asynccontextmanager
async def scene(site: Site, *others: Mapping[str, Any], **sections: Any) -> AsyncIterator[Scene]:
    """Run a service in front of a site, and other engines, that it keeps full as far as there are prompts."""
    transport = RecordedTransport()
    worker = {"url": site.url, "dialect": site.dialect.name, "max_batch": _load(site), **site.worker}
    settings: dict[str, Any] = {
        "trainer": {"train_batch_size": _load(site)},
        "pause": {"quarantine_s": _QUARANTINE_S},
        "sampling": dict(site.sampling),
        "start_timeout_s": site.wait_s,
    }
    async with stage(worker, *others, transport=lambda: transport, **(settings | sections)) as made:
        transport.on_sent = made.bell.ring
        assert set(made.worker().capabilities) - _OTHERS == site.capabilities  # of stopping
        try:
            yield Scene(site, made, transport)
        finally:
            site.heal()


def skip_unshown(request: pytest.FixtureRequest, site: Site) -> None:
    """Skip the test that asks where the site says that its promise cannot be shown there."""
    assert set(site.unshown) <= vars(request.module).keys(), "a promise that is not shown is one there is"
    if reason := site.unshown.get(request.node.originalname):
        pytest.skip(f"{site.name}: {reason}")


def _load(site: Site) -> int:
    return 2 * site.slots
