"""P29: what a clear owes to whom, under any history of failures, deaths and returns."""

from collections import defaultdict
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_svc.tensors.clearing.plan import EVERYTHING, Ending, Plan

NAMES = ("a", "b", "c", "owner")
OWNERS = ("owner", "own2")


@dataclass
class World:
    """Processes as they are, beside a plan that only hears of them."""

    plan: Plan
    incarnation: dict[str, int] = field(default_factory=lambda: dict.fromkeys((*NAMES, *OWNERS), 1))
    sent: dict[str, set[int]] = field(default_factory=lambda: defaultdict(set))
    """By id: the clears in which an order named it."""
    did: set[tuple[str, str, int, str]] = field(default_factory=set)
    """(process, verb, incarnation, id) of what was carried out."""
    owed: list[tuple[int, str, str, int, str]] = field(default_factory=list)
    """(clear, process, verb, incarnation, id) of what each clear owed."""
    given_up: set[tuple[str, str, str]] = field(default_factory=set)
    """(process, verb, id)."""
    told: dict[str, int] = field(default_factory=dict)
    """The incarnation that the plan knows of."""
    first: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    """By process: the clear in which the plan heard that it is another one."""
    clear: int = 0

    def forget(self, name: str, *verbs: str) -> None:
        """What was owed to a process that ended is owed no more."""
        self.owed = [one for one in self.owed if one[1] != name or one[2] not in verbs]

    def tell(self, name: str, incarnation: int) -> None:
        """The plan hears of an incarnation."""
        if self.told.get(name, incarnation) != incarnation:
            self.first[name] = self.clear
        self.told[name] = incarnation

    def run(self, data: st.DataObject) -> Ending:
        """One clear of its own ids, each order failing or not, processes coming and going between orders."""
        self.clear += 1
        ids = [f"{self.clear}.{n}" for n in range(data.draw(st.integers(0, 3)))]
        drops = {"owner": tuple(ids[:1]), "own2": tuple(ids[1:])}
        drops = {name: its for name, its in drops.items() if its}
        now = float(self.clear)
        self.plan.begin("drain", ids, drops=drops, now=now, deadline=now + 0.5)
        for name in dict.fromkeys((*self.plan.members, *drops)):
            self.owed += [(self.clear, name, "drain", self.incarnation[name], one) for one in ids]
        self.owed += [(self.clear, name, "drop", self.incarnation[name], one) for name in drops for one in drops[name]]
        while now < self.clear + 0.5:
            self.carry_out(data, now, ids)
            later = self.plan.next_at()
            if later is None:
                break
            now = max(later, now + 0.001)
        ending = self.plan.end()
        for failure in ending.given_up:
            self.given_up |= {(failure.process, failure.verb, one) for one in failure.ids}
        return ending

    def carry_out(self, data: st.DataObject, now: float, ids: list[str]) -> None:
        """Send what is due; while it is out, anything may happen."""
        orders = self.plan.due(now)
        for order in orders:
            assert len(set(order.ids)) == len(order.ids) > 0
            for one in order.ids:
                self.sent[one].add(self.clear)
                assert int(one.split(".")[0]) >= self.first[order.process], "sent to one that never fetched it"
                assert (order.process, order.verb, one) not in self.given_up, "sent after it was reported"
        for order in orders:
            early, late = data.draw(st.sampled_from([(True, False), (False, True), (False, False)]))
            answered = self.incarnation[order.process]
            if data.draw(st.booleans()):
                self.move(data, ids)
            if late:
                answered = self.incarnation[order.process]
            if early or late:
                self.did |= {(order.process, order.verb, answered, one) for one in order.ids}
                if answered == self.incarnation[order.process] and order.process in self.plan.members:
                    self.tell(order.process, answered)
                self.plan.done(order, str(answered))
            else:
                self.plan.failed(order, "it was not there", now)

    def move(self, data: st.DataObject, ids: list[str]) -> None:
        """Somebody dies and returns, with or without saying so, or leaves, or comes."""
        name = data.draw(st.sampled_from(NAMES))
        kind = data.draw(st.sampled_from(["returns", "returns in silence", "leaves", "joins"]))
        if kind == "leaves":
            self.plan.leave(name)
            self.told.pop(name, None)
            self.forget(name, "drain")
            return
        if kind.startswith("returns"):
            self.incarnation[name] += 1
            self.forget(name, "drain", "drop")
        if kind != "returns in silence":
            known = name in self.plan.members
            self.tell(name, self.incarnation[name])
            self.plan.join(name, str(self.incarnation[name]))
            if kind == "returns" or not known:
                self.owed += [(self.clear, name, "drain", self.incarnation[name], one) for one in ids]


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_every_id_is_drained_by_everyone_alive_or_reported_and_none_is_kept_for_long(data: st.DataObject) -> None:
    """P29: whatever fails, dies, returns, leaves and comes."""
    world = World(Plan(attempts=data.draw(st.integers(1, 3))))
    for name in data.draw(st.sets(st.sampled_from(NAMES))):
        world.plan.join(name, "1")
        world.tell(name, 1)
    for _ in range(data.draw(st.integers(2, 5))):
        ending = world.run(data)
        kept = {(failure.process, failure.verb, one) for failure in ending.kept for one in failure.ids}
        assert world.plan.kept == sum(len(failure.ids) for failure in ending.kept)
        for clear, name, verb, incarnation, one in world.owed:
            owed = (name, verb, one)
            assert (name, verb, incarnation, one) in world.did or owed in kept or owed in world.given_up, owed
            assert clear == world.clear or owed not in kept, "kept for a second clear"
    for one, clears in world.sent.items():
        assert clears <= {int(one.split(".")[0]), int(one.split(".")[0]) + 1}


def _failing(plan: Plan, now: float) -> Ending:
    """Carry an open clear out with nobody answering."""
    while True:
        for order in plan.due(now):
            plan.failed(order, "refused", now)
        later = plan.next_at()
        if later is None:
            return plan.end()
        now = later


def test_a_failure_is_kept_for_one_clear_and_then_given_up_by_name() -> None:
    """P29: tried again once with the next clear, then reported; what failed for the first time there is kept."""
    plan = Plan(attempts=2)
    plan.join("a", "1")
    plan.begin("drain", ["x", "y", "x"], drops={}, now=0.0, deadline=10.0)
    first = _failing(plan, 0.0)
    assert first.given_up == ()
    assert [str(failure) for failure in first.kept] == ["a did not drain 2 ids: refused"]
    plan.begin("drain", ["z"], drops={}, now=20.0, deadline=30.0)
    second = _failing(plan, 20.0)
    assert [failure.ids for failure in second.given_up] == [("x", "y")]
    assert [failure.ids for failure in second.kept] == [("z",)]


def test_a_batch_that_is_cleared_twice_is_kept_no_longer_for_that() -> None:
    """P29: an id that was kept already goes once, and is given up with the clear that names it again."""
    plan = Plan(attempts=1)
    plan.join("a", "1")
    plan.begin("drain", ["x"], drops={}, now=0.0, deadline=1.0)
    _failing(plan, 0.0)
    plan.begin("drain", ["x", "y"], drops={}, now=2.0, deadline=3.0)
    (order,) = plan.due(2.0)
    assert order.ids == ("x", "y")
    plan.failed(order, "refused", 2.0)
    ending = plan.end()
    assert [failure.ids for failure in ending.given_up] == [("x",)]
    assert [failure.ids for failure in ending.kept] == [("y",)]


def test_what_is_kept_is_sent_first_also_with_a_clear_that_has_nothing() -> None:
    """P29: an empty batch is a step too."""
    plan = Plan(attempts=1)
    plan.join("a", "1")
    plan.begin("drain", ["x"], drops={"o": ("x",)}, now=0.0, deadline=1.0)
    _failing(plan, 0.0)
    plan.begin("drain", [], drops={}, now=2.0, deadline=3.0)
    orders = plan.due(2.0)
    assert [(order.process, order.verb, order.ids) for order in orders] == [
        ("o", "drop", ("x",)),
        ("a", "drain", ("x",)),
        ("o", "drain", ("x",)),
    ]
    for order in orders:
        plan.done(order, "1")
    assert plan.end() == Ending((), ())


def test_a_process_that_returned_is_not_owed_what_its_predecessor_was() -> None:
    """P29: the buffer of a new process is empty; its old debt is neither sent nor reported."""
    plan = Plan(attempts=1)
    plan.join("a", "1")
    plan.begin("drain", ["x"], drops={}, now=0.0, deadline=1.0)
    _failing(plan, 0.0)
    assert plan.join("a", "2") == 1
    plan.begin("drain", ["y"], drops={}, now=2.0, deadline=3.0)
    assert [order.ids for order in plan.due(2.0)] == [("y",)]


def test_an_answer_says_that_a_process_returned() -> None:
    """P29: one that came back at its old address is not owed what its predecessor was, once it has answered."""
    plan = Plan(attempts=1)
    plan.join("a", "1")
    plan.begin("drain", ["x"], drops={}, now=0.0, deadline=1.0)
    _failing(plan, 0.0)
    plan.begin("flush", EVERYTHING, drops={}, now=2.0, deadline=3.0)
    flush, drain = sorted(plan.due(2.0), key=lambda order: order.verb, reverse=True)
    plan.failed(drain, "refused", 2.0)
    assert plan.done(flush, "2") == 1
    assert plan.end() == Ending((), ())


def test_a_late_answer_of_a_predecessor_ends_nothing() -> None:
    """P29: the one that came back meanwhile is asked itself."""
    plan = Plan()
    plan.join("a", "1")
    plan.begin("drain", ["x"], drops={}, now=0.0, deadline=1.0)
    (order,) = plan.due(0.0)
    plan.join("a", "2")
    plan.done(order, None)
    (again,) = plan.due(0.0)
    assert again.ids == ("x",)


def test_one_that_joins_during_a_clear_is_part_of_it() -> None:
    """P29: level, not edge: it may have fetched before it was known."""
    plan = Plan()
    plan.begin("drain", ["x"], drops={}, now=0.0, deadline=1.0)
    assert plan.due(0.0) == []
    plan.join("a", "1")
    assert [order.process for order in plan.due(0.0)] == ["a"]


def test_one_that_is_heard_of_again_is_not_asked_again() -> None:
    """P29: what is done is done, as long as it is the same process."""
    plan = Plan()
    plan.join("a", "1")
    plan.join("b", None)
    plan.begin("drain", ["x"], drops={}, now=0.0, deadline=1.0)
    for order in plan.due(0.0):
        plan.done(order, None)
    for name, incarnation in (("a", "1"), ("a", None), ("b", None), ("b", "1")):
        plan.join(name, incarnation)
    assert plan.due(0.0) == []
    plan.join("a", "2")
    assert [order.process for order in plan.due(0.0)] == ["a"]


def test_attempts_share_what_is_left_of_the_deadline() -> None:
    """P29: one that hangs leaves time for another try; none begins after the deadline."""
    plan = Plan(attempts=3, pause_s=0.1)
    plan.join("a", "1")
    plan.begin("drain", ["x"], drops={}, now=0.0, deadline=9.0)
    (first,) = plan.due(0.0)
    assert first.until == 3.0
    plan.failed(first, "hung", 3.0)
    assert plan.next_at() == 3.1
    assert plan.due(3.05) == []
    (second,) = plan.due(3.1)
    assert 6.0 < second.until < 6.1
    plan.failed(second, "hung", 8.99)
    assert plan.next_at() is None
    assert plan.due(9.1) == []


def test_a_flush_that_failed_is_kept_as_such() -> None:
    """P29: all that was fetched, not ids."""
    plan = Plan(attempts=1)
    plan.join("a", "1")
    plan.begin("flush", EVERYTHING, drops={}, now=0.0, deadline=1.0)
    assert str(_failing(plan, 0.0).kept[0]) == "a did not flush all it fetched: refused"
    plan.begin("drain", ["x"], drops={}, now=2.0, deadline=3.0)
    assert {(order.verb, order.ids) for order in plan.due(2.0)} == {("flush", EVERYTHING), ("drain", ("x",))}
