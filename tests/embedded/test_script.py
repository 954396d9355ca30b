"""Scripted answers: which rule speaks, from where it goes on, and that all else is the engine as it is."""

from __future__ import annotations

import asyncio
import json
from math import log
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_svc.embedded.run import main
from rollout_svc.embedded.scheduler import Scheduler
from rollout_svc.embedded.script import Rule, Script
from rollout_svc.embedded.script_file import ScriptError, load_script
from rollout_svc.embedded.tokens import load_vocabulary
from tests.embedded.helpers import ABORTED, VOCABULARY, job, run_to_end, served, small_model, write_tokenizer

if TYPE_CHECKING:
    from pathlib import Path

    from tests.embedded.helpers import Served

TURN = "<assistant>"
CALL = 'I add.<tool_call>{"name": "add", "arguments": {"a": 2, "b": 2}}</tool_call>'
RULES = (
    {"turn": TURN},
    {"match": {"ends_with": f"<tool>4{TURN}"}, "say": "It is 4."},
    {"match": {"regex": r"<user>\d \+ \d"}, "say": CALL, "peak": 0.9},
    {"match": {"contains": "<user>again"}, "say": ["once", "twice"]},
)
ASKED = f"<user>2 + 2{TURN}"
END = 256


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Script:
    return write(tmp_path_factory.mktemp("script"), *RULES)


def write(folder: Path, *objects: Any) -> Script:
    """A script of these objects, one a line."""
    path = folder / "script.jsonl"
    path.write_text("\n".join(json.dumps(one) for one in objects))
    return load_script(path, VOCABULARY)


def ids_of(text: str) -> list[int]:
    return list(text.encode())


def said(script: Script, prompt: str) -> str | None:
    """What is still to be said to a prompt."""
    found = script.scripted(ids_of(prompt))
    if found is None:
        return None
    assert found.ids[-1] == END
    return VOCABULARY.decode(found.ids[found.start :])


def test_the_first_rule_that_a_prompt_meets_speaks(script: Script) -> None:
    """Rules are asked in order, where the model began to speak; no rule: the model's own."""
    assert said(script, ASKED) == CALL
    assert said(script, f"{ASKED}{CALL}<tool>4{TURN}") == "It is 4."
    assert said(script, f"{ASKED}{CALL}<tool>4{TURN}It i") == "s 4."
    assert said(script, f"<user>hello{TURN}") is None


def test_a_list_says_one_text_each_time_the_rule_decides(script: Script) -> None:
    """The last one stands for all later times; turns of other rules do not count."""
    conversation = f"<user>again{TURN}"
    for text in ("once", "twice", "twice"):
        assert said(script, conversation) == text
        conversation += f"{text}<tool>4{TURN}"
        assert said(script, conversation) == "It is 4."
        conversation += f"It is 4.<user>more{TURN}"


@settings(max_examples=50)
@given(st.text(max_size=20), st.data())
def test_a_cut_answer_goes_on_where_it_was(text: str, data: st.DataObject) -> None:
    """With the marker from any place, whatever was drawn so far; without it from any place of what the rule says."""
    answer = (*ids_of(text), END)
    cut = data.draw(st.integers(0, len(answer) - 1))
    drawn = data.draw(st.lists(st.integers(97, 122), min_size=cut, max_size=cut))
    marked = Script([Rule((answer,))], VOCABULARY, ids_of(TURN)).scripted([*ids_of(f"what?{TURN}"), *drawn])
    found = [marked]
    if "?" not in text:  # else the answer meets the rule itself: only a marker could tell
        unmarked = Script([Rule((answer,), ends_with="?")], VOCABULARY)
        found.append(unmarked.scripted([*ids_of("what?"), *answer[:cut]]))
        assert unmarked.scripted(ids_of("nobody asks")) is None
    for scripted in found:
        assert scripted is not None
        assert (scripted.ids, scripted.start) == (answer, cut)
        assert [scripted.at(made) for made in range(len(answer) - cut + 1)] == [*answer[cut:], END]


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 1.0}, {"temperature": 0.7, "top_p": 0.8}])
def test_logprobs_are_those_of_the_scripted_distribution(script: Script, sampling: dict[str, Any]) -> None:
    """P7: greedy and sampled alike: log(peak) of a token that was to be said, log of an even share for any other."""
    jobs = [job(f"j{seed}", ids_of(ASKED), 120, seed=seed, ignore_eos=False, **sampling) for seed in range(4)]
    for one in jobs:
        one.script = script.scripted(one.prompt)
    strayed = 0
    for name, outcome in run_to_end(Scheduler(small_model(), VOCABULARY, max_running=4), jobs).items():
        done = outcome.job
        wanted = [*ids_of(CALL), END]
        assert len(done.ids) <= len(wanted), name
        for token, right, logprob in zip(done.ids, wanted, done.logprobs, strict=False):
            assert logprob == pytest.approx(log(0.9) if token == right else log(0.1 / 256), abs=1e-5)
            strayed += token != right
        assert outcome.finish_reason["type"] == "stop"
    assert (strayed > 0) == (sampling["temperature"] == 1.0)


def test_cut_at_every_token_it_draws_what_it_would_have_drawn(script: Script) -> None:
    """P6: an answer that goes on after an abort has the tokens and logprobs of one that was never cut, strays too."""

    def run(*prompts: list[int]) -> list[tuple[list[int], list[float]]]:
        jobs = [job(f"j{n}", prompt, 60, seed=3) for n, prompt in enumerate(prompts)]
        for one in jobs:
            one.script = script.scripted(one.prompt)
            one.limit -= len(one.prompt) - len(ASKED)
        run_to_end(Scheduler(small_model(), VOCABULARY, max_running=8), jobs)
        return [(one.ids, one.logprobs) for one in jobs]

    ((whole, logprobs),) = run(ids_of(ASKED))
    assert whole != ids_of(CALL)[:60]
    rest = run(*([*ids_of(ASKED), *whole[:cut]] for cut in range(60)))
    assert all(ids == whole[cut:] for cut, (ids, _) in enumerate(rest))
    assert all(made == pytest.approx(logprobs[cut:]) for cut, (_, made) in enumerate(rest))


def test_those_without_a_rule_are_the_models_own(script: Script) -> None:
    """A scripted request beside another changes nothing of it, and the other way round."""

    def alone(prompt: str) -> Any:
        return job(prompt, ids_of(prompt), 40, temperature=1.0)

    prompts = [f"<user>hello{TURN}", ASKED, f"<user>again{TURN}"]
    together = [alone(prompt) for prompt in prompts]
    for one in together:
        one.script = script.scripted(one.prompt)
    run_to_end(Scheduler(small_model(), VOCABULARY, max_running=8), together)
    own = alone(prompts[0])
    run_to_end(Scheduler(small_model(), VOCABULARY, max_running=8), [own])
    assert together[0].ids == own.ids
    assert together[0].logprobs == pytest.approx(own.logprobs, abs=1e-5)
    assert together[2].ids == [*ids_of("once"), *[END] * 36]  # the end goes on where it is to be ignored
    assert together[2].logprobs == [0.0] * 40


async def ask(engine: Served, prompt: str, rid: str, **more: Any) -> dict[str, Any]:
    sampling = {"max_new_tokens": 120, "temperature": 0, "sampling_seed": 0}
    body = {"rid": rid, "input_ids": ids_of(prompt), "sampling_params": sampling, "return_logprob": True} | more
    status, answer = await engine.call("/generate", body)
    assert status == 200
    if not isinstance(answer, dict):
        events = [line.removeprefix("data: ") for line in answer.split("\n\n") if line]
        assert events[-1] == "[DONE]"
        answer = json.loads(events[-2])
    assert isinstance(answer, dict)
    return answer


async def test_a_tool_call_comes_out_exactly_whole_and_streamed(script: Script) -> None:
    """Two at once, one of them as a stream: each has its text to the letter, and ends by its end token."""
    async with served(is_open=True, script=script) as engine:
        call, done = await asyncio.gather(
            ask(engine, ASKED, "whole"), ask(engine, f"{ASKED}{CALL}<tool>4{TURN}", "streamed", stream=True)
        )
        assert (call["text"], done["text"]) == (CALL, "It is 4.")
        assert call["meta_info"]["finish_reason"] == done["meta_info"]["finish_reason"]
        assert call["meta_info"]["finish_reason"] == {"type": "stop", "matched": END}
        engine.assert_idle()


@pytest.mark.parametrize("mode", ["in_place", "retract", "abort"])
async def test_a_pause_in_the_middle_changes_no_word(script: Script, mode: str) -> None:
    """P7: frozen, put back, or cut and asked again: the same words, those after a new label under it."""
    async with served(script=script) as engine:
        task = asyncio.get_running_loop().create_task(ask(engine, ASKED, "r1"), name="ask")
        await engine.queued(1)
        await engine.step(10)
        await engine.call("/pause_generation", {"mode": mode})
        await engine.call("/update_weight_version", {"new_version": "7", "abort_all_requests": False})
        engine.scheduler.open()
        first = await task if mode == "abort" else None
        await engine.call("/continue_generation", {})
        if first is None:
            whole = await task
            assert whole["text"] == CALL
            made = [span["version"] for span in whole["meta_info"]["weight_versions"]]
            assert made == ["default", "7"]
            return
        assert first["meta_info"]["finish_reason"] == ABORTED
        rest = await ask(engine, ASKED + first["text"], "r2")
        assert 10 <= len(first["text"]) < len(CALL)
        assert first["text"] + rest["text"] == CALL
        assert rest["meta_info"]["weight_version"] == "7"


def test_a_tokenizer_of_its_own(tmp_path: Path) -> None:
    """What is said are that tokenizer's ids, its end token, and nothing that it adds to prompts."""
    write_tokenizer(tmp_path, **{"?": 0, "one": 1, "two": 2, "go": 3})
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<stop>"}')
    vocabulary = load_vocabulary(tmp_path)
    path = tmp_path / "script.json"
    path.write_text('[{"turn": "go"},\n {"match": {"ids_end": [1, 3]}, "say": ["two one", "one"]}\n]')
    script = load_script(path, vocabulary)
    found = script.scripted([2, 1, 3, 2])
    assert found is not None
    assert (found.ids, found.start) == ((2, 1, vocabulary.end_id), 1)
    assert script.scripted([2, 2, 3]) is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"match": {}, "say": "a"}\n{"match": {}, "sya": "b"}', ":2: say: Field required"),
        ('{"match": {}, "say": "a"}\n\n{"match": {"regex": "("}, "say": "b"}', ":3: match.regex: "),
        ('[{"match": {}, "say": "a"},\n {"match": {}, "say": "b", "peak": 1.5}]', ":2: peak: "),
        ('[{"match": {}, "say": "a"}\n {"match": {}, "say": "b"}]', ":2: no JSON: expected a comma"),
        ('[{"match": {}, "say": "a"},\n', ":2: no JSON: the list does not end"),
        ('{"match": {},\n "say": }', ":2: no JSON: "),
        ('{"match": {"ids_end": [300]}, "say": "a"}', ":1: match.ids_end: 300 is outside the vocabulary of 257"),
        ('\n{"match": {}, "say": ["a", "b"]}', ':2: say: a list needs {"turn"'),
        ('{"turn": "a"}\n{"turn": "b"}', ":2: turn: is given twice"),
        ("3", ":1: Input should be"),
    ],
)
def test_a_bad_script_is_told_with_file_and_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, message: str
) -> None:
    """P35: exit 2, one line with file, line and field; nothing was served."""
    path = tmp_path / "script.json"
    path.write_text(text)
    with pytest.raises(ScriptError) as caught:
        load_script(path, VOCABULARY)
    assert f"{path}{message}" in str(caught.value)
    assert main(["--script", str(path), "--port", "0"]) == 2
    assert f"engine: {path}{message}" in capsys.readouterr().err


def test_a_script_needs_a_file_and_an_end_token(tmp_path: Path) -> None:
    """P35: both are told before anything is served."""
    with pytest.raises(ScriptError, match=r"none\.json: cannot be read"):
        load_script(tmp_path / "none.json", VOCABULARY)
    write_tokenizer(tmp_path, **{"?": 0})
    (tmp_path / "script.json").write_text('{"match": {}, "say": "a"}')
    with pytest.raises(ScriptError, match="names no end token"):
        load_script(tmp_path / "script.json", load_vocabulary(tmp_path))
