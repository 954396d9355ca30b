"""P29: what is a leak, and which ranks a process has; both pure."""

import pytest

from rollout_svc.tensors.clearing.roles import Consumer, Roles
from rollout_svc.tensors.clearing.watch import Account, Figures, Watch, read_figures
from tests.support.peers import stats_of


def _figures(*cached: str, owned: tuple[str, ...] = (), process: str = "p") -> Figures:
    return read_figures(process, ("actor[0,0]",), stats_of(*cached, owned=owned))


def test_figures_are_read_as_a_data_plane_answers_them() -> None:
    """P29: a process without an owner, or without a buffer, holds nothing there."""
    one = read_figures("p", ("actor[0,0]",), stats_of("x", owned=("y", "z"), incarnation="i"))
    assert one == Figures(
        "p", ("actor[0,0]", "owner"), "i", Account(1, 10, ("x",)), Account(2, 20, ("y", "z")), expired=0
    )
    assert read_figures("p", (), {"owner": None, "buffer": None}) == Figures("p", (), None, Account(), Account())
    with pytest.raises(KeyError):
        read_figures("p", (), {"buffer": {"entries": 1}})


def test_what_is_left_in_a_buffer_is_a_leak_unless_it_is_live_or_owed() -> None:
    """P29: those that are owed are reported already."""
    watch = Watch()
    assert watch.look([_figures("x")], live={"x"}, dropped=set(), owed={}) == ()
    assert watch.look([_figures("x")], live=set(), dropped={"x"}, owed={"p": {"x"}}) == ()
    (leak,) = watch.look([_figures("x", "y", "z")], live={"z"}, dropped=set(), owed={"p": {"y"}, "q": {"x"}})
    assert (leak.where, leak.ids, leak.entries, leak.bytes) == ("buffer", ("x",), 3, 30)


def test_an_owner_may_have_what_nobody_was_told_of_for_one_look() -> None:
    """P29: what it was to drop just now, and did not, is a leak at once."""
    watch = Watch()
    look = {"live": set[str](), "dropped": {"dropped"}, "owed": dict[str, set[str]]()}
    (leak,) = watch.look([_figures(owned=("new", "dropped"))], **look)  # type: ignore[arg-type]
    assert (leak.where, leak.ids) == ("owner", ("dropped",))
    (leak,) = watch.look([_figures(owned=("new", "newer"))], **look)  # type: ignore[arg-type]
    assert leak.ids == ("new",)
    assert watch.look([_figures(owned=("newest",))], **look) == ()  # type: ignore[arg-type]
    assert watch.look([_figures(owned=("newest",))], live=set(), dropped=None, owed={}) == ()


def test_leases_that_ended_are_counted_once_and_anew_for_a_new_process() -> None:
    """P29: a process that returned begins at zero."""
    watch = Watch()
    one = _figures()
    assert watch.expired([one._replace(expired=2)]) == {"p": 2}
    assert watch.expired([one._replace(expired=3)]) == {"p": 1}
    assert watch.expired([one._replace(expired=3)]) == {}
    assert watch.expired([one._replace(expired=1, incarnation="2")]) == {"p": 1}


def test_a_rank_is_one_process_at_a_time_and_a_process_may_have_several() -> None:
    """P29: who has no rank left is told of."""
    roles = Roles()
    assert roles.take("actor", [Consumer("a", (0, 0)), Consumer("b", (0, 1))]) == ()
    assert roles.take("critic", [Consumer("a")]) == ()
    assert roles.parts("a") == ("actor[0,0]", "critic[0]")
    assert roles.take("actor", [Consumer("c", (0, 0)), Consumer("d", (0, 1))]) == ("b",)
    assert roles.leave("critic") == ("a",)
    assert roles.leave("critic") == ()
    assert set(roles.addresses()) == {"c", "d"}
    assert roles.leave("actor", (0, 1)) == ("d",)
    assert list(roles) == ["actor"]
