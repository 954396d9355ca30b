"""A path that another number of shards has used: nobody starts beside what it would not see."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_svc.buffer.journal.layout import refuse_other_layout
from rollout_svc.buffer.journal.opening import open_journal
from rollout_svc.config import Config, Portion
from rollout_svc.errors import ConfigError
from rollout_svc.outside import Outside
from rollout_svc.recovery import open_storage
from rollout_svc.sharding.book import kept_book, open_book
from rollout_svc.sharding.split import split

MINE: dict[str, Any] = {"tasks": {"t": {"prompts": "push"}}, "tokenizer.path": None}


def config_at(path: Path, shards: int) -> Config:
    """The settings of a service, or of shards, whose journals lie there."""
    return Config.model_validate(
        {
            "cluster": "ray",
            "tokenizer": {"path": "bytes"},
            "workers": [{"url": f"http://127.0.0.1:{port}", "max_batch": 8} for port in (1, 2, 3)],
            "tasks": [{"name": "t", "prompts": {"push": True}, "judger": {"name": "exact"}}],
            "trainer": {"train_batch_size": 8},
            "buffer": {"path": str(path)},
            "producer": {"shards": shards},
        }
    )


async def begun(config: Config) -> None:
    """Have the files of a start, as a start has them."""
    if config.producer.shards == 1:
        await (await open_storage(config, Outside())).close()
        return
    async with kept_book(config):
        for part in split(config):
            await (await open_storage(part.config, Outside(), portion=part.portion)).close()


def files(folder: Path) -> dict[str, bytes]:
    """What lies there."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        (2, 1, r"j\.db\.s0, .*j\.db\.s1, .*j\.db\.coordinator: .* of shards.* with producer\.shards: 2 again"),
        (1, 2, r"j\.db: journals of a service without shards.* with producer\.shards: 1 again"),
        (2, 3, "belongs to 2 shards"),
    ],
)
async def test_another_number_of_shards_is_refused(tmp_path: Path, before: int, after: int, words: str) -> None:
    """P31 P35: what they would not see is named, with what can be done; nothing is changed, the number before goes."""
    path = tmp_path / "j.db"
    await begun(config_at(path, before))
    there = files(tmp_path)
    with pytest.raises(ConfigError, match=rf"^buffer\.path: .*{words}"):
        await begun(config_at(path, after))
    assert files(tmp_path) == there
    await begun(config_at(path, before))


async def test_a_shard_is_no_service_without_shards(tmp_path: Path) -> None:
    """A shard opens its journal beside the others', and a book that is left alone is told of as well."""
    config = config_at(tmp_path / "j.db", 2)
    await begun(config)
    (tmp_path / "j.db.coordinator").unlink()
    await begun(config)
    (tmp_path / "j.db.s0").unlink()
    (tmp_path / "j.db.s1").unlink()
    with pytest.raises(ConfigError, match=r"j\.db\.coordinator: .*as many shards \(producer\.shards\) as before"):
        await begun(config_at(tmp_path / "j.db", 1))


@cache
def samples() -> tuple[bytes, bytes]:
    """A journal, and a book."""
    with TemporaryDirectory() as folder:
        open_journal(Path(folder) / "journal", MINE).close()
        open_book(Path(folder) / "book", 2)[0].close()
        return (Path(folder) / "journal").read_bytes(), (Path(folder) / "book").read_bytes()


@settings(deadline=None)  # files
@given(
    whole=st.booleans(),
    parts=st.frozensets(st.integers(0, 12), max_size=8),
    book=st.booleans(),
    shards=st.integers(1, 12),
)
def test_who_would_miss_a_journal_is_refused(whole: bool, parts: frozenset[int], book: bool, shards: int) -> None:
    """P31: a start passes exactly where every journal at the path is one that it goes on from."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "j.db"
        journal, noted = samples()
        if whole:
            path.write_bytes(journal)
        for index in parts:
            Path(f"{path}.s{index}").write_bytes(journal)
        if book:
            Path(f"{path}.coordinator").write_bytes(noted)
        beyond = any(index >= shards for index in parts)
        missed = bool(parts) or book if shards == 1 else whole or beyond
        try:
            refuse_other_layout(path, shards)
        except ConfigError:
            assert missed
        else:
            assert not missed


@pytest.mark.parametrize(
    "name", ["j.db.s", "j.db.s01", "j.db.s0-wal", "j.db.s0.new", "j.db.sx", "other.db.s0", "j.db-s0"]
)
def test_what_only_looks_like_a_journal_hinders_nobody(tmp_path: Path, name: str) -> None:
    """A journal under another's name, and another kind of file under a shard's, are nobody's."""
    open_journal(tmp_path / name, MINE).close()
    (tmp_path / "j.db.s0").write_text("steps: 10\n" * 50)
    (tmp_path / "j.db.s1").mkdir()
    refuse_other_layout(tmp_path / "j.db", 1)
    refuse_other_layout(tmp_path / "missing" / "j.db", 1)


def test_more_files_than_can_be_read_are_counted(tmp_path: Path) -> None:
    """P35: the line stays one that can be read."""
    for index in range(9):
        open_journal(tmp_path / f"j.db.s{index}", MINE).close()
    with pytest.raises(ConfigError, match=r"j\.db\.s4 and 4 more: .* with producer\.shards: 9 again"):
        refuse_other_layout(tmp_path / "j.db", 1)
    with pytest.raises(ConfigError, match=r"j\.db\.s7, .*j\.db\.s8: journals of 9 shards, and 7 shards"):
        refuse_other_layout(tmp_path / "j.db", 7)


async def test_a_portion_of_one_is_the_whole(tmp_path: Path) -> None:
    """Who is given all the prompts is no shard."""
    open_journal(tmp_path / "j.db.s0", MINE).close()
    with pytest.raises(ConfigError, match=r"j\.db\.s0: journals of shards"):
        await open_storage(config_at(tmp_path / "j.db", 1), Outside(), portion=Portion(0, 1))
