"""A conversation's ids only grow: what a message adds is what the template writes after the model's own words."""

from __future__ import annotations

from math import inf
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_svc.chat_template import ChatTemplate
from rollout_svc.conversation import Growth, added_ids, is_continuation
from rollout_svc.errors import ConfigError, SampleFailure
from rollout_svc.tokens import ByteTokenizer

CHATML = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<call>{{ call.function.name }}</call>{% endfor %}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
THINKING = (
    "{% for m in messages %}<|{{ m.role }}|>"
    "{{ m.content.split('</think>')[-1].strip() if m.role == 'assistant' and not loop.last else m.content }}<|end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
USER = {"role": "user", "content": "1 + 1 = ?"}
CALL = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": "{}"}}]}
TOOL = {"role": "tool", "content": "2"}


def tokenizer(template: str) -> ByteTokenizer:
    """The bytes, with a template."""
    return ByteTokenizer(ChatTemplate(template, {}).render)


def added(template: str, before: list[Any], new: list[Any], last_id: int | None = None) -> str:
    """What is added, as text."""
    return bytes(added_ids(tokenizer(template), before, new, last_id)).decode()


@pytest.mark.parametrize("template", [CHATML, THINKING])
@pytest.mark.parametrize("words", ["2", "<think>one and one</think> 2", ""])
def test_what_a_message_adds(template: str, words: str) -> None:
    """P6: the end of the model's turn, the messages, and the beginning of its next; nothing of what it said."""
    before = [USER, {"role": "assistant", "content": words}]
    assert (
        added(template, before, [{"role": "user", "content": "sure?"}])
        == "<|end|>\n<|user|>sure?<|end|>\n<|assistant|>"
    )


def test_what_a_tool_answers_adds() -> None:
    """A call that the template writes in its own way is not written again."""
    assert added(CHATML, [USER, CALL], [TOOL]) == "<|end|>\n<|tool|>2<|end|>\n<|assistant|>"


def test_the_end_of_a_turn_is_not_written_twice() -> None:
    """The model ended its turn by itself: the first id of what follows is there already."""
    before = [USER, {"role": "assistant", "content": "2"}]
    assert added(CHATML, before, [USER], last_id=ord("<")).startswith("|end|>\n")
    assert added(CHATML, before, [USER], last_id=ord("2")).startswith("<|end|>\n")


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=8), min_size=1, max_size=4))
def test_ids_grow_to_what_the_template_would_have_written(turns: list[str]) -> None:
    """Where the model's text encodes to what it made, growing gives the ids of the whole conversation at once."""
    backend = tokenizer(CHATML)
    messages: list[Any] = [USER]
    ids = backend.apply_chat_template(messages)
    for words in turns:
        messages.append({"role": "assistant", "content": words})
        ids = ids + backend.encode(words)
        ids = ids + added_ids(backend, messages, [USER], ids[-1] if words.endswith("\0") else None)
        messages.append(USER)
    assert ids == backend.apply_chat_template(messages)


def test_a_template_that_cannot_grow_is_refused() -> None:
    """One that writes how many messages there are, and one that does not write what is said."""
    before = [USER, {"role": "assistant", "content": "2"}]
    with pytest.raises(SampleFailure, match="otherwise when more is said"):
        added("{% for m in messages %}{{ m.content }}{{ messages | length }}{% endfor %}", before, [USER])
    with pytest.raises(SampleFailure, match="does not write what an assistant says"):
        added("{{ messages | length }}", before, [USER])
    with pytest.raises(ConfigError):
        added_ids(ByteTokenizer(), before, [USER], None)


def test_a_continuation() -> None:
    """All that was said, unchanged, and more."""
    assert is_continuation([USER, CALL], [USER, CALL, TOOL])
    assert not is_continuation([USER, CALL], [USER, CALL])
    assert not is_continuation([USER, CALL], [CALL, USER, TOOL])


class Watched(ByteTokenizer):
    """Knows the longest conversation it was shown."""

    longest = 0

    def render(self, messages: Any, tools: Any = None, *, asking: bool) -> str:
        self.longest = max(self.longest, len(messages))
        return super().render(messages, tools, asking=asking)


COUNTING = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }};{% endfor %}"
    "{% if add_generation_prompt %}{{ '!' if messages | length > 20 }}<a>{% endif %}"
)


@pytest.mark.parametrize("template", [CHATML, THINKING, COUNTING])
def test_a_long_conversation_is_shown_to_its_template_in_part(template: str) -> None:
    """What is added is what the whole of it would have; where a template looks further, it is shown all of it again."""
    backend = Watched(ChatTemplate(template, {}).render)
    growth = Growth()
    before: list[Any] = [{"role": "system", "content": "be brief"}, USER]
    whole, wrong = 0, 0
    for turn in range(60):
        before.append({"role": "assistant", "content": str(turn)})
        new = [USER] if turn % 3 else [TOOL, TOOL]
        backend.longest = 0
        found = growth.added_ids(backend, before, new, None)
        whole += backend.longest == len(before) + len(new)
        wrong += found != added_ids(tokenizer(template), before, new, None)
        before += new
    if template is COUNTING:
        assert whole > 30  # from the next look on
        assert wrong < 30
    else:
        assert whole <= 6
        assert wrong == 0


def test_what_ends_do_not_show_is_shown_whole() -> None:
    """A template that refuses the beginning and the end alone is given all, and its own refusals are told."""
    strict = (
        "{% if messages | length == 4 %}{{ raise_exception('too few') }}{% endif %}"
        "{% for m in messages %}<{{ m.role }}>{{ m.content }};{% endfor %}"
    )
    said = {"role": "assistant", "content": "2"}
    before = [{"role": "system", "content": "x"}, USER, said, USER, said, USER, said]
    growth = Growth()
    assert bytes(growth.added_ids(tokenizer(strict), before, [USER], None)).decode() == ";<user>1 + 1 = ?;"
    with pytest.raises(SampleFailure, match="the chat template refuses them"):
        growth.added_ids(tokenizer("{{ raise_exception('never') }}"), before, [USER], None)


def test_how_much_a_template_is_shown() -> None:
    """The beginning and the end where that is enough; the whole conversation has no bound, and tools have none."""
    backend = tokenizer(CHATML)
    growth = Growth()
    said = {"role": "assistant", "content": "2"}
    assert growth.shown_chars([USER, said], [USER]) == 2 * len(USER["content"]) + 1
    before: list[Any] = [USER, said, USER, said]
    assert growth.shown_chars(before, [USER]) == inf
    growth.added_ids(backend, before, [USER], None)
    before += [USER, said]
    assert growth.shown_chars(before, [USER]) == 2 * len(USER["content"]) + 1
    assert growth.shown_chars(before, [USER], [{"type": "function"}]) == inf
