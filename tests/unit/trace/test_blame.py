"""The first divergence of invented jobs, one for each kind of finding."""

import pytest

from mpitrain.trace.blame import (
    CIRCLE,
    GONE,
    LEFT,
    MISMATCH,
    MISSING,
    MOVING,
    SILENT,
    STOPPED,
    UNKNOWN,
    described_finding,
    first_divergence,
    state_of,
)
from mpitrain.trace.recorder import BACKWARD, RECEIVE, SEND, Recorder
from mpitrain.trace.timeline import read_timeline, trace_file

NOW = 60.0
GRADIENT_SUMS = "the sums of gradients"


class Rank:
    """A rank in step 14 whose clock stands still unless the script moves it."""

    def __init__(self, rank, ranks):
        self.now, self.rank, self.ranks = 1.0, rank, range(ranks)
        self.recorder = Recorder(clock=lambda: self.now)
        self.recorder.facts(rank=rank, ranks=ranks, host=f"node{rank}")
        self.step = self.recorder.stepping(13)
        self.step.__enter__()

    def at(self, now):
        self.now = now
        return self

    def computes(self, what="blocks.3.mlp", micro=1):
        self.recorder.compute(self.recorder.name(what), BACKWARD, micro=micro)

    def enters(self, what, ranks=None):
        return self.recorder.wait(self.recorder.name(what, ranks or self.ranks))

    def passes(self, what):
        self.recorder.go_on(self.enters(what))

    def message(self, kind, peer, what="activation", tag=7, micro=2):
        name = self.recorder.name(what)
        return self.recorder.begin(kind, name, 0, -1, micro, 64, peer, tag)

    def awaits(self, peer, what="activation", tag=7):
        span = self.message(RECEIVE, peer, what, tag)
        self.recorder.wait(self.recorder.name(what), peer, span)

    def sends(self, peer, what="activation", tag=7, ends=True):
        span = self.message(SEND, peer, what, tag)
        if ends:
            self.recorder.end(span)


def judged(folder, scripts, quiet=40.0, processes=()):
    """The finding, and its text, of ranks that each do what a script does."""
    (folder / "trace").mkdir()
    for rank, script in enumerate(scripts):
        one = Rank(rank, len(scripts))
        script(one)
        one.recorder.keep(trace_file(folder, rank))
    states = [
        state_of(trace, dict(processes).get(rank, ""))
        for rank, trace in enumerate(read_timeline(folder).traces)
    ]
    found = first_divergence(states, NOW, quiet)
    return found, described_finding(found, states, NOW, dict.fromkeys(range(9), 4711))


def test_a_rank_that_does_not_move_is_named_with_its_action_and_a_waiter(tmp_path):
    found, said = judged(
        tmp_path,
        [
            lambda one: one.at(3).enters(GRADIENT_SUMS),
            lambda one: one.at(2).awaits(2),
            lambda one: one.computes(),
            lambda one: one.at(5).enters(GRADIENT_SUMS),
        ],
    )
    assert (found.kind, found.culprits, found.waiter) == (SILENT, [2], 1)
    assert said == (
        "rank 2 on node2 has not moved for 59 s: step 14, backward of blocks.3.mlp, micro-batch "
        "1; rank 1 on node1 has waited for activation of micro-batch 2 of rank 2 for 58 s."
    )


def test_ranks_that_wait_for_one_that_moves_blame_no_rank(tmp_path):
    scripts = (
        lambda one: one.enters("the control message"),
        lambda one: one.awaits(2),
        lambda one: one.at(45.0).computes(),
    )
    found, said = judged(tmp_path, scripts)
    assert (found.kind, found.culprits) == (MOVING, ()) and "No rank is to" in said


def test_a_circle_names_both_ranks_whatever_waits_for_them(tmp_path):
    found, said = judged(
        tmp_path,
        [
            lambda one: one.enters("the control message"),
            lambda one: one.at(4).awaits(2, "gradient", 8),
            lambda one: one.at(3).awaits(1),
        ],
    )
    assert found.kind == CIRCLE and sorted(found.culprits) == [1, 2]
    assert said == (
        "Ranks wait for each other in a circle: rank 1 on node1 has waited for gradient of "
        "micro-batch 2 of rank 2 for 56 s; rank 2 on node2 has waited for activation of "
        "micro-batch 2 of rank 1 for 57 s."
    )


def test_a_circle_is_found_while_other_ranks_move(tmp_path):
    found, _ = judged(
        tmp_path,
        [lambda one: one.awaits(1), lambda one: one.awaits(0), lambda one: one.at(59.0).computes()],
    )
    assert found.kind == CIRCLE and sorted(found.culprits) == [0, 1]


@pytest.mark.parametrize("is_sent", [True, False])
def test_a_message_that_is_lost_or_never_sent_is_named_with_both_ends(is_sent, tmp_path):
    def receiver(one):
        one.message(RECEIVE, 1, "chunk", 7)
        one.at(2).enters(GRADIENT_SUMS)

    def sender(one):
        if is_sent:  # It never arrives.
            one.sends(0, "chunk")
        one.passes(GRADIENT_SUMS)
        one.message(RECEIVE, 0, "control")
        one.at(3).enters("the control message")

    found, said = judged(tmp_path, [receiver, sender])
    assert (found.kind, found.culprits, found.message.tag) == (MISSING, [1, 0], 7)
    assert (found.message.sender, found.message.receiver) == (1, 0)
    assert said == (
        "A message is missing: rank 0 on node0 has waited for chunk of micro-batch 2 of rank 1 "
        "for 58 s (tag 7; step 14, waiting for the sums of gradients). Rank 1 on node1 has {}: "
        "step 14, waiting for the control message."
    ).format("sent it" if is_sent else "not sent it")


def test_a_message_under_way_is_not_missing(tmp_path):
    """The receive is posted, the send has started: the ranks of both ends are in the same call."""

    def rank(one):
        other = 1 - one.rank
        one.message(RECEIVE, other, "chunk")
        one.sends(other, "chunk", ends=False)
        one.enters(GRADIENT_SUMS)

    assert judged(tmp_path, [rank, rank])[0].kind == CIRCLE


def test_a_lost_activation_is_told_from_a_circle_by_its_send(tmp_path):
    def sender(one):
        one.sends(1)
        one.awaits(1, "gradient", 8)

    found, _ = judged(tmp_path, [sender, lambda one: one.awaits(0)])
    assert (found.kind, found.culprits) == (MISSING, [0, 1])


def test_different_collectives_name_the_ranks_on_each_side_and_both_calls(tmp_path):
    def sums(one):
        one.message(RECEIVE, (one.rank - 1) % 4, "chunk")
        one.at(2.0 + one.rank).enters(GRADIENT_SUMS)

    scripts = [sums, lambda one: one.enters("a barrier"), sums, sums]
    found, said = judged(tmp_path, scripts)
    assert found.kind == MISMATCH
    assert found.sides == {"a barrier": [1], GRADIENT_SUMS: [0, 2, 3]}
    assert said == (
        "Ranks are in different calls: rank 1 in a barrier; ranks 0, 2, 3 in the sums of "
        "gradients (rank 1 on node1: step 14, waiting for a barrier; rank 0 on node0: step 14, "
        "waiting for the sums of gradients)."
    )


def test_a_rank_with_one_call_more_is_on_a_side_of_its_own(tmp_path):
    def more(one):
        one.passes("a barrier")
        one.enters("a barrier")

    found, _ = judged(tmp_path, [lambda one: one.enters("a barrier"), more])
    assert found.kind in (MISMATCH, UNKNOWN)


@pytest.mark.parametrize("process", [GONE, LEFT, STOPPED])
def test_the_state_of_a_process_comes_before_waits(process, tmp_path):
    found, said = judged(
        tmp_path, [lambda one: one.awaits(1), lambda one: one.awaits(0)], processes={1: process}
    )
    assert (found.kind, found.culprits, found.waiter) == (process, [1], 0)
    assert {"gone": "is gone", "left": "has left", "stopped": "kill -CONT 4711"}[process] in said


def test_the_earlier_step_diverged_first(tmp_path):
    def behind(one):
        one.at(5.0).computes()

    def ahead(one):
        one.recorder.end(1)
        one.step = one.recorder.stepping(14)
        one.step.__enter__()
        one.at(2.0).computes()

    found, _ = judged(tmp_path, [ahead, behind])
    assert found.culprits == [1]


def test_a_rank_before_its_first_record_is_silent(tmp_path):
    (tmp_path / "trace").mkdir()
    recorder = Recorder(clock=lambda: 1.0)
    recorder.facts(rank=0, ranks=1, host="node0")
    recorder.keep(trace_file(tmp_path, 0))
    states = [state_of(trace) for trace in read_timeline(tmp_path).traces]
    assert first_divergence(states, NOW, 40.0).culprits == [0]


def test_a_call_of_one_stage_is_a_mismatch_with_the_wait_of_the_other(tmp_path):
    """A stage in a barrier has receives under way, which say nothing about the barrier."""

    def stage(one):
        one.message(RECEIVE, 0, "activation")
        one.at(2.0).enters("a barrier")

    def other(one):
        one.sends(1)
        one.at(3.0).awaits(1, "gradient", 8)

    found, said = judged(tmp_path, [other, stage])
    assert (found.kind, found.culprits) == (MISMATCH, [1, 0])
    assert (found.sides, found.absent) == ({"a barrier": [1]}, [0])
    assert said == (
        "Ranks are in different calls: rank 1 in a barrier, which rank 0 has not entered (rank 1 "
        "on node1: step 14, waiting for a barrier; rank 0 on node0: step 14, waiting for "
        "gradient)."
    )


def test_a_mismatch_between_stages_is_told_from_the_sums_of_replicas(tmp_path):
    """Ranks 0 and 2, and ranks 1 and 3, are the stages of a replica; rank 3 enters a barrier."""

    def sums(one):
        one.message(RECEIVE, (one.rank + 1) % 2 + one.rank // 2 * 2, "chunk", 9)
        one.at(4.0).enters(GRADIENT_SUMS, range(one.rank // 2 * 2, one.rank // 2 * 2 + 2))

    found, _ = judged(
        tmp_path,
        [
            sums,
            lambda one: one.at(5.0).awaits(3, "gradient", 8),
            sums,
            lambda one: one.at(2.0).enters("a barrier"),
        ],
    )
    assert found.kind == MISMATCH and found.culprits[0] == 3
    assert found.sides["a barrier"] == [3]


def test_equal_calls_of_two_groups_are_no_mismatch(tmp_path):
    """Two groups sum at the same time; one of them waits for a rank in a barrier of all ranks."""

    def sums(one):
        first = one.rank // 2 * 2
        one.at(3.0).enters(GRADIENT_SUMS, range(first, first + 2))

    scripts = [sums, lambda one: one.at(2.0).enters("a barrier"), sums, sums]
    found, _ = judged(tmp_path, scripts)
    assert found.kind == MISMATCH
    assert found.sides == {"a barrier": [1], GRADIENT_SUMS: [0]}


def test_a_server_that_waits_for_any_message_is_no_side_of_a_mismatch(tmp_path):
    def server(one):
        one.message(RECEIVE, -1, "a header")
        one.at(4.0).enters("messages")

    def worker(one):
        one.message(RECEIVE, 0, "parameters")
        one.at(3.0).enters("messages")

    found, _ = judged(tmp_path, [server, lambda one: one.at(2.0).enters("a barrier"), worker])
    assert (found.kind, found.culprits) == (MISMATCH, [1, 0])
    assert (found.sides, found.absent) == ({"a barrier": [1]}, [0, 2])
