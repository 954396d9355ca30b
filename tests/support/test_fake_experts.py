"""The fakes send routed experts as their engines do, quirks included."""

from __future__ import annotations

from typing import Any

import pytest

from rollout_svc.tensors.experts import RawExperts, decode
from tests.support import lmdeploy_wire, sglang_wire
from tests.support.routing import TINY
from tests.support.sglang_wire import Finish, Reply

PROMPT = [3, 1, 4, 1, 5]


@pytest.mark.parametrize("finish", ["stop", "length"])
@pytest.mark.parametrize("returned", [True, False])
@pytest.mark.parametrize("ray", [False, True])
def test_lmdeploy_aligns_its_rows_but_on_ray(finish: Finish, returned: bool, ray: bool) -> None:
    """Of a stop token that is not returned the row goes too; on Ray it stays, and is cut off here."""
    body = {"input_ids": PROMPT, "return_routed_experts": True, "include_stop_str_in_output": returned}
    shared: list[Any] = []

    def share(rows: Any) -> str:
        shared.append(rows)
        return "ab" * 28

    reply = Reply(tokens=4, finish=finish)
    answer = lmdeploy_wire.generation(body, reply, routing=TINY, share=share if ray else None)
    tokens = [*PROMPT, *answer["output_ids"]]
    told = answer["meta_info"]["routed_experts"]
    assert isinstance(told, str) == ray
    raw = RawExperts("array", shared[0] if ray else told)
    dropped = finish == "stop" and not returned
    assert len(raw.data) == len(tokens) - 1 + (ray and dropped)
    rows = decode(raw, TINY.layout, tokens=len(tokens), stopped=finish == "stop")
    assert rows.tolist() == TINY.rows(tokens).tolist()


def test_sglang_has_none_for_what_it_took_back() -> None:
    """A request that is aborted out of the queue keeps its tokens, and has no routing."""
    body = {"input_ids": PROMPT, "return_routed_experts": True}
    for finish, has in (("abort", True), ("abort-queued", False)):
        reply = Reply(tokens=2, finish=finish)  # type: ignore[arg-type]
        answer = sglang_wire.generation("r", reply, body=body, max_new_tokens=8, version="0", routing=TINY)
        assert ("routed_experts" in answer["meta_info"]) == has
        assert len(answer["output_ids"]) == 2


def test_sglang_refuses_a_start_outside_of_the_prompt() -> None:
    """From 0 up to the prompt's length."""
    for start, refused in ((0, False), (5, False), (6, True), (-1, True)):
        body = {"input_ids": PROMPT, "return_routed_experts": True, "routed_experts_start_len": start}
        assert (sglang_wire.check_generate(body, context=100) is not None) == refused
