"""Logs metrics and example trajectories to W&B, TensorBoard or a JSONL file. A failing sink never stops a training.

slime itself logs the metrics that a rollout function returns. This module logs the rest: metrics before filtering,
tables of example trajectories with screenshots, and optionally all metrics of a rollout as JSON lines or TensorBoard
events, for runs without slime.
"""

from __future__ import annotations

import functools
import io
import json
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from slime_plugins.rollout_buffer.errors import ConfigError
from slime_plugins.rollout_buffer.trainer.settings import TrackingSettings
from slime_plugins.rollout_buffer.wire import RolloutItem

logger = logging.getLogger(__name__)

STEP = "rollout/step"
EXAMPLES = "rollout/examples"
TEXT_LIMIT = 4000
"""Maximum number of characters of an example's last reply."""
TIMEOUT_S = 30.0
"""How long a rollout waits for a sink."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Example:
    """One trajectory of a table: its values, last reply, first and last screenshot."""

    uid: str
    instance_id: str
    task: str
    reward: float
    success: bool | None
    stop_reason: str
    turns: int | None
    last_words: str
    screenshots: tuple[tuple[str, bytes], ...] = ()

    @staticmethod
    def columns() -> list[str]:
        """Column names, in the order of ``cells``."""
        return ["uid", "instance_id", "task", "reward", "success", "stop_reason", "turns", "last_words"]

    def cells(self) -> list[Any]:
        """Values of the columns."""
        return [getattr(self, column) for column in self.columns()]


class MetricSink(Protocol):
    """A destination of metrics and examples. Its methods may raise any exception."""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Logs the metrics of one step."""

    def log_examples(self, examples: Sequence[Example], step: int) -> None:
        """Logs a table of examples."""


class Tracker:
    """Sends metrics to sinks. Each kind of failure is logged once; a sink that hangs is skipped until it returns."""

    def __init__(self, before_filter: Sequence[MetricSink], everything: Sequence[MetricSink]) -> None:
        """``before_filter`` are sinks to which slime itself logs all other metrics; to ``everything`` it logs none."""
        self._before_filter = [_SinkThread(sink) for sink in before_filter]
        self._everything = [_SinkThread(sink) for sink in everything]

    def log_before_filter(self, metrics: Mapping[str, float], step: int) -> None:
        """Logs the buffer's metrics before filtering, which slime does not log."""
        self._send(self._before_filter, lambda sink: sink.log(metrics, step))

    def log_rollout(self, metrics: Mapping[str, float], step: int) -> None:
        """Logs all metrics of a rollout, for sinks that slime does not have."""
        self._send(self._everything, lambda sink: sink.log(metrics, step))

    def log_examples(self, examples: Sequence[Example], step: int) -> None:
        """Logs a table of trajectories."""
        if examples:
            self._send([*self._before_filter, *self._everything], lambda sink: sink.log_examples(examples, step))

    def _send(self, sinks: Sequence[_SinkThread], send: Callable[[MetricSink], None]) -> None:
        for sink in sinks:
            sink.call(send)


class _SinkThread:
    """Calls one sink in threads, so that a sink that hangs blocks neither the rollout nor the end of the process."""

    def __init__(self, sink: MetricSink) -> None:
        self._sink = sink
        self._name = type(sink).__name__
        self._thread: threading.Thread | None = None

    def call(self, send: Callable[[MetricSink], None]) -> None:
        """Calls the sink and waits at most ``TIMEOUT_S``; skips a sink that still hangs in an earlier call."""
        if self._thread is not None and self._thread.is_alive():
            return
        self._thread = threading.Thread(target=self._try, args=[send], name=f"metrics to {self._name}", daemon=True)
        self._thread.start()
        self._thread.join(TIMEOUT_S)
        if self._thread.is_alive():
            _warn_once(f"{self._name} did not finish within {TIMEOUT_S:g} s: it gets no metrics until it has")

    def _try(self, send: Callable[[MetricSink], None]) -> None:
        try:
            send(self._sink)
        except Exception as error:  # noqa: BLE001 - a failed sink must not stop a training
            _warn_once(f"{self._name} failed: {type(error).__name__}: {error}")


class WandbSink:
    """Logs to the W&B run of this process, if there is one."""

    def __init__(self) -> None:
        self._defined_for: str | None = None

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Logs the metrics with ``rollout/step`` as their step; several calls may have the same step."""
        run = self._run()
        if run is not None:
            run.log({**metrics, STEP: step})

    def log_examples(self, examples: Sequence[Example], step: int) -> None:
        """Logs a W&B table with screenshots."""
        run = self._run()
        if run is None:
            return
        import wandb

        table = wandb.Table(columns=[*Example.columns(), "first_screenshot", "last_screenshot"])
        for example in examples:
            pictures = [wandb.Image(_picture(data)) for _, data in example.screenshots[:1] + example.screenshots[-1:]]
            table.add_data(*example.cells(), *(pictures or [None, None]))
        run.log({EXAMPLES: table, STEP: step})

    def _run(self) -> Any:
        import wandb

        run = wandb.run
        if run is not None and run.id != self._defined_for:
            run.define_metric(STEP)
            run.define_metric("rollout/*", step_metric=STEP)
            self._defined_for = run.id
        return run


class TensorBoardSink:
    """Writes event files into a folder. Needs ``tensorboardX``."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Writes one scalar for each metric."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def log_examples(self, examples: Sequence[Example], step: int) -> None:
        """Writes the examples as a text."""
        lines = (" | ".join(str(cell).replace("\n", " ") for cell in example.cells()) for example in examples)
        rule = " | ".join("---" for _ in Example.columns())
        self._writer.add_text(EXAMPLES, "\n".join([" | ".join(Example.columns()), rule, *lines]), step)

    def close(self) -> None:
        """Flushes and closes the event file, which is flushed every ten seconds otherwise."""
        self._writer.close()

    @functools.cached_property
    def _writer(self) -> Any:
        try:
            from tensorboardX import SummaryWriter
        except ImportError as error:
            raise ConfigError("rollout_buffer_tensorboard_dir needs tensorboardX: pip install tensorboardX") from error
        return SummaryWriter(str(self._folder), flush_secs=10)


class JsonLinesSink:
    """Appends one line for each call to a file; screenshots by hash."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Appends the metrics with their step."""
        self._append({STEP: step, **metrics})

    def log_examples(self, examples: Sequence[Example], step: int) -> None:
        """Appends the examples with their step."""
        rows = [
            {
                **dict(zip(Example.columns(), example.cells(), strict=True)),
                "screenshots": [sha256 for sha256, _ in example.screenshots],
            }
            for example in examples
        ]
        self._append({STEP: step, EXAMPLES: rows})

    def _append(self, record: Mapping[str, Any]) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record, ensure_ascii=False) + "\n")


@functools.lru_cache(maxsize=8)
def tracker_for(settings: TrackingSettings) -> Tracker:
    """Returns the tracker of these settings, one per process, because sinks hold open files."""
    everything: list[MetricSink] = []
    if settings.json_lines is not None:
        everything.append(JsonLinesSink(settings.json_lines))
    if settings.tensorboard is not None:
        everything.append(TensorBoardSink(settings.tensorboard))
    return Tracker([WandbSink()] if settings.use_wandb else [], everything)


def chosen_examples(items: Sequence[RolloutItem]) -> list[RolloutItem]:
    """Returns the worst, the median and the best trajectory by raw reward; fewer if there are fewer."""
    played = [item for item in items if not item.remove_sample and item.error is None]
    ranked = sorted(played, key=lambda item: (_raw_reward(item), item.uid))
    places = dict.fromkeys((0, len(ranked) // 2, len(ranked) - 1))
    return [ranked[place] for place in places if ranked]


def example_of(item: RolloutItem, screenshots: Mapping[str, bytes]) -> Example:
    """Returns the table row of an item; missing screenshots are left out."""
    shown = [sha256 for sha256 in dict.fromkeys((*item.images[:1], *item.images[-1:])) if sha256 in screenshots]
    success, turns = item.extra_info.get("success"), item.extra_info.get("turns")
    return Example(
        uid=item.uid,
        instance_id=item.instance_id,
        task=str(item.extra_info.get("task_name") or ""),
        reward=_raw_reward(item),
        success=success if isinstance(success, bool) else None,
        stop_reason=item.stop_reason,
        turns=turns if isinstance(turns, int) else None,
        last_words=_last_words(item),
        screenshots=tuple((sha256, screenshots[sha256]) for sha256 in shown),
    )


def _raw_reward(item: RolloutItem) -> float:
    reward = item.reward if item.raw_reward is None else item.raw_reward
    return 0.0 if reward is None else float(reward)


def _last_words(item: RolloutItem) -> str:
    spoken = [message.get("content") for message in item.messages if message.get("role") == "assistant"]
    content = spoken[-1] if spoken else ""
    if isinstance(content, list):
        content = "".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
    return str(content or "")[:TEXT_LIMIT]


def _picture(data: bytes) -> Any:
    from PIL import Image

    picture = Image.open(io.BytesIO(data))
    picture.load()
    return picture


@functools.lru_cache(maxsize=64)
def _warn_once(text: str) -> None:
    logger.warning("%s; the same failure is not reported again", text)
