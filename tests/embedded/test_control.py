"""Control over real sockets: pauses, weights, labels, keys, shutdown, and what each does to the requests in flight."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from rollout_svc.embedded.auth import Keys
from rollout_svc.embedded.model import build, load_weights, save_weights
from tests.embedded.helpers import (
    ABORTED,
    CONFIG,
    PATIENCE_S,
    job,
    plain_logprobs,
    served,
    small_model,
    uninterrupted_ids,
)


async def test_a_pause_aborts_and_holds_newcomers_until_it_ends() -> None:
    """After a pause nothing runs; a newcomer waits, also through a second pause, and runs on continue."""
    async with served() as engine:
        running = engine.generate("running", limit=50)
        await engine.queued(1)
        await engine.step(3)
        paused = {"message": "Generation paused successfully.", "status": "ok"}
        assert await engine.call("/pause_generation", {"mode": "abort"}) == (200, paused)
        assert running.done() or (await running)
        assert (await running)[1]["meta_info"]["finish_reason"] == ABORTED
        late = engine.generate("late", limit=4)
        await engine.until(lambda: engine.engine.door.waiting == 1)
        assert await engine.call("/pause_generation", {}) == (200, paused)
        assert (await engine.call("/ready", method="GET"))[0] == 503
        assert (await engine.call("/ping", method="GET"))[0] == 200
        assert (await engine.call("/health", method="GET"))[0] == 200
        assert (await engine.call("/v1/loads", method="GET"))[1]["loads"][0]["num_waiting_reqs"] == 1
        engine.scheduler.open()
        assert not late.done()
        assert (await engine.call("/continue_generation", {}))[1]["status"] == "ok"
        assert (await late)[1]["meta_info"]["finish_reason"] == {"type": "length", "length": 4}
        assert (await engine.call("/ready", method="GET"))[0] == 200
        engine.assert_idle()


async def test_weights_from_disk_change_the_tokens_and_the_label(tmp_path: Path) -> None:
    """While paused an update runs at once; afterwards tokens are those of the new weights."""
    save_weights(build(CONFIG, 99), tmp_path)
    async with served(is_open=True) as engine:
        _, before = await engine.generate("before")
        await engine.call("/pause_generation", {"mode": "abort"})
        body = {"model_path": str(tmp_path), "weight_version": "v1", "flush_cache": True}
        status, answer = await engine.call("/update_weights_from_disk", body)
        message = "Succeeded to update model weights. Weight version updated to v1."
        assert (status, answer) == (200, {"success": True, "message": message, "num_paused_requests": 0})
        await engine.call("/continue_generation", {})
        _, after = await engine.generate("after")
        assert after["meta_info"]["weight_version"] == "v1"
        assert after["output_ids"] != before["output_ids"]
        done = job("after")
        done.ids = after["output_ids"]
        model = small_model()
        load_weights(model, tmp_path)
        logprobs = [entry[0] for entry in after["meta_info"]["output_token_logprobs"]]
        assert logprobs == pytest.approx(plain_logprobs(model, done), abs=1e-4)
        info = (await engine.call("/model_info", method="GET"))[1]
        assert (info["weight_version"], info["model_path"]) == ("v1", str(tmp_path))


async def test_weights_that_do_not_fit_change_nothing_and_abort_nothing(tmp_path: Path) -> None:
    """A failed update answers 400 and is a no-op: running requests go on, tokens and label stay."""
    path = tmp_path / "broken.safetensors"
    path.write_bytes(b"not a tensor")
    whole = uninterrupted_ids(16)
    async with served() as engine:
        running = engine.generate("running")
        await engine.queued(1)
        await engine.step(2)
        for bad in (path, tmp_path / "absent"):
            body = {"model_path": str(bad), "weight_version": "v1", "abort_all_requests": True}
            status, answer = await engine.call("/update_weights_from_disk", body)
            assert (status, answer["success"]) == (400, False)
            assert str(bad) in answer["message"]
        engine.scheduler.open()
        _, answer = await running
        assert answer["output_ids"] == whole
        assert answer["meta_info"]["weight_version"] == "default"


async def test_an_update_without_a_pause_waits_for_what_runs(tmp_path: Path) -> None:
    """It lets the running finish on the old weights, and holds newcomers back for the new ones."""
    save_weights(build(CONFIG, 99), tmp_path)
    async with served() as engine:
        running = engine.generate("running", limit=12)
        await engine.queued(1)
        await engine.step()
        body = {"model_path": str(tmp_path), "weight_version": "v1"}
        update = asyncio.create_task(engine.call("/update_weights_from_disk", body), name="update")
        await engine.until(lambda: engine.engine.door.closed)
        late = engine.generate("late", limit=3)
        await engine.until(lambda: engine.engine.door.waiting == 1)
        assert not update.done()
        engine.scheduler.open()
        assert (await running)[1]["meta_info"]["weight_versions"] == [{"version": "default", "start": 0, "end": 12}]
        assert (await update)[0] == 200
        assert (await late)[1]["meta_info"]["weight_versions"] == [{"version": "v1", "start": 0, "end": 3}]
        engine.assert_idle()


async def test_an_update_may_abort_what_runs(tmp_path: Path) -> None:
    """With `abort_all_requests` the running are answered with what they have, under the old label."""
    save_weights(build(CONFIG, 99), tmp_path)
    async with served() as engine:
        running = engine.generate("running", limit=12)
        await engine.queued(1)
        await engine.step()
        body = {"model_path": str(tmp_path), "weight_version": "v1", "abort_all_requests": True}
        assert (await engine.call("/update_weights_from_disk", body))[0] == 200
        _, answer = await running
        assert answer["meta_info"]["finish_reason"] == ABORTED
        assert answer["meta_info"]["weight_version"] == "default"


async def test_a_new_label_aborts_everything_unless_told_not_to() -> None:
    """The default aborts; with false the request goes on and its answer spans both labels."""
    async with served() as engine:
        first = engine.generate("first", limit=12)
        await engine.queued(1)
        await engine.step(2)
        body: dict[str, Any] = {"new_version": "v1"}
        expected = {"success": True, "message": "Weight version updated to v1", "new_version": "v1"}
        assert await engine.call("/update_weight_version", body) == (200, expected)
        _, answer = await first
        assert (answer["meta_info"]["finish_reason"], answer["meta_info"]["weight_version"]) == (ABORTED, "default")
        second = engine.generate("second", limit=12)
        await engine.queued(1)
        await engine.step(2)
        await engine.call("/update_weight_version", {"new_version": "v2", "abort_all_requests": False})
        engine.scheduler.open()
        meta = (await second)[1]["meta_info"]
        assert meta["finish_reason"]["type"] == "length"
        assert meta["weight_version"] == "v2"
        spans = [{"version": "v1", "start": 0, "end": 3}, {"version": "v2", "start": 3, "end": 12}]
        assert meta["weight_versions"] == spans


async def test_flush_is_refused_while_busy() -> None:
    """400 while anything runs, 200 when idle; with a timeout it waits."""
    async with served() as engine:
        assert (await engine.call("/flush_cache"))[0] == 200
        running = engine.generate("running")
        await engine.queued(1)
        status, text = await engine.call("/flush_cache", method="GET")
        assert (status, text.strip()) == (400, "Flush cache failed.")
        assert (await engine.call("/flush_cache?timeout=0.001"))[0] == 400
        waiting = asyncio.create_task(engine.call("/flush_cache?timeout=20"), name="flush")
        engine.scheduler.open()
        assert (await waiting)[0] == 200
        await running
        assert (await engine.call("/flush_cache?timeout=soon"))[0] == 400


async def test_a_client_that_leaves_frees_its_row() -> None:
    """A closed connection aborts the request behind it: running, queued or at the door."""
    async with served(max_running=1) as engine:
        tasks = [engine.generate("running"), engine.generate("queued")]
        await engine.queued(2)
        await engine.step()
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks, timeout=PATIENCE_S)
        await engine.queued(0)
        await engine.call("/pause_generation", {})
        late = engine.generate("late")
        await engine.until(lambda: engine.engine.door.waiting == 1)
        late.cancel()
        await asyncio.wait([late], timeout=PATIENCE_S)
        await engine.until(lambda: engine.engine.door.waiting == 0)
        engine.assert_idle()


async def test_loads_count_running_and_waiting() -> None:
    """Running are those in the batch, waiting all others in flight."""
    async with served(max_running=2) as engine:
        tasks = [engine.generate(f"r{index}") for index in range(5)]
        await engine.queued(5)
        await engine.step()
        _, answer = await engine.call("/v1/loads", method="GET")
        load = answer["loads"][0]
        assert (load["num_running_reqs"], load["num_waiting_reqs"], load["max_running_requests"]) == (2, 3, 2)
        engine.scheduler.open()
        await asyncio.gather(*tasks)


async def test_closing_answers_what_is_in_flight() -> None:
    """A shutdown gives every request its partial output."""
    async with served(max_running=1) as engine:
        tasks = [engine.generate("running"), engine.generate("queued")]
        await engine.queued(2)
        await engine.step()
        await engine.server.close()
        kinds = [(await task)[1]["meta_info"]["finish_reason"]["type"] for task in tasks]
        assert kinds == ["abort", "abort"]
        await engine.server.close()


async def test_keys_guard_data_and_control_apart() -> None:
    """The data key opens data routes only, the admin key admin routes only; health is open."""
    async with served(is_open=True, keys=Keys("k1", "adm")) as engine:
        body = {"input_ids": [1], "sampling_params": {"max_new_tokens": 1}}

        async def status(path: str, key: str | None, method: str = "POST") -> int:
            headers = {} if key is None else {"Authorization": f"Bearer {key}"}
            sent = None if method == "GET" else body if path == "/generate" else {"new_version": "a"}
            code, answer = await engine.call(path, sent, method=method, headers=headers)
            assert code != 401 or answer == {"error": "Unauthorized"}
            return code

        assert [await status("/generate", key) for key in (None, "k1", "adm")] == [401, 200, 401]
        assert [await status("/abort_request", key) for key in (None, "k1", "adm")] == [401, 401, 200]
        assert [await status("/update_weight_version", key) for key in (None, "k1", "adm")] == [401, 401, 200]
        assert [await status("/ping", key, "GET") for key in (None, "k1")] == [401, 200]
        assert [await status(path, None, "GET") for path in ("/health", "/ready")] == [200, 200]


def test_one_key_guards_everything_but_health() -> None:
    """With a data key alone, admin routes take it too; with an admin key alone, data routes are open."""
    data = Keys(api_key="k1")
    assert data.admits("/abort_request", "Bearer k1")
    assert not data.admits("/abort_request", None)
    admin = Keys(admin_api_key="adm")
    assert admin.admits("/generate", None)
    assert not admin.admits("/abort_request", "Bearer other")
    assert "k1" not in repr(data)


async def test_a_fault_of_the_engine_is_told_to_everyone(monkeypatch: pytest.MonkeyPatch) -> None:
    """When a step raises, requests are answered 503, and liveness says so."""
    async with served(is_open=True) as engine:

        def broken() -> None:
            raise ArithmeticError("bad step")

        monkeypatch.setattr(engine.scheduler, "step", broken)
        status, answer = await engine.generate("r")
        assert status == 503
        assert "bad step" in answer["error"]["message"]
        assert (await engine.call("/ping", method="GET"))[0] == 503
        assert (await engine.call("/health", method="GET"))[0] == 503
        assert (await engine.generate("next"))[0] == 503
        assert isinstance(await engine.engine.thread.failed, ArithmeticError)
