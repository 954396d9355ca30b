"""Groups in which one process broadcasts: they meet, they last, and they end for all of their members at once."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import distributed

from rollout_svc.collective import Backend, Collective, CollectiveError, Doing, Meeting, unique_id
from tests.support.processes import until

HOST = "127.0.0.1"
TIMEOUT_S = 5.0
PATIENCE_S = 20.0


@contextmanager
def group(size: int = 2, backend: Backend = "gloo", timeout_s: float = TIMEOUT_S) -> Iterator[list[Collective]]:
    """All members of a group, in this process."""
    meeting = Meeting(HOST, timeout_s)

    def join(rank: int) -> Callable[[], Collective]:
        return lambda: Collective(backend, (HOST, meeting.port), rank, size, "g", timeout_s)

    joining = [Doing(f"join {rank}", join(rank)) for rank in range(size)]
    members = [one.result(PATIENCE_S) for one in joining]
    try:
        yield members
    finally:
        for member in members:
            member.close()
        meeting.close()


def broadcast(members: list[Collective], tensors: list[list[torch.Tensor]]) -> None:
    """Have all members take part."""
    work = [
        Doing("broadcast", lambda member=member, own=own: member.broadcast(own))  # type: ignore[misc]
        for member, own in zip(members, tensors, strict=True)
    ]
    for one in work:
        one.result(PATIENCE_S)


def test_everybody_has_what_rank_0_sends() -> None:
    """Tensor after tensor, of several dtypes, empty ones too; in two groups at once; and nobody's default group."""
    sent = [torch.randn(5, 3), torch.arange(7), torch.tensor(2.5).bfloat16(), torch.empty(0, 3)]
    with group(3) as members, group(2) as others:
        for group_ in (members, others, members):
            got = [[torch.zeros_like(tensor) for tensor in sent] for _ in group_[1:]]
            broadcast(group_, [sent, *got])
            for own in got:
                assert all(torch.equal(one, tensor) for one, tensor in zip(own, sent, strict=True))
    assert not distributed.is_initialized()


def test_who_waits_for_one_that_leaves_hears_of_it() -> None:
    """Not its timeout, but the other's leaving ends a wait; what follows is refused."""
    with group(2, timeout_s=PATIENCE_S) as (first, second):
        began = time.monotonic()
        waiting = Doing("wait", lambda: second.broadcast([torch.zeros(4)]))
        first.close()
        with pytest.raises(CollectiveError, match="broadcast"):
            waiting.result(PATIENCE_S)
        assert time.monotonic() - began < TIMEOUT_S
        assert first.closed
        assert second.closed
        with pytest.raises(CollectiveError, match="closed"):
            second.broadcast([torch.zeros(4)])


def test_one_that_takes_no_part_is_waited_for_until_the_timeout() -> None:
    """Then the group is closed, for everybody: the one that comes late finds nobody."""
    with group(2, timeout_s=0.3) as (first, second):
        with pytest.raises(CollectiveError, match=r"[Tt]imed out"):
            first.broadcast([torch.zeros(2**20)])
        assert first.closed
        with pytest.raises(CollectiveError):
            second.broadcast([torch.zeros(2**20)])


def test_closing_one_that_waits_does_not_wait() -> None:
    """`close` is for any thread; the call under way ends by its own timeout, and never as if it had worked."""
    with group(2, timeout_s=0.5) as (first, _):
        waiting = Doing("wait", lambda: first.broadcast([torch.zeros(2**20)]))
        first.close()
        assert first.closed
        with pytest.raises(CollectiveError):
            waiting.result(PATIENCE_S)


def test_a_meeting_that_is_closed_ends_the_joins() -> None:
    """Two of three have come: they do not wait for the third until their timeout."""
    meeting = Meeting(HOST, PATIENCE_S)

    def join(rank: int) -> Callable[[], Collective]:
        return lambda: Collective("gloo", (HOST, meeting.port), rank, 3, "g", PATIENCE_S)

    began = time.monotonic()
    joining = [Doing(f"join {rank}", join(rank)) for rank in (0, 1)]
    until(lambda: meeting._server.num_keys() >= len(joining), "both have come")
    meeting.close()
    for one in joining:
        with pytest.raises(CollectiveError, match="did not meet"):
            one.result(PATIENCE_S)
    with pytest.raises(CollectiveError, match="did not meet"):
        join(0)()
    assert time.monotonic() - began < TIMEOUT_S


def test_one_that_nobody_comes_to_gives_up() -> None:
    """A join is bounded; so is the wait for an id that nobody makes."""
    meeting = Meeting(HOST, TIMEOUT_S)
    with pytest.raises(CollectiveError, match="did not meet"):
        Collective("gloo", (HOST, meeting.port), 0, 2, "g", 0.2)
    with pytest.raises(CollectiveError, match="no unique id"):
        unique_id((HOST, meeting.port), "g", 0.2)
    with pytest.raises(CollectiveError, match="no group can meet"):
        Meeting("192.0.2.1", TIMEOUT_S)  # an address that is nobody's
    meeting.close()


def test_a_member_may_have_joined_as_engines_do() -> None:
    """The keys are those of torch's own helper, with which SGLang and LMDeploy make their group."""
    c10d: Any = distributed.distributed_c10d
    meeting = Meeting(HOST, TIMEOUT_S)
    got = torch.zeros(6)

    def engine() -> None:
        timeout = timedelta(seconds=TIMEOUT_S)
        store = next(c10d.rendezvous(f"tcp://{HOST}:{meeting.port}", 1, 2, timeout=timeout))[0]
        joined, _ = c10d._new_process_group_helper(
            2, 1, [], "gloo", c10d.PrefixStore("g", store), group_name="g", timeout=timeout
        )
        c10d._world.pg_group_ranks[joined] = {0: 0, 1: 1}
        c10d.broadcast(got, src=0, group=joined)
        c10d.destroy_process_group(joined)

    other = Doing("engine", engine)
    member = Collective("gloo", (HOST, meeting.port), 0, 2, "g", TIMEOUT_S)
    member.broadcast([torch.arange(6.0)])
    other.result(PATIENCE_S)
    assert torch.equal(got, torch.arange(6.0))
    member.close()
    meeting.close()


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL needs a device for each of the two members")
def test_nccl_takes_the_same_way() -> None:
    """On two devices: joined by the first broadcast, bit for bit."""
    meeting = Meeting(HOST, PATIENCE_S)
    got = torch.zeros(1000, device="cuda:1")

    def member(rank: int, tensor: torch.Tensor) -> Callable[[], None]:
        def work() -> None:
            with torch.cuda.device(rank):
                own = Collective("nccl", (HOST, meeting.port), rank, 2, "g", PATIENCE_S)
                own.broadcast([tensor])
                own.close()

        return work

    sent = torch.randn(1000, device="cuda:0")
    for one in [Doing("first", member(0, sent)), Doing("second", member(1, got))]:
        one.result(2 * PATIENCE_S)
    assert torch.equal(got.cpu(), sent.cpu())
    meeting.close()
