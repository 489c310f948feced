"""The scripted engine over HTTP: SGLang's shapes and sentences, and a reply that survives being cut in pieces."""

from __future__ import annotations

import asyncio
import gzip
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest

from rollout_buffer_lab.scripted_engine.generation import Generation, Pace
from rollout_buffer_lab.scripted_engine.server import running
from rollout_buffer_lab.scripted_engine.settings import ScriptedEngineSettings
from rollout_buffer_lab.sglang_routes.records import Sampled
from rollout_buffer_lab.sglang_routes.sampling import BadRequestError, read_sampling_params
from slime_plugins.rollout_buffer.engine.sglang import SglangEngine
from slime_plugins.rollout_buffer.errors import ConfigError
from slime_plugins.rollout_buffer.wire import encode_data_uri
from tests.demo_tokens import ids_of
from tests.pictures import png

PAD = "<|vision_start|><|image_pad|><|vision_end|>"
QUESTION = "<|im_start|>user\nWhat is 17 * 23?<|im_end|>\n<|im_start|>assistant\n"


def data_uri() -> str:
    return encode_data_uri(png((64, 128), (200, 30, 30)))


@dataclass
class Client:
    session: aiohttp.ClientSession
    url: str

    async def post(self, route: str, body: Any = None, **headers: str) -> tuple[int, Any]:
        async with self.session.post(f"{self.url}/{route}", json=body or {}, headers=headers) as response:
            return response.status, await _content(response)

    async def get(self, route: str) -> tuple[int, Any]:
        async with self.session.get(f"{self.url}/{route}") as response:
            return response.status, await _content(response)

    async def until(self, load: str) -> None:
        """Returns as soon as the server counts a request as running, or as waiting."""
        async with asyncio.timeout(40):
            while not (await self.get("v1/loads"))[1]["loads"][0][load]:  # noqa: ASYNC110 - a server tells its load only when asked
                await asyncio.sleep(0.005)

    async def generate(self, session: str = "s", most: int = 64, **body: Any) -> dict[str, Any]:
        sampling = {"max_new_tokens": most, **body.pop("sampling_params", {})}
        asked = {"text": QUESTION, "return_logprob": True, **body, "sampling_params": sampling}
        if "input_ids" in asked:
            del asked["text"]
        status, reply = await self.post("generate", asked, **{"X-SMG-Routing-Key": session})
        assert status == 200, reply
        assert isinstance(reply, dict)
        return reply


async def _content(response: aiohttp.ClientResponse) -> Any:
    return await response.json() if response.content_type == "application/json" else await response.text()


@pytest.fixture
async def client() -> AsyncIterator[Client]:
    async with (
        running(ScriptedEngineSettings(port=0, skill=1.0, context_length=2000)) as url,
        aiohttp.ClientSession() as session,
    ):
        yield Client(session, url)


@pytest.fixture
async def slow_client() -> AsyncIterator[Client]:
    async with (
        running(ScriptedEngineSettings(port=0, skill=1.0, token_latency_s=0.01)) as url,
        aiohttp.ClientSession() as session,
    ):
        yield Client(session, url)


class TestGenerate:
    async def test_text_and_ids_are_the_same_question(self, client: Client) -> None:
        by_text = await client.generate()
        by_ids = await client.generate(input_ids=ids_of(QUESTION))
        assert by_text["output_ids"] == by_ids["output_ids"]
        assert by_text["text"].endswith("\\boxed{391}.")

    async def test_the_end_of_turn_is_sampled_and_trimmed_from_the_text_on_request_only(self, client: Client) -> None:
        trimmed = await client.generate()
        whole = await client.generate(sampling_params={"no_stop_trim": True, "skip_special_tokens": False})
        assert whole["text"] == trimmed["text"] + "<|im_end|>"
        assert whole["output_ids"] == trimmed["output_ids"]
        assert whole["meta_info"]["finish_reason"] == {"type": "stop", "matched": whole["output_ids"][-1]}

    async def test_a_reply_goes_on_from_where_it_was_cut(self, client: Client) -> None:
        """What a client does after an abort: the partial reply is part of the prompt."""
        whole = (await client.generate())["output_ids"]
        for cut in (1, 7, len(whole) - 1):
            rest = await client.generate(input_ids=[*ids_of(QUESTION), *whole[:cut]])
            assert rest["output_ids"] == whole[cut:]

    async def test_stop_strings_and_stop_tokens_end_it(self, client: Client) -> None:
        by_text = await client.generate(sampling_params={"stop": ["391"]})
        assert by_text["text"].endswith("391")
        assert by_text["meta_info"]["finish_reason"] == {"type": "stop", "matched": "391"}
        third = (await client.generate())["output_ids"][2]
        by_token = await client.generate(sampling_params={"stop_token_ids": [third]})
        assert by_token["output_ids"][-1] == third

    async def test_greedy_requests_draw_nothing_at_random(self) -> None:
        async with running(ScriptedEngineSettings(port=0, skill=0.5)) as url, aiohttp.ClientSession() as session:
            client = Client(session, url)
            greedy = {
                (await client.generate(f"s{slot}", sampling_params={"temperature": 0}))["text"] for slot in range(12)
            }
            sampled = {(await client.generate(f"s{slot}"))["text"] for slot in range(12)}
        assert len(greedy) == 1
        assert len(sampled) > 1

    async def test_the_expanded_prompt_is_returned_on_request(self, client: Client) -> None:
        ids = ids_of(f"<|im_start|>user\n{PAD}<|im_end|>\n<|im_start|>assistant\n")
        reply = await client.generate(input_ids=ids, image_data=[data_uri()], return_prompt_token_ids=True)
        assert reply["meta_info"]["prompt_tokens"] == len(reply["prompt_token_ids"]) == len(ids) + 71
        assert reply["meta_info"]["image_tokens"] == 72

    async def test_a_surplus_image_is_ignored(self, client: Client) -> None:
        one_pad = f"<|im_start|>user\n{PAD}<|im_end|>\n<|im_start|>assistant\n"
        surplus = await client.generate(text=one_pad, image_data=[data_uri()] * 3)
        assert surplus["meta_info"]["image_tokens"] == 72


class TestStreams:
    async def test_each_token_is_an_event_that_repeats_the_reply_so_far(self, client: Client) -> None:
        whole = (await client.generate(sampling_params={"temperature": 0}))["output_ids"]
        body = {"text": QUESTION, "stream": True, "sampling_params": {"temperature": 0, "max_new_tokens": 64}}
        async with client.session.post(f"{client.url}/generate", json=body) as response:
            events = [line.removeprefix(b"data: ").strip() async for line in response.content if line.strip()]
        assert events.pop() == b"[DONE]"
        assert [orjson.loads(event)["output_ids"] for event in events] == [
            whole[:count] for count in range(1, len(whole) + 1)
        ]

    async def test_a_slow_client_makes_the_engine_keep_the_newest_reply_only(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Each event repeats the reply: kept for all tokens, one reply of 30,000 tokens would be gigabytes."""
        kept = Counter[str]()

        class Ids(list[int]):
            def __init__(self, ids: Iterable[int]) -> None:
                super().__init__(ids)
                kept["now"] += 1
                kept["most"] = max(kept["most"], kept["now"])

            def __del__(self) -> None:
                kept["now"] -= 1

        def sampled(**fields: Any) -> Sampled:
            return Sampled(**{**fields, "output_ids": Ids(fields["output_ids"])})

        monkeypatch.setattr("rollout_buffer_lab.scripted_engine.scripted_backend.Sampled", sampled)
        settings = ScriptedEngineSettings(port=0, skill=1.0, context_length=3000)
        async with running(settings) as url, aiohttp.ClientSession() as session:
            asked = {"max_new_tokens": 2000, "ignore_eos": True}
            body = {"text": QUESTION, "stream": True, "return_logprob": True, "sampling_params": asked}
            async with session.post(f"{url}/generate", json=body) as response:
                await response.read()
        assert kept["most"] < 5


class TestRefusals:
    @pytest.mark.parametrize(
        ("body", "sentence"),
        [
            ({"text": "a", "sampling_params": {"max_tokens": 3}}, "unknown field `max_tokens`, expected one of"),
            ({"text": "a", "sampling_params": {"max_new_tokens": 9999}}, "maximum context length of 2000 tokens"),
            ({"input_ids": [9] * 2001}, "The input (2001 tokens) is longer than the model's context length"),
            ({"input_ids": []}, "input_ids cannot be empty."),
            ({"input_ids": "abc"}, "input_ids must be list or null; got str"),
            ({"input_ids": [1, 10**9]}, "no id of the tokenizer"),
            ({"input_ids": [1, "2"]}, "no id of the tokenizer"),
            ({"text": ""}, "The prompt is empty."),
            ({}, "Either text, input_ids or input_embeds should be provided."),
            ({"text": "a", "image_data": ["data:image/png;base64,AAAA"]}, "Could not decode image"),
            ({"text": "a", "image_data": ["http://host/a.png"]}, "Could not decode image"),
        ],
    )
    async def test_a_wrong_request_is_told_what_is_wrong(
        self, client: Client, body: Mapping[str, Any], sentence: str
    ) -> None:
        status, reply = await client.post("generate", body)
        assert status == 400
        error = reply["error"]
        assert sentence in (error if isinstance(error, str) else error["message"])

    async def test_bodies_that_are_no_object_are_refused(self, client: Client) -> None:
        async with client.session.post(f"{client.url}/generate", data=b"nonsense") as response:
            assert response.status == 400
        assert (await client.post("generate", [1]))[0] == 400

    async def test_one_request_id_runs_once_at_a_time(self, slow_client: Client) -> None:
        first = asyncio.create_task(slow_client.generate(rid="same", most=5000, sampling_params={"ignore_eos": True}))
        await slow_client.until("num_running_reqs")
        status, reply = await slow_client.post("generate", {"text": "a", "rid": "same"})
        assert (status, "Duplicate request ID" in reply["error"]["message"]) == (400, True)
        await slow_client.post("abort_request", {"rid": "same"})
        await first

    @pytest.mark.parametrize("values", [{"skill": 1.5}, {"latency_s": -1}, {"context_length": 0}, {"threads": 0}])
    def test_settings_that_cannot_work_are_refused(self, values: dict[str, Any]) -> None:
        with pytest.raises(ConfigError, match="scripted engine"):
            ScriptedEngineSettings(**values)


class TestPausesAndAborts:
    async def test_a_paused_engine_holds_requests_until_it_continues(self, client: Client) -> None:
        await client.post("pause_generation")
        held = asyncio.create_task(client.generate())
        await client.until("num_waiting_reqs")
        await asyncio.sleep(0.1)
        assert not held.done()
        assert (await client.get("health"))[0] == 503
        assert (await client.get("v1/loads"))[1]["loads"][0]["num_waiting_reqs"] == 1
        await client.post("update_weight_version", {"new_version": 8})
        await client.post("continue_generation")
        assert (await held)["meta_info"]["weight_version"] == "8"
        assert (await client.get("health_generate"))[0] == 200

    async def test_a_held_request_can_be_aborted(self, client: Client) -> None:
        await client.post("pause_generation")
        held = asyncio.create_task(client.generate(rid="held"))
        await client.until("num_waiting_reqs")
        await client.post("abort_request", {"rid": "held"})
        reply = await held
        assert (reply["output_ids"], reply["meta_info"]["finish_reason"]["type"]) == ([], "abort")

    async def test_the_cache_is_flushed_only_when_idle(self, slow_client: Client) -> None:
        endless = slow_client.generate(rid="r", most=5000, sampling_params={"ignore_eos": True})
        request = asyncio.create_task(endless)
        await slow_client.until("num_running_reqs")
        assert (await slow_client.post("flush_cache"))[0] == 400
        await slow_client.post("abort_request", {"rid": "r"})
        await request
        assert (await slow_client.get("flush_cache"))[0] == 200

    @pytest.mark.parametrize(
        ("route", "body"), [("pause_generation", {"mode": "gently"}), ("update_weight_version", {})]
    )
    async def test_orders_that_make_no_sense_are_refused(self, client: Client, route: str, body: Any) -> None:
        assert (await client.post(route, body))[0] == 400


class TestWhatItSaysOfItself:
    @pytest.mark.parametrize("route", ["model_info", "get_model_info"])
    async def test_it_says_that_it_is_no_model(self, client: Client, route: str) -> None:
        _, info = await client.get(route)
        assert info["model_path"] == "stand-in (a scripted policy, not a model)"
        assert (info["stand_in"], info["weight_version"], info["skill"]) == (True, "default", 1.0)

    @pytest.mark.parametrize("route", ["server_info", "get_server_info", "v1/models", "health"])
    async def test_a_router_finds_what_it_asks_for(self, client: Client, route: str) -> None:
        assert (await client.get(route))[0] == 200


class TestChat:
    async def test_openai_messages_get_the_reply_that_ids_get(self, client: Client) -> None:
        messages = [{"role": "user", "content": "What is 17 * 23?"}]
        headers = {"X-SMG-Routing-Key": "s"}
        status, reply = await client.post("v1/chat/completions", {"messages": messages, "max_tokens": 64}, **headers)
        by_ids = await client.generate()
        assert status == 200
        assert reply["choices"][0]["message"]["content"] == by_ids["text"]
        assert reply["choices"][0]["finish_reason"] == "stop"
        assert reply["usage"]["prompt_tokens"] == len(ids_of(QUESTION))
        assert reply["usage"]["completion_tokens"] == len(by_ids["output_ids"])
        assert "prompt_token_ids" not in reply["choices"][0]

    async def test_token_ids_and_log_probs_come_on_request(self, client: Client) -> None:
        body = {"messages": [{"role": "user", "content": "Hello"}], "return_token_ids": True, "logprobs": True}
        _, reply = await client.post("v1/chat/completions", body)
        choice = reply["choices"][0]
        assert choice["prompt_token_ids"] == ids_of("<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n")
        assert len(choice["logprobs"]["content"]) == len(choice["response_token_ids"])

    async def test_images_in_messages_are_seen(self, client: Client) -> None:
        content = [{"type": "text", "text": "Look: "}, {"type": "image_url", "image_url": {"url": data_uri()}}]
        _, reply = await client.post("v1/chat/completions", {"messages": [{"role": "user", "content": content}]})
        bare = ids_of(f"<|im_start|>user\nLook: {PAD}<|im_end|>\n<|im_start|>assistant\n")
        assert reply["usage"]["prompt_tokens"] == len(bare) + 71

    async def test_a_final_assistant_message_is_continued(self, client: Client) -> None:
        headers = {"X-SMG-Routing-Key": "s"}
        whole = (await client.generate())["text"]
        messages = [{"role": "user", "content": "What is 17 * 23?"}, {"role": "assistant", "content": whole[:12]}]
        body = {"messages": messages, "continue_final_message": True}
        _, reply = await client.post("v1/chat/completions", body, **headers)
        assert whole[:12] + reply["choices"][0]["message"]["content"] == whole

    @pytest.mark.parametrize(
        "body",
        [
            {"messages": []},
            {},
            {"messages": ["hello"]},
            {"messages": [{"role": "wizard", "content": "x"}]},
            {"messages": [{"role": "user", "content": "x"}], "stream": True},
            {"messages": [{"role": "user", "content": "x"}], "temperature": -1},
        ],
    )
    async def test_wrong_conversations_are_refused(self, client: Client, body: Any) -> None:
        status, reply = await client.post("v1/chat/completions", body)
        assert (status, bool(reply["error"]["message"])) == (400, True)


class TestParts:
    def test_tokens_appear_with_time_and_stand_still_while_frozen(self) -> None:
        now = [100.0]
        generation = Generation(Pace(latency_s=1.0, token_latency_s=0.5), "v1", clock=lambda: now[0])
        generation.begin(10)
        seen = []
        for moment in (100.9, 101.0, 101.6, 102.1):
            now[0] = moment
            seen.append(generation.produced)
        generation.freeze()
        now[0] = 200.0
        seen.append(generation.produced)
        generation.set_weight_version("v2")
        generation.thaw()
        now[0] = 200.5
        seen.append(generation.produced)
        assert seen == [0, 1, 2, 3, 3, 4]
        generation.abort()
        now[0] = 300.0
        assert generation.version_spans(4) == [("v1", 0, 3), ("v2", 3, 4)]

    def test_a_finished_reply_cannot_be_aborted(self) -> None:
        generation = Generation(Pace(), "v1")
        generation.begin(3)
        generation.abort()
        assert (generation.aborted, generation.produced) == (False, 3)


# --- who may ask -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Origin": "http://evil.example", "Content-Type": "text/plain"}, 403),
        ({"Origin": "null"}, 403),
        ({"Host": "evil.example:30000"}, 403),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Content-Encoding": "gzip"}, 415),
        ({"Host": "localhost:1234"}, 200),
        ({"Content-Type": "application/x-www-form-urlencoded"}, 200),
    ],
)
async def test_no_web_page_pauses_an_engine_and_any_program_does(
    client: Client, headers: Mapping[str, str], status: int
) -> None:
    for route in ("pause_generation", "update_weight_version", "generate", "flush_cache"):
        body = b'{"new_version": "6", "mode": "in_place", "text": "Hi", "sampling_params": {"max_new_tokens": 0}}'
        content = gzip.compress(body) if "Content-Encoding" in headers else body
        async with client.session.post(f"{client.url}/{route}", data=content, headers=headers) as response:
            assert response.status == status, (route, await response.text())
        await client.post("continue_generation")
    assert (await client.get("model_info"))[1]["weight_version"] == ("6" if status == 200 else "default")


async def test_an_engine_that_others_reach_needs_a_token_and_answers_who_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="can be reached from other machines: give --token-file"):
        ScriptedEngineSettings(host="0.0.0.0", port=0)
    token = tmp_path / "token"
    token.write_text("a-token-of-enough-characters")
    settings = ScriptedEngineSettings(host="0.0.0.0", port=0, token_file=token)
    async with running(settings) as listening, aiohttp.ClientSession() as session:
        url = listening.replace("0.0.0.0", "127.0.0.1")
        asked = {"generate": {"text": QUESTION}, "pause_generation": {"mode": "abort"}}
        for route, body in asked.items():
            for headers in ({}, {"Authorization": "Bearer another-token-of-enough"}):
                async with session.post(f"{url}/{route}", json=body, headers=headers) as response:
                    assert response.status == 401
        async with session.get(f"{url}/health") as response:
            assert response.status == 200
        engine = SglangEngine(url)
        assert not await engine.answers()
        monkeypatch.setenv("ROLLOUT_BUFFER_ENGINE_API_URL", url)
        monkeypatch.setenv("ROLLOUT_BUFFER_ENGINE_API_KEY", token.read_text())
        assert await engine.answers()
        await engine.close()


@pytest.mark.parametrize(
    "params",
    [
        [],
        "hot",
        {"max_new_tokens": -1},
        {"max_new_tokens": "9"},
        {"max_new_tokens": 1.5},
        {"temperature": -1},
        {"temperature": "hot"},
        {"top_p": 0},
        {"top_p": 1.5},
        {"top_k": 0},
        {"top_k": 2.5},
        {"min_p": 2},
        {"n": 2},
        {"stop": 5},
        {"stop": [5]},
        {"stop": ["x"] * 100_000},
        {"stop": "x" * 100_000},
        {"stop_token_ids": 5},
        {"stop_token_ids": ["a"]},
        {"stop_token_ids": [1] * 100_000},
        {"logit_bias": [1]},
        {"logit_bias": {"a": 1}},
        {"logit_bias": {"1": "a"}},
        {"logit_bias": {"1": 1e308}},
        {"logit_bias": {str(token_id): 1 for token_id in range(5000)}},
        {"sampling_seed": "x"},
        {"custom_params": 5},
    ],
    ids=lambda params: str(params)[:30],
)
def test_a_parameter_of_a_wrong_kind_or_size_is_refused_in_a_sentence(params: Any) -> None:
    with pytest.raises(BadRequestError, match="must be") as caught:
        read_sampling_params(params)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    "body",
    [
        {"token_ids_logprob": [1] * 300_000},
        {"token_ids_logprob": [1] * 4000, "sampling_params": {"max_new_tokens": 1000}},
    ],
)
async def test_the_log_probs_that_a_reply_would_have_besides_have_a_limit(client: Client, body: dict[str, Any]) -> None:
    status, said = await client.post("generate", {"text": QUESTION, **body})
    assert status == 400
    assert "at most" in said["error"]["message"]
