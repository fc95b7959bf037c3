"""The authority over membership and commits, without processes."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest

from keepstep.resilience.survivors.membership import Fewest, Membership, deal


class Recorded:
    """A membership, of three unless there may be fewer, and what it sent."""

    def __init__(self, fewest: Fewest | None = None) -> None:
        self.sent: dict[int, list[dict[str, Any]]] = defaultdict(list)
        self.notes: list[dict[str, Any]] = []
        self.membership = Membership(3, lambda number, message: self.sent[number].append(message), self._note, fewest)
        for number in range(fewest.replicas if fewest else 3):
            self.join(number)
        for number in range(1, fewest.replicas if fewest else 3):
            self.copied(number, step=0)

    def _note(self, **facts: Any) -> None:
        self.notes.append(facts)

    def join(self, number: int) -> None:
        self.membership.hello(number, f"address {number}")
        self.membership.receive(number, {"kind": "ready", "copy": 0})

    def copied(self, number: int, step: int) -> None:
        copy = next(message["copy"] for message in reversed(self.sent[number]) if message["kind"] == "copy")
        self.membership.receive(number, {"kind": "copied", "copy": copy, "step": step})

    def last(self, number: int) -> dict[str, Any]:
        return self.sent[number][-1]

    def prepare(self, number: int, step: int = 1, checksum: str = "a") -> None:
        epoch = next(message["epoch"] for message in reversed(self.sent[number]) if message["kind"] == "view")
        self.membership.receive(number, {"kind": "prepared", "epoch": epoch, "step": step, "checksum": checksum})

    def prepare_all(self, step: int) -> None:
        for number in self.membership.members:
            self.prepare(number, step)


@pytest.fixture
def three() -> Recorded:
    return Recorded()


def test_first_replica_leads_and_others_copy(three: Recorded) -> None:
    assert three.sent[0][0] == {"kind": "welcome", "leads": True}
    assert three.sent[1][0] == {"kind": "welcome", "leads": False}
    assert three.membership.members == (0, 1, 2)


def test_step_is_committed_when_all_have_prepared(three: Recorded) -> None:
    three.prepare(0)
    three.prepare(1)
    assert [three.last(number)["kind"] for number in range(3)] == ["view"] * 3
    three.prepare(2)
    assert [three.last(number)["kind"] for number in range(3)] == ["commit"] * 3


def test_loss_before_the_commit_makes_survivors_redo_the_step(three: Recorded) -> None:
    three.prepare(0)
    three.membership.lost(2)
    three.prepare(1)
    assert [three.last(number)["kind"] for number in (0, 1)] == ["view"] * 2
    three.prepare(0)
    assert [three.last(number)["kind"] for number in (0, 1)] == ["commit"] * 2
    assert [(note["kind"], note["replica"], note["ranks"]) for note in three.notes] == [("left", 2, 2)]


def test_report_of_an_earlier_epoch_evicts_nobody(three: Recorded) -> None:
    three.membership.lost(2)
    three.membership.receive(1, {"kind": "broken", "epoch": three.last(0)["epoch"] - 1, "peer": 0})
    assert three.membership.members == (0, 1)


def test_longest_serving_member_leads_after_the_leader(three: Recorded) -> None:
    three.membership.lost(0)
    three.join(0)
    three.prepare_all(step=1)
    assert three.last(1)["joining"] == [[0, "address 0"]]
    three.copied(0, step=1)
    three.prepare_all(step=2)
    assert three.membership.members == (1, 2, 0)


def test_members_step_on_until_the_one_that_joins_has_caught_up(three: Recorded) -> None:
    three.membership.lost(0)
    three.join(0)
    three.prepare_all(step=1)
    # The state of step 1 has not arrived yet.
    three.prepare_all(step=2)
    assert (three.last(1)["kind"], three.last(1)["joining"], three.last(1)["entering"]) == ("commit", [], False)
    three.copied(0, step=1)
    three.prepare_all(step=3)
    assert three.membership.members == (1, 2)
    three.copied(0, step=2)
    three.copied(0, step=3)
    three.prepare_all(step=4)
    assert [message["kind"] for message in three.sent[1][-2:]] == ["commit", "view"]
    assert three.sent[1][-2]["entering"]
    assert three.last(0)["members"] == [[1, "address 1"], [2, "address 2"], [0, "address 0"]]


def test_source_lost_during_a_copy_lets_it_start_again(three: Recorded) -> None:
    three.membership.lost(0)
    three.join(0)
    three.prepare_all(step=1)
    three.membership.lost(2)
    # What belongs to the first copy counts no more, and the next one is after the next step.
    three.copied(0, step=1)
    assert three.membership.members == (1,)
    three.prepare(1, step=2)
    assert three.last(0) == {"kind": "copy", "copy": 3, "sources": 1}


def test_one_that_joins_and_is_lost_disturbs_nobody(three: Recorded) -> None:
    three.membership.lost(0)
    three.join(0)
    three.prepare_all(step=1)
    three.membership.lost(0)
    three.prepare_all(step=2)
    assert [three.last(number)["kind"] for number in (1, 2)] == ["commit"] * 2
    assert three.membership.members == (1, 2)


def test_one_that_misses_the_last_sums_copies_again(three: Recorded) -> None:
    three.membership.lost(0)
    three.join(0)
    three.prepare_all(step=1)
    copy = three.last(0)["copy"]
    three.copied(0, step=1)
    three.prepare_all(step=2)
    three.membership.receive(0, {"kind": "ready", "copy": copy})
    assert three.membership.members == (1, 2)
    three.prepare_all(step=3)
    assert three.last(0)["kind"] == "copy"
    assert [note["kind"] for note in three.notes] == ["left"]


def test_replica_with_other_sums_is_evicted(three: Recorded) -> None:
    three.prepare(0)
    three.prepare(1, checksum="b")
    three.prepare(2)
    assert three.last(1)["kind"] == "evicted"
    assert three.membership.members == (0, 2)
    assert three.last(0)["kind"] == "view"


def test_replica_out_of_step_with_the_leader_is_evicted(three: Recorded) -> None:
    three.prepare(0, step=5)
    three.prepare(1, step=7)
    three.membership.lost(2)
    three.prepare(0, step=5)
    three.prepare(1, step=7)
    assert three.membership.members == (0,)


def test_nobody_left_ends_the_membership(three: Recorded) -> None:
    three.join(3)
    for number in range(3):
        three.membership.lost(number)
    assert three.membership.all_lost
    # Those who wait for a state, or come later, end as well: the agent starts over.
    three.membership.hello(0, "address 0")
    assert (three.last(3)["kind"], three.last(0)["kind"]) == ("evicted", "evicted")


def test_replicas_without_anybody_to_copy_from_are_sent_away(three: Recorded) -> None:
    for number in (0, 1):
        three.membership.lost(number)
        three.join(number)
    three.prepare_all(step=1)
    copy = three.last(0)["copy"]
    for number in (0, 1):
        three.copied(number, step=1)
    three.prepare(2, step=2)
    assert three.membership.members == (2, 0, 1)
    # The last one that has the whole state is lost before it has sent all of it.
    three.membership.lost(2)
    three.join(2)
    for number in (0, 1):
        three.membership.receive(number, {"kind": "ready", "copy": copy})
    assert three.membership.all_lost
    assert [three.last(number)["kind"] for number in range(3)] == ["evicted"] * 3


def test_replica_that_comes_after_the_end_is_sent_away(three: Recorded) -> None:
    three.membership.lost(2)
    three.membership.receive(0, {"kind": "finished"})
    three.membership.hello(2, "address 2")
    assert three.last(2) == {"kind": "over"}


def test_replica_that_fails_to_copy_after_the_end_changes_nothing(three: Recorded) -> None:
    three.membership.lost(2)
    three.join(2)
    three.prepare_all(step=1)
    copy = three.last(2)["copy"]
    three.membership.receive(0, {"kind": "finished"})
    three.membership.lost(1)
    three.membership.receive(2, {"kind": "ready", "copy": copy})
    assert three.last(2) == {"kind": "over"}


def test_one_that_was_to_enter_after_the_last_step_is_sent_away(three: Recorded) -> None:
    three.membership.lost(2)
    three.join(2)
    three.prepare_all(step=1)
    copy = three.last(2)["copy"]
    three.copied(2, step=1)
    three.prepare_all(step=2)
    assert three.last(2)["kind"] == "view"
    three.membership.receive(0, {"kind": "finished"})
    three.membership.receive(2, {"kind": "ready", "copy": copy})
    assert three.last(2) == {"kind": "over"}


def test_spare_waits_and_takes_a_free_place(three: Recorded) -> None:
    three.join(3)
    three.prepare_all(step=1)
    assert three.last(3) == {"kind": "welcome", "leads": False}
    assert three.membership.is_spare(3)
    three.membership.lost(1)
    three.prepare_all(step=2)
    assert three.last(0)["joining"] == [[3, "address 3"]]
    three.join(1)
    three.copied(3, step=2)
    three.prepare_all(step=3)
    assert three.membership.members == (0, 2, 3)
    assert three.membership.is_spare(1)


def test_lost_spare_disturbs_nobody_and_is_noted(three: Recorded) -> None:
    three.join(3)
    three.prepare_all(step=1)
    sent = {number: len(three.sent[number]) for number in range(3)}
    three.membership.lost(3)
    assert {number: len(three.sent[number]) for number in range(3)} == sent
    assert [(note["kind"], note["step"]) for note in three.notes] == [("spare_ready", 0), ("spare_lost", 1)]
    assert three.membership.is_spare(3)


def test_replacement_that_is_ready_before_the_spare_has_its_place_is_noted_too(three: Recorded) -> None:
    three.join(3)
    three.membership.lost(1)
    three.join(1)
    # Until the next commit a place is free.
    assert [(note["kind"], note["replica"]) for note in three.notes] == [("spare_ready", 3)]
    three.prepare_all(step=1)
    assert three.last(0)["joining"] == [[3, "address 3"]]
    kinds = ("spare_ready", "spare_lost")
    assert [note["replica"] for note in three.notes if note["kind"] in kinds] == [3, 1]
    # Lost while no place is free, or while one is: it was a spare.
    three.membership.lost(0)
    three.membership.lost(1)
    assert (three.notes[-1]["kind"], three.notes[-1]["replica"]) == ("spare_lost", 1)


def test_run_starts_with_the_replica_that_has_the_newest_snapshot() -> None:
    sent: dict[int, list[dict[str, Any]]] = defaultdict(list)
    membership = Membership(3, lambda number, message: sent[number].append(message), lambda **_: None)
    for number, snapshot in enumerate((-1, 7)):
        membership.hello(number, f"address {number}", snapshot)
    # Nobody builds a state as long as another one may have a newer one.
    assert not sent
    membership.hello(2, "address 2", 5)
    assert [sent[number] for number in range(3)] == [[{"kind": "welcome", "leads": number == 1}] for number in range(3)]
    for number in range(3):
        membership.receive(number, {"kind": "ready", "copy": 0})
    assert membership.members == (1,)
    assert sent[1][1]["joining"] == [[0, "address 0"], [2, "address 2"]]


@pytest.fixture
def paused() -> Recorded:
    """Two of at most three nodes are the fewest; one of them is lost."""
    two = Recorded(Fewest(nodes=2, replicas=2, slots=1))
    two.prepare_all(step=1)
    two.membership.lost(1)
    two.prepare(0, step=2)
    return two


def test_run_starts_with_the_fewest_and_further_ones_join() -> None:
    two = Recorded(Fewest(nodes=2, replicas=2, slots=1))
    assert two.membership.members == (0, 1)
    two.join(2)
    two.prepare_all(step=1)
    two.copied(2, step=1)
    two.prepare_all(step=2)
    assert two.membership.members == (0, 1, 2)
    # Down to the fewest nobody waits.
    two.membership.lost(1)
    two.prepare_all(step=3)
    assert not two.last(0)["pauses"]


def test_more_than_the_fewest_at_the_start_are_noted() -> None:
    notes: list[tuple[str, int, int]] = []
    membership = Membership(
        3,
        lambda *_: None,
        lambda **facts: notes.append((facts["kind"], facts["replica"], facts["ranks"])),
        Fewest(nodes=1, replicas=1, slots=1),
    )
    for number in (0, 1):
        membership.hello(number, f"address {number}")
    # The second one is ready before the first one has a state.
    for number in (1, 0):
        membership.receive(number, {"kind": "ready", "copy": 0})
    membership.receive(1, {"kind": "copied", "copy": 1, "step": 0})
    assert membership.members == (0, 1)
    for number in (0, 1):
        membership.receive(number, {"kind": "prepared", "epoch": 2, "step": 1, "checksum": "a"})
    assert notes == [("joined", 1, 2)]


def test_replicas_of_one_node_count_as_one_node() -> None:
    fewest = Fewest(nodes=2, replicas=4, slots=3)
    assert fewest.met_by([0, 5])
    assert not fewest.met_by([3, 4, 5])


def test_too_few_pause_after_the_step_in_flight(paused: Recorded) -> None:
    assert (paused.last(0)["kind"], paused.last(0)["pauses"], paused.last(0)["joining"]) == ("commit", True, [])
    assert paused.membership.paused_at is not None
    assert (paused.notes[-1]["kind"], paused.notes[-1]["step"]) == ("paused", 2)


def test_pause_ends_when_enough_have_the_state(paused: Recorded) -> None:
    paused.join(4)
    assert (paused.last(0)["joining"], paused.last(0)["entering"]) == ([[4, "address 4"]], True)
    assert paused.membership.paused_at is None
    paused.copied(4, step=2)
    assert [member for member, _ in paused.last(4)["members"]] == [0, 4]
    paused.prepare_all(step=3)
    assert (paused.notes[-1]["kind"], paused.notes[-1]["replica"], paused.notes[-1]["step"]) == ("joined", 4, 3)


def test_one_that_already_waits_ends_the_pause() -> None:
    two = Recorded(Fewest(nodes=2, replicas=2, slots=1))
    two.join(2)
    two.membership.lost(1)
    two.prepare(0, step=1)
    assert two.membership.paused_at is None
    assert (two.last(0)["kind"], two.last(0)["joining"]) == ("view", [[2, "address 2"]])


def test_member_lost_while_others_copy_in_a_pause_lets_them_start_over() -> None:
    both = Recorded(Fewest(nodes=3, replicas=3, slots=1))
    both.prepare_all(step=1)
    both.membership.lost(2)
    both.prepare_all(step=2)
    both.join(5)
    both.membership.lost(1)
    # The one that is left does a step, and waits again.
    assert (both.last(0)["kind"], both.last(0).get("entering", False)) == ("view", False)
    both.prepare(0, step=3)
    assert both.membership.paused_at is not None
    both.join(6)
    assert [number for number, _ in both.last(0)["joining"]] == [5, 6]
    assert both.last(5)["kind"] == "copy"


def test_stop_request_ends_a_pause(paused: Recorded) -> None:
    paused.membership.receive(0, {"kind": "asked_to_stop"})
    assert (paused.last(0)["kind"], paused.membership.paused_at) == ("view", None)
    sent = len(paused.sent[0])
    paused.membership.receive(0, {"kind": "asked_to_stop"})
    assert len(paused.sent[0]) == sent


def test_survivors_keep_their_micro_batches_and_share_the_rest() -> None:
    assert deal([[4, 0, 2]], 8) == {4: [0, 3, 6], 0: [1, 4, 7], 2: [2, 5]}
    assert deal([[4, 0, 2], [4, 2]], 8) == {4: [0, 3, 6, 4], 2: [2, 5, 1, 7]}
    assert deal([[4, 0, 2], [4, 2], [2]], 8)[2][:4] == [2, 5, 1, 7]
    assert sorted(deal([[4, 0, 2], [4, 2], [2]], 8)[2]) == list(range(8))


def test_members_hear_who_was_lost_since_the_step_began(three: Recorded) -> None:
    three.prepare_all(step=1)
    three.membership.lost(1)
    three.membership.lost(0)
    assert three.last(2)["history"] == [[0, 1, 2], [0, 2], [2]]
    three.prepare_all(step=2)
    three.join(0)
    three.prepare_all(step=3)
    three.copied(0, step=3)
    three.prepare_all(step=4)
    assert three.last(2)["history"] == [[2, 0]]
