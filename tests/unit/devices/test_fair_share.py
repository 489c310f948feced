"""Shares of scarce devices: nobody waits for ever, nobody idles a device, and under load each gets its part."""

from __future__ import annotations

import heapq
from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime_plugins.rollout_buffer.devices.fair_share import Claimant, FairShare, Purpose


def training(owner: str) -> Claimant:
    return Claimant(owner=owner, purpose=Purpose.TRAINING)


def evaluation(owner: str) -> Claimant:
    return Claimant(owner=owner, purpose=Purpose.EVALUATION)


@dataclass
class Farm:
    """Devices, and claimants who always want more; each grant is held for a while. Time only passes by returns."""

    devices: int
    line: FairShare
    now: float = 0.0
    number: int = 0
    running: list[tuple[float, int, Claimant]] = field(default_factory=list)
    held: Counter[Claimant] = field(default_factory=Counter)
    grants: list[Claimant] = field(default_factory=list)

    def lend_all(self, seconds: float) -> None:
        while len(self.running) < self.devices and (claimant := self.line.next(self.held, self.now)) is not None:
            self.line.serve(claimant, self.now)
            self.number += 1
            self.now += 1e-6
            heapq.heappush(self.running, (self.now + seconds, self.number, claimant))
            self.held[claimant] += 1
            self.grants.append(claimant)

    def take_one_back(self) -> None:
        self.now, _, claimant = heapq.heappop(self.running)
        self.held[claimant] -= 1

    def turns(self, count: int) -> None:
        for _ in range(count):
            self.lend_all(1.0)
            self.take_one_back()

    def holds(self, purpose: Purpose) -> int:
        return sum(count for claimant, count in self.held.items() if claimant.purpose is purpose)


@given(
    devices=st.integers(1, 12),
    trainings=st.integers(0, 5),
    evaluations=st.integers(0, 5),
    share=st.floats(0.1, 0.9),
    seconds=st.lists(st.floats(0.1, 100.0), min_size=40, max_size=120),
)
def test_each_claimant_is_served_in_bounded_time_and_no_device_idles(
    devices: int, trainings: int, evaluations: int, share: float, seconds: list[float]
) -> None:
    claimants = [training(f"t{n}") for n in range(trainings)] + [evaluation(f"e{n}") for n in range(evaluations)]
    farm = Farm(devices=devices, line=FairShare(share))
    for claimant in claimants:
        farm.line.join(claimant, farm.now)
    unserved = dict.fromkeys(claimants, 0)
    for duration in seconds:
        before = len(farm.grants)
        farm.lend_all(duration)
        assert len(farm.running) == (devices if claimants else 0)
        for granted in farm.grants[before:]:
            unserved = {
                claimant: 0 if farm.held[claimant] else waited + (claimant.purpose is granted.purpose)
                for claimant, waited in unserved.items()
            }
        assert all(waited <= max(trainings, evaluations) for waited in unserved.values())
        if farm.running:
            farm.take_one_back()


@given(
    devices=st.integers(2, 40),
    trainings=st.integers(1, 6),
    share=st.floats(0.1, 0.9),
    seconds=st.lists(st.floats(0.1, 100.0), min_size=120, max_size=200),
)
def test_under_load_each_purpose_holds_its_share(
    devices: int, trainings: int, share: float, seconds: list[float]
) -> None:
    farm = Farm(devices=devices, line=FairShare(share))
    for number in range(trainings):
        farm.line.join(training(f"t{number}"), farm.now)
    farm.lend_all(seconds[0])  # training has had everything for itself
    farm.line.join(evaluation("e"), farm.now)
    for at, duration in enumerate(seconds):
        farm.take_one_back()
        farm.lend_all(duration)
        if at > devices:
            assert abs(farm.holds(Purpose.EVALUATION) - share * devices) <= 1


@given(devices=st.integers(6, 40), owners=st.integers(1, 6), seconds=st.lists(st.floats(0.1, 9), min_size=60))
def test_owners_of_one_purpose_hold_equally_many(devices: int, owners: int, seconds: list[float]) -> None:
    farm = Farm(devices=devices, line=FairShare())
    for number in range(owners):
        farm.line.join(training(f"t{number}"), farm.now)
    for duration in seconds:
        farm.lend_all(duration)
        counts = [farm.held[training(f"t{number}")] for number in range(owners)]
        assert max(counts) - min(counts) <= 1
        farm.take_one_back()
        # Who gave one back is one behind until the next is dealt out.


@pytest.mark.parametrize(("share", "turns"), [(0.5, 50), (0.25, 25), (0.75, 75)])
def test_on_a_single_device_turns_follow_the_share(share: float, turns: int) -> None:
    farm = Farm(devices=1, line=FairShare(share))
    farm.line.join(training("t"), 0)
    farm.line.join(evaluation("e"), 0)
    farm.turns(100)
    assert farm.grants.count(evaluation("e")) == turns


def test_a_changed_share_starves_no_purpose() -> None:
    farm = Farm(devices=1, line=FairShare(0.5))
    farm.line.join(training("t"), 0)
    farm.line.join(evaluation("e"), 0)
    farm.turns(1000)
    farm.line.evaluation_share = 0.1
    farm.turns(20)
    assert farm.grants[1000:].count(evaluation("e")) == 2


def test_an_owner_alone_gets_all_devices_and_no_smaller_share_afterwards() -> None:
    farm = Farm(devices=1, line=FairShare())
    farm.line.join(training("t"), 0)
    farm.turns(50)
    farm.line.join(evaluation("e"), farm.now)
    farm.turns(10)
    assert Counter(farm.grants[50:]) == {training("t"): 5, evaluation("e"): 5}


def test_an_empty_line_serves_nobody() -> None:
    line = FairShare()
    assert line.next({}, 0.0) is None
    line.join(training("a"), 0)
    line.leave(training("a"), 0)
    assert line.next({}, 0.0) is None
