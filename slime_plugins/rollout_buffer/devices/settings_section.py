"""The base class of settings, which refuses unknown keys, infinities, and booleans in place of other values.

YAML reads ``yes``, ``no``, ``on`` and ``off`` as booleans, and Python accepts booleans as the numbers 1 and 0.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator


def refuse_boolean(value: Any) -> Any:
    """Returns the value unchanged.

    Raises:
        ValueError: it is a boolean.
    """
    if isinstance(value, bool):
        raise ValueError("must not be true or false (YAML reads yes, no, on and off as booleans)")
    return value


class SettingsSection(BaseModel):
    """Frozen settings with strict types."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _only_switches_are_true_or_false(cls, value: Any, info: ValidationInfo) -> Any:
        is_switch = cls.model_fields[str(info.field_name)].annotation is bool
        return value if is_switch else refuse_boolean(value)
