"""What a real vLLM does in an update and asleep that the service has to know: each is why some of its code is there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.vllm.checkpoints import broken
from tests.vllm.models import Oracle
from tests.vllm.server import Server

PROMPT = [5, 6, 7, 8]
START, UPDATE, FINISH = "/start_weight_update", "/update_weights", "/finish_weight_update"


def said(engine: Server, path: str) -> Any:
    """What a GET answers."""
    status, answer = engine.call("GET", path)
    assert status == 200
    return answer


def refused(engine: Server, path: str, body: Any = None) -> str:
    """Why a POST is answered with 500, as it should be."""
    status, answer = engine.call("POST", path, body)
    assert status == 500, answer
    message: str = answer["error"]["message"]
    return message


def reload(path: Path) -> dict[str, Any]:
    """A load from disk."""
    return {"method": "reload_weights", "kwargs": {"weights_path": str(path)}}


def bucket(path: Path, part: int = 0, parts: int = 3) -> dict[str, Any]:
    """A bucket of the tests' own transfer."""
    return {"update_info": {"path": str(path), "part": part, "parts": parts}}


def spoken(engine: Server) -> list[int]:
    """A few greedy tokens, none of them out of a cache."""
    engine.do("/reset_prefix_cache")
    params = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}
    answer = engine.do("/inference/v1/generate", {"token_ids": PROMPT, "sampling_params": params})
    ids: list[int] = answer["choices"][0]["token_ids"]
    return ids


def test_a_server_tells_its_switches(engine: Server) -> None:
    """Routes are there with the development mode, whatever they need: the configuration says what works."""
    config = said(engine, "/server_info?config_format=json")["vllm_config"]
    assert config["weight_transfer_config"] == {"backend": "files"}
    assert config["model_config"]["enable_sleep_mode"] is False
    assert {"/sleep", "/wake_up", START} <= said(engine, "/openapi.json")["paths"].keys()


def test_a_round_that_failed_is_over_and_nothing_says_so(engine: Server, oracle: Oracle) -> None:
    """The label is the old one, the server healthy, and there are no weights: hence `loading` on the label."""  # P24
    engine.do(START)
    assert "already active" in refused(engine, START)
    engine.do(UPDATE, bucket(oracle.path("b")))
    refused(engine, UPDATE, bucket(oracle.path("none")))
    assert "without a matching start" in refused(engine, FINISH, {"weight_version": "5"})
    assert said(engine, "/weight_info") == {"weight_version": "default"}
    assert engine.is_up()
    engine.drop_round()
    engine.reload(oracle.path("b"))
    assert oracle.is_greedy("b", PROMPT, spoken(engine))


def test_a_round_is_finished_with_whatever_came(engine: Server, oracle: Oracle) -> None:
    """A third of the tensors, and it takes the label of the whole: who sends them has to count."""  # P24
    engine.do(START)
    engine.do(UPDATE, bucket(oracle.path("b")))
    engine.do(FINISH, {"weight_version": "5"})
    assert said(engine, "/weight_info") == {"weight_version": "5"}
    ids = spoken(engine)
    assert not oracle.is_greedy("a", PROMPT, ids)
    assert not oracle.is_greedy("b", PROMPT, ids)


@pytest.mark.parametrize("how", ["wrong_shape", "torn_layer"])
def test_a_load_that_failed_is_part_of_the_next(engine: Server, oracle: Oracle, tmp_path: Path, how: str) -> None:
    """A good checkpoint fails after it, unless an empty round came at once and made the engine forget it."""  # P24
    bad = reload(broken(oracle.path("b"), how, tmp_path))
    refused(engine, "/collective_rpc", bad)
    engine.drop_round()
    engine.do("/collective_rpc", reload(oracle.path("b")))
    assert oracle.is_greedy("b", PROMPT, spoken(engine))
    refused(engine, "/collective_rpc", bad)
    refused(engine, "/collective_rpc", reload(oracle.path("b")))


def test_an_empty_round_changes_nothing(engine: Server, oracle: Oracle) -> None:
    """So it may be tried in an engine that is whole."""  # P24
    engine.drop_round()
    assert said(engine, "/weight_info") == {"weight_version": "default"}
    assert oracle.is_greedy("a", PROMPT, spoken(engine))


def test_an_engine_asleep_is_resumed_when_asked(engine: Server, oracle: Oracle) -> None:
    """`/resume` would have it compute with memory that is gone: only `/wake_up` may follow `/sleep`."""
    engine.do("/sleep?level=1")
    assert (said(engine, "/is_sleeping"), said(engine, "/is_paused")) == ({"is_sleeping": True}, {"is_paused": True})
    engine.do("/resume")
    assert (said(engine, "/is_sleeping"), said(engine, "/is_paused")) == ({"is_sleeping": True}, {"is_paused": False})
    engine.do("/sleep?level=1")
    assert engine.do("/wake_up?tags=weights")["status"] == "sleeping"
    assert engine.do("/wake_up?tags=kv_cache")["status"] == "awake"
    assert (said(engine, "/is_sleeping"), said(engine, "/is_paused")) == ({"is_sleeping": False}, {"is_paused": False})
    assert oracle.is_greedy("a", PROMPT, spoken(engine))


def test_asleep_is_said_of_every_pause(engine: Server) -> None:
    """And waking ends a pause that is not its own, so it is not asked of an engine that was never put to sleep."""
    assert "requires a completed pause" in refused(engine, "/release_kv_cache_memory")
    engine.do("/pause?mode=keep&clear_cache=false")
    assert said(engine, "/is_sleeping") == {"is_sleeping": True}
    engine.do("/wake_up")
    assert said(engine, "/is_paused") == {"is_paused": False}
