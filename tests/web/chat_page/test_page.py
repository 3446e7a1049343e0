"""The chat page in a browser, in front of scripted answers."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.web.chat_page.scripted import KEY, Scripted, words

ANSWERS = "#messages > li.assistant"


def ask(page: Any, text: str) -> None:
    page.wait_for_selector("#model:enabled")
    page.fill("#prompt", text)
    page.press("#prompt", "Enter")


def answered(page: Any, text: str) -> Any:
    """Ask, and wait for the end of the answer, which is the last one of the page."""
    ask(page, text)
    return ended(page)


def ended(page: Any) -> Any:
    page.wait_for_selector("#stop-button", state="hidden")
    return page.locator(ANSWERS).last


def asked(scripted: Scripted, i: int = -1) -> list[Any]:
    return [message["content"] for message in scripted.requests[i]["messages"]]


def set_field(page: Any, name: str, value: str) -> None:
    page.click("#settings-button")
    page.fill(f"#field-{name}", value)
    page.keyboard.press("Escape")


def test_a_conversation(page: Any, scripted: Scripted) -> None:
    assert page.locator("#welcome").is_visible()
    first = answered(page, "Hello **you**")
    assert first.locator(".text strong").inner_text() == "you"
    figures = first.locator(".figures").inner_text()
    assert figures.startswith("7 tokens · ")
    assert figures.endswith("prompt 12 (5 cached) · m")
    assert page.locator("#welcome").is_hidden()
    answered(page, "Second")
    assert asked(scripted) == ["Hello **you**", "Hello **you**", "Second"]
    assert scripted.requests[-1] == {
        "model": "m",
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "messages": scripted.requests[-1]["messages"],
    }
    assert page.locator("#messages > li.user .text").first.inner_text() == "Hello **you**"  # as it was written
    page.reload()
    assert page.locator(ANSWERS).count() == 2  # the conversation ends with the tab
    page.click("#new-button")
    assert page.locator("#messages > li").count() == 0


def test_stop(page: Any, scripted: Scripted) -> None:
    ask(page, "SLOW " + "word " * 200)
    page.wait_for_selector(f"{ANSWERS} .text p")
    page.click("#stop-button")
    last = ended(page)
    assert "stopped" in last.locator(".figures").inner_text()
    said = last.locator(".text").inner_text()
    assert said.startswith("SLOW")
    answered(page, "next")
    assert asked(scripted)[1].strip() == said.strip()
    ask(page, "SLOW " + "word " * 200)
    page.wait_for_selector(f"{ANSWERS} >> nth=2 >> .text p")
    page.keyboard.press("Escape")
    ended(page)
    page.wait_for_timeout(100)
    assert len(scripted.gone) == 2


def test_another_answer_and_an_edited_message_are_branches(page: Any, scripted: Scripted) -> None:
    answered(page, "one")
    answered(page, "two")
    page.locator(ANSWERS).last.get_by_title("Answer again").click()
    ended(page)
    assert asked(scripted) == ["one", "one", "two"]
    assert page.locator(ANSWERS).last.locator(".branches").inner_text() == "2/2"
    page.press("#prompt", "ArrowUp")
    page.keyboard.type(" more")
    page.keyboard.press("Enter")
    ended(page)
    assert asked(scripted) == ["one", "one", "two more"]
    edited = page.locator("#messages > li.user").last
    assert edited.locator(".branches").inner_text() == "2/2"
    edited.get_by_title("The version before").click()
    assert page.locator(ANSWERS).last.locator(".branches").inner_text() == "2/2"
    page.locator("#messages > li.user").first.get_by_title("Edit").click()
    page.locator(".editor textarea").fill("changed")
    page.locator(".editor").get_by_text("Cancel").click()
    assert page.locator("#messages > li.user .text").first.inner_text() == "one"
    answered(page, "three")
    assert asked(scripted) == ["one", "one", "two", "two", "three"]


def test_reasoning_is_folded(page: Any, scripted: Scripted) -> None:
    scripted.answers["why"] = [*words("Because *of* it.", "reasoning_content"), *words("So.")]
    scripted.answers["how"] = [*words("Thus.", "reasoning"), *words("Done.")]
    last = answered(page, "why")
    assert last.locator("details > .text").is_hidden()
    assert last.locator("summary").inner_text().startswith("Thought for ")
    last.locator("summary").click()
    assert last.locator("details em").inner_text() == "of"
    assert last.locator(":scope > .text").inner_text() == "So."
    page.evaluate("performance.now = () => 0")  # an answer that comes all at once
    assert answered(page, "how").locator("summary").inner_text() == "Thought for 0.0 s"
    assert asked(scripted) == ["why", "So.", "how"]


def test_tool_calls_are_shown_and_answered(page: Any, scripted: Scripted) -> None:
    def call(**made: Any) -> dict[str, Any]:
        return {"tool_calls": [made]}

    scripted.answers["weather"] = [
        {"content": "Let me look."},
        call(index=0, id="a", function={"name": "weather", "arguments": ""}),
        call(index=0, function={"arguments": '{"city": "Os'}),
        call(index=0, function={"arguments": 'lo"}'}),
        call(index=1, id="b", function={"name": "time", "arguments": "{}"}),
    ]
    set_field(page, "more", '{"tools": [{"type": "function", "function": {"name": "weather"}}]}')
    last = answered(page, "weather")
    assert scripted.requests[-1]["tools"][0]["function"]["name"] == "weather"
    assert last.locator(".call b").all_inner_texts() == ["weather", "time"]
    assert json.loads(last.locator(".call code").first.inner_text()) == {"city": "Oslo"}
    page.get_by_label("Result of weather").fill("rain")
    page.get_by_label("Result of time").fill("noon")
    page.get_by_text("Send results").click()
    ended(page)
    assert scripted.requests[-1]["messages"][1:] == [
        {
            "role": "assistant",
            "content": "Let me look.",
            "tool_calls": [
                {"id": "a", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}},
                {"id": "b", "type": "function", "function": {"name": "time", "arguments": "{}"}},
            ],
        },
        {"role": "tool", "tool_call_id": "a", "content": "rain"},
        {"role": "tool", "tool_call_id": "b", "content": "noon"},
    ]
    assert page.locator(".results").count() == 0


def test_settings_become_fields(page: Any, scripted: Scripted) -> None:
    for name, value in {"temperature": "0.37", "top_k": "20", "seed": "7", "system": "be brief"}.items():
        set_field(page, name, value)
    set_field(page, "top_p", "3")  # out of range: not taken
    answered(page, "a")
    sent = scripted.requests[-1]
    assert (sent["temperature"], sent["top_k"], sent["seed"]) == (0.37, 20, 7)
    assert "top_p" not in sent
    assert asked(scripted) == ["be brief", "a"]
    set_field(page, "more", "[1]")
    ask(page, "b")
    assert "not a JSON object" in page.locator("#notice").inner_text()
    assert page.input_value("#prompt") == "b"  # nothing is lost
    assert len(scripted.requests) == 1
    page.reload()
    page.click("#settings-button")
    assert page.input_value("#field-temperature") == "0.37"
    page.click("#reset-button")
    page.keyboard.press("Escape")
    answered(page, "c")
    assert "temperature" not in scripted.requests[-1]


def test_a_key_is_asked_for_and_kept_in_the_tab(page: Any, scripted: Scripted) -> None:
    scripted.needs_key = True
    page.reload()
    page.wait_for_selector("#settings-panel[open]")
    assert page.evaluate("document.activeElement.id") == "field-key"
    page.keyboard.type(KEY)
    page.keyboard.press("Enter")
    page.wait_for_selector("#model:enabled")
    assert page.locator("#notice").is_hidden()
    assert answered(page, "hi").locator(".text").inner_text() == "hi"
    assert page.evaluate("[JSON.stringify(localStorage), document.cookie]").count(KEY) == 0
    assert KEY not in page.evaluate("JSON.stringify(localStorage) + document.cookie + location.href")
    assert page.evaluate("sessionStorage['lmkit.key']") == KEY


def test_a_failure_is_said_and_the_answer_can_be_asked_for_again(page: Any, scripted: Scripted) -> None:
    last = answered(page, "BUSY")
    assert last.locator(".problem").inner_text() == "the queue is full <b>now</b>"
    last = answered(page, "CUT after a piece")
    assert last.locator(".problem").inner_text() == "The answer broke off."
    assert last.locator(":scope > .text").inner_text() == "CUT aft"
    last.get_by_title("Answer again").click()
    assert asked(scripted) == ["BUSY", "CUT after a piece"]  # a failed answer without text is no message


def test_the_choice_of_a_model_lasts(page: Any, scripted: Scripted) -> None:
    scripted.models = ("m", "n")
    page.reload()
    page.wait_for_selector("#model:enabled")
    page.select_option("#model", "n")
    answered(page, "a")
    assert scripted.requests[-1]["model"] == "n"
    page.reload()
    page.wait_for_selector("#model:enabled")
    assert page.input_value("#model") == "n"
    scripted.models = ()
    page.reload()
    page.get_by_text("No model is served").wait_for()


def test_keys_and_copies(page: Any, scripted: Scripted) -> None:
    page.wait_for_selector("#model:enabled")
    page.keyboard.type("/one")  # the message has the focus from the start
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("two")
    page.keyboard.press("Enter")
    last = ended(page)
    assert asked(scripted) == ["/one\ntwo"]
    last.get_by_title("Copy").click()
    page.wait_for_selector("[data-done]")
    assert page.evaluate("navigator.clipboard.readText()") == "/one\ntwo"
    answered(page, "```py\nx = 1\n```").locator("[data-copy]").click()
    page.get_by_text("Copied").wait_for()
    assert page.evaluate("navigator.clipboard.readText()") == "x = 1"
    page.locator("#scroll").focus()
    page.keyboard.press("/")
    assert page.evaluate("document.activeElement.id") == "prompt"
    with page.expect_download() as download:
        page.click("#settings-button")
        page.click("#export-button")
    saved = json.loads(download.value.path().read_text())
    assert [message["role"] for message in saved["messages"]] == ["user", "assistant"] * 2


def test_the_end_stays_in_sight_until_one_scrolls_up(page: Any) -> None:
    ask(page, "SLOW " + "line\n\n" * 150)
    page.wait_for_function("document.getElementById('scroll').scrollTop > 100")
    page.mouse.move(500, 300)
    page.mouse.wheel(0, -2000)
    page.wait_for_selector("#down-button", state="visible")
    top = page.evaluate("document.getElementById('scroll').scrollTop")
    page.wait_for_timeout(300)
    assert page.evaluate("document.getElementById('scroll').scrollTop") == top
    page.click("#down-button")
    page.wait_for_selector("#down-button", state="hidden")
    page.keyboard.press("Escape")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1100])
def test_accessible_in_both_themes_and_on_a_phone(page: Any, scripted: Scripted, scheme: str, width: int) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe is not installed").Axe()
    text = "# T\n\n- [x] a `b` **c** [d](https://x.example)\n\n|a|b|\n|-|-|\n|1|2|\n\n> q\n\n```py\n# c\nf('s', 1)\n```"
    scripted.answers["all"] = [
        {"reasoning": "hm"}, {"content": text + "\n" + "long" * 90},
        {"tool_calls": [{"index": 0, "id": "a", "function": {"name": "f", "arguments": '{"x": 1}'}}]},
    ]  # fmt: skip
    page.emulate_media(color_scheme="light")
    page.set_viewport_size({"width": width, "height": 700})
    page.wait_for_selector("#model:enabled")
    if scheme == "dark":
        page.click("#theme-button")
        page.reload()  # the choice lasts
    found = axe.run(page).response["violations"]
    answered(page, "BUSY")
    answered(page, "all").locator("summary").click()
    found += axe.run(page).response["violations"]
    assert page.evaluate("document.documentElement.scrollWidth") == width
    page.click("#settings-button")
    found += axe.run(page).response["violations"]
    assert [(item["id"], item["nodes"][0]["html"], item["nodes"][0]["failureSummary"]) for item in found] == []
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (ground == "rgb(24, 25, 27)") == (scheme == "dark")
