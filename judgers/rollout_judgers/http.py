"""`http`: a reward service somewhere else.

It is posted one JSON object per sample, with the keys `sample_id`, `group_id`, `task`, `prompt` (the line's `text` or
`messages`, or null), `prompt_ids`, `response` (null without a tokenizer), `response_ids`, `ground_truth`, `meta` and
`finish_reason`. It answers 200 with JSON that has a number at `reward`, and may have an object of numbers at `parts`.
429 and 5xx, with or without `Retry-After`, ask it to be tried again; any other status is a failure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Final

from rollout_judgers.dotted import MISSING, look_up
from rollout_judgers.options import a_count, a_text, texts_by_name
from rollout_judgers.remote import Remote, check_url
from rollout_svc.judging import JudgedSample, JudgeFailed, Reward

__all__ = ["Http"]

_KEYS: Final = tuple(field.name for field in fields(JudgedSample))


class Http:
    """Have a remote service judge.

    Args:
        url: where samples are posted.
        reward: dotted path of the reward in the answer.
        parts: dotted path of its parts; null: `parts`, where the answer has one.
        api_key: sent as a bearer token.
        headers: sent along.
        tries: calls for one verdict, the first included; the judger's `timeout_s` is over all of them.
    """

    def __init__(
        self,
        *,
        url: str,
        reward: str = "reward",
        parts: str | None = None,
        api_key: str | None = None,
        headers: Mapping[str, str] | None = None,
        tries: int = 4,
    ) -> None:
        self.reward = a_text(reward, "reward")
        self.parts = None if parts is None else a_text(parts, "parts")
        sent = texts_by_name(headers, "headers")
        if api_key is not None:
            sent["Authorization"] = f"Bearer {a_text(api_key, 'api_key')}"
        self._remote = Remote(check_url(url, "url"), sent, a_count(tries, "tries"))

    async def judge(self, sample: JudgedSample) -> Reward:
        """Post the sample, and read the reward of the answer; that it is a number is looked at by who asked."""
        answer = await self._remote.post({key: getattr(sample, key) for key in _KEYS})
        value = look_up(answer, self.reward)
        if value is MISSING:
            raise JudgeFailed("invalid_answer", f"there is no {self.reward} in {answer!r:.200}")
        parts = look_up(answer, self.parts or "parts")
        if parts is MISSING:
            if self.parts is not None:
                raise JudgeFailed("invalid_answer", f"there is no {self.parts} in {answer!r:.200}")
            parts = {}
        return Reward(value, parts)

    async def close(self) -> None:
        """Close its connections."""
        await self._remote.close()
