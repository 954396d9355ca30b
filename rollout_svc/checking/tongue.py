"""A vocabulary in which a model never says a word as a tokenizer would write it.

Every byte has two ids. `encode` writes the first, the model of a check speaks in the second, and both are decoded to
the same text. So whoever decodes what the model made and encodes it again has other ids, always.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from rollout_svc.chat_template import Functions, Messages
from rollout_svc.tokens import BYTE_EOS, ByteTokenizer

__all__ = ["Tongue", "spoken"]

_SECOND: Final = BYTE_EOS + 1
"""Added to a byte: its other id."""


class Tongue(ByteTokenizer):
    """The tokenizer of a check; it has a chat template that needs no Jinja."""

    def __init__(self) -> None:
        super().__init__(_render)

    def decode(self, ids: Sequence[int]) -> str:
        """Turn ids of either kind into text."""
        return super().decode([token - _SECOND if token >= _SECOND else token for token in ids])


def spoken(text: str) -> list[int]:
    """The ids by which the model says a text, its end included."""
    return [byte + _SECOND for byte in text.encode()] + [BYTE_EOS]


def _render(messages: Messages, /, *, tools: Functions | None = None, asking: bool = True) -> str:
    parts = [f"<|tools|>{len(tools)}<|end|>"] if tools else []
    for message in messages:
        calls = "".join(str(call) for call in message.get("tool_calls") or ())
        parts.append(f"<|{message.get('role')}|>{message.get('content') or ''}{calls}<|end|>")
    return "".join(parts) + ("<|assistant|>" if asking else "")
