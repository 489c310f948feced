"""Names, beats and silences of services, in one table."""

from __future__ import annotations

import pytest

from slime_plugins.rollout_buffer.rules.heartbeats import DEVICES, ENGINE, SUPERVISOR, Service


@pytest.mark.parametrize("service", [SUPERVISOR, ENGINE, DEVICES])
def test_a_service_may_miss_some_beats_before_it_counts_as_silent(service: Service) -> None:
    assert service.silent_after_s >= 3 * service.beats_every_s
    assert not service.is_silent(service.silent_after_s)
    assert service.is_silent(service.silent_after_s + 0.1)
    assert service.is_silent(None)
    assert service.is_silent(float("inf"))


def test_services_have_the_names_that_lie_in_data_directories() -> None:
    assert [SUPERVISOR.name, ENGINE.of_job(7), DEVICES.of_job(7)] == [
        "supervisor",
        "engine of job 7",
        "devices of job 7",
    ]
