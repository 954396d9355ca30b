"""A turn with stop texts that is cut: what may be the beginning of one is made again, with all that belongs to it."""

from collections.abc import Sequence

import numpy as np
import pytest

from rollout_svc.config import SamplingConfig
from rollout_svc.engines import Completion
from rollout_svc.errors import Interrupted
from rollout_svc.sample import Sample
from rollout_svc.segment import FinishReason, VersionSpan
from rollout_svc.tensors import Handles, MemoryStore
from rollout_svc.tokens import BYTE_EOS, ByteTokenizer, Tokenizer
from tests.support.caller import Table, answer, told
from tests.support.virtual import virtual

PROMPT = [1, 2, 3]
FIRST = SamplingConfig(max_tokens=40, stop=("first",))


def said(text: str, finish: FinishReason = "stop", version: int = 0) -> Completion:
    """An answer, a token for each byte."""
    return answer(list(text.encode()), finish, late=finish == "abort", version=version)


def table(*script: Completion, stop: tuple[str, ...] = ("first",), tokenizer: Tokenizer | None = None) -> Table:
    """A loop that parks, whose turns end at those texts; without a tokenizer unless one is given."""
    made = Table(*script, on_pause="park")
    made.sampling = SamplingConfig(max_tokens=40, stop=stop)
    made.tokenizer = tokenizer  # type: ignore[assignment]
    return made


def text_of(sample: Sample) -> str:
    """What it says."""
    return bytes(sample.response_ids).decode()


def asked_after(made: Table) -> list[str]:
    """What each call was given of the turn."""
    return [bytes(asked.input_ids[len(PROMPT) :]).decode() for asked in made.caller.asked]


@pytest.mark.parametrize(
    ("tokenizer", "kept"), [(ByteTokenizer(), "the "), (None, "the")], ids=["a tokenizer", "no tokenizer"]
)
@virtual
async def test_a_cut_within_a_stop_text_is_gone_on_with_before_it(tokenizer: Tokenizer | None, kept: str) -> None:
    """With a tokenizer where the text began, without one as far back as it may have; logprobs and versions likewise."""
    made = table(said("the fir", "abort"), said("the first".removeprefix(kept), version=1), tokenizer=tokenizer)
    turn = await made.context().generate(PROMPT)
    ids = list(b"the first")
    assert told(turn) == (ids, [-1.0] * len(ids), "stop")
    assert asked_after(made) == ["", kept]
    assert [asked.max_tokens for asked in made.caller.asked] == [40, 40 - len(kept)]
    assert made.sample.weight_versions == (VersionSpan(0, 0, len(kept)), VersionSpan(1, len(kept), len(ids)))


@virtual
async def test_what_no_stop_text_begins_with_is_kept() -> None:
    """Where the text is known a cut costs nothing, unless it may divide one."""
    made = table(said("the fox", "abort"), said(" first"), tokenizer=ByteTokenizer())
    await made.context().generate(PROMPT)
    assert asked_after(made) == ["", "the fox"]
    assert text_of(made.sample) == "the fox first"


@virtual
async def test_without_stop_texts_everything_is_kept() -> None:
    """As ever: the next call is given all there is."""
    made = table(said("the fir", "abort"), said("st"), stop=())
    await made.context().generate(PROMPT)
    assert asked_after(made) == ["", "the fir"]


@virtual
async def test_cuts_that_follow_each_other_take_back_only_what_was_made_since() -> None:
    """Without a tokenizer: a call that brings less than is given back leaves what it was given, and is made again."""
    cuts = [said("one two", "abort"), said("wo", "abort"), answer([], "abort", late=True), said("two first")]
    made = table(*cuts)
    await made.context().generate(PROMPT)
    assert asked_after(made) == ["", "one", "one", "one"]
    assert text_of(made.sample) == "onetwo first"


@virtual
async def test_a_turn_that_is_handed_back_gives_it_back_when_it_goes_on() -> None:
    """A loop that does not park: its tokens stay whole until another attempt takes them up."""
    made = table(said("the fir", "abort"), said("first"), tokenizer=ByteTokenizer())
    made.on_pause = "abort"
    with pytest.raises(Interrupted):
        await made.context().generate(PROMPT)
    made.hand_back()
    assert text_of(made.sample) == "the fir"
    await made.context().generate(PROMPT)
    assert asked_after(made) == ["", "the "]
    assert text_of(made.sample) == "the first"


@virtual
async def test_a_whole_turn_gives_nothing_back() -> None:
    """What was told stays: the next turn's stop texts begin with it."""
    made = table(said("one fir"), said("st"), tokenizer=ByteTokenizer())
    context = made.context()
    await context.generate()
    context.append([9])
    await context.generate()
    assert asked_after(made) == ["", "one fir\t"]


@virtual
async def test_a_turn_that_had_all_its_tokens_gives_nothing_back() -> None:
    """P6: it is as long as it may be, and so would an uncut one have been: no call is made for it."""
    made = table(said("fir", "abort"), tokenizer=ByteTokenizer())
    made.sampling, made.on_pause = SamplingConfig(max_tokens=3, stop=("first",)), "abort"
    with pytest.raises(Interrupted):
        await made.context().generate(PROMPT)
    made.hand_back()
    assert told(await made.context().generate(PROMPT)) == (list(b"fir"), [-1.0] * 3, "length")
    assert asked_after(made) == [""]


@virtual
async def test_what_was_there_before_the_turn_is_never_taken() -> None:
    """A cut in a second turn gives back that turn's tokens at most."""
    made = table(said("firs"), said("t", "abort"), said("two"), stop=("first", "turn"), tokenizer=None)
    context = made.context()
    await context.generate()
    await context.generate()
    assert asked_after(made) == ["", "firs", "firs"]
    assert text_of(made.sample) == "firstwo"


@virtual
async def test_a_tokenizer_that_fails_is_none() -> None:
    """Ids that are no text are given back by their number."""

    class Broken(ByteTokenizer):
        def decode(self, ids: object) -> str:
            raise RuntimeError("no text")

    made = table(said("the fir", "abort"), said(" first"), tokenizer=Broken())
    await made.context().generate(PROMPT)
    assert asked_after(made) == ["", "the"]


@virtual
async def test_special_tokens_may_be_text_to_an_engine() -> None:
    """With one that is written out a stop text may begin; one that is left out may stand within."""

    class Special(ByteTokenizer):
        def spell(self, ids: Sequence[int]) -> str:
            return "".join("<end>" if token == BYTE_EOS else chr(token) for token in ids)

    for cut, stop, kept in ((b"one", "<end>!", b"one"), (b"one fir", "first", b"one ")):
        made = table(answer([*cut, BYTE_EOS], "abort", late=True), said("!"), stop=(stop,), tokenizer=Special())
        await made.context().generate(PROMPT)
        assert made.caller.asked[1].input_ids == [*PROMPT, *kept]


@virtual
async def test_the_rows_of_what_is_given_back_go_with_it() -> None:
    """P27: the next call asks from the last token that is kept; one history is alive, and none after the end."""
    handles, rows = Handles(), np.arange(11, dtype=np.uint8).reshape(11, 1, 1)
    made = Table(on_pause="park", experts=True)
    made.sampling = FIRST
    held: list[int] = []

    def routed(completion: Completion, count: int) -> Completion:
        completion.experts = handles.hold(MemoryStore().put(rows[:count]), kind="experts", holder="s")
        return completion

    def look() -> None:
        assert made.sample.experts is not None
        held.append(made.sample.experts.shape[0])
        assert np.array_equal(made.sample.experts.read(), rows[: held[-1]])
        assert np.array_equal(made.sample.experts.later()(), rows[: held[-1]])

    cut, whole = routed(said("the fir", "abort"), 9), routed(said("first"), 11)
    made.caller.script += [cut, made.then(look, whole)]
    await made.context().generate(PROMPT)
    assert held == [len(PROMPT) + len("the ") - 1]
    assert (made.sample.rows_missing, handles.live["experts"].handles) == (0, 1)
    made.sample.let_go("the test is over")
    assert not handles.live
