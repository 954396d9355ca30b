"""Whose journals lie at a path: those of one service, or those of shards, which have their names behind it.

Invariants:

- A start goes on from everything that lies there, or is refused: what it would not see would be out of sight, and its
  prompts might be trained on a second time.
- Nothing is changed, and a file of another kind is nobody's.
"""

from __future__ import annotations

import re
import struct
from pathlib import Path
from typing import Final

from rollout_svc.buffer.journal.opening import HEADER_BYTES, MAGIC, refusal
from rollout_svc.buffer.journal.schema import APPLICATION
from rollout_svc.errors import ConfigError

__all__ = ["BOOK", "BOOK_ENDING", "refuse_other_layout"]

BOOK: Final = 0x726F6C63  # "rolc": `application_id` of a coordinator's book
BOOK_ENDING: Final = ".coordinator"
_SHARD: Final = re.compile(r"\.s(0|[1-9][0-9]*)")
_TOLD: Final = 5  # files that are named


def refuse_other_layout(path: Path, shards: int) -> None:
    """Refuse what another number of shards has left, where these would not see it. Blocks.

    Args:
        path: `buffer.path` of the whole.
        shards: how many there are; 1: a service without any.

    Raises:
        ConfigError: at `buffer.path`: which files lie there, and what can be done.
    """
    try:
        whole, parts, book = _application(path) == APPLICATION, _parts(path), Path(f"{path}{BOOK_ENDING}")
        found = [*parts.values(), *([book] if _application(book) == BOOK else [])]
    except OSError as error:
        raise refusal(path, f"cannot be used: {error.strerror or error}") from None
    if shards == 1 and found:
        number = f"producer.shards: {max(parts) + 1}" if parts else "as many shards (producer.shards) as before"
        raise _other(found, "of shards", "a service without them", number)
    if shards > 1 and whole:
        raise _other([path], "of a service without shards", f"{shards} shards", "producer.shards: 1")
    beyond = [file for index, file in parts.items() if index >= shards]
    if shards > 1 and beyond:
        raise _other(beyond, f"of {max(parts) + 1} shards", f"{shards} shards", f"producer.shards: {max(parts) + 1}")


def _other(files: list[Path], whose: str, who: str, again: str) -> ConfigError:
    named = ", ".join(map(str, files[:_TOLD])) + (f" and {len(files) - _TOLD} more" if len(files) > _TOLD else "")
    told = f"start with {again} again; or name another path, or move the files away, and what is in them is left out"
    return ConfigError.at("buffer.path", f"{named}: journals {whose}, and {who} would not see what is in them: {told}")


def _parts(path: Path) -> dict[int, Path]:
    """Journals of shards, by their numbers."""
    if not path.parent.is_dir():
        return {}
    files = ((_SHARD.fullmatch(file.name.removeprefix(path.name)), file) for file in path.parent.iterdir())
    mine = {int(match[1]): file for match, file in files if match is not None and file.name.startswith(path.name)}
    return {index: mine[index] for index in sorted(mine) if _application(mine[index]) == APPLICATION}


def _application(path: Path) -> int | None:
    """Which kind of database a file is; None: it is none."""
    if not path.is_file():
        return None
    with path.open("rb") as file:
        header = file.read(HEADER_BYTES)
    if len(header) < HEADER_BYTES or not header.startswith(MAGIC):
        return None
    (application,) = struct.unpack_from(">I", header, 68)
    return int(application)
