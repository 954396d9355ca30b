"""Prometheus figures: events in, a registry of its own per service.

Invariant: nothing here is read by the service; leaving it out changes no behaviour.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from rollout_svc import events

__all__ = ["Metrics", "RequestFigures"]

_SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000)
_LENGTHS = (0, 16, 64, 256, 1024, 4096, 16384, 65536)


class RequestFigures(Collector):
    """Counts and histograms of engine calls, in plain dictionaries until they are scraped.

    This is the one event of every request: the library's own counters, with their labels and locks, would be a tenth
    of what a sample costs.
    """

    def __init__(self, bus: events.EventBus) -> None:
        self._finished: defaultdict[tuple[str, str, bool], int] = defaultdict(int)
        self._tokens: defaultdict[str, int] = defaultdict(int)
        self._seconds, self._lengths = _Buckets(_SECONDS), _Buckets(_LENGTHS)
        bus.count(events.RequestFinished, self._count)

    def _count(
        self, _sample_id: str, worker: str, _lane: str, seconds: float, tokens: int, reason: str, late: bool
    ) -> None:
        self._finished[worker, reason, late] += 1
        self._tokens[worker] += tokens
        self._seconds.observe(seconds)
        self._lengths.observe(tokens)

    def collect(self) -> Iterator[Metric]:
        """Give the figures as they are now."""
        finished = CounterMetricFamily("rollout_requests", "Engine answers", labels=["worker", "finish_reason", "late"])
        for (worker, reason, late), number in self._finished.items():
            finished.add_metric([worker, reason, str(late).lower()], number)
        yield finished
        tokens = CounterMetricFamily("rollout_tokens", "Tokens received", labels=["worker"])
        for worker, number in self._tokens.items():
            tokens.add_metric([worker], number)
        yield tokens
        yield self._seconds.family("rollout_request_seconds", "Engine call")
        yield self._lengths.family("rollout_request_tokens", "Tokens of one call")


class _Buckets:
    """A histogram: one count per upper bound, and the sum."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def family(self, name: str, text: str) -> HistogramMetricFamily:
        cumulative, buckets = 0, []
        for bound, number in zip((*self.bounds, float("inf")), self.counts, strict=True):
            cumulative += number
            buckets.append(("+Inf" if bound == float("inf") else f"{float(bound)}", cumulative))
        return HistogramMetricFamily(name, text, buckets=buckets, sum_value=self.total)


class Metrics:
    """Subscribes to a bus and renders `/metrics`."""

    def __init__(self, bus: events.EventBus, status: Callable[[], Mapping[str, Any]]) -> None:
        """Subscribe; `status` gives the record that the gauges are set from when they are read."""
        self.registry = CollectorRegistry()
        self._status = status
        self._counters(bus)
        self._histograms(bus)
        self._gauges()

    def _counters(self, bus: events.EventBus) -> None:
        registry = self.registry
        registry.register(RequestFigures(bus))
        retried = Counter("rollout_retries", "Calls tried again", ["kind"], registry=registry)
        aborted = Counter("rollout_aborted_requests", "Calls cancelled by us", ["reason"], registry=registry)
        failed = Counter("rollout_sample_failures", "Failed attempts", ["reason", "final"], registry=registry)
        settled = Counter("rollout_groups_settled", "Groups ended", ["outcome", "reason"], registry=registry)
        exited = Counter("rollout_engine_exits", "Launched engines that ended", ["worker"], registry=registry)
        died = Counter("rollout_component_deaths", "Tasks that ended with an error", registry=registry)

        bus.subscribe(events.RequestRetried, lambda e: retried.labels(e.kind).inc())
        bus.subscribe(events.RequestAborted, lambda e: aborted.labels(e.reason).inc())
        bus.subscribe(events.SampleFailed, lambda e: failed.labels(e.reason, str(e.final).lower()).inc())
        bus.subscribe(events.GroupSettled, lambda e: settled.labels(e.outcome, e.reason or "").inc())
        bus.subscribe(events.BatchAcked, lambda e: settled.labels("consumed", "").inc(e.groups))
        bus.subscribe(events.EngineExited, lambda e: exited.labels(e.worker).inc())
        bus.subscribe(events.ComponentDied, lambda _: died.inc())
        evaluated = Counter("rollout_evaluations", "Evaluations ended", ["outcome"], registry=registry)
        bus.subscribe(events.EvaluationFinished, lambda e: evaluated.labels(e.outcome).inc())

        accounts = Gauge("rollout_memory_bytes", "Memory and disk", ["process", "account"], registry=registry)
        growth = Gauge(
            *("rollout_memory_growth_bytes_per_step", "Slope over the last window of steps", ["process", "account"]),
            registry=registry,
        )
        growing = Counter("rollout_memory_growing", "Warnings of growth", ["process", "account"], registry=registry)
        bus.subscribe(events.MemorySampled, lambda e: _fill(accounts, e.accounts))
        bus.subscribe(events.MemorySampled, lambda e: _fill(growth, e.slopes))
        bus.subscribe(events.MemoryGrowing, lambda e: growing.labels(e.process, e.account).inc())

    def _histograms(self, bus: events.EventBus) -> None:
        registry = self.registry
        pause = Histogram("rollout_pause_seconds", "Pause", ["mode", "clean"], buckets=_SECONDS, registry=registry)
        left = Counter("rollout_pause_abandoned", "Requests and tasks a pause left running", registry=registry)
        update = Histogram("rollout_update_seconds", "Weight update", ["ok"], buckets=_SECONDS, registry=registry)
        phase = Histogram(
            *("rollout_weight_update_seconds", "Weight update by phase", ["phase"]), buckets=_SECONDS, registry=registry
        )
        wait = Histogram("rollout_batch_wait_seconds", "Wait for a batch", buckets=_SECONDS, registry=registry)

        bus.subscribe(events.PauseFinished, lambda e: pause.labels(e.mode, str(e.clean).lower()).observe(e.elapsed_s))
        bus.subscribe(events.PauseFinished, lambda e: left.inc(e.abandoned))
        bus.subscribe(events.WeightsUpdated, lambda e: update.labels(str(e.ok).lower()).observe(e.seconds))

        def update_phases(event: events.WeightUpdateEnded) -> None:
            for name, seconds in event.phases.items():
                phase.labels(name).observe(seconds)

        bus.subscribe(events.WeightUpdateEnded, update_phases)
        bus.subscribe(events.BatchTaken, lambda e: wait.observe(e.wait_s))

    def _gauges(self) -> None:
        registry = self.registry
        self._ledger = Gauge("rollout_ledger", "Groups and samples by account", ["unit", "account"], registry=registry)
        self._in_flight = Gauge("rollout_in_flight", "Engine calls under way", ["worker"], registry=registry)
        self._limit = Gauge("rollout_limit", "Engine calls allowed", ["worker"], registry=registry)
        self._state = Gauge("rollout_worker_state", "1 for the state it is in", ["worker", "state"], registry=registry)
        self._waits = Gauge("rollout_producer_waiting", "1 for why nothing starts", ["reason"], registry=registry)
        self._absent = Gauge("rollout_no_worker_seconds", "Time without a worker in traffic", registry=registry)
        self._is = Gauge("rollout_service_state", "1 for the state it is in", ["state"], registry=registry)
        self._ready = Gauge("rollout_buffer_ready_groups", "Groups ready for a trainer", registry=registry)
        self._bytes = Gauge("rollout_buffer_bytes", "Finished groups, routed experts included", registry=registry)
        self._handles = Gauge("rollout_tensor_handles", "Heavy tensors that are alive", ["kind"], registry=registry)
        self._tensors = Gauge("rollout_tensor_bytes", "Bytes of those", ["kind"], registry=registry)
        self._lost = Counter("rollout_tensor_handles_lost", "Handles that nobody released", registry=registry)
        self._known_lost = 0
        self._judges = Gauge("rollout_judge_calls", "Judge calls", ["judger", "state"], registry=registry)
        self._judge_s = Gauge(
            *("rollout_judge_seconds", "Judge calls: in line, and running", ["judger", "part", "of"]), registry=registry
        )
        self._eval = Gauge(
            "rollout_evaluation_ledger", "Groups and samples of lane eval", ["unit", "account"], registry=registry
        )
        self._sessions = Gauge("rollout_sessions", "Sessions, and their turns", ["what"], registry=registry)
        self._version = Gauge("rollout_weight_version", "Weight version of the fleet", registry=registry)
        self._rss = Gauge("rollout_rss_bytes", "Resident memory", registry=registry)

    def render(self) -> tuple[bytes, str]:
        """Return the body and content type of `/metrics`."""
        status = self._status()
        for unit in ("groups", "samples"):
            for account, number in status["ledger"][unit].items():
                self._ledger.labels(unit, account).set(number)
            for account, number in status["evaluations"]["ledger"][unit].items():
                self._eval.labels(unit, account).set(number)
        for gauge in (self._in_flight, self._limit, self._state, self._waits, self._is):
            gauge.clear()
        self._is.labels(status["state"]).set(1)
        if reason := status["producer"]["waiting_for"]:
            self._waits.labels(reason).set(1)
        self._absent.set(status["producer"]["no_worker_s"] or 0.0)
        for worker in status["workers"]:
            self._in_flight.labels(worker["id"]).set(worker["in_flight"])
            self._limit.labels(worker["id"]).set(worker["limit"])
            self._state.labels(worker["id"], worker["state"]).set(1)
        self._ready.set(status["buffer"]["ready"])
        self._bytes.set(status["buffer"]["bytes"])
        for gauge in (self._handles, self._tensors):
            gauge.clear()
        for kind, tensors in status["tensors"].items():
            self._handles.labels(kind).set(tensors["handles"])
            self._tensors.labels(kind).set(tensors["bytes"])
        _fill_judges(self._judges, self._judge_s, status.get("judges", {}))
        lost = sum(tensors["lost"] for tensors in status["tensors"].values())
        self._lost.inc(max(0, lost - self._known_lost))
        self._known_lost = max(lost, self._known_lost)
        for what, number in status["sessions"].items():
            self._sessions.labels(what).set(number)
        self._version.set(status["weight_version"])
        self._rss.set(status["rss_bytes"])
        return generate_latest(self.registry), CONTENT_TYPE_LATEST


def _fill_judges(calls: Gauge, seconds: Gauge, judges: Mapping[str, Mapping[str, Any]]) -> None:
    """Show what each judger costs."""
    calls.clear()
    seconds.clear()
    for judger, figures in judges.items():
        for state in ("running", "waiting", "judged", "interrupted"):
            calls.labels(judger, state).set(figures[state])
        for reason, number in figures["failed"].items():
            calls.labels(judger, reason).set(number)
        for part in ("queue", "run"):
            for of in ("p50", "max"):
                seconds.labels(judger, part, of).set(figures[f"{part}_s"][of])


def _fill(gauge: Gauge, values: Mapping[str, Mapping[str, float]]) -> None:
    """Show these values by process and account, and no older ones."""
    gauge.clear()
    for process, accounts in values.items():
        for account, value in accounts.items():
            gauge.labels(process, account).set(value)
