"""The page in headless Chromium: chat, metrics and timeline work, no text of a model becomes markup, nothing is loaded
from elsewhere. Skipped, saying so, where no Chromium is installed."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator

import pytest

from tests.server.page.browser import Browser, chromium
from tests.server.page.stage import Stage, busy_steps

pytestmark = [
    pytest.mark.skipif(chromium() is None, reason="no Chromium on PATH (Debian: apt-get install chromium)"),
    pytest.mark.timeout(300),
]


Act = Callable[[Stage, Browser], Awaitable[None]]


@pytest.fixture(scope="module")
def played() -> Iterator[Callable[..., None]]:
    """Runs an act on a fresh stage, whose page one browser shows (another port is another origin: nothing is kept)."""
    loop = asyncio.new_event_loop()
    browser = loop.run_until_complete(Browser().__aenter__())

    async def act_on(stage: Stage, act: Act, how: dict) -> None:
        await browser.open(stage.url, **how)
        await browser.until("document.body.dataset.state === 'up' && !!document.getElementById('model').value")
        await act(stage, browser)

    def play(act: Act, **how) -> None:
        with Stage() as stage:
            loop.run_until_complete(act_on(stage, act, how))

    try:
        yield play
    finally:
        loop.run_until_complete(browser.__aexit__())
        loop.close()


async def say(browser: Browser, text: str) -> None:
    await browser.evaluate("document.getElementById('message').focus()")
    await browser.type(text, enter=True)


def text_of(selector: str) -> str:
    return f"[...document.querySelectorAll({selector!r})].map((element) => element.textContent)"


def test_a_conversation_streams_stops_and_goes_on(played):
    async def act(stage: Stage, browser: Browser) -> None:
        await say(browser, "first")
        await browser.until("document.querySelectorAll('.facts').length === 1")
        assert await browser.evaluate(text_of(".message .text")) == ["first", "Hello there"]
        assert "42 tokens" in await browser.evaluate("document.querySelector('.facts').textContent")

        stage.hold = threading.Event()  # the next answer hangs before its last piece
        await say(browser, "second")
        await browser.until("document.querySelector('.waiting .text')?.textContent === 'Hello'")
        assert await browser.evaluate("document.getElementById('send').hidden")
        await browser.evaluate("document.getElementById('stop').click()")
        await browser.until("document.querySelectorAll('.facts').length === 2")
        assert "stopped" in await browser.evaluate("[...document.querySelectorAll('.facts')].at(-1).textContent")
        assert await asyncio.to_thread(stage.gone.wait, 60), "the server was not told that the answer was stopped"

        stage.hold = None
        await say(browser, "third")
        await browser.until("document.querySelectorAll('.facts').length === 3")
        roles = [message["role"] for message in stage.asked[-1]["messages"]]
        assert roles == ["user", "assistant", "user", "assistant", "user"]
        await browser.evaluate("document.getElementById('retry').click()")
        await browser.until("document.querySelectorAll('.facts').length === 3 && !document.querySelector('.waiting')")
        await browser.evaluate("document.getElementById('new').click()")
        assert await browser.evaluate("document.querySelectorAll('.message').length") == 0
        await say(browser, "fourth")
        await browser.until("!!document.querySelector('.facts')")
        assert [message["content"] for message in stage.asked[-1]["messages"]] == ["fourth"]
        assert browser.complaints == []

    played(act)


def test_what_a_model_writes_stays_text_and_can_run_nothing(played):
    attack = (
        "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>\n```html\n<b>x</b>\n```"
    )

    async def act(stage: Stage, browser: Browser) -> None:
        stage.answer = [attack]
        await say(browser, attack.partition("\n")[0])
        await browser.until("!!document.querySelector('.facts')")
        assert await browser.evaluate("document.title") == "research_engine"
        assert await browser.evaluate("document.querySelectorAll('#log img, #log script, #log b').length") == 0
        assert await browser.evaluate("document.querySelector('#log pre').textContent") == "<b>x</b>"
        assert await browser.evaluate("document.querySelector('.assistant .text').textContent.startsWith('<img src=x')")
        # and if markup did get in, the page's policy would stop it
        await browser.evaluate("document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=\"title=1\">')")
        await browser.evaluate("new Promise((done) => setTimeout(done, 50))")
        assert await browser.evaluate("document.title") == "research_engine"

    played(act)


def test_settings_go_with_the_question_and_are_remembered_but_the_key_is_not_stored(played):
    async def act(stage: Stage, browser: Browser) -> None:
        await browser.evaluate("""for (const [name, value] of Object.entries(
            {system: 'be brief', temperature: '0', max_tokens: '7', model: 'large'})) {
              const element = document.getElementById(name);
              element.value = value;
              element.dispatchEvent(new Event('change'));
        }""")
        await say(browser, "hi")
        await browser.until("!!document.querySelector('.facts')")
        body = stage.asked[-1]
        assert (body["model"], body["temperature"], body["max_tokens"]) == ("large", 0, 7)
        assert body["messages"][0] == {"role": "system", "content": "be brief"} and "top_p" not in body

        stage.key = "secret"
        await browser.open(stage.url)
        await browser.until("document.getElementById('system').value === 'be brief'")
        await browser.evaluate("""{ const key = document.getElementById('key');
            key.value = 'secret'; key.dispatchEvent(new Event('change')); }""")
        await browser.until("document.getElementById('model').options.length === 2")
        assert not await browser.evaluate("Object.values(localStorage).includes('secret')")

    played(act)


def test_refusals_are_shown_in_the_servers_words(played):
    async def act(stage: Stage, browser: Browser) -> None:
        stage.refusal = "the prompt is too long: 9 of 8 tokens"
        await say(browser, "hi")
        await browser.until("!!document.querySelector('.error')")
        assert await browser.evaluate("document.querySelector('.error .text').textContent") == stage.refusal
        assert await browser.evaluate("document.querySelector('.error').getAttribute('role')") == "alert"
        stage.refusal = None
        await browser.evaluate("document.getElementById('retry').click()")
        await browser.until("!!document.querySelector('.facts') && !document.querySelector('.waiting')")
        assert "Hello there" in await browser.evaluate(text_of(".assistant .text"))

    played(act)


def test_metrics_and_the_timeline_follow_the_engine(played):
    async def act(stage: Stage, browser: Browser) -> None:
        assert await browser.evaluate("document.getElementById('running').textContent") == "3"
        assert await browser.evaluate("document.getElementById('status-text').textContent") == "small · fcfs"
        stage.now, stage.tokens = 1.0, (1000, 500)
        await browser.until("document.getElementById('generation').textContent === '500'")
        assert await browser.evaluate("document.getElementById('prompt').textContent") == "1000"
        assert await browser.evaluate("document.getElementById('kv').textContent") == "25.0 %"

        stage.steps = busy_steps(8.0)
        stage.now = stage.steps[-1]["finished"]
        final = stage.steps[-1]["step"]
        await browser.until(f"document.getElementById('step').textContent.startsWith('Step {final}:')")
        await browser.until(f"document.getElementById('timeline').ariaLabel.includes('{final + 1} steps')")
        colours = await browser.evaluate("""(() => {
            const canvas = document.getElementById('timeline');
            const data = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
            const found = {prefill: 0, decode: 0};
            for (let i = 0; i < data.length; i += 4) {
              if (data[i] > 200 && data[i + 2] < 40 && data[i + 3]) found.prefill += 1;
              if (data[i] < 40 && data[i + 2] > 160 && data[i + 3]) found.decode += 1;
            }
            return found;
        })()""")
        assert colours["prefill"] > 100 and colours["decode"] > 100
        await browser.evaluate("document.getElementById('pause').click()")
        box = await browser.evaluate("""(() => { const {left, top, width, height} =
            document.getElementById('timeline').getBoundingClientRect(); return [left, top, width, height]; })()""")
        await browser.move_to(box[0] + box[2] * 0.6, box[1] + box[3] / 2)
        told = await browser.until(f"(t => t.startsWith('Step ') && !t.startsWith('Step {final}:') && t)"
                                   "(document.getElementById('step').textContent)")  # fmt: skip
        assert "prefill" in told and told.endswith(" ms")
        assert browser.complaints == []

    played(act)


def test_a_server_that_starts_anew_begins_a_new_timeline(played):
    async def act(stage: Stage, browser: Browser) -> None:
        stage.steps = busy_steps(3.0)
        stage.now = stage.steps[-1]["finished"]
        await browser.until("document.getElementById('step').textContent.startsWith('Step ')")
        stage.steps, stage.now, stage.tokens = busy_steps(0.1), 0.5, (0, 0)
        await browser.until(f"document.getElementById('timeline').ariaLabel.includes(': {len(stage.steps)} steps')")

    played(act)


@pytest.mark.parametrize("width", [360, 700, 1200])
def test_no_width_cuts_anything_off(width, played):
    async def act(stage: Stage, browser: Browser) -> None:
        stage.answer = ["word " * 200, "x" * 400]
        await say(browser, "y" * 300)
        await browser.until("!!document.querySelector('.facts')")
        for view in ("chat", "monitor", "settings"):
            await browser.evaluate(f"document.querySelector('[data-view={view}]').click()")
            assert await browser.evaluate("document.documentElement.scrollWidth <= innerWidth"), view
            assert await browser.evaluate(f"document.getElementById('{view}').getBoundingClientRect().width > 250"), (
                view
            )

    played(act, width=width)


def test_light_and_dark_follow_the_system_until_one_is_chosen(played):
    async def act(stage: Stage, browser: Browser) -> None:
        assert await browser.evaluate("document.documentElement.dataset.theme") == "dark"
        await browser.evaluate("document.getElementById('theme').click()")
        assert await browser.evaluate("document.documentElement.dataset.theme") == "light"
        await browser.open(stage.url, dark=True)
        await browser.until("document.documentElement.dataset.theme === 'light'")

    played(act, dark=True)


def test_every_control_has_a_name_and_nothing_comes_from_elsewhere(played):
    async def act(stage: Stage, browser: Browser) -> None:
        nameless = await browser.evaluate("""[...document.querySelectorAll('button, input, select, textarea, canvas')]
            .filter((e) => !(e.labels?.length || e.ariaLabel || e.textContent.trim())).map((e) => e.id)""")
        assert nameless == []
        assert {url for url in browser.urls if not url.startswith((stage.url, "data:"))} == set()
        assert browser.complaints == []

    played(act)
