"""The dashboard in a real browser: every page, phones and desks, keyboard alone, hostile text, signing in.

Needs Chromium and playwright, else it is skipped: ``ROLLOUT_BUFFER_CHROMIUM`` names a browser that is not on the PATH.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import pytest
import requests

from slime_plugins.rollout_buffer import wire
from slime_plugins.rollout_buffer.demo_tokenizer import DEMO_TOKENIZER_PATH
from slime_plugins.rollout_buffer.rules.heartbeats import SUPERVISOR
from slime_plugins.rollout_buffer.serve_settings import ServeSettings
from slime_plugins.rollout_buffer.server.http import ServerContext
from tests.asgi_client import create_app, serving_wsgi
from tests.pictures import png
from tests.support import written

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Locator, Page

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

TOKEN = "a-token-of-enough-characters"
JOB = 'run/1 <img src=x onerror="window.hacked=1">'
EVIL = '<script>window.hacked=1</script><img src=x onerror="window.hacked=1">'
CHROMIUM = os.environ.get("ROLLOUT_BUFFER_CHROMIUM") or next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
SIZES = [(360, 800), (390, 844), (1440, 900), (1920, 1080)]


def shot(shade: int) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": wire.encode_data_uri(png((90, 200), shade, "L"))}}


def reply(**arguments: Any) -> dict[str, Any]:
    call = str({"name": "mobile_use", "arguments": arguments}).replace("'", '"')
    text = f"<thinking>I think {EVIL}</thinking><tool_call>{call}</tool_call><conclusion>Done.</conclusion>"
    return {"role": "assistant", "content": text}


def episode(uid: str, instance_id: str, reward: float) -> dict[str, Any]:
    """A phone episode of three turns: a tap, a swipe, the end."""
    messages = [
        {"role": "system", "content": f"Tools {EVIL}"},
        {"role": "user", "content": [{"type": "text", "text": f"Do it {EVIL}"}, shot(40)]},
        reply(action="click", coordinate=[500, 250]),
        {"role": "user", "content": [{"type": "text", "text": "Step 2"}, shot(90)]},
        reply(action="swipe", coordinate=[500, 900], coordinate2=[500, 100]),
        {"role": "user", "content": [{"type": "text", "text": "Step 3"}, shot(140)]},
        reply(action="terminate", status="success"),
    ]
    breakdown = {"reward": reward, "success": 1.0, "step_scale": 0.7, "thinking_bonus": 0.03, "premature_penalty": 0.0}
    generations = [
        {"prompt_ids": [1, 2, 3], "output_ids": [40, 41], "output_log_probs": [-0.01, -4.0], "weight_version": "1"},
        {"prompt_ids": [1, 9], "output_ids": [42], "output_log_probs": [-0.5], "weight_version": "2"},
    ]
    return written(
        uid,
        instance_id,
        reward,
        messages=messages,
        generations=generations,
        extra_info={"success": True, "goal": EVIL, "screen": [90, 200], "reward_breakdown": breakdown, "evil": EVIL},
        timings_s={"reset": 1.0, "generate": 3.0, "act": 2.0},
    )


class Site:
    def __init__(self, url: str, context: ServerContext) -> None:
        self.url, self.context = url, context
        self.beat()

    def beat(self) -> None:
        self.context.buffer.beat(
            SUPERVISOR.name, os.getpid(), {"task_types": {"external": {}}, "broken_generators": {}}
        )

    def post(self, path: str, body: dict[str, Any]) -> Any:
        found = requests.post(f"{self.url}{path}", json=body, headers={"Authorization": f"Bearer {TOKEN}"}, timeout=20)
        assert found.ok, found.text
        return found.json()

    def write(self, uid: str, instance_id: str, reward: float) -> None:
        self.post("/buffer/write", {"job_id": JOB, **episode(uid, instance_id, reward)})


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("site")
    (folder / "token").write_text(TOKEN)
    app = create_app(ServeSettings(data_dir=folder / "data", token_file=folder / "token"))
    with serving_wsgi(app) as url:
        found = Site(url, app.extensions["rollout_buffer"])
        fill(found)
        yield found
    found.context.buffer.store.close()


def fill(found: Site) -> None:
    names = ["equal", "good", EVIL, *(f"later-{at}" for at in range(60))]
    start = {"task_type": "external", "job_id": JOB, "num_repeat_per_sample": 2, "group_timeout_seconds": 1e6}
    instances = [{"instance_id": name} for name in names]
    found.post("/start_rollout", {**start, "instances": instances, "tokenizer_path": str(DEMO_TOKENIZER_PATH)})
    for slot in range(2):
        found.write(f"e{slot}", "equal", 0.5)
        found.write(f"g{slot}", "good", 0.2 + slot / 2)
    found.write(f"x/{EVIL}", EVIL, -0.4)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if CHROMIUM is None:
        pytest.skip("no Chromium on the PATH, and ROLLOUT_BUFFER_CHROMIUM names none")
    with sync_api.sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-dev-shm-usage"])
        yield found
        found.close()


class Visit:
    """A page that must neither complain nor be wider than its window."""

    def __init__(self, page: Page, url: str) -> None:
        self.page = page
        self.url = url
        self.complaints: list[str] = []
        page.set_default_timeout(20_000)
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("console", lambda message: self._hear(message.type, message.text))

    def _hear(self, kind: str, text: str) -> None:
        if kind in ("error", "warning") and "401" not in text:
            self.complaints.append(text)

    def open(self, *parts: str, query: str = "") -> Page:
        address = "/".join(quote(part, safe="") for part in parts)
        self.page.goto(f"{self.url}/#/{address}{query}")
        return self.page

    def check(self) -> None:
        too_wide = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
        assert self.page.evaluate(too_wide) <= 0
        assert self.page.evaluate("window.hacked === undefined")
        assert self.complaints == []


@pytest.fixture
def visit(browser: Browser, site: Site) -> Iterator[Callable[..., Visit]]:
    """Opens windows of a size, signed in."""
    contexts = []

    def make(width: int = 1440, height: int = 900, *, signed_in: bool = True, theme: Any = "light") -> Visit:
        size: Any = {"width": width, "height": height}
        context = browser.new_context(viewport=size, color_scheme=theme, reduced_motion="reduce")
        contexts.append(context)
        if signed_in:
            context.request.post(f"{site.url}/sign_in", data={"token": TOKEN}, headers={"Origin": site.url})
        return Visit(context.new_page(), site.url)

    yield make
    for context in contexts:
        context.close()


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_every_page_can_be_clicked_through(visit: Callable[..., Visit], width: int, height: int) -> None:
    here = visit(width, height, theme="dark" if width < 400 else "light")
    page = here.open()
    page.get_by_role("link", name=JOB).click()
    page.get_by_role("heading", name=JOB).wait_for()
    tabs = page.locator(".tabs")
    assert tabs.evaluate("tabs => tabs.scrollWidth <= tabs.clientWidth"), "the tabs have a scrollbar"
    assert tabs.evaluate("tabs => new Set([...tabs.children].map((tab) => tab.offsetTop)).size") == 1, "in one row"
    page.get_by_text("Mean reward").wait_for()
    page.locator("#chart-reward canvas").wait_for()
    here.check()
    page.get_by_role("link", name="Groups", exact=True).click()
    page.get_by_text("Dropped: all 2 members earned the same reward").wait_for()
    here.check()
    page.get_by_role("link", name="equal").click()
    page.get_by_role("heading", name="Members side by side").wait_for()
    here.check()
    page.get_by_role("link", name="Play the episode of slot 1").click()
    page.get_by_role("heading", name="Turn 1").wait_for()
    here.check()
    page.get_by_role("link", name="Trajectories").click()
    page.get_by_role("link", name="good").first.wait_for()
    here.check()
    page.get_by_role("link", name="Settings").click()
    page.get_by_text("group_timeout_seconds").wait_for()
    here.check()


def current(page: Page, turn: int) -> Locator:
    """The article of turn ``turn``, present while the screen of this turn is shown."""
    return page.locator(f"article[data-turn='{turn}'][aria-current=step]")


def test_an_episode_of_600_turns_is_one_transcript(visit: Callable[..., Visit], site: Site) -> None:
    told = [{"role": "user", "content": f"Question {at}"} for at in range(600)]
    replies = [{"role": "assistant", "content": f"**Answer** `{at}`"} for at in range(600)]
    messages = [message for pair in zip(told, replies, strict=True) for message in pair]
    site.post("/buffer/write", {"job_id": JOB, **written("long", "later-58", 0.1, messages=messages)})
    here = visit()
    page = here.open("jobs", JOB, "trajectories", "long", query="?turn=599")
    current(page, 599).wait_for()
    assert page.locator("article.step").count() == 600
    place = page.locator("article[data-turn='599']").bounding_box()
    assert place is not None
    assert 0 < place["y"] < 900
    here.check()


READ_HOSTILE = """async () => {
  const { readEpisode } = await import("/dashboard/episode.js");
  const { markdown } = await import("/dashboard/markdown.js");
  const of = (piece, length) => piece.repeat(length / piece.length);
  for (const piece of ["<tool_call>", "<think>", "<thinking>", "<conclusion>", "<tool_call>x</tool_call>"])
    readEpisode({ messages: [{ role: "assistant", content: of(piece, 400000) }] });
  for (const start of ["# ", "```", "~~~", "- ", "1. "]) markdown(start + of(" ", 39900) + "a\\u2028b");
}"""


def test_a_reply_of_400_kb_that_closes_no_tag_freezes_no_page(visit: Callable[..., Visit]) -> None:
    page = visit().open()
    began = time.monotonic()
    page.evaluate(READ_HOSTILE)
    assert time.monotonic() - began < 20


def test_the_player_draws_what_was_done_and_steps_with_keys(visit: Callable[..., Visit]) -> None:
    here = visit()
    page = here.open("jobs", JOB, "trajectories", "g1")
    page.get_by_role("heading", name="Turn 1").wait_for()
    assert page.locator(".marks circle.dot").count() == 1
    assert "taps (500, 250)" in page.locator(".deed").inner_text()
    assert page.locator(".glass img").evaluate("image => image.decode().then(() => image.naturalHeight)") == 200
    page.keyboard.press("ArrowRight")
    current(page, 2).wait_for()
    assert page.locator(".marks line.path").count() == 1
    page.keyboard.press("End")
    current(page, 3).wait_for()
    assert "ends the task: success" in page.locator(".deed").inner_text()
    page.keyboard.press("Home")
    current(page, 1).wait_for()
    page.get_by_label("Speed").select_option("600")
    page.get_by_role("button", name="Play").click()
    current(page, 3).wait_for()
    assert "success 1.00 × step scale 0.700" in page.locator(".sum-line").inner_text()
    here.check()


FIRST_DIFFERENCES = """async () => {
  const { firstDifference, readEpisode } = await import("/dashboard/episode.js");
  const called = (b) => ({ name: "add", arguments: `{"b": ${b}}` });
  const call = (id, b) => ({ role: "assistant", content: "", tool_calls: [{ id, function: called(b) }] });
  const user = (content) => ({ role: "user", content });
  const shot = (hash) => user([{ type: "image_url", image_url: { url: `sha256:${hash.repeat(64)}` } }]);
  const of = (...messages) => readEpisode({ messages });
  const where = (one, other) => {
    const found = firstDifference(of(...one), of(...other));
    return found && [found.turn, found.where, found.at];
  };
  return [
    where([user("q"), call("x", 1)], [user("q"), call("y", 1)]),
    where([user("q"), call("x", 1)], [user("q"), call("y", 2)])?.slice(0, 2),
    where([shot("a"), call("x", 1)], [shot("b"), call("x", 1)])?.slice(0, 2),
    where([user("q"), call("x", 1), user("same"), call("z", 1)], [user("q"), call("x", 1)]),
    where([user("q"), { role: "assistant", content: "abc" }], [user("q"), { role: "assistant", content: "abd" }]),
  ];
}"""


def test_two_members_are_compared_from_their_first_difference_on(visit: Callable[..., Visit], site: Site) -> None:
    for uid, end, reward in (("c0", "success", 1.0), ("c1", "failure", 0.0)):
        body = episode(uid, "later-57", reward)
        body["messages"][-1] = reply(action="terminate", status=end)
        turn = {"prompt_ids": [1], "output_ids": [2], "environment_s": 0.5}
        body["generations"] = [{**turn, "engine_s": seconds} for seconds in (0.024, 4.5 - reward, 1)]
        site.post("/buffer/write", {"job_id": JOB, **body})
    here = visit(390, 844)
    page = here.open("jobs", JOB, "trajectories", "c1")
    assert page.evaluate(FIRST_DIFFERENCES) == [None, [1, "reply"], [1, "seen"], [2, "seen", 0], [1, "reply", 2]]
    page.locator(".took").nth(2).wait_for()
    took = [one.inner_text() for one in page.locator(".took").all()]
    assert took == [f"engine {seconds} · environment 0.5 s" for seconds in ("24 ms", "4.5 s", "1 s")]
    with page.expect_download() as saved:
        page.get_by_role("link", name="Download").click()
    assert '"uid":"c1"' in saved.value.path().read_text()
    page.get_by_role("link", name="Compare").click()
    page.get_by_text("Turn 3: what they replied is the same").wait_for()
    assert [mark.inner_text().split('"')[0] for mark in page.locator("mark").all()] == ["failure", "success"]
    assert page.get_by_role("row", name="reward +0.00 +1.00 +1.00", exact=True).count() == 1
    assert page.get_by_role("row", name="generate, mean per turn 1 s 1 s 0 s").count() == 1
    assert page.get_by_role("row", name="slowest turn, engine 4.5 s 3.5 s −1 s").count() == 1
    page.get_by_text("The same in both: 2 turns").click()
    assert page.locator(".versus").count() == 3
    assert page.evaluate("[...document.querySelectorAll('.scroll')].every((one) => one.scrollWidth <= one.clientWidth)")
    here.check()
    page.get_by_role("link", name="later-57").click()
    with page.expect_download() as saved:
        page.get_by_role("button", name="Download").click()
    lines = saved.value.path().read_text().splitlines()
    assert [json.loads(line)["uid"] for line in lines] == ["c0", "c1"]


def test_two_jobs_are_compared_over_the_time_since_their_start(visit: Callable[..., Visit], site: Site) -> None:
    other = {"task_type": "external", "job_id": "other", "num_repeat_per_sample": 1, "group_timeout_seconds": 1e6}
    site.beat()
    site.post("/start_rollout", other)
    site.post("/buffer/write", {"job_id": "other", **episode("o", "one", -1.0)})
    here = visit(360, 800)
    page = here.open("jobs", JOB)
    page.get_by_role("link", name="Compare", exact=True).click()
    page.get_by_text("Compared with what?").wait_for()
    page.get_by_label("Compare with").select_option("other")
    page.locator("#chart-reward canvas").wait_for()
    assert "other −1.00" in page.locator("#chart-reward .words").inner_text().replace("\n", " ")
    assert page.get_by_role("row", name="success 100 % 100 % 0 %").count() == 1
    here.check()


def test_tokens_are_coloured_by_mask_and_log_prob(visit: Callable[..., Visit]) -> None:
    here = visit()
    page = here.open("jobs", JOB, "trajectories", "g1")
    page.get_by_text("Tokens, mask and log-probs").click()
    page.get_by_text("1 prompt of 2 did not continue the previous one").wait_for()
    shades = page.locator(".tokens .t").evaluate_all("spans => spans.map((span) => span.className)")
    assert shades == ["t lp1", "t lp6"]
    page.locator(".tokens").focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert "log-prob −4.000" in page.locator(".token-told").inner_text()
    here.check()


def test_hostile_text_stays_text(visit: Callable[..., Visit]) -> None:
    here = visit()
    page = here.open("jobs", JOB, "trajectories", f"x/{EVIL}")
    page.get_by_role("heading", name=EVIL).wait_for()
    for summary in page.locator("summary").all():
        summary.click()
    page.wait_for_timeout(300)
    assert page.locator("main script, main img[onerror]").count() == 0
    here.check()


def test_what_is_new_appears_without_a_reload(visit: Callable[..., Visit], site: Site) -> None:
    here = visit()
    page = here.open("jobs", JOB, "trajectories")
    page.get_by_role("link", name="good").first.wait_for()
    page.evaluate("window.stays = true")
    site.write("news", "later-59", 0.9)
    page.get_by_role("link", name="later-59").wait_for()
    assert page.evaluate("window.stays") is True
    here.check()


def test_a_failed_job_says_that_it_has_no_trajectory_and_not_that_none_ended_yet(
    visit: Callable[..., Visit], site: Site
) -> None:
    site.beat()
    site.post("/start_rollout", {"task_type": "external", "job_id": "failed", "num_repeat_per_sample": 1})
    buffer = site.context.buffer
    buffer.fail_job(buffer.job("failed").key, "it broke")
    here = visit()
    page = here.open("jobs", "failed")
    page.get_by_text("no trajectory", exact=True).wait_for()
    assert page.get_by_text("ended yet").count() == 0
    here.check()


@pytest.mark.large
def test_filters_stand_in_the_address_and_lists_are_paged(visit: Callable[..., Visit], site: Site) -> None:
    site.post("/start_rollout", {"task_type": "external", "job_id": "paged", "num_repeat_per_sample": 2})
    for at, name in enumerate(["equal", "equal", *(f"open-{at}" for at in range(50))]):
        site.post("/buffer/write", {"job_id": "paged", **written(f"p{at}", name, 0.5)})
    here = visit()
    page = here.open("jobs", "paged", "groups")
    page.get_by_role("button", name="Older").click()
    page.wait_for_url("**cursor**")
    page.get_by_role("button", name="Newest").click()
    page.get_by_label("State").select_option("filtered")
    page.wait_for_url("**state=filtered**")
    page.get_by_role("link", name="equal").wait_for()
    assert page.locator("tbody tr").count() == 1
    page.get_by_label("Instance contains").fill("nothing like this")
    page.keyboard.press("Enter")
    page.get_by_text("No group matches these filters.").wait_for()
    here.check()


@pytest.mark.large
def test_a_text_is_found_in_one_job_and_over_all_and_leads_to_its_turn(visit: Callable[..., Visit], site: Site) -> None:
    site.write("sought", "later-57", 0.3)
    here = visit()
    page = here.open("jobs", JOB, "search")
    page.get_by_label("Text in messages").fill("STEP 2")
    page.keyboard.press("Enter")
    page.wait_for_url("**text=STEP**")
    page.get_by_text("were searched").wait_for()
    page.get_by_role("link", name="later-57").first.click()
    current(page, 2).wait_for()
    assert page.evaluate("CSS.highlights.get('found').size") > 0
    page.get_by_role("link", name="Search").click()
    page.get_by_label("Text in messages").fill(EVIL)
    page.keyboard.press("Enter")
    page.locator("mark", has_text="<script>").first.wait_for()
    page.get_by_label("Text in messages").fill("nothing has this")
    page.keyboard.press("Enter")
    page.get_by_text("No message, thought or tool call has this text.").wait_for()
    here.check()


def test_a_job_is_paused_only_after_asking(visit: Callable[..., Visit], site: Site) -> None:
    here = visit()
    page = here.open("jobs", JOB)
    page.get_by_role("button", name="Pause").click()
    page.get_by_role("button", name="Keep it as it is").click()
    assert site.context.buffer.job(JOB).state == "running"
    page.get_by_role("button", name="Pause").click()
    page.get_by_role("dialog").get_by_role("button", name="Pause").click()
    page.get_by_text("The job was paused by request").wait_for()
    assert site.context.buffer.job(JOB).state == "paused"
    page.get_by_role("button", name="Resume").click()
    page.get_by_role("dialog").get_by_role("button", name="Resume").click()
    page.get_by_role("button", name="Pause").wait_for()
    here.check()


@pytest.mark.large
def test_the_keyboard_alone_is_enough(visit: Callable[..., Visit]) -> None:
    here = visit(signed_in=False)
    page = here.open()
    page.get_by_label("Token").wait_for()
    page.keyboard.type(TOKEN)
    page.keyboard.press("Enter")
    page.get_by_role("link", name=JOB).wait_for()
    _tab_to(page, JOB)
    page.keyboard.press("Enter")
    page.get_by_text("Mean reward").wait_for()
    _tab_to(page, "Trajectories")
    page.keyboard.press("Enter")
    page.get_by_role("link", name="good").first.wait_for()
    _tab_to(page, "good")
    page.keyboard.press("Enter")
    page.get_by_role("heading", name="Turn 1").wait_for()
    page.keyboard.press(" ")
    page.get_by_role("button", name="Pause").wait_for()
    page.keyboard.press("End")
    current(page, 3).wait_for()
    here.check()


def _tab_to(page: Page, text: str) -> None:
    """Presses the tab key until the element with this text has the focus, which must be visible."""
    for _ in range(60):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.textContent").strip() == text:
            assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") != "none"
            return
    raise AssertionError(f"the tab key never reaches {text!r}")


def test_the_wrong_token_is_refused_and_signing_out_ends_the_session(visit: Callable[..., Visit]) -> None:
    here = visit(signed_in=False)
    page = here.open("jobs", JOB)
    page.get_by_label("Token").fill("not the token at all")
    page.get_by_role("button", name="Sign in").click()
    page.get_by_text("This is not the server's token.").wait_for()
    page.get_by_label("Token").fill(TOKEN)
    page.get_by_role("button", name="Sign in").click()
    page.get_by_text("Mean reward").wait_for()
    page.reload()
    page.get_by_role("button", name="Sign out").click()
    page.get_by_label("Token").wait_for()
    page.reload()
    page.get_by_label("Token").wait_for()
    assert page.evaluate("document.cookie") == ""
