"""A conversation as the text its model was trained on.

Invariants:

- Templates are other people's code: they run in Jinja's immutable sandbox.
- Jinja is imported when a template is loaded, and is an extra (`hf`): a directory that merely brings a template can be
  used without it, until a conversation is to be rendered.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn, Protocol

from rollout_svc.errors import ConfigError, SampleFailure

__all__ = ["BAD_PROMPT", "ChatTemplate", "Functions", "Messages", "Render", "load_chat_template"]

NEEDS_JINJA = "chat templates need jinja2: pip install 'rollout-svc[hf]'"
FIELD = "tokenizer.chat_template"
"""Where the user sets it."""

BAD_PROMPT = "bad_prompt"
"""Reason of a sample whose prompt line cannot become tokens."""

Messages = Sequence[Mapping[str, Any]]
Functions = Sequence[Mapping[str, Any]]
"""Tools that a model may call, as OpenAI's API describes them: `{"type": "function", "function": {…}}`."""


class Render(Protocol):
    """Writes a conversation."""

    def __call__(self, messages: Messages, /, *, tools: Functions | None = None, asking: bool = True) -> str:
        """Write it; `asking`: up to where the assistant's next message begins. Raises SampleFailure, ConfigError."""


class ChatTemplate:
    """A Jinja template in the dialect of `tokenizer_config.json`."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Compile a template.

        Args:
            source: The template.
            special_tokens: `bos_token`, `eos_token`, …: names the template may use.

        Raises:
            ConfigError: If jinja2 is not installed, or the template is none.
        """
        try:
            import jinja2  # noqa: PLC0415 - an extra
            from jinja2.sandbox import ImmutableSandboxedEnvironment  # noqa: PLC0415 - an extra
        except ImportError:
            raise ConfigError.at(FIELD, NEEDS_JINJA) from None
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError.at(FIELD, f"line {error.lineno}: {error.message}") from None
        self._special_tokens = dict(special_tokens)

    def render(self, messages: Messages, /, *, tools: Functions | None = None, asking: bool = True) -> str:
        """Write a conversation.

        Args:
            messages: Of it, oldest first.
            tools: That the model may call; None: none.
            asking: Up to where the assistant's next message begins.

        Raises:
            SampleFailure: If the template refuses the conversation.
        """
        try:
            return self._template.render(
                messages=messages, tools=tools or None, add_generation_prompt=asking, **self._special_tokens
            )
        except Exception as error:  # a template can raise whatever its expressions raise
            raise SampleFailure(BAD_PROMPT, f"messages: the chat template refuses them: {error}") from error


def load_chat_template(given: str | None, directory: Path | None) -> Render | None:
    """Find the chat template: the one given, else the directory's own, else none.

    Args:
        given: A template (it has a brace), or the path of one.
        directory: Where `chat_template.jinja` and `tokenizer_config.json` may be.

    Raises:
        ConfigError: If a file cannot be read, the template is none, or the one given needs jinja2 and it is missing.
    """
    settings = _read_settings(directory / "tokenizer_config.json") if directory else {}
    tokens = {key: text for key, value in settings.items() if key.endswith("_token") and (text := _token_text(value))}
    if given is not None:
        return ChatTemplate(given if "{" in given else _read(Path(given)), tokens).render
    source = _own_template(directory, settings) if directory else None
    if source is None:
        return None
    try:
        import jinja2  # noqa: F401, PLC0415 - an extra: is it there?
    except ImportError:
        return _render_without_jinja
    return ChatTemplate(source, tokens).render


def _render_without_jinja(_messages: Messages, /, **_: object) -> NoReturn:
    raise ConfigError.at(FIELD, NEEDS_JINJA)


def _own_template(directory: Path, settings: Mapping[str, Any]) -> str | None:
    path = directory / "chat_template.jinja"
    if path.is_file():
        return _read(path)
    template = settings.get("chat_template")
    if isinstance(template, list):  # several, by name
        named = {item.get("name"): item.get("template") for item in template if isinstance(item, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError.at(FIELD, f"{path} cannot be read: {error}") from None


def _read_settings(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError.at("tokenizer.path", f"{path} cannot be read: {error}") from None
    return settings if isinstance(settings, dict) else {}


def _token_text(value: object) -> str | None:
    """A special token is written as its text, or as a mapping with its text as `content`."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _tojson(value: Any, indent: int | None = None) -> str:
    """Write JSON as models saw it in training: no HTML escapes, unlike Jinja's own filter."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_exception(message: str) -> NoReturn:
    raise ValueError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().astimezone().strftime(pattern)
