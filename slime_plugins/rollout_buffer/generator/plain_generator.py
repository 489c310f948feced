"""slime's ``BaseGenerator`` and ``query_single_turn``, for generators with ``run_rollout``.

    def run_rollout(data):
        generator = BaseGenerator(data["remote_engine_url"], data["remote_buffer_url"], task_type=TASK_TYPE)
        generator.entry(data["input_file"], query_single_turn, my_reward)

Names, arguments and items are slime's. Differences: plays run in threads of this process, an item is sent until it is
stored, a play that raises is counted instead of stopping its worker, ids are compared as text, and nothing sleeps
except before a retry.
"""

from __future__ import annotations

import copy
import json
import logging
import os
import random
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, Final

from slime_plugins.rollout_buffer.errors import (
    BusyError,
    ConfigError,
    EngineError,
    GeneratorError,
    RequestError,
    RolloutBufferError,
)
from slime_plugins.rollout_buffer.rules.backoff import backoff_s

SAMPLING_PARAMS: Final[dict[str, Any]] = {"top_p": 1}
"""Sampling parameters of every play, in addition to the generator's ``max_tokens``; a module may add its own."""
QUERY_TRIES: Final = 6
MAX_RETRY_PAUSE_S: Final = 10.0

ItemDict = dict[str, Any]
Messages = list[dict[str, Any]]
RolloutFunction = Callable[[Any, Any, Mapping[str, Any]], tuple[Messages, str]]
RewardFunction = Callable[[ItemDict], float]

logger = logging.getLogger(__name__)


def query_single_turn(
    client: Any, messages: Messages, sampling_params: Mapping[str, Any], tools: Any = None
) -> tuple[Messages, str]:
    """Samples the reply to ``messages`` from an OpenAI client; returns the conversation and the finish reason.

    A reply cut by a weight update is continued, within the same ``max_tokens``.

    Raises:
        EngineError: no complete reply in six tries. slime returns an empty or cut reply then, which reward functions do
            not expect.
    """
    text, used, reason = "", 0, "abort"
    problem: object = "every reply was cut or empty"
    for tried in range(QUERY_TRIES):
        remaining = sampling_params["max_tokens"] - used if "max_tokens" in sampling_params else None
        if remaining is not None and remaining <= 0:
            reason = "length"
            break
        try:
            response = client.chat.completions.create(**_query(messages, sampling_params, tools, text, remaining))
        except Exception as error:  # noqa: BLE001 - the caller's client may raise anything; every error is retried
            problem = error
            time.sleep(backoff_s(tried + 1, first_s=0.5, longest_s=MAX_RETRY_PAUSE_S))
            continue
        if response.choices:
            reason = response.choices[0].finish_reason
            text += response.choices[0].message.content or ""
            used += response.usage.completion_tokens if response.usage is not None else 0
            if reason != "abort":
                break
    if not reason or reason == "abort":
        raise EngineError(f"no reply in {QUERY_TRIES} tries: {problem}")
    # As in slime, the reply replaces a message of the assistant at the end.
    prompt = messages[:-1] if messages and messages[-1]["role"] == "assistant" else messages
    return [*prompt, {"role": "assistant", "content": text}], reason


def _query(
    messages: Messages, sampling_params: Mapping[str, Any], tools: Any, text: str, remaining: int | None
) -> dict[str, Any]:
    query = {**sampling_params, "model": "custom", "stream": False, "seed": random.randint(1, 10_000_000)}
    query |= {"messages": messages, **({"tools": tools} if tools else {})}
    if remaining is not None:
        query["max_tokens"] = remaining
    if text:
        query["messages"] = [*messages, {"role": "assistant", "content": text}]
        query["extra_body"] = {"continue_final_message": True}
    return query


class BaseGenerator:
    """Plays every line of an input file with your functions and writes the items to the buffer."""

    def __init__(
        self,
        remote_engine_url: str,
        remote_buffer_url: str,
        num_repeat_per_sample: int = 1,
        queue_size: int = 1_000_000,
        num_process: int = 10,
        task_type: str = "math",
        max_tokens: int = 4096,
        num_repeats: int = 1,
        skip_instance_ids: list[str] | None = None,
    ) -> None:
        """Takes slime's arguments.

        ``num_process`` plays run concurrently, in threads. Each epoch has ``num_repeats`` passes (default one; slime's
        was ten). ``queue_size`` is ignored. Each of ``skip_instance_ids`` skips its instance in one pass.

        Raises:
            ConfigError: the package ``openai`` is not installed.
        """
        self.remote_engine_url = remote_engine_url
        self.remote_buffer_url = remote_buffer_url
        self.num_repeat_per_sample = int(num_repeat_per_sample)
        self.queue_size = queue_size
        self.num_process = int(num_process)
        self.task_type = task_type
        self.max_tokens = int(max_tokens)
        self.num_repeats = int(num_repeats)
        self.skip_instance_ids = [str(instance_id) for instance_id in skip_instance_ids or ()]
        self.client = _openai_client(remote_engine_url)
        # Not imported at the top, because every runner loads this file.
        from slime_plugins.rollout_buffer.client import RolloutBufferClient

        self._buffer = RolloutBufferClient(remote_buffer_url, token=os.environ.get("ROLLOUT_BUFFER_TOKEN") or None)

    def entry(
        self, input_file: str, rollout_func: RolloutFunction, reward_func: RewardFunction, num_epoch: int = 1
    ) -> None:
        """Plays the input file ``num_epoch`` times over; see ``run``."""
        for _ in range(int(num_epoch)):
            self.run(input_file, rollout_func, reward_func)

    def run(self, input_file: str, rollout_func: RolloutFunction, reward_func: RewardFunction) -> str:
        """Plays every line ``num_repeat_per_sample`` times in each pass and sends each finished item; returns
        "finished".

        Raises:
            GeneratorError: every play failed; names the most frequent error.
            OSError: the input file cannot be read.
        """
        SAMPLING_PARAMS["max_tokens"] = self.max_tokens
        plays = _Plays()
        with ThreadPoolExecutor(max_workers=self.num_process, thread_name_prefix="play") as pool:
            for line in self._lines_to_play(_lines_of(input_file)):
                plays.add(pool.submit(self._play, line, rollout_func, reward_func))
                plays.collect(down_to=self.num_process - 1)
            plays.collect(down_to=0)
        plays.report()
        return "finished"

    def send_data_to_buffer(self, data: ItemDict) -> None:
        """Writes an item to the job's address, ``remote_buffer_url``; retries until it is stored.

        Raises:
            RequestError: the buffer refuses the item.
        """
        pause_s = 0.5
        while True:
            try:
                self._buffer.write([data], job_id=data.get("job_id"))
            except (RolloutBufferError, OSError) as error:
                if isinstance(error, RequestError) and not isinstance(error, BusyError):
                    raise
                logger.warning("item %s is not stored yet: %s", data.get("uid"), error)
                time.sleep(pause_s)
                pause_s = min(MAX_RETRY_PAUSE_S, 2 * pause_s)
            else:
                return

    def _lines_to_play(self, lines: list[ItemDict]) -> Iterator[ItemDict]:
        """Yields each line as often as it is to be played, the members of a group in sequence; drops the used skips."""
        skips = Counter(self.skip_instance_ids)
        for _ in range(self.num_repeats):
            for line in lines:
                if skips[str(line["instance_id"])] > 0:
                    skips[str(line["instance_id"])] -= 1
                    continue
                for _ in range(self.num_repeat_per_sample):
                    yield copy.deepcopy(line)
        self.skip_instance_ids = list(skips.elements())

    def _play(self, line: ItemDict, rollout_func: RolloutFunction, reward_func: RewardFunction) -> ItemDict:
        try:
            item = self._item(line, rollout_func, reward_func)
            self.send_data_to_buffer(item)
        except Exception:
            logger.exception("a play of instance %s failed", line["instance_id"])
            raise
        return item

    def _item(self, line: ItemDict, rollout_func: RolloutFunction, reward_func: RewardFunction) -> ItemDict:
        params = dict(SAMPLING_PARAMS)
        messages, finish_reason = rollout_func(self.client, copy.deepcopy(line["prompt"]), params)
        play = {**line, "uid": uuid.uuid4().hex, "messages": messages}
        reward = reward_func(play)
        extra_info = {key: value for key, value in play.items() if key not in ("uid", "messages", "instance_id")}
        extra_info |= {"rollout_index": 1, "reward": reward, **params, "timestamp": str(time.time())}
        extra_info |= {
            "round_number": sum(message["role"] == "assistant" for message in messages),
            "finish_reason": finish_reason,
        }
        return {
            "uid": play["uid"],
            "instance_id": str(line["instance_id"]),
            "messages": messages,
            "reward": reward,
            "extra_info": extra_info,
        }


def _openai_client(engine_url: str) -> Any:
    try:
        import openai
    except ImportError as error:
        raise ConfigError(
            "BaseGenerator needs the package openai, which is not installed: pip install openai"
        ) from error
    return openai.OpenAI(api_key="test", base_url=engine_url if "/v1" in engine_url else f"{engine_url.rstrip('/')}/v1")


def _lines_of(input_file: str) -> list[ItemDict]:
    """Returns the lines in random order, as slime plays them; a line without an id gets its number."""
    with Path(input_file).open(encoding="utf-8") as file:
        lines = [{"instance_id": number, **json.loads(line)} for number, line in enumerate(file) if line.strip()]
    random.shuffle(lines)
    return lines


class _Plays:
    """Running plays, and counts of finished and failed ones."""

    def __init__(self) -> None:
        self._running: set[Future[ItemDict]] = set()
        self._failures: Counter[str] = Counter()
        self._finished = 0

    def add(self, play: Future[ItemDict]) -> None:
        self._running.add(play)

    def collect(self, *, down_to: int) -> None:
        """Waits until at most ``down_to`` plays are running."""
        while len(self._running) > down_to:
            finished, self._running = wait(self._running, return_when=FIRST_COMPLETED)
            self._finished += len(finished)
            errors = (future.exception() for future in finished)
            self._failures.update(f"{type(error).__name__}: {error}" for error in errors if error is not None)

    def report(self) -> None:
        """Logs the number of failures and their most frequent error; raises GeneratorError if all failed."""
        if not self._failures:
            return
        ((commonest, count),) = self._failures.most_common(1)
        message = f"{self._failures.total()} of {self._finished} plays failed, {count} of them with {commonest}"
        if self._failures.total() == self._finished:
            raise GeneratorError(message)
        logger.warning("%s", message)
