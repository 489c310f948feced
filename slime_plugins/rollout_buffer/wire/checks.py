"""Validation of wire types: their base class, the types of their fields, and the sentences of errors."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass
from itertools import islice
from typing import Annotated, Any, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    StringConstraints,
    ValidationError,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import CoreSchema, ErrorDetails, core_schema

from slime_plugins.rollout_buffer.errors import InvalidPayloadError
from slime_plugins.rollout_buffer.rules.validity import LOWEST_LOG_PROB, MAX_REWARD, MAX_VOCABULARY, ROUNDING

MAX_IDENTIFIER = 256
"""Characters of an id."""
MAX_ITEMS = 100
"""Limit of items in one write, which is one transaction, so that other writers do not wait long."""
MAX_SENTENCES = 10
"""Limit of the wrong values that one error names."""
MAX_KEYS = 200
"""Limit of the keys of a record that are compared with known keys: thousands would take seconds."""
MIN_SIMILARITY = 0.84
"""``difflib`` ratio from which on an unknown key counts as misspelt."""
_KINDS_WANTED = {
    "dict_type": "an object",
    "model_type": "an object",
    "list_type": "a list",
    "string_type": "a string",
    "int_type": "an integer",
    "float_type": "a number",
    "bool_type": "true or false",
}
"""The types of pydantic's errors, and the words for what is wanted."""
_KIND_NAMES = {dict: "an object", list: "a list", bool: "true or false", int: "an integer", type(None): "null"}


@dataclass(frozen=True, slots=True)
class MustBe:
    """Annotates a type with a phrase for errors that completes "must be"; a reason follows a colon."""

    what: str

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.custom_error_schema(
            handler(source), custom_error_type="must_be", custom_error_message=f"must be {self.what}"
        )


def nearest_key(key: str, known: Iterable[str]) -> str | None:
    """Returns the most similar known key; None if none is similar enough."""
    near = difflib.get_close_matches(key, list(known), n=1, cutoff=MIN_SIMILARITY)
    return near[0] if near else None


def misspelt_key_messages(given: Iterable[str], known: Iterable[str], prefix: str = "") -> list[str]:
    """Returns a message for each misspelt key among the first ``MAX_KEYS``; ``prefix`` is prepended to key names."""
    names = list(known)
    unknown = ((key, nearest_key(key, names)) for key in islice(given, MAX_KEYS) if key not in names)
    return [f"{prefix}{key} is not known; did you mean {prefix}{near}?" for key, near in unknown if near]


def refuse_misspelt(record: Mapping[str, Any], known: Set[str]) -> None:
    """Raises ``ValueError`` for unknown keys that resemble a known key which the record lacks."""
    if wrong := misspelt_key_messages((key for key in record if key not in known), known - record.keys()):
        raise ValueError("." + "; ".join(wrong))  # ``_sentence`` puts the path of the record before the dot


class WireRecord(BaseModel):
    """Base of wire types. Values are not converted; unknown keys are ignored."""

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore", use_attribute_docstrings=True)


class WrittenRecord(WireRecord):
    """Base of types that other programs write: near misspellings of known keys are refused."""

    @model_validator(mode="before")
    @classmethod
    def _has_no_misspelt_key(cls, record: Any) -> Any:
        if isinstance(record, dict):
            refuse_misspelt(record, cls.model_fields.keys())
        return record


def checked_identifier(value: Any) -> str:
    """Returns an id as a string (integers are taken as well).

    Raises:
        ValueError: it is empty, longer than 256 characters, or has control characters.
    """
    if type(value) is int:
        value = str(value)
    if not isinstance(value, str) or not value or len(value) > MAX_IDENTIFIER or not value.isprintable():
        raise ValueError(f"must be a string of 1 to {MAX_IDENTIFIER} printable characters (or an integer)")
    return value


def identifier(value: Any, where: str) -> str:
    """Returns an id as a string (integers are taken as well).

    Raises:
        InvalidPayloadError: it is missing, empty, longer than 256 characters, or has control characters.
    """
    try:
        return checked_identifier(value)
    except ValueError as error:
        raise InvalidPayloadError(f"{where} {error}") from error


Identifier = Annotated[
    str,
    BeforeValidator(checked_identifier),
    WithJsonSchema({"anyOf": [{"type": "string", "minLength": 1, "maxLength": MAX_IDENTIFIER}, {"type": "integer"}]}),
]
"""An id: 1 to 256 printable characters, or an integer."""
Reward = Annotated[
    float,
    Field(ge=-MAX_REWARD, le=MAX_REWARD, allow_inf_nan=False),
    MustBe("a finite number of 32 bits (up to 3.4e38)"),
]
TokenIds = Annotated[
    list[
        Annotated[
            int, Field(ge=0, lt=MAX_VOCABULARY), MustBe(f"a token id (an integer from 0, below {MAX_VOCABULARY})")
        ]
    ],
    Field(fail_fast=True),
]
LogProbs = Annotated[
    list[
        Annotated[
            float, Field(ge=LOWEST_LOG_PROB, le=ROUNDING, allow_inf_nan=False), MustBe("a finite number of at most 0")
        ]
    ],
    Field(fail_fast=True),
]
Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$"), MustBe("a sha256 in lower-case hex")]
WeightVersion = Annotated[str | int, MustBe("a string or an integer")]


Record = TypeVar("Record")


def checked(validate: Callable[[Any], Record], value: Any, where: str) -> Record:
    """Calls a pydantic validator and returns its result.

    Raises:
        InvalidPayloadError: a value is wrong; each sentence of the message starts with the path of a wrong value.
    """
    try:
        return validate(value)
    except ValidationError as error:
        details = error.errors(include_url=False)[:MAX_SENTENCES]
        sentences = [_sentence(detail, where).removeprefix(".") for detail in details]
        raise InvalidPayloadError("; ".join(sentences)) from error
    except RecursionError as error:
        raise InvalidPayloadError(f"{where} is nested too deeply") from error


def _sentence(error: ErrorDetails, where: str) -> str:
    """Returns the sentence for an error. A validator's message that starts with a dot continues the path."""
    path = where + "".join(f"[{part}]" if isinstance(part, int) else f".{part[:100]}" for part in error["loc"])
    if error["type"] == "missing":
        return f"{path} is missing"
    if error["type"] == "extra_forbidden":
        return f"{path} is not known: keys of your own belong into extra_info"
    if error["type"] == "value_error":
        message = str(error["ctx"]["error"])
        return f"{path}{message}" if message.startswith((".", "[")) else f"{path} {message}"
    if error["type"] in _KINDS_WANTED:
        return f"{path} must be {_KINDS_WANTED[error['type']]}, not {_input_in_error(error['input'])}"
    # pydantic's "Input should be …", or the phrase of a ``MustBe``, whose reason stays at the end.
    wanted, colon, reason = error["msg"].replace("Input should be", "must be").partition(": ")
    return f"{path} {wanted}, not {_input_in_error(error['input'])}{colon}{reason}"


def _input_in_error(value: Any) -> str:
    if isinstance(value, str):
        return repr(value[:80])
    if isinstance(value, float) or (type(value) is int and abs(value) < 2**63):
        return str(value)
    return _KIND_NAMES.get(type(value), type(value).__name__)
