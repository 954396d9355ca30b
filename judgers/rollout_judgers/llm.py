"""`llm`: a model behind an OpenAI-compatible API that judges by a rubric.

Invariant: a verdict that cannot be read, or is off the scale, is a failure: it is never 0, nor the nearest score.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import orjson

from rollout_judgers.dotted import look_up
from rollout_judgers.options import a_count, a_finite, a_text, texts_by_name
from rollout_judgers.remote import Remote, check_url
from rollout_svc.errors import ConfigError
from rollout_svc.judging import JudgedSample, JudgeFailed, Reward

__all__ = ["Llm", "fill", "read_score"]

_SCORE: Final = r"(?i:score)\s*[:=]\s*\**\s*(-?\d+(?:\.\d+)?)"
_PLACE: Final = re.compile(r"\{(prompt|response|ground_truth|task)\}")
_FENCE: Final = re.compile(r"```(?:json)?\s*\n(.*?)```", re.DOTALL)


class Llm:
    """Ask a model for a score, and put it on the scale from 0 to 1.

    Args:
        base_url: of the API, up to and with `/v1`.
        model: the model that judges.
        rubric: what it is told; `{prompt}`, `{response}`, `{ground_truth}` and `{task}` stand for the sample's.
        api_key: sent as a bearer token.
        system: a system message before it.
        scale: lowest and highest score, which become 0 and 1.
        pattern: regular expression with one group, whose last match in the answer is the score;
            it is matched in the loop, so it must not be one that backtracks for ever.
        field: instead of a pattern: dotted path of the score in the answer, which is JSON then.
        sampling: further keys of the request.
        headers: sent along.
        tries: calls for one verdict, the first included; the judger's `timeout_s` is over all of them.
    """

    def __init__(
        self,
        *,
        base_url: str,
        model: str,
        rubric: str,
        api_key: str | None = None,
        system: str | None = None,
        scale: Sequence[float] = (0, 1),
        pattern: str | None = None,
        field: str | None = None,
        sampling: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
        tries: int = 4,
    ) -> None:
        self.model = a_text(model, "model")
        self.rubric = a_text(rubric, "rubric")
        if "{response}" not in self.rubric:
            raise ConfigError.at("rubric", "has no {response}: the model would not see what it judges")
        self.system = None if system is None else a_text(system, "system")
        self.low, self.high = _scale(scale)
        if pattern is not None and field is not None:
            raise ConfigError.at("field", "give a pattern or a field, not both")
        self.field = None if field is None else a_text(field, "field")
        self.pattern = _pattern(_SCORE if pattern is None else pattern)
        if sampling is not None and not isinstance(sampling, Mapping):
            raise ConfigError.at("sampling", f"{sampling!r} is not a mapping")
        self.sampling = {"temperature": 0, **(sampling or {})}
        sent = texts_by_name(headers, "headers")
        if api_key is not None:
            sent["Authorization"] = f"Bearer {a_text(api_key, 'api_key')}"
        url = check_url(base_url, "base_url").rstrip("/") + "/chat/completions"
        self._remote = Remote(url, sent, a_count(tries, "tries"))

    async def judge(self, sample: JudgedSample) -> Reward:
        """Ask, and read the score; the score as it was said is a part."""
        if sample.response is None:
            raise JudgeFailed("no_text", "a model judges text: set tokenizer.path")
        messages = [{"role": "user", "content": fill(self.rubric, sample)}]
        if self.system is not None:
            messages.insert(0, {"role": "system", "content": self.system})
        answer = await self._remote.post({**self.sampling, "model": self.model, "messages": messages})
        text = look_up(answer, "choices.0.message.content")
        if not isinstance(text, str):
            raise JudgeFailed("invalid_answer", f"there is no text in {answer!r:.200}")
        score = read_score(text, self.field or self.pattern)
        if not self.low <= score <= self.high:
            raise JudgeFailed("off_scale", f"{score:g} is not from {self.low:g} to {self.high:g}: {text[-200:]!r}")
        return Reward((score - self.low) / (self.high - self.low), {"score": score})

    async def close(self) -> None:
        """Close its connections."""
        await self._remote.close()


def fill(rubric: str, sample: JudgedSample) -> str:
    """Put a sample into a rubric, in one go: what the sample itself says in braces stays as it is."""
    texts = {
        "prompt": _spoken(sample.prompt),
        "response": sample.response or "",
        "ground_truth": _spoken(sample.ground_truth),
        "task": sample.task,
    }
    return _PLACE.sub(lambda place: texts[place[1]], rubric)


def read_score(text: str, how: str | re.Pattern[str]) -> float:
    """Read the score of a model's answer, at a dotted path of its JSON, or by a pattern's last match.

    Raises:
        JudgeFailed: `unparseable`.
    """
    if isinstance(how, str):
        found = look_up(_json(text), how)
        if isinstance(found, bool) or not isinstance(found, int | float):
            raise JudgeFailed("unparseable", f"no number at {how} in {text[-200:]!r}")
        return float(found)
    matches = how.findall(text)
    try:
        return float(matches[-1])
    except (IndexError, ValueError) as error:
        raise JudgeFailed("unparseable", f"no score in {text[-200:]!r}") from error


def _json(text: str) -> Any:
    fenced = _FENCE.findall(text)
    try:
        return orjson.loads(fenced[-1] if fenced else text)
    except orjson.JSONDecodeError as error:
        raise JudgeFailed("unparseable", f"no JSON ({error}): {text[-200:]!r}") from error


def _spoken(value: Any) -> str:
    """A prompt or a truth as text: messages as who says what, everything else as JSON."""
    if value is None or isinstance(value, str):
        return value or ""
    if isinstance(value, list) and all(isinstance(one, dict) and isinstance(one.get("content"), str) for one in value):
        return "\n\n".join(f"{one.get('role', 'user')}: {one['content']}" for one in value)
    return orjson.dumps(value).decode()


def _scale(value: Any) -> tuple[float, float]:
    if not isinstance(value, list | tuple) or len(value) != 2:  # noqa: PLR2004 - lowest and highest
        raise ConfigError.at("scale", f"{value!r} is not a lowest and a highest score")
    low, high = a_finite(value[0], "scale.0"), a_finite(value[1], "scale.1")
    if not low < high:
        raise ConfigError.at("scale", f"{low:g} is not below {high:g}")
    return low, high


def _pattern(value: Any) -> re.Pattern[str]:
    try:
        pattern = re.compile(a_text(value, "pattern"))
    except re.error as error:
        raise ConfigError.at("pattern", f"{value!r}: {error}") from error
    if pattern.groups != 1:
        raise ConfigError.at("pattern", f"{value!r} has {pattern.groups} groups, and needs the one with the score")
    return pattern
