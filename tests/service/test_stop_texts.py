"""Stop texts through a whole service and the built-in engine: found, wherever a pause divides them."""

from __future__ import annotations

import json
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollout_svc.embedded.script_file import load_script
from rollout_svc.sample import Sample
from tests.embedded.helpers import CONFIG, MOE_CONFIG, VOCABULARY, Served, served
from tests.support.lifted import LiftingTransport
from tests.support.stage import Stage, stage

ASKED = "<user>which?<assistant>"
SAYS = "the fifth, no, the first, as ever"
ENDS = "the fifth, no, the first"
BYTES: dict[str, Any] = {"path": "bytes"}


async def serve(
    stack: AsyncExitStack, folder: Path, *, stream: bool = False, moe: bool = False, **sections: Any
) -> tuple[Served, Stage]:
    """A service whose one engine says `SAYS`, a byte a token, under a task that ends at `first`."""
    path = folder / "script.jsonl"
    path.write_text('{"turn": "<assistant>"}' + json.dumps({"match": {}, "say": SAYS}))
    script = load_script(path, VOCABULARY)
    config = MOE_CONFIG if moe else CONFIG
    engine = await stack.enter_async_context(served(script=script, config=config, tells_experts=moe))
    sections.setdefault("sampling", {"max_tokens": 100, "stop": ["first"]})
    worker = {"url": str(engine.session._base_url), "stream": stream}
    return engine, await stack.enter_async_context(stage(worker, transport=LiftingTransport, **sections))


async def answer(engine: Served, made: Stage, *cuts: int) -> tuple[Sample, Any]:
    """Have a prompt answered, with a pause after so many steps of the engine, and again; returns its routing too."""
    await made.push([{"id": str(cuts), "input_ids": list(ASKED.encode())}])
    for steps in cuts:
        await engine.queued(1)
        await engine.step(steps)
        assert (await made.pause()).clean
        await made.resume()
    engine.scheduler.permit(1000)
    batch = await made.take()
    engine.scheduler.forbid()
    [group] = made.live_groups()
    [sample] = group.samples
    rows = None if sample.experts is None else sample.experts.read().copy()
    await made.service.ack(batch["batch_id"])
    return sample, rows


def text_of(sample: Sample) -> str:
    """What it says."""
    return bytes(sample.response_ids).decode()


@pytest.mark.parametrize("on_pause", ["abort", "park"])
@pytest.mark.parametrize("tokenizer", [BYTES, {}], ids=["tokenizer", "none"])
async def test_a_stop_text_is_found_wherever_a_pause_divides_it(
    tmp_path: Path, tokenizer: dict[str, Any], on_pause: str
) -> None:
    """Cut after every token of it, and twice in it, a turn is the one that an uncut call makes."""  # P6
    async with AsyncExitStack() as stack:
        agent = {"name": "single_turn", "on_pause": on_pause}
        engine, made = await serve(stack, tmp_path, agent=agent, tokenizer=tokenizer, trainer={"max_staleness": 9})
        whole, _ = await answer(engine, made)
        assert (text_of(whole), whole.finish_reason) == (ENDS, "stop")
        for cuts in [(steps,) for steps in range(15, len(ENDS) - 1)] + [(20, 2), (3, 15, 1)]:
            sample, _ = await answer(engine, made, *cuts)
            assert (cuts, text_of(sample), sample.finish_reason) == (cuts, ENDS, "stop")
            assert (sample.response_length, len(sample.logprobs)) == (len(ENDS), len(ENDS))
            assert sample.weight_versions == whole.weight_versions
        assert made.parts.ledger.redone == 0


async def test_a_stream_that_is_cut_gives_back_too(tmp_path: Path) -> None:
    """What came of a stream before its call was closed is a cut turn like any other."""  # P6
    async with AsyncExitStack() as stack:
        engine, made = await serve(stack, tmp_path, stream=True, tokenizer=BYTES)
        sample, _ = await answer(engine, made, 20, 1)
        assert (text_of(sample), sample.finish_reason) == (ENDS, "stop")


async def test_the_rows_of_a_cut_turn_are_those_of_its_tokens(tmp_path: Path) -> None:
    """Routed experts of what is given back go with it, and those of what is made again take their place."""  # P27
    wanted = {"enabled": True, "layers": MOE_CONFIG.layers, "top_k": MOE_CONFIG.top_k}
    async with AsyncExitStack() as stack:
        engine, made = await serve(stack, tmp_path, moe=True, tokenizer={}, experts=wanted)
        _, rows = await answer(engine, made)
        cut, others = await answer(engine, made, 20, 2)
        assert text_of(cut) == ENDS
        assert len(rows) == len(ASKED) + len(ENDS) - 1
        assert np.array_equal(others, rows)


async def test_a_turn_without_stop_texts_keeps_all_it_had(tmp_path: Path) -> None:
    """Nothing is made again: the engine is asked for what was missing."""  # P10
    async with AsyncExitStack() as stack:
        sampling = {"max_tokens": 100}
        engine, made = await serve(stack, tmp_path, tokenizer=BYTES, sampling=sampling)
        sample, _ = await answer(engine, made, 20)
        assert bytes(sample.response_ids[:-1]).decode() == SAYS
        assert engine.scheduler.generated_tokens == len(SAYS) + 1
