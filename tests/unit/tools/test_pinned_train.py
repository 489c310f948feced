"""A training over several nodes: slime's rollout manager goes where the job is, and all else as slime says."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from tools.launching.pinned_train import pin


class Manager:
    """Stands for a Ray actor class: remembers the options it was created with."""

    created: ClassVar[list[dict[str, Any]]] = []
    name = "manager"

    @classmethod
    def options(cls, **options: Any) -> type[Manager]:
        cls.created.append(options)
        return cls


def test_the_rollout_manager_is_pinned_and_nothing_else_of_it_changes() -> None:
    module = SimpleNamespace(__name__="slime.ray.placement_group", RolloutManager=Manager)
    pin(module, "here")
    module.RolloutManager.options(num_cpus=1, num_gpus=0)
    module.RolloutManager.options(scheduling_strategy="there")

    assert Manager.created == [
        {"num_cpus": 1, "num_gpus": 0, "scheduling_strategy": "here"},
        {"scheduling_strategy": "there"},
    ]
    assert module.RolloutManager.name == "manager"


def test_a_slime_that_creates_the_manager_elsewhere_is_refused() -> None:
    with pytest.raises(SystemExit, match="creates no RolloutManager"):
        pin(SimpleNamespace(__name__="slime.ray.placement_group"), "here")
