"""Mutants of routed experts: histories of rows that are kept, lost, or asked for where nobody should.

Invariant: data only, as in `catalogue`.
"""

from __future__ import annotations

from typing import Final

from tests.simulation.mutants.mutant import Edit, Mutant

__all__ = ["ROUTED"]


def _mutant(name: str, bug: str, caught_by: str, *edits: tuple[str, str, str]) -> Mutant:
    return Mutant(name, bug, tuple(Edit(*edit) for edit in edits), frozenset(caught_by.split()))


ROUTED: Final = (
    _mutant(
        "continuation_keeps_old_rows",
        "a sample that goes on has a new history, and nobody releases the old one",
        "P27",
        ("sample.sample", '            self._release_experts("its continuation")\n', ""),
    ),
    _mutant(
        "redone_keeps_rows",
        "a sample that begins again goes on from the rows it had",
        "P27",
        (
            "sample.sample",
            '        self._release_experts(f"{self.status} ({self.reason})")\n',
            '        if for_good:\n            self._release_experts(f"{self.status} ({self.reason})")\n',
        ),
    ),
    _mutant(
        "dropped_keeps_rows",
        "what failed, expired or was filtered keeps its rows",
        "P27 P28",
        (
            "sample.sample",
            '        self._release_experts(f"{self.status} ({self.reason})")\n',
            '        if not for_good:\n            self._release_experts(f"{self.status} ({self.reason})")\n',
        ),
    ),
    _mutant(
        "consumed_keeps_rows",
        "an acknowledged sample keeps its rows",
        "P27",
        ("sample.sample", '            self._release_experts("consumed")\n', "            pass\n"),
    ),
    _mutant(
        "rows_asked_from_the_tokens",
        "a call asks for the rows of what is new, not for those that are missing, and joins what it gets",
        "P27",
        (
            "workers.experts",
            "return 0 if sample.experts is None else sample.experts.shape[0]",
            "return max(0, len(sample.prompt_ids) + sample.response_length - 1) if sample.segments else 0",
        ),
        ("workers.experts", " or len(before) != self.held", ""),
    ),
    _mutant(
        "rows_of_an_ended_call",
        "a thread goes on when its call was ended, and nobody takes what it made",
        "P27",
        (
            "workers.experts",
            "            job.unwanted = True\n            result.add_done_callback(self._let_go)\n",
            "            result.add_done_callback(self._results.discard)\n",
        ),
    ),
    _mutant(
        "incomplete_rows_are_judged",
        "a sample whose rows are not all there is taken for whole",
        "P27 P4",
        ("rollout.generating", "if context.experts and (missing := sample.rows_missing):", "if missing := 0:"),
        ("workers.experts", "elif not may_lack(completion, request):", "elif not completion.ids:"),
    ),
    _mutant(
        "a_turn_without_rows_is_forgotten",
        "a loop that wants none in one turn keeps those of the others",
        "P28 P27",
        ("agent.context", '            sample.give_up_experts(self._attempt, "a turn asked for none")\n', ""),
    ),
    _mutant(
        "evaluation_asks",
        "an evaluation asks for routed experts, as the task's settings say",
        "P28",
        ("evaluations.evaluations", ", settling=settling, experts=False)", ", settling=settling)"),
        ("evaluations.request", '"return_routed_experts": False', '"return_routed_experts": True'),
        ("workers.experts", ' and lane == "train"', ""),
    ),
    _mutant(
        "evaluation_switches_it_off",
        "an evaluation takes the setting away from training, for good",
        "P27 P28",
        (
            "evaluations.request",
            'drawn.model_copy(update={"return_routed_experts": False}, deep=True)',
            "(base.__dict__.update(return_routed_experts=False), drawn.model_copy(update=base.__dict__))[1]",
        ),
    ),
)
