"""Compares limits of staleness for an asynchronous trainer, in a simulation.

    python -m benchmarks.simulate_staleness
    python -m benchmarks.simulate_staleness --times pareto:1.5:50 --alike groups --lag 2 --json staleness.json
    python -m benchmarks.simulate_staleness --start 10 --times lognormal:1

Devices play groups of episodes with heavy-tailed durations; some attempts fail and are retried while their device is
repaired; the trainer takes a batch, trains, and pauses sometimes. Five policies, on the same episodes:

* admit: ``rules/admission.py``, the rules that the service applies, not a copy of them;
* ahead: ``max_groups_ahead`` of lag + 1 batches and nothing else, oldest first;
* drop: groups that are too old at their delivery are dropped;
* wait: nothing is played while the trainer trains (``rollout-buffer drain``, or ``rollout_buffer_on_policy``);
* unlimited: everything is played and trained, however old.

Output per policy: distance of the trained groups from the submitted ones (total variation over tenths by duration),
trained share of the slowest tenth, device utilisation, share of the trained tokens within the limit (of all, and of the
slowest tenth), percentiles of their lag, and trained groups as a share of what the devices can play. Tokens are spread
evenly over an episode, each sampled with the weights of its moment. Everything follows from the seed.

``--start SEEDS`` compares some of the first batches with all episodes instead, because short groups finish first.

Caveats: engine and network take no time here; an episode takes equally long on each device. Groups that are not
finished at the end count as submitted.
"""

from __future__ import annotations

import argparse
import bisect
import heapq
import json
import random
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import fmean

from rich.console import Console
from rich.table import Table

from slime_plugins.rollout_buffer.rules.admission import (
    GroupsAhead,
    GroupTimes,
    VersionSeen,
    pace_of,
    room_for_groups,
    should_defer,
    should_wait_for_slow_groups,
    version_at,
)

POLICIES = ("admit", "ahead", "drop", "wait", "unlimited")
TIMES = (
    "constant",
    "lognormal:0.7",
    "lognormal:1",
    "bimodal:0.1:10",
    "bimodal:0.3:20",
    "pareto:1.5:50",
    "pareto:1.2:50",
)
ALIKE = ("episodes", "groups", "tasks")
MAX_GROUPS_AHEAD = 256
MAX_PASSED_OVER = 32
"""A group that was passed over this many times is taken next; a choice considers at most this many groups."""
TENTHS = 10
START_BATCHES = (1, 2, 5, 10, 20, 40)


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """Sizes of one simulation. Times are relative to the mean duration of an episode."""

    times: str = "lognormal:1"
    alike: str = "episodes"
    """What has similar durations: nothing (``episodes``), the members of a group, or all groups of a task."""
    lag: int = 4
    devices: int = 64
    group_size: int = 8
    batch: int = 32
    """Groups per weight version."""
    versions: int = 150
    step: float = 0.7
    """The trainer's own time per version, relative to the playing time of a version."""
    pauses: tuple[tuple[int, float], ...] = ((30, 2.0), (75, 1.0), (110, 4.0))
    """(after which version, for how many versions' playing time) the trainer pauses."""
    failing: float = 0.03
    """Share of attempts that fail, at a random moment."""
    repair: float = 0.5
    """Duration of a repair."""
    seed: int = 1

    @property
    def playing_time(self) -> float:
        """Time in which all devices play one version's groups."""
        return self.batch * self.group_size / self.devices


@dataclass(frozen=True, kw_only=True)
class Result:
    """Result of one policy."""

    policy: str
    distance: float
    """Total variation between trained and submitted groups, over tenths by duration."""
    slowest: float
    """Trained over submitted, of the slowest tenth; 1 is unbiased."""
    busy: float
    """Device utilisation, without repairs."""
    within: float
    """Share of the trained tokens within the limit of lag."""
    within_slowest: float
    """The same of the slowest tenth."""
    lag_p50: int
    lag_p99: int
    throughput: float
    """Trained groups, relative to the capacity of the devices."""
    dropped: int


def sampler(name: str) -> Callable[[random.Random], float]:
    """Returns a sampler of durations: ``lognormal:SIGMA``, ``pareto:ALPHA:CAP``, ``bimodal:SHARE:FACTOR``,
    ``constant``, or ``file:PATH``, a JSON list of seconds.
    """
    kind, *parameters = name.split(":")
    if kind == "constant":
        return lambda rng: rng.uniform(0.9, 1.1)
    if kind == "lognormal":
        sigma = float(parameters[0])
        return lambda rng: rng.lognormvariate(0.0, sigma)
    if kind == "pareto":
        alpha, cap = map(float, parameters)
        return lambda rng: min(cap, rng.paretovariate(alpha))
    if kind == "bimodal":
        share, factor = map(float, parameters)
        return lambda rng: rng.uniform(0.8, 1.2) * (factor if rng.random() < share else 1.0)
    if kind == "file":
        durations = json.loads(Path(":".join(parameters)).read_text("utf-8"))
        return lambda rng: float(rng.choice(durations))
    raise ValueError(f"unknown times: {name}")


def episode_times(scenario: Scenario) -> list[list[float]]:
    """Returns the durations of each group's members, with mean 1, in the order of the input."""
    rng, draw = random.Random(scenario.seed), sampler(scenario.times)
    count = scenario.batch * scenario.versions * 2
    tasks = [draw(rng) for _ in range(128)]
    groups = []
    for _ in range(count):
        if scenario.alike == "episodes":
            groups.append([draw(rng) for _ in range(scenario.group_size)])
            continue
        shared = draw(rng) if scenario.alike == "groups" else tasks[_task_of(len(groups))]
        groups.append([shared * rng.lognormvariate(0.0, 0.25) for _ in range(scenario.group_size)])
    mean = sum(map(sum, groups)) / (count * scenario.group_size)
    return [[time / mean for time in group] for group in groups]


def _task_of(group: int) -> int:
    """Returns one of 128 tasks, in rotation, as epochs do."""
    return group % 128


@dataclass
class _Group:
    times: list[float]
    began: float = 0.0
    unplayed: int = 0
    played: list[tuple[float, float]] = field(default_factory=list)


class Simulation:
    """One policy's run: a discrete-event simulation."""

    def __init__(self, scenario: Scenario, policy: str) -> None:
        """``policy`` is one of ``POLICIES``."""
        self.scenario, self.policy = scenario, policy
        self.rng = random.Random(scenario.seed + 1)
        self.groups = [_Group(times, unplayed=len(times)) for times in episode_times(scenario)]
        self.waiting = deque(range(len(self.groups)))
        self.passed_over: Counter[int] = Counter()
        self.slots: deque[tuple[int, int]] = deque()
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.now = 0.0
        self.free = scenario.devices
        self.in_repair = 0
        self.running: set[int] = set()
        self.ready: list[int] = []
        self.begun: list[int] = []
        self.batch: list[int] = []
        self.trained: list[tuple[int, int]] = []
        self.dropped: list[int] = []
        self.training = False
        self.waits_since: float | None = 0.0
        self.seen = [VersionSeen(version=0, since=0.0, last_taken_at=0.0, groups=0)]
        self.version_began = [0.0]
        self.group_times = GroupTimes(group_size=scenario.group_size)
        self.played_time = self.offered_time = 0.0
        self.pauses = dict(scenario.pauses)

    # --- the clock ---------------------------------------------------------------------------------------------------

    def run(self) -> Result:
        """Runs until the trainer has trained all versions."""
        self._fill()
        while self.version < self.scenario.versions and self.events:
            time, _, act = heapq.heappop(self.events)
            self.played_time += (self.scenario.devices - self.free - self.in_repair) * (time - self.now)
            self.offered_time += (self.scenario.devices - self.in_repair) * (time - self.now)
            self.now = time
            act()
            self._poll()
            self._fill()
        if self.version < self.scenario.versions:
            raise RuntimeError(f"{self.policy}: deadlock at version {self.version}")
        return self._result()

    @property
    def version(self) -> int:
        """The trainer's newest version."""
        return len(self.version_began) - 1

    def _after(self, seconds: float, act: Callable[[], None]) -> None:
        tie_break = self.rng.getrandbits(40)  # functions cannot be ordered
        heapq.heappush(self.events, (self.now + seconds, len(self.events) + tie_break, act))

    # --- playing -----------------------------------------------------------------------------------------------------

    def _fill(self) -> None:
        while self.free and (self.slots or self._begin_group()):
            group, member = self.slots.popleft()
            self.free -= 1
            seconds = self.groups[group].times[member]
            if self.rng.random() < self.scenario.failing:
                self._after(seconds * self.rng.random(), partial(self._failed, group, member))
            else:
                self._after(seconds, partial(self._played, group, self.now))

    def _begin_group(self) -> bool:
        if not self.waiting or not self._may_begin():
            return False
        group = self._next_group()
        self.groups[group].began = self.now
        self.running.add(group)
        self.begun.append(group)
        self.slots.extend((group, member) for member in range(self.scenario.group_size))
        return True

    def _may_begin(self) -> bool:
        ahead = len(self.ready) + len(self.running)
        if self.policy == "unlimited":
            return True
        if self.policy == "wait":
            return not self.training and len(self.batch) + ahead < self.scenario.batch
        limit = (self.scenario.lag + 1) * self.scenario.batch if self.policy == "ahead" else MAX_GROUPS_AHEAD
        if ahead + len(self.batch) >= limit:
            return False
        if self.policy in ("ahead", "drop"):
            return True
        room = room_for_groups(self.scenario.lag, pace_of(self.seen), self._ahead())
        return room is None or room > 0

    def _ahead(self) -> GroupsAhead:
        return GroupsAhead(
            taken=len(self.batch),
            ready=len(self.ready),
            running=len(self.running),
            trainer_waits=self.waits_since is not None,
        )

    def _next_group(self) -> int:
        if self.policy == "admit":
            pace, ahead = pace_of(self.seen), self._ahead()
            for place in range(min(len(self.waiting), MAX_PASSED_OVER)):
                group = self.waiting[place]
                expected = self.group_times.expected_s(*self._names(group))
                if self.passed_over[group] >= MAX_PASSED_OVER or not should_defer(
                    self.scenario.lag, pace, ahead, expected
                ):
                    self.passed_over.update(self.waiting[earlier] for earlier in range(place))
                    del self.waiting[place]
                    return group
        return self.waiting.popleft()

    def _names(self, group: int) -> tuple[str, str]:
        """Returns instance and task; only equal tasks share statistics."""
        return (f"task {_task_of(group)}", "") if self.scenario.alike == "tasks" else (f"group {group}", "")

    def _failed(self, group: int, member: int) -> None:
        self.in_repair += 1
        self.slots.appendleft((group, member))
        self._after(self.scenario.repair, self._repaired)

    def _repaired(self) -> None:
        self.in_repair -= 1
        self.free += 1

    def _played(self, group: int, began: float) -> None:
        self.free += 1
        state = self.groups[group]
        state.played.append((began, self.now))
        self.group_times.add(*self._names(group), self.now - began)
        state.unplayed -= 1
        if not state.unplayed:
            self.running.discard(group)
            self.ready.append(group)

    # --- the trainer -------------------------------------------------------------------------------------------------

    def _poll(self) -> None:
        if self.training:
            return
        if self.policy == "drop":
            old = [group for group in self.ready if self._behind(group) > self.scenario.lag]
            self.dropped += old
            self.ready = [group for group in self.ready if group not in set(old)]
        if self.policy in ("admit", "ahead"):
            self.ready.sort(key=lambda group: self.groups[group].began)
        if self.policy == "admit" and self._holds_back():
            return
        while self.ready and len(self.batch) < self.scenario.batch:
            self.batch.append(self.ready.pop(0))
            self._note_taken()
        if len(self.batch) == self.scenario.batch:
            self.training, self.waits_since = True, None
            pause = self.pauses.pop(self.version, 0.0)
            self._after((self.scenario.step + pause) * self.scenario.playing_time, self._trained)

    def _holds_back(self) -> bool:
        behind = [behind for group in self.running if (behind := self._behind(group)) >= self.scenario.lag]
        pace = pace_of(self.seen)
        waited_s = 0.0 if self.waits_since is None else self.now - self.waits_since
        return should_wait_for_slow_groups(
            self.scenario.lag, pace, self._ahead(), oldest_is_behind=max(behind, default=None), waited_s=waited_s
        )

    def _behind(self, group: int) -> int:
        return self.version - (version_at(self.seen, self.groups[group].began) or 0)

    def _note_taken(self) -> None:
        newest = self.seen[-1]
        self.seen[-1] = VersionSeen(
            version=newest.version, since=newest.since, last_taken_at=self.now, groups=newest.groups + 1
        )

    def _trained(self) -> None:
        self.trained += [(group, self.version) for group in self.batch]
        self.batch, self.training, self.waits_since = [], False, self.now
        self.version_began.append(self.now)
        self.seen.append(VersionSeen(version=self.version, since=self.now, last_taken_at=self.now, groups=0))

    # --- results -----------------------------------------------------------------------------------------------------

    def _result(self) -> Result:
        tenths = self._tenths()
        lags = self._token_lags(range(len(self.groups)))
        of_slowest = self._token_lags([group for group, tenth in enumerate(tenths) if tenth == TENTHS - 1])
        submitted = Counter(tenths[group] for group in self.begun)
        trained = Counter(tenths[group] for group, _ in self.trained)
        shares = [(trained[tenth] / len(self.trained), submitted[tenth] / len(self.begun)) for tenth in range(TENTHS)]
        could_play = self.scenario.devices * self.now / self.scenario.group_size
        return Result(
            policy=self.policy,
            distance=sum(abs(of_trained - of_submitted) for of_trained, of_submitted in shares) / 2,
            slowest=shares[-1][0] / shares[-1][1] if shares[-1][1] else 1.0,  # with few groups a tenth may be empty
            busy=self.played_time / self.offered_time,
            within=self._within(lags),
            within_slowest=self._within(of_slowest),
            lag_p50=_percentile(lags, 0.5),
            lag_p99=_percentile(lags, 0.99),
            throughput=len(self.trained) / could_play,
            dropped=len(self.dropped),
        )

    def _within(self, lags: Counter[int]) -> float:
        return sum(tokens for lag, tokens in lags.items() if lag <= self.scenario.lag) / (sum(lags.values()) or 1)

    def bias_of_first_batches(self) -> dict[int, tuple[float, float]]:
        """Returns, by number of a batch, the relative excess of its mean duration and the excess of its mean reward.

        Both are compared with all episodes. The reward is the probability of success: 1 for an episode of length 0,
        halved with each mean length.
        """
        everything = [time for group in self.groups for time in group.times]
        excess = {}
        for batch in START_BATCHES:
            groups = [group for group, version in self.trained if version == batch - 1]
            times = [time for group in groups for time in self.groups[group].times]
            longer = fmean(times) / fmean(everything) - 1
            excess[batch] = (longer, fmean(0.5**time for time in times) - fmean(0.5**time for time in everything))
        return excess

    def _token_lags(self, of_groups: Iterable[int]) -> Counter[int]:
        """Returns seconds of playing, which stand for tokens, by their lag in versions at training."""
        lags: Counter[int] = Counter()
        included = set(of_groups)
        for group, trained_at in self.trained:
            if group not in included:
                continue
            for began, ended in self.groups[group].played:
                version = bisect.bisect_right(self.version_began, began) - 1
                while began < ended:
                    next_began = self.version_began[version + 1] if version < self.version else ended
                    lags[trained_at - version] += min(ended, next_began) - began  # type: ignore[assignment]  # seconds
                    began, version = min(ended, next_began), version + 1
        return lags

    def _tenths(self) -> list[int]:
        """Returns the tenth of each group, by the total duration of its episodes."""
        work = [sum(group.times) for group in self.groups]
        edges = [sorted(work)[len(work) * tenth // TENTHS] for tenth in range(1, TENTHS)]
        return [bisect.bisect_right(edges, total) for total in work]


def _percentile(lags: Counter[int], share: float) -> int:
    wanted, passed = share * sum(lags.values()), 0.0
    for lag in sorted(lags):
        passed += lags[lag]
        if passed >= wanted:
            return lag
    return max(lags)


def compare(scenario: Scenario, policies: Sequence[str] = POLICIES) -> list[Result]:
    """Returns the result of each policy in one scenario."""
    return [Simulation(scenario, policy).run() for policy in policies]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--times", action="append", help="lognormal:SIGMA, pareto:ALPHA:CAP, bimodal:SHARE:FACTOR, "
                        "constant, file:PATH (a JSON list of seconds); may be repeated")  # fmt: skip
    parser.add_argument("--alike", action="append", choices=ALIKE, help="what has similar durations; may be repeated")
    for name in ("lag", "devices", "group-size", "batch", "versions", "seed"):
        parser.add_argument(f"--{name}", type=int, default=getattr(Scenario, name.replace("-", "_")))
    for name in ("step", "failing", "repair"):
        parser.add_argument(f"--{name}", type=float, default=getattr(Scenario, name))
    parser.add_argument("--start", type=int, metavar="SEEDS", help="compare the first batches, over this many seeds")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    options = parser.parse_args()
    sizes = {name: getattr(options, name) for name in
             ("lag", "devices", "group_size", "batch", "versions", "seed", "step", "failing", "repair")}  # fmt: skip
    if options.start is not None:
        sizes["versions"] = max(START_BATCHES) + 1
        for times in options.times or TIMES:
            for alike in options.alike or ALIKE:
                _print_start(Scenario(times=times, alike=alike, **sizes), options.start)
        return
    runs = [
        (scenario, compare(scenario))
        for times in options.times or TIMES
        for alike in options.alike or ALIKE
        for scenario in [Scenario(times=times, alike=alike, **sizes)]
    ]
    Console(width=120).print(_table(runs, options.lag))
    report = [{"scenario": asdict(scenario), "results": [*map(asdict, results)]} for scenario, results in runs]
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=1) + "\n", "utf-8")


def _print_start(scenario: Scenario, seeds: int) -> None:
    runs = []
    for seed in range(seeds):
        simulation = Simulation(replace(scenario, seed=seed), "admit")
        simulation.run()
        runs.append(simulation.bias_of_first_batches())
    batches = ", ".join(
        f"{batch}: {fmean(run[batch][0] for run in runs):+.0%} {fmean(run[batch][1] for run in runs):+.3f}"
        for batch in START_BATCHES
    )
    Console(width=120).print(
        f"{scenario.times} {scenario.alike}, length and reward by batch: {batches}", highlight=False
    )


def _table(runs: Sequence[tuple[Scenario, Sequence[Result]]], lag: int) -> Table:
    table = Table(title=f"lag {lag}")
    left = ("times", "alike", "policy")
    for column in (*left, "distance", "slowest", "busy", "within", "of slowest", "p50", "p99", "trained", "dropped"):
        table.add_column(column, justify="left" if column in left else "right")
    for scenario, results in runs:
        for result in results:
            table.add_row(
                *(scenario.times, scenario.alike, result.policy, f"{result.distance:.3f}", f"{result.slowest:.2f}"),
                *(f"{share:.1%}" for share in (result.busy, result.within, result.within_slowest)),
                *(str(result.lag_p50), str(result.lag_p99), f"{result.throughput:.1%}", str(result.dropped)),
            )
        table.add_section()
    return table


if __name__ == "__main__":
    main()
