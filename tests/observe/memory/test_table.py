"""The record of memory as text for a bug report."""

from __future__ import annotations

from typing import Any

import pytest

from rollout_svc.observe.memory.advice import advice_on
from rollout_svc.observe.memory.table import render_memory

RECORD: dict[str, Any] = {
    "verdict": "growing: handles.experts of service by 2.00 MB a step since step 31",
    "growing": [{"process": "service", "account": "handles.experts"}],
    "step": 44,
    "steps": 45,
    "window_steps": 20,
    "processes": [
        {
            "name": "service",
            "pid": 77,
            "accounts": {
                "rss": {"bytes": 2_500_000_000, "first_bytes": 999, "bytes_per_step": 2_000_000},
                "journal_disk": {"bytes": 0, "first_bytes": 10_000, "bytes_per_step": -400},
            },
        },
        {"name": "children", "pid": None, "accounts": {"rss": {"bytes": 5, "first_bytes": 5, "bytes_per_step": None}}},
    ],
    "handles": {"experts": {"handles": 3, "bytes": 12_000_000}},
    "lost": {},
    "holders": None,
    "holders_omitted": 0,
    "system": {
        "rollout_svc": "0.1.0",
        "python": "3.11.7",
        "torch": None,
        "ray": "2.60.0",
        "numpy": "2.4.6",
        "libc": "glibc 2.36",
        "allocator": "malloc of the C library",
        "settings": {"MALLOC_ARENA_MAX": "2"},
        "cpus": 2,
        "memory_bytes": 25_000_000_000,
        "memory_limit_bytes": None,
    },
    "trouble": None,
}


def test_the_table_says_everything_and_lines_up() -> None:
    """Verdict, what to look at, each account with its numbers, handles, versions and settings."""
    assert list(render_memory(RECORD)) == [
        "growing: handles.experts of service by 2.00 MB a step since step 31",
        "  handles.experts: tensors that were not released: memory.debug names the holder of each",
        "45 steps seen, the last one 44; slopes over 20 steps",
        "",
        "process       account          now  at first   a step",
        "service (77)  rss           2.5 GB     999 B  +2.0 MB",
        "              journal_disk     0 B   10.0 KB   -400 B",
        "children      rss              5 B       5 B        -",
        "",
        "live handles: experts 3 (12.0 MB)",
        "holders: set memory.debug to have each handle listed with its holder",
        "rollout_svc 0.1.0, python 3.11.7, torch not installed, ray 2.60.0, numpy 2.4.6",
        "glibc 2.36, malloc of the C library, MALLOC_ARENA_MAX=2",
        "2 cpus, 25.0 GB of memory, no limit",
    ]


def test_holders_are_counted_and_what_was_lost_is_said() -> None:
    """In debug, who holds how many of what; tensors that were forgotten, and what could not be read."""
    holders = [{"kind": "experts", "bytes": 4, "holder": name} for name in ("sample a", "sample b", "sample b")]
    more = {"holders": holders, "holders_omitted": 7, "lost": {"shard": 2}, "trouble": "RpcError: no"}
    text = list(render_memory(RECORD | more))
    assert text[-8:] == [
        "forgotten by their owners: shard 2",
        "  experts: 2 held by sample b",
        "  experts: 1 held by sample a",
        "  and 7 more",
        *list(render_memory(RECORD))[-3:],
        "could not be read: RpcError: no",
    ]


@pytest.mark.parametrize("account", ["rss", "handles.anything", "something else"])
def test_there_is_advice_on_every_account(account: str) -> None:
    """Each has a line, an unknown one too."""
    assert advice_on(account)
