"""Vocabularies: by bytes, or from a `tokenizer.json`.

Invariants:
- Ids run from 0 to `size - 1`, and every one of them can be decoded.
- Decoding never raises: bytes that are not UTF-8 become replacement characters.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tokenizers import Tokenizer

_COMMON_END_TOKENS: Final = ("</s>", "<eos>", "<|endoftext|>", "<|im_end|>", "<|eot_id|>", "<|end|>")
"""Looked for, in this order, when nothing beside the `tokenizer.json` names the end token."""


class VocabularyError(ValueError):
    """Raised when a tokenizer directory cannot be used."""


class Vocabulary(Protocol):
    """What the engine asks of a vocabulary."""

    @property
    def size(self) -> int:
        """Number of ids."""

    @property
    def end_id(self) -> int | None:
        """The id that ends an output, or None."""

    def encode(self, text: str, *, bare: bool = False) -> list[int]:
        """Turn text into ids; `bare`: of the text alone, special tokens only where it has them written out."""

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Turn ids into text."""


class ByteVocabulary:
    """Ids 0-255 are the bytes of UTF-8, 256 is the end token, which has no text."""

    size: Final = 257
    end_id: Final = 256

    def encode(self, text: str, *, bare: bool = False) -> list[int]:  # noqa: ARG002 - bytes are bare
        """Return the bytes of the text."""
        return list(text.encode("utf-8", errors="surrogatepass"))

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of the bytes; the end token shows as `<end>` when special tokens are kept."""
        if skip_special_tokens or self.end_id not in ids:
            return bytes(token for token in ids if token < self.end_id).decode("utf-8", errors="replace")
        pieces = b"".join(b"<end>" if token == self.end_id else bytes((token,)) for token in ids)
        return pieces.decode("utf-8", errors="replace")


class FileVocabulary:
    """The vocabulary of a directory holding `tokenizer.json`."""

    def __init__(self, tokenizer: Tokenizer, end_id: int | None) -> None:
        self._tokenizer = tokenizer
        self.size: Final = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1
        self.end_id: Final = end_id

    def encode(self, text: str, *, bare: bool = False) -> list[int]:
        """Return the ids of the text, with whatever special tokens the file's post-processor adds unless `bare`."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=not bare).ids
        return ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of the ids."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text


def load_vocabulary(directory: str | Path | None) -> Vocabulary:
    """Return the vocabulary of a directory, or the bytes when there is none.

    Args:
        directory: Holds `tokenizer.json`, and often `tokenizer_config.json`, whose `eos_token` names the end token.

    Raises:
        VocabularyError: The directory has no readable `tokenizer.json`, or names an end token that it lacks.
    """
    if directory is None:
        return ByteVocabulary()
    from tokenizers import Tokenizer

    path = Path(directory) / "tokenizer.json"
    if not path.is_file():
        raise VocabularyError(f"no tokenizer.json in {directory}")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception for any fault of the file
        raise VocabularyError(f"cannot read {path}: {error}") from error
    return FileVocabulary(tokenizer, _end_id(tokenizer, Path(directory)))


def _end_id(tokenizer: Tokenizer, directory: Path) -> int | None:
    """Find the id of the end token: named by a file beside the tokenizer, or a common name."""
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        path = directory / name
        if not path.is_file():
            continue
        try:
            token = json.loads(path.read_text(encoding="utf-8")).get("eos_token")
        except (OSError, ValueError, AttributeError) as error:
            raise VocabularyError(f"cannot read {path}: {error}") from error
        content = token.get("content") if isinstance(token, dict) else token
        if isinstance(content, str):
            found: int | None = tokenizer.token_to_id(content)
            if found is None:
                raise VocabularyError(f"{path} names the end token {content!r}, which tokenizer.json lacks")
            return found
    known = (tokenizer.token_to_id(token) for token in _COMMON_END_TOKENS)
    return next((token for token in known if token is not None), None)
