"""Runs one of slime's training programs with its rollout manager on this node.

    python tools/launching/pinned_train.py ~/slime/train_async.py ARGUMENTS…

slime lets Ray choose the node of that actor. The actor talks to the rollout buffer, reads the input file, and writes
checkpoints of the data source, all of which are on this node.
"""

from __future__ import annotations

import importlib
import runpy
import sys
from pathlib import Path
from typing import Any

MODULE = "slime.ray.placement_group"
ACTOR = "RolloutManager"


class Pinned:
    """An actor class whose ``options`` also select a node."""

    def __init__(self, actor_class: Any, strategy: Any) -> None:
        self._actor_class = actor_class
        self._strategy = strategy

    def __getattr__(self, name: str) -> Any:
        return getattr(self._actor_class, name)

    def options(self, **options: Any) -> Any:
        """Returns the class's options with the node, unless they select one."""
        return self._actor_class.options(**{"scheduling_strategy": self._strategy, **options})


def pin(module: Any, strategy: Any) -> None:
    """Pins the rollout manager that the module creates to a node.

    Raises:
        SystemExit: this version of slime creates it in another module.
    """
    if not hasattr(module, ACTOR):
        raise SystemExit(f"pinned_train: {module.__name__} of this slime creates no {ACTOR}")
    setattr(module, ACTOR, Pinned(getattr(module, ACTOR), strategy))


def main() -> None:
    """Pins the actor and runs the program."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    program = Path(sys.argv[1]).resolve()
    sys.argv = [str(program), *sys.argv[2:]]
    sys.path[0] = str(program.parent)
    if not ray.is_initialized():
        ray.init()
    node = ray.get_runtime_context().get_node_id()
    pin(importlib.import_module(MODULE), NodeAffinitySchedulingStrategy(node_id=node, soft=False))
    runpy.run_path(str(program), run_name="__main__")


if __name__ == "__main__":
    main()
