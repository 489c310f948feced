"""The numbers of a rollout: each trajectory once, dummies apart, every name documented."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime.rollout.agent_rollout_samples import batch_metrics
from slime.utils.types import Sample
from slime_plugins.rollout_buffer.trainer.metrics import job_metrics, no_filter_metrics
from tools.wandb_dashboard import LAYOUT


def sample(reward: float, **metadata: Any) -> Sample:
    versions = metadata.pop("weight_versions", [])
    dummy = metadata.pop("dummy", False)
    cached, prompt, response = metadata.pop("cached", 0), metadata.pop("prompt", 0), metadata.pop("response", "")
    facts = {"raw_reward": reward, "outcome": "completed", "stop_reason": "terminated", **metadata}
    return Sample(
        tokens=[1, 2, 3, 4],
        loss_mask=[1, 0, 1],
        response_length=3,
        reward=reward,
        metadata=facts,
        remove_sample=dummy,
        weight_versions=versions,
        response=response,
        prefix_cache_info=Sample.PrefixCacheInfo(cached_tokens=cached, total_prompt_tokens=prompt),
    )


def test_a_trajectory_counts_once_however_many_rows_it_has() -> None:
    rows = [sample(1.0, turns=3), sample(1.0, turns=3), sample(1.0, turns=3)]
    metrics = batch_metrics([[rows, sample(0.0, turns=1)]])

    assert metrics["rollout/reward/mean"] == 0.5
    assert metrics["rollout/reward/std"] == pytest.approx(math.sqrt(0.5))
    assert (metrics["rollout/response_length/max"], metrics["rollout/response_length/min"]) == (9, 3)
    assert metrics["rollout/trained_tokens/mean"] == 4
    assert (metrics["rollout/turns/mean"], metrics["rollout/turns/max"]) == (2, 3)


def test_a_group_whose_rewards_do_not_differ_is_told_and_a_dummy_makes_no_difference() -> None:
    groups = [[sample(1.0), sample(1.0), sample(0.5, dummy=True)], [sample(0.0), sample(1.0)], [sample(3.0)]]

    assert batch_metrics(groups)["rollout/equal_rewards/mean"] == 0.5


def test_long_replies_that_compress_to_a_tenth_are_repetitive() -> None:
    batch = [[sample(1.0, response="na " * 5000), sample(0.0, response="na " * 3000), sample(0.0, response="\ud83d")]]

    assert batch_metrics(batch)["rollout/repetition/mean"] == pytest.approx(1 / 3)


def test_success_is_told_by_task_and_app_of_those_who_say_it() -> None:
    batch = [
        [sample(1.0, success=True, task_name="A", app="clock"), sample(0.0, success=False, task_name="A", app="clock")],
        [sample(1.0, success=True, task_name="B/C", app="sms"), sample(0.5)],
    ]
    metrics = batch_metrics(batch)

    assert metrics["rollout/success/mean"] == pytest.approx(2 / 3)
    assert metrics["rollout/success/task/A"] == 0.5
    assert metrics["rollout/success/task/B_C"] == 1.0
    assert metrics["rollout/success/app/clock"] == 0.5


def test_staleness_is_the_distance_to_the_newest_version_of_the_batch() -> None:
    batch = [[sample(0.0, weight_versions=["default", "2"]), sample(0.0, weight_versions=["4"]), sample(0.0)]]

    metrics = batch_metrics(batch)
    assert (metrics["rollout/staleness/mean"], metrics["rollout/staleness/max"]) == (2, 4)
    for odd in ("main", "²", "9" * 30):
        assert "rollout/staleness/max" not in batch_metrics([[sample(0.0, weight_versions=[odd])]])


def test_what_was_seen_before_filtering_is_weighted_over_replies() -> None:
    replies: list[dict[str, Any]] = [
        {"total_samples": 10, "avg_reward": 1.0, "reward_std": 0.5, "reward_min": -1.0, "reward_max": 1.0},
        {"total_samples": 30, "avg_reward": 0.0, "reward_std": 0.1, "reward_min": 0.0, "reward_max": 2.0},
        {"total_samples": 0, "avg_reward": None},
        {"total_samples": 5, "avg_reward": float("nan")},
        {},
    ]

    assert no_filter_metrics(replies) == {
        "rollout/no_filter/total_samples": 45,
        "rollout/no_filter/avg_reward": 0.25,
        "rollout/no_filter/reward_std": pytest.approx(0.2),
        "rollout/no_filter/reward_min": -1.0,
        "rollout/no_filter/reward_max": 2.0,
    }
    assert no_filter_metrics([{}]) == {}


def test_the_accounting_of_a_job_keeps_its_names() -> None:
    job = {
        "slots": {"submitted": 8, "open": 2, "ready": 6},
        "outcomes": {"completed": 6},
        "attempts": {"finished": 6, "failed": 3, "failed:device_hung": 2, "failed:engine_gone": 1},
        "late": 3,
        "damaged": 0,
        "measures": {"reward": {"mean": 0.5}, "poll_wait_seconds": {"max": 7.0}},
    }

    assert job_metrics(job) == {
        "rollout/buffer/slots/submitted": 8,
        "rollout/buffer/slots/open": 2,
        "rollout/buffer/slots/ready": 6,
        "rollout/buffer/trajectories/completed": 6,
        "rollout/buffer/attempts/failed/device_hung": 2,
        "rollout/buffer/attempts/failed/engine_gone": 1,
        "rollout/buffer/trajectories/late": 3,
        "rollout/buffer/trajectories/damaged": 0,
        "rollout/buffer/reward/mean": 0.5,
        "rollout/buffer/poll/wait/seconds/max": 7.0,
    }
    assert [name for name in job_metrics(job) if not is_documented(name)] == []
    assert job_metrics({}) == {}


@given(
    st.lists(
        st.lists(
            st.builds(
                sample,
                st.floats(-1, 1),
                dummy=st.booleans(),
                turns=st.one_of(st.none(), st.integers(0, 50)),
                success=st.one_of(st.none(), st.booleans()),
                task_name=st.sampled_from(["A", "B"]),
                app=st.one_of(st.none(), st.just("clock")),
                stop_reason=st.sampled_from(["stop", "max_turns"]),
                outcome=st.sampled_from(["completed", "failed"]),
                weight_versions=st.lists(st.sampled_from(["1", "2", "x"])),
            ),
            min_size=1,
            max_size=4,
        ),
        max_size=4,
    )
)
def test_every_number_is_finite_and_documented(groups: list[list[Sample]]) -> None:
    metrics = batch_metrics(groups)

    assert all(math.isfinite(value) for value in metrics.values())
    assert [name for name in metrics if not is_documented(name)] == []
    for kind in ("rollout/outcome/", "rollout/stop_reason/"):
        shares = [value for name, value in metrics.items() if name.startswith(kind)]
        assert not shares or sum(shares) == pytest.approx(1)


def is_documented(name: str) -> bool:
    """Returns True for a metric of the W&B layout, all of which docs/trainer.md describes."""
    known = (one for section in LAYOUT for panel in section.panels for one in panel.metrics)
    return any(re.fullmatch(re.sub(r"<\w+>", "[^/]+", re.escape(one)), name) for one in known)
