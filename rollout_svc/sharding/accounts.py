"""One ledger of several. Pure.

Invariants:

- The sum of books that balance balances.
- What a life without a journal had settled stays counted (`settled_in`); what it had not settled was lost with it, and
  is in no account. A life with a journal brings its own counts back.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rollout_svc.ledger import ACCOUNTS, SETTLED

__all__ = ["EMPTY", "ledger_sum", "settled_in"]

Record = Mapping[str, Any]

_UNITS = ("groups", "samples")
_TALLIES = ("late_discarded", "redone")


def _book(counts: Mapping[str, int]) -> dict[str, int]:
    accounts = {str(name): counts.get(name, 0) for name in ACCOUNTS}
    return {"admitted": sum(accounts.values())} | accounts


def ledger_sum(records: Iterable[Record]) -> dict[str, Any]:
    """Add up ledgers, as their records."""
    records = list(records)
    books = {unit: _book({name: sum(record[unit][name] for record in records) for name in ACCOUNTS}) for unit in _UNITS}
    return books | {name: sum(record[name] for record in records) for name in _TALLIES}


def settled_in(record: Record) -> dict[str, Any]:
    """What of a ledger is for good."""
    books = {unit: _book({name: record[unit][name] for name in SETTLED}) for unit in _UNITS}
    return books | {name: record[name] for name in _TALLIES}


EMPTY: Record = ledger_sum(())
"""The ledger of nothing."""
