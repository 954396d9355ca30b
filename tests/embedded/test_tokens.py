"""Vocabularies."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_svc.embedded.tokens import ByteVocabulary, VocabularyError, load_vocabulary
from tests.embedded.helpers import write_tokenizer


@given(st.text())
def test_bytes_round_trip(text: str) -> None:
    """Text of any script comes back."""
    vocabulary = load_vocabulary(None)
    ids = vocabulary.encode(text)
    assert all(0 <= token < 256 for token in ids)
    assert vocabulary.decode(ids) == text


@given(st.lists(st.integers(0, 256)))
def test_any_ids_decode(ids: list[int]) -> None:
    """Decoding never raises; the end token has no text unless special tokens are kept."""
    vocabulary = ByteVocabulary()
    assert vocabulary.decode(ids) == vocabulary.decode([token for token in ids if token != 256])
    assert vocabulary.decode(ids, skip_special_tokens=False).count("<end>") >= ids.count(256)


def test_a_tokenizer_file_gives_ids_text_and_end(tmp_path: Path) -> None:
    """Size, encoding, decoding and the end token come from the directory."""
    write_tokenizer(tmp_path, **{"?": 0, "hello": 1, "world": 2})
    assert load_vocabulary(tmp_path).end_id is None
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<stop>"}}))
    vocabulary = load_vocabulary(tmp_path)
    assert (vocabulary.size, vocabulary.end_id) == (4, 3)
    assert vocabulary.encode("hello world") == [1, 2]
    assert vocabulary.decode([1, 2, 3]) == "hello world"
    assert vocabulary.decode([1, 3], skip_special_tokens=False) == "hello <stop>"


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("tokenizer.json", "{", "cannot read"),
        ("tokenizer_config.json", "{", "cannot read"),
        ("tokenizer_config.json", '{"eos_token": "<nope>"}', "names the end token '<nope>'"),
    ],
)
def test_a_directory_that_cannot_be_used_is_refused(tmp_path: Path, name: str, content: str, words: str) -> None:
    """The file at fault is named."""
    write_tokenizer(tmp_path, **{"?": 0, "a": 1})
    (tmp_path / name).write_text(content)
    with pytest.raises(VocabularyError, match=words):
        load_vocabulary(tmp_path)
    with pytest.raises(VocabularyError, match=r"no tokenizer\.json"):
        load_vocabulary(tmp_path / "absent")
