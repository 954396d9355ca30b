"""The persistent buffer: whatever happens in a round, the receiver never loads stale bytes."""

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_svc.weights.persistent import Parts, SendRound


@dataclass
class _Consumer:
    """LMDeploy's consumer as it is, silent where it should complain: what it would load, by generation and dtype."""

    opens_events: bool
    cached: tuple[int, str, int] | None = None  # generation, dtype, writes seen; a clone sees no later write
    cloned: bool = False

    def load(self, parts: Parts, generation: int, dtype: str, writes: int) -> tuple[int, str, int] | None:
        """Return what is loaded; None: refused."""
        if parts.event and not self.opens_events:
            self.cached = None
            return None
        if parts.buffer:
            self.cached, self.cloned = (generation, dtype, writes), parts.require_clone
        elif self.cached is None:
            return None
        elif not self.cloned and self.cached[0] == generation:
            self.cached = (generation, self.cached[1], writes)
        return self.cached

    def finish(self) -> None:
        """Drop both."""
        self.cached = None


steps = st.lists(
    st.tuples(
        st.sampled_from(["call", "call", "call", "lost before", "lost after", "finish", "replace"]),
        st.sampled_from(["float32", "bfloat16"]),
    ),
    max_size=30,
)


@given(steps, st.booleans())
def test_nothing_stale_is_ever_loaded(drawn: list[tuple[str, str]], opens: bool) -> None:
    """P26: over any rounds, failures, dtypes and replaced buffers each answered call loaded what was just written."""
    consumer, send = _Consumer(opens), SendRound(events=True)
    generation = writes = said = 0
    for what, dtype in drawn:
        if what == "replace":
            generation += 1
        elif what == "finish":
            consumer.finish()
            send.ended()
        else:
            writes += 1
            while True:
                parts = send.next(generation, dtype)
                if what == "lost before":
                    send.failed()
                    break
                loaded = consumer.load(parts, generation, dtype, writes)
                if loaded is None and parts.event:
                    said += send.no_events()
                    continue
                assert loaded == (generation, dtype, writes)
                if what == "lost after":
                    consumer.finish()  # a restarted engine, or one that dropped everything at a failure
                    send.failed()
                else:
                    send.sent(generation, dtype)
                break
    assert said <= 1


def test_later_calls_carry_metadata_alone() -> None:
    """P26: the buffer and its event travel once a round."""
    send = SendRound(events=True)
    assert send.next(0, "bfloat16") == Parts(buffer=True, event=True, require_clone=False, synchronize=False)
    send.sent(0, "bfloat16")
    assert send.next(0, "bfloat16") == Parts(buffer=False, event=False, require_clone=False, synchronize=False)


@pytest.mark.parametrize("why", ["dtype", "buffer", "failed", "ended"])
def test_what_the_receiver_may_not_have_is_sent_again(why: str) -> None:
    """P26: after a dtype change, a new buffer, a failure or the end of a round buffer and event travel again."""
    send = SendRound(events=True)
    send.sent(0, "bfloat16")
    if why == "failed":
        send.failed()
    if why == "ended":
        send.ended()
    parts = send.next(int(why == "buffer"), "float32" if why == "dtype" else "bfloat16")
    assert (parts.buffer, parts.event, parts.require_clone) == (True, True, False)


def test_without_events_every_call_is_synchronized_and_carries_the_buffer() -> None:
    """P26: where the event cannot be opened the sync is not skipped, and that is said once."""
    send = SendRound(events=True)
    assert send.no_events()
    assert not send.no_events()
    for _ in range(2):
        assert send.next(0, "float32") == Parts(buffer=True, event=False, require_clone=True, synchronize=True)
        send.sent(0, "float32")
