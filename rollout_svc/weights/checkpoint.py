"""What can be known of weights on disk before an engine is told to load them.

Invariants:

- Only what is certain is a problem: a path that this machine does not see may be there for the engines, and files of
  another format than safetensors are theirs to judge.
- Reads headers, and contents only where they are to be looked through; never more than `CHUNK_BYTES` at once.
- Blocks, and never for ever: `stopped` is asked before each piece. Called in a thread.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from rollout_svc.weights.names import Kind

__all__ = ["CHUNK_BYTES", "capped", "problems_of", "tensors_of"]

CHUNK_BYTES: Final = 16 * 2**20
"""Read at once: some milliseconds, and no more memory than that."""
_LENGTH_BYTES: Final = 8  # of a safetensors file: how long its header is, little-endian
_MAX_HEADER_BYTES: Final = 100 * 2**20  # the bound of the safetensors library
_PARTIAL: Final = (".tmp", ".incomplete", ".partial", ".part")  # what writers call files that are not done
_INDEX: Final = "*.safetensors.index.json"
_MAIN_INDEX: Final = "model.safetensors.index.json"
_OTHER_LAYOUT: Final = "consolidated*"  # the same weights once more, in the names of their makers: engines pass it by
_NUMBERED: Final = re.compile(r"(.+)-([0-9]+)-of-([0-9]+)(\.safetensors|\.bin)")
_BESIDE: Final = frozenset({"", ".json", ".txt", ".md", ".jinja", ".model", ".tiktoken", ".py", ".yaml", ".yml"})
"""Suffixes of what lies beside weights, and is written before them: settings, tokenizers, words."""
_LISTED: Final = 20  # problems that are told one by one
_CHARS: Final = 300  # of each
_EXPONENTS: Final = {
    "F64": ("<u8", 0x7FF0_0000_0000_0000),
    "F32": ("<u4", 0x7F80_0000),
    "BF16": ("<u2", 0x7F80),
    "F16": ("<u2", 0x7C00),
    "F8_E5M2": ("u1", 0x7C),
    "F8_E4M3": ("u1", 0x7F),
}
"""By dtype: bits that are all set in what is not finite, and in nothing else."""


class _Entry(NamedTuple):
    """A tensor in a file: its first byte, and the byte after its last."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


Header = dict[str, _Entry]
"""By name."""


class _Unsound(Exception):
    """Raised when a file is not what it has to be; says why."""


def problems_of(path: str, *, finite: bool = False, stopped: Callable[[], bool] = lambda: False) -> list[str]:
    """Look at weights that engines are to load; empty where nothing is known against them.

    Args:
        path: what the engines will be told: a folder or a file; any other name is theirs to resolve.
        finite: look for NaN and infinity as well; what cannot be read is a problem then.
        stopped: whether nobody waits for the answer any more.
    """
    place = Path(path)
    try:
        files = _files(place)
        if files is None:
            unseen = [f"its values cannot be checked: {path!r} is not to be seen from here"] if finite else []
            return capped(_absence(place) or unseen)
        problems = _unfinished(place, files) or _unwritten(place, files)
        headers: dict[Path, Header] = {}
        for file in files:
            if file.suffix == ".safetensors" and not stopped():
                try:
                    headers[file] = _header(file)
                except _Unsound as error:
                    problems.append(f"{file.name}: {error}")
        for index in (file for file in files if file.match(_INDEX)):
            problems += _lacking(index, files, headers)
        if finite and not problems:
            if not headers:
                problems.append(f"its values cannot be checked: {path!r} has no safetensors file")
            problems += _not_finite(headers, stopped)
    except OSError as error:
        problems = [f"it cannot be read here: {error}"]
    return capped(problems)


def tensors_of(path: str) -> dict[str, Kind] | None:
    """Read which tensors engines will find there; None where that cannot be known for certain.

    Of a folder with an index they are those that the index names, else those of all its safetensors files.
    """
    place = Path(path)
    try:
        files = _files(place) or []
        shards = [file for file in files if file.suffix == ".safetensors"]
        if any(not file.match(_OTHER_LAYOUT) for file in shards):
            shards = [file for file in shards if not file.match(_OTHER_LAYOUT)]
        found = {name: Kind(entry.shape, entry.dtype) for file in shards for name, entry in _header(file).items()}
        index = next((file for file in files if file.name == _MAIN_INDEX), None)
        if index is not None and place.is_dir():
            named = json.loads(index.read_bytes())["weight_map"]
            found = {name: kind for name, kind in found.items() if name in named}
    except (OSError, _Unsound, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    return found or None


def capped(problems: list[str]) -> list[str]:
    """Tell some, each in some characters, and count the others."""
    told = [words if len(words) <= _CHARS else f"{words[: _CHARS - 1]}…" for words in problems[:_LISTED]]
    return told if len(problems) <= _LISTED else [*told, f"and {len(problems) - _LISTED} more"]


def _files(place: Path) -> list[Path] | None:
    """Every file there; None where this machine sees nothing of that name."""
    if not place.is_absolute():
        return None
    if place.is_dir():
        return sorted(file for file in place.iterdir() if file.is_file())
    return [place] if place.is_file() else None


def _absence(place: Path) -> list[str]:
    """Whether it is certainly nowhere: the folder it would be in is here, and has others, but not this one.

    An empty folder may be where the engines have a disk mounted, and every machine has a root.
    """
    folder = place.parent
    if not place.is_absolute() or folder == folder.parent or not folder.is_dir() or not any(folder.iterdir()):
        return []
    return [f"there is no {place.name!r} in {str(folder)!r}"]


def _unfinished(place: Path, files: list[Path]) -> list[str]:
    """Name what a writer has left, or is still at."""
    beside = [place.with_name(place.name + suffix) for suffix in _PARTIAL]
    left = [str(other) for other in beside if other.exists()]
    left += [file.name for file in files if file != place and file.name.endswith(_PARTIAL)]
    return [f"{name} is still there: it is being written, or was never ended" for name in left]


def _unwritten(place: Path, files: list[Path]) -> list[str]:
    """Say what a writer has not come to: settings go first, shards one by one, and the index that names them last."""
    if not files or not place.is_dir():  # an empty folder may be where the engines have a disk mounted
        return []
    if all(file.suffix in _BESIDE and not file.match(_INDEX) for file in files):
        if any(other.is_dir() for other in place.iterdir()):  # a layout of its own
            return []
        return [f"it has no weights, only {', '.join(file.name for file in files[:_LISTED])}"]
    shards: dict[tuple[str, str, str], set[int]] = defaultdict(set)
    for file in files:
        if (found := _NUMBERED.fullmatch(file.name)) is not None:
            shards[found[1], found[3], found[4]].add(int(found[2]))
    indexed = {suffix for suffix in (".safetensors", ".bin") if any(f.match(f"*{suffix}.index.json") for f in files)}
    return [
        f"{len(there)} of {int(count)} shards {stem}-…-of-{count}{suffix} are there, and no index"
        for (stem, count, suffix), there in shards.items()
        if suffix not in indexed and len(there) < int(count)
    ]


def _header(file: Path) -> Header:
    """Read which tensors are in a safetensors file; raises _Unsound where they cannot all be."""
    size = file.stat().st_size
    with file.open("rb") as opened:
        first = opened.read(_LENGTH_BYTES)
        length = int.from_bytes(first, "little")
        if len(first) < _LENGTH_BYTES or length > min(size - _LENGTH_BYTES, _MAX_HEADER_BYTES):
            raise _Unsound(f"it has {size} bytes, and no header")
        text = opened.read(length)
    start = _LENGTH_BYTES + length
    try:
        header = {
            name: _Entry(
                str(entry["dtype"]),
                tuple(int(size) for size in entry["shape"]),
                start + int(entry["data_offsets"][0]),
                start + int(entry["data_offsets"][1]),
            )
            for name, entry in json.loads(text).items()
            if name != "__metadata__"
        }
    except (ValueError, TypeError, KeyError, AttributeError, IndexError, RecursionError) as error:
        raise _Unsound(f"its header cannot be read: {error!r}") from error
    if any(not start <= entry.begin <= entry.end for entry in header.values()):
        raise _Unsound("its header has a tensor that ends before it begins")
    promised = max((entry.end for entry in header.values()), default=start)
    if promised != size:
        raise _Unsound(f"its header promises {promised} bytes, it has {size}")
    return header


def _lacking(index: Path, files: list[Path], headers: Mapping[Path, Header]) -> Iterator[str]:
    """Compare an index with the files beside it."""
    try:
        placed = {str(name): str(shard) for name, shard in json.loads(index.read_bytes())["weight_map"].items()}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        yield f"{index.name}: it cannot be read: {error!r}"
        return
    there = {file.name: file for file in files}
    for shard in sorted(set(placed.values()) - there.keys()):
        yield f"{index.name} names {shard}, which is not there"
    for name, shard in placed.items():
        header = headers.get(there.get(shard, index))
        if header is not None and name not in header:
            yield f"{index.name} has {name} in {shard}, which has none"


def _not_finite(headers: Mapping[Path, Header], stopped: Callable[[], bool]) -> Iterator[str]:
    """Name tensors with NaN or infinity."""
    for file, header in headers.items():
        with file.open("rb") as opened:
            for name, entry in header.items():
                if not _is_finite(opened, entry.dtype, entry.begin, entry.end, stopped):
                    yield f"{name} in {file.name} has values that are not finite"


def _is_finite(opened: Any, dtype: str, begin: int, end: int, stopped: Callable[[], bool]) -> bool:
    if dtype not in _EXPONENTS:
        return True  # whole numbers
    code, mask = _EXPONENTS[dtype]
    opened.seek(begin)
    while begin < end and not stopped():
        piece = opened.read(min(CHUNK_BYTES, end - begin))
        values = np.frombuffer(piece, code, len(piece) // np.dtype(code).itemsize)
        if bool(((values & mask) == mask).any()):
            return False
        begin += max(len(piece), 1)
    return True
