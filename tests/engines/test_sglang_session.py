"""The session around an update of SGLang's, whichever way its weights come."""

from __future__ import annotations

import orjson
import pytest

from rollout_svc.engines.calls import Call, Reply
from rollout_svc.engines.updates.distributed import SGLangDistributedUpdate
from rollout_svc.engines.updates.protocol import Opening
from rollout_svc.engines.updates.sglang import SGLangUpdate

BEGIN, END = "/begin_weight_update", "/end_weight_update"
OPENING = Opening(manifest=None, check_finite=False, version=3, own={})


class Engine:
    """Answers each path with its statuses in turn, the last of them from then on; 200 where none are given."""

    def __init__(self, **statuses: list[int]) -> None:
        self.calls: list[Call] = []
        self._statuses = {f"/{path}": given for path, given in statuses.items()}

    async def ask(self, call: Call) -> Reply:
        self.calls.append(call)
        left = self._statuses.get(call.path, [200])
        status = left.pop(0) if len(left) > 1 else left[0]
        return Reply(status, b"{}" if status == 200 else b"no")

    @property
    def session(self) -> list[str]:
        return [call.path for call in self.calls if call.path in (BEGIN, END)]


@pytest.mark.parametrize("update", [SGLangUpdate, SGLangDistributedUpdate])
async def test_a_draft_model_takes_part(update: type[SGLangUpdate | SGLangDistributedUpdate]) -> None:
    """P24: by either way the session is for all models of the engine: one left out would keep its old weights."""
    engine = Engine()
    await update().open(engine.ask, OPENING)
    assert [orjson.loads(call.body or b"") for call in engine.calls if call.path == BEGIN] == [{"selector": "all"}]


@pytest.mark.parametrize("update", [SGLangUpdate, SGLangDistributedUpdate])
@pytest.mark.parametrize("status", [404, 405])
async def test_an_engine_without_sessions_is_asked_for_none_again(
    update: type[SGLangUpdate | SGLangDistributedUpdate], status: int
) -> None:
    """Whichever way it says so; there is nothing to end then."""
    engine = Engine(begin_weight_update=[status])
    made = update()
    await made.open(engine.ask, OPENING)
    await made.abandon(engine.ask)
    assert engine.session == [BEGIN]


@pytest.mark.parametrize("update", [SGLangUpdate, SGLangDistributedUpdate])
async def test_what_somebody_left_open_is_ended_first(update: type[SGLangUpdate | SGLangDistributedUpdate]) -> None:
    """A sender that died left it so; what is opened now is closed once."""
    engine = Engine(begin_weight_update=[400, 200])
    made = update()
    await made.open(engine.ask, OPENING)
    await made.abandon(engine.ask)
    await made.abandon(engine.ask)
    assert engine.session == [BEGIN, END, BEGIN, END]
