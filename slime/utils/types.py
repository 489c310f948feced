"""Replacement for ``slime.utils.types`` where slime is not installed.

``Sample`` has the same fields, in the same order and with the same defaults, as slime's record at v0.3.1; a test
compares the two. It has none of slime's methods that need torch. This file is never installed over slime: in a slime
checkout, slime's own ``Sample`` is imported.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any


@dataclass
class Sample:
    """One sequence for the trainer: prompt and response tokens, loss mask and reward.

    The response is the last ``response_length`` of ``tokens``; ``loss_mask`` and ``rollout_log_probs``, if set, have a
    value for each token of the response. ``index`` is an int in slime's own rollouts and the instance id in agent
    rollouts. Samples with the same ``rollout_id`` belong to one trajectory.
    """

    group_index: int | None = None
    index: int | str | None = None
    rollout_id: int | None = None
    prompt: str | list[dict[str, str]] = ""
    tokens: list[int] = field(default_factory=list)
    multimodal_inputs: dict[str, Any] | None = None
    multimodal_train_inputs: dict[str, Any] | None = None
    multimodal_train_input_id: str | None = None
    apply_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    response: str = ""
    response_length: int = 0
    label: str | None = None
    reward: float | dict[str, Any] | None = None
    loss_mask: list[int] | None = None
    weight_versions: list[str] = field(default_factory=list)
    rollout_log_probs: list[float] | None = None
    rollout_top_p_token_ids: Any = None
    rollout_top_p_token_offsets: Any = None
    rollout_routed_experts: Any = None
    remove_sample: bool = False
    teacher_log_probs: list[float] | None = None

    class Status(Enum):
        """How a sample ended."""

        PENDING = "pending"  # it is not generated yet
        COMPLETED = "completed"  # it ended by itself
        TRUNCATED = "truncated"  # a limit ended it
        ABORTED = "aborted"  # a cancellation ended it
        FAILED = "failed"  # a failure of the infrastructure ended it

    status: Status = Status.PENDING

    metadata: dict[str, Any] = field(default_factory=dict)
    generate_function_path: str | None = None
    custom_rm_path: str | None = None
    train_metadata: dict[str, Any] | None = None
    session_id: str | None = None
    non_generation_time: float = 0.0

    @dataclass
    class SpecInfo:
        """Counters of speculative decoding."""

        spec_accept_token_num: int = 0
        spec_draft_token_num: int = 0
        spec_verify_ct: int = 0
        completion_token_num: int = 0

    spec_info: SpecInfo = field(default_factory=SpecInfo)

    @dataclass
    class PrefixCacheInfo:
        """Counters of the engine's prefix cache."""

        cached_tokens: int = 0
        total_prompt_tokens: int = 0

    prefix_cache_info: PrefixCacheInfo = field(default_factory=PrefixCacheInfo)

    def get_reward_value(self, args: Any) -> Any:
        """Returns the reward; if it is a dict and ``args.reward_key`` is set, the entry of that key."""
        key = getattr(args, "reward_key", None)
        return self.reward[key] if key and isinstance(self.reward, dict) else self.reward

    def to_dict(self) -> dict[str, Any]:
        """Returns the sample as plain values."""
        values = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        return {
            **values,
            "status": self.status.value,
            "spec_info": vars(self.spec_info).copy(),
            "prefix_cache_info": vars(self.prefix_cache_info).copy(),
        }
