"""Errors of calls on the loop of the shared browsers, without a browser."""

from __future__ import annotations

import pytest

from slime_plugins.rollout_buffer.errors import EnvironmentSetupError
from slime_plugins.rollout_buffer.generator.miniwob.browser import SharedBrowsers


def test_a_task_that_cannot_be_set_up_is_no_failure_of_its_page() -> None:
    async def set_up() -> None:
        raise EnvironmentSetupError("the task has no goal")

    with pytest.raises(EnvironmentSetupError, match=r"^the task has no goal$"):
        SharedBrowsers().call(set_up, None, 5.0, "loading the task")
