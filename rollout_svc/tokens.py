"""The tokenizer as the service sees it, and its use off the event loop.

Invariants:

- Importing this module imports neither `tokenizers` nor `jinja2`; loading a tokenizer does, when it needs them.
- Without a tokenizer there is no text: `input_ids` pass through, `decode` answers None.
- Decoding is of all ids at once: text pieces decoded alone do not add up.
- Ids that stand for no text (end of sequence, special tokens) leave no trace in a decoded text.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

from rollout_svc.chat_template import BAD_PROMPT, Functions, Messages, Render, load_chat_template
from rollout_svc.config import TokenizerConfig
from rollout_svc.errors import ConfigError, Problem, SampleFailure

__all__ = [
    "BYTE_EOS",
    "INLINE_TOKENS",
    "MOST_ID",
    "NOT_IDS",
    "ByteTokenizer",
    "FileTokenizer",
    "Refused",
    "TextCodec",
    "Tokenizer",
    "are_ids",
    "load_tokenizer",
    "refused_content",
]

INLINE_TOKENS = 4096
"""Bytes or ids: a cheap tokenizer handles these in 0.1 ms at most, about what a trip to a thread costs."""
BYTE_EOS = 256
"""Id of the end of sequence in the bytes vocabulary; 0 to 255 are the bytes themselves."""

MOST_ID: Final = 2**63 - 1
"""The largest token id: what 64 bits with a sign hold, in the journal and in a batch of tensors."""
NOT_IDS: Final = f"expected whole numbers from 0 to {MOST_ID}"
"""What is said of `input_ids` that are none."""

SAMPLE_CONVERSATION: Messages = ({"role": "user", "content": "1 + 1 = ?"},)
"""Rendered once, to see whether there is a template at all."""
Refused = Mapping[str, Problem]
"""Kinds of prompt content (`text`, `messages`) that cannot become tokens here: why, and at which setting, if any."""

A = TypeVar("A")
R = TypeVar("R")


class Tokenizer(Protocol):
    """Text to ids and back."""

    cheap: bool
    """Small inputs may be handled in the event loop."""

    def encode(self, text: str) -> list[int]:
        """Turn text into ids, special tokens of the model's own included."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Turn ids into text, special tokens left out."""
        ...

    def spell(self, ids: Sequence[int]) -> str:
        """Turn ids into text, special tokens written out."""
        ...

    def apply_chat_template(self, messages: Messages, tools: Functions | None = None) -> list[int]:
        """Turn a conversation into the ids that ask for the next assistant message.

        Raises:
            ConfigError: If there is no template.
            SampleFailure: If the template refuses the conversation.
        """
        ...

    def render(self, messages: Messages, tools: Functions | None = None, *, asking: bool) -> str:
        """Write a conversation as text; raises as `apply_chat_template`."""
        ...

    def encode_rendered(self, text: str) -> list[int]:
        """Turn what a template wrote into ids: nothing is added, special tokens in it are special tokens."""
        ...


class ByteTokenizer:
    """A vocabulary of 257: the bytes of UTF-8, and the end of sequence."""

    cheap = True

    def __init__(self, template: Render | None = None) -> None:
        self._template = template

    def encode(self, text: str) -> list[int]:
        """Turn text into the bytes of its UTF-8 form."""
        return list(text.encode("utf-8"))

    def decode(self, ids: Sequence[int]) -> str:
        """Turn bytes into text, broken characters replaced, ids above 255 left out."""
        try:
            text = bytes(ids)
        except ValueError:  # the end of sequence, or an id of nothing
            text = bytes([token for token in ids if 0 <= token < BYTE_EOS])
        return text.decode("utf-8", errors="replace")

    def spell(self, ids: Sequence[int]) -> str:
        """Turn bytes into text: there are no special tokens that have one."""
        return self.decode(ids)

    def apply_chat_template(self, messages: Messages, tools: Functions | None = None) -> list[int]:
        """Render the conversation and encode it."""
        return self.encode(self.render(messages, tools, asking=True))

    def render(self, messages: Messages, tools: Functions | None = None, *, asking: bool) -> str:
        """Write a conversation by the template."""
        return _render(self._template, messages, tools, asking=asking)

    def encode_rendered(self, text: str) -> list[int]:
        """Turn text into bytes: there are no special tokens in it."""
        return self.encode(text)


class FileTokenizer:
    """A vocabulary from `tokenizer.json`."""

    cheap = False

    def __init__(self, backend: Any, template: Render | None = None) -> None:
        self._backend = backend
        self._template = template

    def encode(self, text: str) -> list[int]:
        """Turn text into ids."""
        ids: list[int] = self._backend.encode(text).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Turn ids into text."""
        text: str = self._backend.decode(list(ids), skip_special_tokens=True)
        return text

    def spell(self, ids: Sequence[int]) -> str:
        """Turn ids into text, special tokens written out."""
        text: str = self._backend.decode(list(ids), skip_special_tokens=False)
        return text

    def apply_chat_template(self, messages: Messages, tools: Functions | None = None) -> list[int]:
        """Render the conversation and encode it; the template has written the special tokens already."""
        return self.encode_rendered(self.render(messages, tools, asking=True))

    def render(self, messages: Messages, tools: Functions | None = None, *, asking: bool) -> str:
        """Write a conversation by the template."""
        return _render(self._template, messages, tools, asking=asking)

    def encode_rendered(self, text: str) -> list[int]:
        """Turn text into ids, special tokens written out in it included."""
        ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        return ids


class TextCodec:
    """Encode and decode without holding the event loop."""

    def __init__(self, tokenizer: Tokenizer | None, executor: Executor | None = None) -> None:
        """Make a codec.

        Args:
            tokenizer: None: only `input_ids` prompts, and no text.
            executor: Threads to work in; None: the loop's own.
        """
        self.tokenizer = tokenizer
        self._executor = executor

    async def encode_prompt(self, line: Mapping[str, Any]) -> list[int]:
        """Return the ids of a prompt line: its `input_ids`, its `text`, or its `messages`.

        Raises:
            SampleFailure: If the line has not exactly one of the three, or not in a form that can be used here.
        """
        given = [key for key in ("input_ids", "text", "messages") if line.get(key) is not None]
        if len(given) != 1:
            raise SampleFailure(BAD_PROMPT, f"expected exactly one of input_ids, text, messages, not {given or 'none'}")
        (key,) = given
        value = line[key]
        if key == "input_ids":
            return _checked_ids(value)
        try:
            return await self._encode(key, value)
        except SampleFailure:
            raise
        except ConfigError as error:  # no template: the fault of the settings, but it must not end the run
            raise SampleFailure(BAD_PROMPT, str(error)) from error
        except Exception as error:  # half a character, or whatever the tokenizer's library raises
            raise SampleFailure(BAD_PROMPT, f"{key}: {type(error).__name__}: {error}") from error

    async def _encode(self, key: str, value: Any) -> list[int]:
        if self.tokenizer is None:
            raise SampleFailure(BAD_PROMPT, f"a prompt with {key} needs a tokenizer, and tokenizer.path is null")
        if key == "messages":
            _check_messages(value)
            return await self._run(self.tokenizer.apply_chat_template, value, small=False)
        if not isinstance(value, str):
            raise SampleFailure(BAD_PROMPT, f"text: expected a string, not {type(value).__name__}")
        return await self._run(self.tokenizer.encode, value, small=len(value) <= INLINE_TOKENS)

    async def decode(self, ids: Sequence[int]) -> str | None:
        """Return the text of the ids, or None without a tokenizer."""
        if self.tokenizer is None:
            return None
        return await self._run(self.tokenizer.decode, ids, small=len(ids) <= INLINE_TOKENS)

    async def work(self, work: Callable[[Tokenizer], R], *, small: bool = False) -> R:
        """Do something with the tokenizer, off the event loop; `small`: it is for no more than `INLINE_TOKENS`.

        Raises:
            SampleFailure: If there is no tokenizer; or whatever `work` raises.
        """
        if self.tokenizer is None:
            raise SampleFailure(BAD_PROMPT, "messages need a tokenizer, and tokenizer.path is null")
        return await self._run(work, self.tokenizer, small=small)

    async def _run(self, work: Callable[[A], R], argument: A, *, small: bool) -> R:
        if small and self.tokenizer is not None and self.tokenizer.cheap:
            return work(argument)
        return await asyncio.get_running_loop().run_in_executor(self._executor, work, argument)


def refused_content(tokenizer: Tokenizer | None) -> Refused:
    """Say which kinds of prompt content cannot become tokens with this tokenizer; renders a conversation."""
    if tokenizer is None:
        without = Problem("", "needs a tokenizer, and tokenizer.path is null")
        return {"text": without, "messages": without}
    try:
        tokenizer.apply_chat_template(SAMPLE_CONVERSATION)
    except ConfigError as error:
        return {"messages": error.problems[0]}
    except Exception:  # noqa: BLE001 - it has a template, which does not like this conversation; others it may
        return {}
    return {}


def load_tokenizer(config: TokenizerConfig) -> Tokenizer | None:
    """Load the tokenizer a configuration names; it reads files.

    Raises:
        ConfigError: If the directory or the template cannot be used.
    """
    if config.path is None:
        if config.chat_template is not None:
            raise ConfigError.at("tokenizer.chat_template", "has no use without tokenizer.path")
        return None
    if config.path == "bytes":
        return ByteTokenizer(load_chat_template(config.chat_template, None))
    from tokenizers import Tokenizer as Backend  # noqa: PLC0415 - 30 ms, and only where text is tokenized so

    directory = Path(config.path)
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise ConfigError.at("tokenizer.path", f"no tokenizer.json in {directory}")
    try:
        backend = Backend.from_file(str(path))
    except Exception as error:  # noqa: BLE001 - the library raises bare Exception
        raise ConfigError.at("tokenizer.path", f"{path} is not a tokenizer: {error}") from None
    return FileTokenizer(backend, load_chat_template(config.chat_template, directory))


def _render(template: Render | None, messages: Messages, tools: Functions | None, *, asking: bool) -> str:
    if template is None:
        raise ConfigError.at("tokenizer.chat_template", "prompts with messages need one, and the tokenizer brings none")
    return template(messages, tools=tools, asking=asking)


def are_ids(values: Sequence[object]) -> bool:
    """Whether these are token ids."""
    return all(type(token) is int and 0 <= token <= MOST_ID for token in values)


def _checked_ids(value: object) -> list[int]:
    if not isinstance(value, list | tuple) or not value:
        raise SampleFailure(BAD_PROMPT, "input_ids: expected a list of at least one id")
    if not are_ids(value):
        raise SampleFailure(BAD_PROMPT, f"input_ids: {NOT_IDS}")
    return list(value)


def _check_messages(value: object) -> None:
    if not isinstance(value, list | tuple) or not value:
        raise SampleFailure(BAD_PROMPT, "messages: expected a list of at least one message")
    if not all(isinstance(message, Mapping) and isinstance(message.get("role"), str) for message in value):
        raise SampleFailure(BAD_PROMPT, "messages: expected mappings with a role")
