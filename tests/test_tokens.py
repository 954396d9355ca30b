"""Text to tokens and back, templates, and where the work is done."""

import json
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing

from rollout_svc.chat_template import Functions, Messages, load_chat_template
from rollout_svc.config import TokenizerConfig
from rollout_svc.errors import ConfigError, SampleFailure
from rollout_svc.tokens import (
    BYTE_EOS,
    INLINE_TOKENS,
    ByteTokenizer,
    TextCodec,
    Tokenizer,
    load_tokenizer,
    refused_content,
)

WORDS = ["<s>", "</s>", "<unk>", "user", "assistant", "hello", "world", ":"]
TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.role }} : {{ m.content }}\n{% endfor %}assistant :"
HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Make a directory with a small `tokenizer.json` that begins each text with `<s>`."""
    backend = Backend(WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    backend.pre_tokenizer = Whitespace()
    backend.add_special_tokens(["<s>", "</s>"])
    backend.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    backend.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def load(path: str | Path | None, template: str | None = None) -> Tokenizer:
    tokenizer = load_tokenizer(TokenizerConfig(path=str(path), chat_template=template))
    assert tokenizer is not None
    return tokenizer


@given(st.text())
def test_bytes_come_back(text: str) -> None:
    """The bytes tokenizer gives back any text, whatever ids above 255 are mixed in."""
    ids = ByteTokenizer().encode(text)
    assert ids == list(text.encode())
    assert ByteTokenizer().decode([BYTE_EOS, *ids, BYTE_EOS, 999]) == text


@given(st.lists(st.integers(0, 400)))
def test_any_bytes_are_some_text(ids: list[int]) -> None:
    """Ids that are no UTF-8 decode to replacement characters, never to an error."""
    assert isinstance(ByteTokenizer().decode(ids), str)


def test_no_tokenizer_is_none() -> None:
    """Without a path there is no tokenizer; a template for none is refused at its path."""
    assert load_tokenizer(TokenizerConfig()) is None
    with pytest.raises(ConfigError, match=r"^tokenizer\.chat_template: "):
        load_tokenizer(TokenizerConfig(chat_template=TEMPLATE))


def test_what_cannot_become_tokens_is_known_beforehand(directory: Path) -> None:
    """P35: without a tokenizer no text, without a chat template no messages; a template that is there may be picky."""
    assert set(refused_content(None)) == {"text", "messages"}
    for path in ("bytes", directory):
        [(kind, problem)] = refused_content(load(path)).items()
        assert (kind, problem.path) == ("messages", "tokenizer.chat_template")
        assert refused_content(load(path, TEMPLATE)) == {}
        assert refused_content(load(path, "{{ raise_exception('system first') }}")) == {}


async def test_whatever_a_tokenizer_raises_is_the_failure_of_its_prompt() -> None:
    """Text that is no Unicode, in a prompt or made by its template, is `bad_prompt`, not an error of the service."""
    codec = TextCodec(ByteTokenizer(lambda _, **__: "\ud83d"))
    for line in ({"text": "half \ud83d"}, {"messages": HELLO}):
        with pytest.raises(SampleFailure, match="UnicodeEncodeError") as failed:
            await codec.encode_prompt(line)
        assert failed.value.reason == "bad_prompt"


def test_a_directory_is_loaded(directory: Path) -> None:
    """A directory with `tokenizer.json` encodes with the model's special tokens and decodes without them."""
    tokenizer = load(directory)
    assert tokenizer.encode("hello world") == [0, 5, 6]
    assert tokenizer.decode([0, 5, 6, 1]) == "hello world"
    assert tokenizer.spell([0, 5, 6, 1]) == "<s> hello world </s>"
    assert not tokenizer.cheap


def test_a_directory_that_is_none_is_refused(directory: Path) -> None:
    """P35: no `tokenizer.json`, or one that is none, is a problem at `tokenizer.path`."""
    with pytest.raises(ConfigError, match=r"^tokenizer\.path: no tokenizer\.json"):
        load(directory / "elsewhere")
    (directory / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match=r"^tokenizer\.path: .* is not a tokenizer"):
        load(directory)
    (directory / "tokenizer_config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"^tokenizer\.path: "):
        load_chat_template(None, directory)


@pytest.mark.parametrize("origin", ["settings", "settings-file", "jinja-file", "config", "named"])
def test_a_template_is_found(directory: Path, origin: str) -> None:
    """A chat template comes from the settings (text or file), `chat_template.jinja`, or `tokenizer_config.json`."""
    given_template = None
    settings: dict[str, Any] = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "chat_template": "wrong"}
    if origin == "settings":
        given_template = TEMPLATE
    elif origin == "settings-file":
        given_template = str(directory / "mine.jinja")
        Path(given_template).write_text(TEMPLATE)
    elif origin == "jinja-file":
        (directory / "chat_template.jinja").write_text(TEMPLATE)
    elif origin == "config":
        settings["chat_template"] = TEMPLATE
    else:
        settings["chat_template"] = [{"name": "tools", "template": "x"}, {"name": "default", "template": TEMPLATE}]
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = load(directory, given_template)
    assert tokenizer.apply_chat_template(HELLO) == [0, 3, 7, 5, 4, 7]


def test_bytes_take_a_template_too() -> None:
    """The bytes tokenizer renders a conversation with the template of the settings."""
    tokenizer = load("bytes", "{% for m in messages %}{{ m | tojson }}{% endfor %}>")
    assert tokenizer.decode(tokenizer.apply_chat_template(HELLO)) == '{"role": "user", "content": "hello"}>'


def test_a_template_that_is_none_is_refused(directory: Path) -> None:
    """P35: a template with a syntax error, or one that cannot be read, is a problem at `tokenizer.chat_template`."""
    for template in ["{% for %}", str(directory / "none.jinja")]:
        with pytest.raises(ConfigError, match=r"^tokenizer\.chat_template: "):
            load("bytes", template)


def test_a_template_is_confined() -> None:
    """P34: a template runs in a sandbox: it reaches no internals and changes no message."""
    for template in ["{{ messages.__class__.__mro__ }}", "{{ messages.append(1) }}", "{{ raise_exception('no') }}"]:
        with pytest.raises(SampleFailure):
            load("bytes", template).apply_chat_template(HELLO)


def test_without_jinja_the_extra_is_named(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """P35: without jinja2 a template in the settings is refused with the extra's name; a directory's own, when used."""
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(ConfigError, match=r"^tokenizer\.chat_template: .*rollout-svc\[hf\]"):
        load("bytes", TEMPLATE)
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    tokenizer = load(directory)
    assert tokenizer.encode("hello") == [0, 5]
    with pytest.raises(ConfigError, match=r"rollout-svc\[hf\]"):
        tokenizer.apply_chat_template(HELLO)


def test_no_template_is_said() -> None:
    """P35: a conversation without any template names the field that is missing."""
    with pytest.raises(ConfigError, match=r"^tokenizer\.chat_template: "):
        load("bytes").apply_chat_template(HELLO)


class Spy:
    """A tokenizer that notes the thread it is used in."""

    def __init__(self, *, cheap: bool) -> None:
        self.cheap = cheap
        self.threads: list[threading.Thread] = []

    def encode(self, text: str) -> list[int]:
        self.threads.append(threading.current_thread())
        return [len(text)]

    def decode(self, ids: Sequence[int]) -> str:
        self.threads.append(threading.current_thread())
        return str(len(ids))

    def apply_chat_template(self, messages: Messages, tools: Functions | None = None) -> list[int]:
        assert tools is None
        self.threads.append(threading.current_thread())
        return [len(messages)]

    def render(self, messages: Messages, tools: Functions | None = None, *, asking: bool) -> str:
        raise NotImplementedError

    def spell(self, ids: Sequence[int]) -> str:
        return self.decode(ids)

    def encode_rendered(self, text: str) -> list[int]:
        raise NotImplementedError


@pytest.fixture
def executor() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as pool:
        yield pool


async def test_work_is_off_the_loop(executor: ThreadPoolExecutor) -> None:
    """P35: a tokenizer that is not cheap never runs in the event loop's thread, however small the input."""
    spy = Spy(cheap=False)
    codec = TextCodec(spy, executor)
    assert await codec.encode_prompt({"text": "abc"}) == [3]
    assert await codec.encode_prompt({"messages": HELLO}) == [1]
    assert await codec.decode([1, 2]) == "2"
    assert len(spy.threads) == 3
    assert threading.main_thread() not in spy.threads


async def test_cheap_work_is_in_the_loop_while_it_is_small(executor: ThreadPoolExecutor) -> None:
    """A cheap tokenizer handles small inputs in place, and large ones in a thread."""
    spy = Spy(cheap=True)
    codec = TextCodec(spy, executor)
    await codec.encode_prompt({"text": "a" * INLINE_TOKENS})
    await codec.decode([1] * INLINE_TOKENS)
    assert set(spy.threads) == {threading.main_thread()}
    spy.threads.clear()
    await codec.encode_prompt({"text": "a" * (INLINE_TOKENS + 1)})
    await codec.decode([1] * (INLINE_TOKENS + 1))
    assert threading.main_thread() not in spy.threads


async def test_without_a_tokenizer_ids_pass() -> None:
    """Without a tokenizer ids pass through as a copy, a response has no text, and text is refused."""
    codec = TextCodec(None)
    ids = [1, 2]
    passed = await codec.encode_prompt({"input_ids": ids, "ground_truth": "x"})
    assert passed == ids
    assert passed is not ids
    assert await codec.decode([1, 2]) is None
    with pytest.raises(SampleFailure, match=r"tokenizer\.path"):
        await codec.encode_prompt({"text": "hello"})


@pytest.mark.parametrize(
    "line",
    [
        {},
        {"text": "a", "input_ids": [1]},
        {"text": 3},
        {"input_ids": []},
        {"input_ids": "12"},
        {"input_ids": [1, "2"]},
        {"input_ids": [True]},
        {"input_ids": [-1]},
        {"messages": []},
        {"messages": "hello"},
        {"messages": ["hello"]},
        {"messages": [{"content": "x"}]},
        {"messages": HELLO},
    ],
)
async def test_a_bad_line_is_a_typed_failure(line: dict[str, Any]) -> None:
    """P35: a line that cannot become tokens fails its sample with a reason; the run goes on."""
    with pytest.raises(SampleFailure) as raised:
        await TextCodec(ByteTokenizer()).encode_prompt(line)
    assert raised.value.reason == "bad_prompt"


async def test_a_codec_takes_each_kind_of_prompt(directory: Path) -> None:
    """A line has its prompt as ids, as text, or as messages; each becomes ids."""
    codec = TextCodec(load(directory, TEMPLATE))
    assert await codec.encode_prompt({"input_ids": [5]}) == [5]
    assert await codec.encode_prompt({"text": "hello"}) == [0, 5]
    assert (await codec.encode_prompt({"messages": HELLO}))[-2:] == [4, 7]
    assert await codec.decode([0, 6, 1]) == "world"
