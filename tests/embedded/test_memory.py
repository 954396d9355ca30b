"""The built-in engine gives memory up and takes it back, over its socket."""

from __future__ import annotations

import torch

from rollout_svc.embedded.model import save_weights
from tests.embedded.helpers import Served, served, small_model, uninterrupted_ids

RELEASE, RESUME = "/release_memory_occupation", "/resume_memory_occupation"
BOTH = {"tags": ["weights", "kv_cache"]}


def parameters(engine: Served) -> dict[str, torch.Tensor]:
    """Copies of its weights."""
    return {name: tensor.clone() for name, tensor in engine.scheduler.model.state_dict().items()}


def held_bytes(engine: Served) -> int:
    """Bytes of its weights and of its cache."""
    kv = engine.scheduler.batch._forward._kv
    return sum(tensor.nbytes for tensor in [*engine.scheduler.model.parameters(), *kv])


async def told(engine: Served) -> list[str]:
    """What it says it has given up."""
    _, info = await engine.call("/server_info", method="GET")
    released: list[str] = info["released_memory"]
    return released


async def test_weights_come_back_bit_for_bit() -> None:
    """Everything is given up, nothing is held, and the engine generates what it did before."""
    async with served(is_open=True) as engine:
        before = parameters(engine)
        assert await engine.call(RELEASE, BOTH) == (200, None)
        assert (held_bytes(engine), await told(engine)) == (0, ["kv_cache", "weights"])
        assert await engine.call(RESUME, {"tags": ["weights"]}) == (200, None)
        assert await told(engine) == ["kv_cache"]
        assert await engine.call(RESUME, {"tags": ["kv_cache"]}) == (200, None)
        after = parameters(engine)
        assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
        _, answer = await engine.generate("a", limit=8)
        assert answer["output_ids"] == uninterrupted_ids(8)
        engine.assert_idle()


async def test_a_busy_engine_refuses() -> None:
    """A request that runs has its memory; an idle engine may be asked again."""
    async with served() as engine:
        running = engine.generate("a", limit=4)
        await engine.queued(1)
        status, body = await engine.call(RELEASE, BOTH)
        assert (status, "busy" in body["error"]["message"], await told(engine)) == (400, True, [])
        engine.scheduler.open()
        assert (await running)[1]["output_ids"] == uninterrupted_ids(4)
        assert (await engine.call(RELEASE, BOTH))[0] == 200


async def test_what_is_not_so_is_refused() -> None:
    """A tag that is unknown, given up already or not at all: 400, and nothing has changed."""
    async with served() as engine:
        before = held_bytes(engine)
        refused = [
            await engine.call(RESUME, {"tags": ["weights"]}),
            await engine.call(RELEASE, {"tags": ["weights", "cuda_graph"]}),
            await engine.call(RELEASE, {"tags": []}),
        ]
        assert ([status for status, _ in refused], held_bytes(engine)) == ([400] * 3, before)
        assert (await engine.call(RELEASE, {"tags": ["kv_cache"]}))[0] == 200
        status, body = await engine.call(RELEASE, BOTH)
        assert (status, await told(engine)) == (400, ["kv_cache"])
        assert "already given up: kv_cache" in body["error"]["message"]


async def test_requests_wait_for_the_memory() -> None:
    """What comes meanwhile waits in the queue, where an abort ends it, and runs when all is back."""
    async with served(is_open=True) as engine:
        await engine.call(RELEASE, BOTH)
        waiting, doomed = engine.generate("a", limit=8), engine.generate("b", limit=8)
        await engine.queued(2)
        await engine.call("/abort_request", {"rid": "b"})
        assert (await doomed)[1]["output_ids"] == []
        await engine.call(RESUME, {"tags": ["weights"]})
        assert (engine.scheduler.steps, waiting.done()) == (0, False)
        await engine.call(RESUME, {"tags": ["kv_cache"]})
        assert (await waiting)[1]["output_ids"] == uninterrupted_ids(8)


async def test_weights_are_loaded_once_they_are_back(tmp_path: object) -> None:
    """Without weights there is nothing to load into; with them, and no cache yet, there is."""
    path = f"{tmp_path}/model.safetensors"
    save_weights(small_model(seed=7), path)
    update = {"model_path": path, "weight_version": "1"}
    async with served(is_open=True) as engine:
        await engine.call(RELEASE, BOTH)
        for route, body in (("/update_weights_from_disk", update), ("/begin_weight_update", {})):
            status, answer = await engine.call(route, body)
            assert (status, "taken back first" in answer["message"]) == (400, True)
        await engine.call(RESUME, {"tags": ["weights"]})
        assert (await engine.call("/update_weights_from_disk", update))[0] == 200
        await engine.call(RESUME, {"tags": ["kv_cache"]})
        wanted = small_model(seed=7).state_dict()
        assert all(torch.equal(tensor, wanted[name]) for name, tensor in parameters(engine).items())
        assert (await engine.generate("a", limit=8))[1]["meta_info"]["weight_version"] == "1"
