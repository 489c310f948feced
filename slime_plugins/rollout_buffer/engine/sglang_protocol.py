"""Requests to and replies from SGLang's HTTP server, as bytes.

Pure functions. The only file with the JSON keys of SGLang's ``/generate`` on the client's side.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import orjson

from slime.utils.mask_rows import TOP_P_TOKENS, TokenRecords
from slime_plugins.rollout_buffer.engine.banned_tokens import ban_bias, with_banned_mass
from slime_plugins.rollout_buffer.engine.base import EngineLoad
from slime_plugins.rollout_buffer.engine.token_records import (
    EXPERTS_KEY,
    EXPERTS_START_KEY,
    asked_records,
    records_of_reply,
)
from slime_plugins.rollout_buffer.errors import EngineError
from slime_plugins.rollout_buffer.rules.validity import LOWEST_LOG_PROB, checked_log_prob, first_invalid_id
from slime_plugins.rollout_buffer.types import MAX_EXACT_INTEGER, Image, SamplingParams, WeightVersionSpan

FINISH_REASONS: Final = ("stop", "length", "abort")
RETRIED_STATUSES: Final = frozenset({408, 429, 502, 503, 504})
"""HTTP statuses after which the same request may succeed later."""
MAX_EVENT_BYTES: Final = 64 * 1024 * 1024
"""Limit of one event of a streamed reply."""
_TEXT_OF_IDS: Final = {"skip_special_tokens": False, "spaces_between_special_tokens": False, "no_stop_trim": True}
"""With these the decoded text has all ids; without them SGLang removes stop tokens and adds spaces."""
_OF_ONE_TOKEN: Final = frozenset(
    {"max_tokens", "min_new_tokens", "top_k", "min_p", "logit_bias", "sampling_seed", "stop_token_ids", "ignore_eos"}
)
"""Parameters whose effect on a token does not depend on whether the tokens before it were sampled or are prompt."""
_OF_WHOLE_REPLIES: Final = ("json_schema", "regex", "ebnf", "structural_tag", "stop_regex")
"""Parameters with which the engine matches a reply as a whole, from its first token on."""
_WITHOUT_EFFECT: Final = {"n": 1, "repetition_penalty": 1}
"""Values with which a parameter changes nothing."""


class ForeignReplyError(Exception):
    """The body is not an engine's: a proxy or another program answered, or the engine was not ready."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SampledPart:
    """The tokens of a turn that one call sampled. ``spans`` count from the first id of this part."""

    ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    finish_reason: str
    weight_version: str | None
    spans: tuple[WeightVersionSpan, ...]
    prompt_tokens: int | None
    cached_tokens: int | None
    records: Mapping[str, TokenRecords] = field(default_factory=dict)
    prompt_ids: tuple[int, ...] | None = None
    """The ids that the engine ran, images expanded; None if it does not report them."""


def generate_body(
    *,
    input_ids: Sequence[int],
    sampling_params: SamplingParams,
    max_new_tokens: int,
    images: Sequence[Image],
    rid: str,
    banned_ids: Collection[int] = (),
    experts_from: int = 0,
    is_streamed: bool = False,
    reports_prompt: bool = True,
) -> bytes:
    """Returns the body of one ``POST /generate``. A prompt without images has no ``image_data`` key at all.

    ``experts_from`` is the first position whose experts are to be returned, if the parameters request experts.
    SGLang before 0.5.13 ignores ``return_prompt_token_ids``, which ``reports_prompt`` asks for.
    """
    sampling = sampling_params_body(sampling_params, max_new_tokens)
    body: dict[str, Any] = {
        "input_ids": list(input_ids),
        "sampling_params": sampling,
        "return_logprob": True,
        "return_prompt_token_ids": reports_prompt,
        "rid": rid,
    }
    if is_streamed:
        body["stream"] = True
    if sampling_params.extra.get(EXPERTS_KEY):
        body |= {EXPERTS_KEY: True, EXPERTS_START_KEY: experts_from}
    if banned_ids:
        ban = ban_bias(banned_ids, sampling_params.temperature)
        sampling["logit_bias"] = {**(sampling.get("logit_bias") or {}), **ban}
        # With top-p records, log-probs are relative to the kept ids, and the ban does not change them. Greedy decoding
        # is excluded, too: the temperature of its log-probs depends on the other requests of the batch.
        if sampling.get("top_k") != 1 and TOP_P_TOKENS not in asked_records(sampling_params):
            body["token_ids_logprob"] = sorted(banned_ids)
    if images:
        body["image_data"] = [data_uri(image) for image in images]
    return orjson.dumps(body)


def probe_body(input_ids: Sequence[int], images: Sequence[Image], *, by_log_probs: bool) -> bytes:
    """Returns the body that requests the ids run for a prompt; ``by_log_probs`` for engines before 0.5.13."""
    body: dict[str, Any] = {
        "input_ids": list(input_ids),
        "sampling_params": sampling_params_body(SamplingParams(max_new_tokens=1, temperature=0.0), 1),
    }
    body |= {"return_logprob": True, "logprob_start_len": 0} if by_log_probs else {"return_prompt_token_ids": True}
    if images:
        body["image_data"] = [data_uri(image) for image in images]
    return orjson.dumps(body)


def parse_probe_reply(status: int, body: bytes) -> list[int] | None:
    """Returns the ids that were run, from the reply to either form of ``probe_body``; None if it has none, or if the
    engine itself answered with an error.

    Raises:
        ForeignReplyError: not a finished reply of an engine, such as a proxy's page.
    """
    if status in RETRIED_STATUSES:
        raise ForeignReplyError(f"HTTP {status}")
    if status == 500 and not is_html(body):  # the only error that SGLang answers in plain text
        return None
    reply = _json_object(body)
    if status != 200:
        return None
    meta = reply.get("meta_info")
    if not isinstance(meta, dict) or _finish_reason(meta) == "abort":
        raise ForeignReplyError(f"no finished reply: {_shortened(body)}")
    if (ids := _prompt_ids(reply)) is not None:
        return list(ids)
    entries = meta.get("input_token_logprobs")
    if not isinstance(entries, list) or not entries:
        return None
    ran_ids = [entry[1] for entry in entries if isinstance(entry, list) and len(entry) > 1 and type(entry[1]) is int]
    is_valid = len(ran_ids) == len(entries) and min(ran_ids) >= 0  # an entry is [log_prob, id, text]
    return ran_ids if is_valid else None


def parse_sees_images(body: bytes) -> bool:
    """Returns True if ``GET /model_info`` reports that the model takes images.

    Raises:
        ForeignReplyError: not a JSON object.
    """
    return _json_object(body).get("has_image_understanding") is True


def sampling_params_body(params: SamplingParams, max_new_tokens: int) -> dict[str, Any]:
    """Returns ``params`` under SGLang's names, without those that it does not take as sampling parameters.

    ``max_new_tokens`` is what is left of the limit in ``params``; ``min_new_tokens`` is reduced by the same number.
    """
    extra = {key: value for key, value in params.extra.items() if key not in ("max_tokens", EXPERTS_KEY)}
    if isinstance(minimum := extra.get("min_new_tokens"), int):
        extra["min_new_tokens"] = max(0, minimum - (params.max_new_tokens - max_new_tokens))
    limits = {"max_new_tokens": max_new_tokens, "temperature": params.temperature, "top_p": params.top_p}
    return extra | limits | _TEXT_OF_IDS


def can_be_continued(params: SamplingParams) -> bool:
    """Returns True if sampling goes on unchanged after a prompt that holds the reply so far.

    The engine's state of a reply is lost for stop sequences, grammars, penalties and any parameter unknown here.
    """
    with_state = {key: value for key, value in params.extra.items() if key not in _OF_ONE_TOKEN | _TEXT_OF_IDS.keys()}
    return all(not value or value == _WITHOUT_EFFECT.get(key) for key, value in with_state.items())


def has_grammar(params: SamplingParams) -> bool:
    """Returns True if the engine matches the whole reply, from its first token on, with a grammar or expression."""
    return any(params.extra.get(key) for key in _OF_WHOLE_REPLIES)


def stop_sequences(params: SamplingParams) -> list[str]:
    """Returns the texts that end a reply."""
    stop = params.extra.get("stop") or []
    return [stop] if isinstance(stop, str) else list(filter(None, stop))


def parse_generate_reply(body: bytes) -> SampledPart:
    """Returns the sampled part in the body of an HTTP 200.

    Raises:
        ForeignReplyError: the body is no engine's reply.
        EngineError: the body is not as SGLang documents it, or log-probs are missing or invalid.
    """
    reply = _json_object(body)
    meta = reply.get("meta_info")
    if not isinstance(meta, dict):
        raise ForeignReplyError(f"no meta_info: {_shortened(body)}")
    return _part_of(reply, meta)


def _part_of(reply: Mapping[str, Any], meta: Mapping[str, Any]) -> SampledPart:
    ids, log_probs = _sampled_tokens(reply, meta)
    log_probs = with_banned_mass(log_probs, meta.get("output_token_ids_logprobs"))
    version = meta.get("weight_version")
    version = None if version is None else str(version)
    return SampledPart(
        ids=ids,
        log_probs=log_probs,
        finish_reason=_finish_reason(meta),
        weight_version=version,
        spans=_weight_version_spans(meta, version, len(ids)),
        prompt_tokens=_optional_int(meta, "prompt_tokens"),
        cached_tokens=_optional_int(meta, "cached_tokens"),
        records=records_of_reply(meta, len(ids)),
        prompt_ids=_prompt_ids(reply),
    )


class StreamedReply:
    """Joins the events of a streamed ``/generate`` to the reply that the same request would get without streaming.

    ``on_tokens`` gets the sampled ids as they come. By default each list of an event covers all tokens so far. With
    SGLang's ``--incremental-streaming-output`` each list covers the tokens since the event before; with its older
    ``--stream-output`` only the list of ids does.
    """

    def __init__(
        self, on_tokens: Callable[[Sequence[int]], None], params: SamplingParams, eos_id: int | None = None
    ) -> None:
        """``eos_id`` is the id of the token with which the model ends a reply."""
        self._on_tokens = on_tokens
        self._params = params
        self._eos_id = eos_id
        self._rest = b""
        """The beginning of a line whose end has not come yet."""
        self._reply: dict[str, Any] = {}
        """The last event, which may be an error."""
        self._sampled: dict[str, Any] = {}
        """The last event with tokens."""
        self._ids: list[Any] = []
        """``output_ids`` of all events so far."""
        self._entries: list[Any] = []
        """``output_token_logprobs`` of all events so far: one ``[log_prob, id, text]`` for each token."""
        self._versions: set[str] = set()
        """Weight versions that the events have named."""
        self._is_cumulative: bool | None = None
        """Whether each list of an event holds all tokens so far; None until the second event with tokens."""
        self.delivered = 0
        """Number of ids given to ``on_tokens``."""

    def add(self, content: bytes) -> None:
        """Adds the next bytes of the body.

        Raises:
            ForeignReplyError, EngineError: as ``parse_generate_reply``.
        """
        *lines, self._rest = (self._rest + content).split(b"\n")
        if len(self._rest) > MAX_EVENT_BYTES:
            raise ForeignReplyError(f"an event of more than {MAX_EVENT_BYTES} bytes")
        data = [line.removeprefix(b"data:") for line in lines if line.startswith(b"data:")]
        events = [event for event in data if event.strip() != b"[DONE]"]
        while events:
            events = events[-1:] if self._is_cumulative else events  # the last event then holds all of the others
            self._add(_json_object(events.pop(0)))

    @property
    def status(self) -> int:
        """The HTTP status that the reply would have unstreamed: the ``code`` of an event with an ``error``, else 200.

        An error without a code that comes before any token is a refusal of the request, and counts as HTTP 400.
        """
        error = self._reply.get("error")
        code = error.get("code", 200 if self.delivered else 400) if isinstance(error, dict) else None
        return code if isinstance(code, int) and 400 <= code < 600 else 200

    def body(self) -> bytes:
        """Returns the body that the reply would have unstreamed.

        Raises:
            ForeignReplyError: the stream ended before the reply.
        """
        if self._reply is self._sampled and self._finish_reason is None:
            raise ForeignReplyError("it has no last event")
        return orjson.dumps(self._reply) if self._reply else b""

    def part(self) -> SampledPart | None:
        """Returns the delivered part of a reply that broke off; as aborted, unless its last event or id ends the reply.

        Returns None if the reply did not end and cannot be continued: see ``can_be_continued``, or the weight version
        changed meanwhile, and only the last event reports the version of each token.
        """
        reason, extra = self._finish_reason, self._params.extra
        end_ids = () if extra.get("ignore_eos") else (self._eos_id, *(extra.get("stop_token_ids") or ()))
        last_id = _token(self._entries[-1])[0]
        is_ended = last_id in end_ids
        if reason is None and (len(self._versions) > 1 or not (is_ended or can_be_continued(self._params))):
            return None
        reason = reason or {"type": "stop" if is_ended else "abort"}
        return _part_of(self._sampled, self._sampled["meta_info"] | {"finish_reason": reason})

    @property
    def _finish_reason(self) -> Any:
        return self._sampled.get("meta_info", {}).get("finish_reason")

    def _add(self, event: dict[str, Any]) -> None:
        self._reply = event
        meta = event.get("meta_info")
        if not isinstance(meta, dict):
            return
        self._sampled = event
        self._versions.add(str(meta.get("weight_version")))
        total = meta.get("completion_tokens")
        if isinstance(event.get("output_ids"), list):
            self._ids = event["output_ids"] = self._joined(self._ids, event["output_ids"], total)
        if isinstance(meta.get("output_token_logprobs"), list):
            entries = self._joined(self._entries, meta["output_token_logprobs"], total)
            self._entries = meta["output_token_logprobs"] = entries
            new = [_token(entry)[0] for entry in entries[self.delivered :]]
            self.delivered = len(entries)
            if new:
                self._on_tokens(new)

    def _joined(self, earlier: list[Any], given: list[Any], total: Any) -> list[Any]:
        """Returns a list of all tokens so far.

        ``earlier`` is the list before this event, ``given`` the event's own list, and ``total`` the number of tokens so
        far, if the event names it.
        """
        if len(earlier) == total:  # the event brings no token
            return earlier
        is_increment = not self._is_cumulative and len(given) != total and type(total) is int
        if earlier:  # in the first event both forms are equal
            self._is_cumulative = self._is_cumulative is not False and not is_increment
        if is_increment:
            earlier.extend(given)
        return earlier if is_increment else given


def is_html(body: bytes) -> bool:
    """Returns True for a page, which a proxy sends and no engine."""
    return body.lstrip().startswith(b"<")


def engine_sentence(body: bytes) -> str:
    """Returns the engine's message in an error reply, in any of the forms that SGLang and its router use."""
    try:
        reply = orjson.loads(body)
    except orjson.JSONDecodeError:
        return _shortened(body) or "(no text)"
    for _ in range(3):  # such as {"error": {"message": …}}
        if isinstance(reply, dict):
            reply = next((reply[key] for key in ("error", "message", "detail") if reply.get(key)), str(reply))
    return str(reply)[:1000]


def is_refusal_of_request(status: int, body: bytes) -> bool:
    """Returns True if an HTTP error concerns this one request: the same request would fail again.

    Any other error has a cause outside of the request: a proxy's page, a route that does not exist yet, a missing
    permission. A body that is too large (413) always concerns the request.
    """
    if status == 413:
        return True
    try:
        reply = orjson.loads(body)
    except orjson.JSONDecodeError:
        return False
    if not 400 <= status < 500 or not isinstance(reply, dict):
        return False
    error = reply.get("error")
    if isinstance(error, dict) and isinstance(error.get("message"), str):
        return True
    return status in (400, 422) and any(reply.get(key) for key in ("error", "message", "detail"))


def parse_loads(body: bytes) -> EngineLoad:
    """Returns the load in ``GET /v1/loads`` of a worker, or ``GET /get_load`` of an older one: one entry per DP rank.

    Raises:
        ForeignReplyError: the body is neither of these replies.
    """
    try:
        reply = orjson.loads(body)
        loads = reply["loads"] if isinstance(reply, dict) else reply
        waiting = sum(int(load.get("num_waiting_reqs", 0)) for load in loads)
        return EngineLoad(running=sum(_running_of(load) for load in loads), waiting=waiting)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ForeignReplyError(f"no load of an engine: {_shortened(body)}") from error


def _running_of(load: Mapping[str, Any]) -> int:
    """Returns the running requests; ``num_reqs`` of the older form includes waiting ones."""
    if "num_running_reqs" in load:
        return int(load["num_running_reqs"])
    return max(0, int(load["num_reqs"]) - int(load.get("num_waiting_reqs", 0)))


def urls_of_workers(body: bytes) -> tuple[str, ...]:
    """Returns the addresses in a router's reply to ``GET /workers``.

    Raises:
        ForeignReplyError: not a JSON object.
    """
    workers = _json_object(body).get("workers")
    entries = workers if isinstance(workers, list) else []
    urls = [entry.get("url") for entry in entries if isinstance(entry, dict)]
    return tuple(url.rstrip("/") for url in urls if isinstance(url, str))


def data_uri(image: Image) -> str:
    """Returns an image as text, as engines take it."""
    return f"data:{image.media_type};base64,{base64.b64encode(image.data).decode('ascii')}"


def _sampled_tokens(reply: Mapping[str, Any], meta: Mapping[str, Any]) -> tuple[tuple[int, ...], tuple[float, ...]]:
    output_ids = reply.get("output_ids")
    entries = meta.get("output_token_logprobs")
    if entries is None and not output_ids and not meta.get("completion_tokens"):
        return (), ()  # aborted before it was scheduled: no log-probs
    if not isinstance(entries, list):
        raise EngineError("the engine's reply has no output_token_logprobs")
    tokens = [_token(entry) for entry in entries]
    ids = tuple(token_id for token_id, _ in tokens)
    reported = meta.get("completion_tokens")
    if not isinstance(output_ids, list) and type(reported) is int and reported != len(ids):
        raise EngineError(f"the engine reports {reported} sampled tokens, but sent log-probs of {len(ids)}")
    if isinstance(output_ids, list) and tuple(output_ids) != ids:
        raise EngineError(
            f"the engine sent {len(output_ids)} output ids and log-probs of {len(ids)}: they do not belong together",
            {"output_ids": output_ids[:20], "ids_with_log_probs": list(ids[:20])},
        )
    return ids, tuple(log_prob for _, log_prob in tokens)


def _token(entry: Any) -> tuple[int, float]:
    """Returns id and log-prob of one entry ``[log_prob, id, text]``."""
    if not isinstance(entry, list) or len(entry) < 2 or type(entry[1]) is not int:
        raise EngineError(f"an entry of output_token_logprobs is {str(entry)[:100]}, not [log-prob, id, text]")
    if type(entry[0]) is float and LOWEST_LOG_PROB <= entry[0] <= 0.0:  # nearly always; a reply has thousands
        return entry[1], entry[0]
    log_prob = checked_log_prob(entry[0])
    # JSON has no NaN or infinity: SGLang writes them as null.
    if log_prob is None:
        reported = str(entry[0])[:100]
        raise EngineError(f"the log-prob of sampled token {entry[1]} is {reported}, not a finite number of at most 0")
    return entry[1], log_prob


def _prompt_ids(reply: Mapping[str, Any]) -> tuple[int, ...] | None:
    ids = reply.get("prompt_token_ids")
    if not isinstance(ids, list) or set(map(type, ids)) != {int} or first_invalid_id(ids, None) is not None:
        return None
    return tuple(ids)


def _finish_reason(meta: Mapping[str, Any]) -> str:
    reason = meta.get("finish_reason")
    kind = reason.get("type") if isinstance(reason, dict) else None
    if not isinstance(reason, dict) or kind not in FINISH_REASONS:
        raise EngineError(f"the engine's finish_reason is {str(reason)[:200]}, not one of {', '.join(FINISH_REASONS)}")
    status = reason.get("status_code")
    if kind == "abort" and isinstance(status, int) and 400 <= status < 500 and status not in RETRIED_STATUSES:
        raise EngineError(f"the engine refused the request: {reason.get('message')}", {"status": status})
    return str(kind)


def _weight_version_spans(meta: Mapping[str, Any], version: str | None, length: int) -> tuple[WeightVersionSpan, ...]:
    """Returns the weight version of each token: the engine's per-token spans if they cover the part, else its
    version."""
    spans = _reported_spans(meta.get("weight_versions"))
    bounds = [0, *(span.end for span in spans)]
    if spans and bounds[:-1] == [span.start for span in spans] and bounds[-1] == length:
        return tuple(span for span in spans if span.end > span.start)
    return (WeightVersionSpan(version, 0, length),) if version is not None and length else ()


def _reported_spans(reported: Any) -> list[WeightVersionSpan]:
    if not isinstance(reported, list):
        return []
    try:
        return [WeightVersionSpan(str(span["version"]), int(span["start"]), int(span["end"])) for span in reported]
    except (TypeError, KeyError, ValueError, OverflowError):
        return []


def _optional_int(meta: Mapping[str, Any], key: str) -> int | None:
    """Returns a count; None if it is missing, invalid, or above ``MAX_EXACT_INTEGER``."""
    value = meta.get(key)
    return value if type(value) is int and 0 <= value <= MAX_EXACT_INTEGER else None


def _json_object(body: bytes) -> dict[str, Any]:
    try:
        reply = orjson.loads(body)
    except orjson.JSONDecodeError:
        reply = _lax_json(body)
    if not isinstance(reply, dict):
        raise ForeignReplyError(f"not one JSON object: {_shortened(body)}")
    return reply


def _lax_json(body: bytes) -> Any:
    """Parses JSON with NaN and Infinity, as Python's encoder in an engine writes it."""
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ForeignReplyError(f"not JSON: {_shortened(body) or '(an empty body)'}") from error


def _shortened(body: bytes) -> str:
    """Returns the beginning of a body on one line."""
    return " ".join(body[:500].decode("utf-8", errors="replace").split())[:300]
