"""Images beside a message: by the button, from the clipboard and by dropping, for models that take them."""

from __future__ import annotations

import base64
import struct
import zlib
from typing import Any

import pytest

from tests.web.chat_page.scripted import Scripted
from tests.web.chat_page.test_page import answered, ended

INPUT, THUMBS = "#attach-input", "#attached img"
NAME = '"><img src=x onerror=alert(1)>.png'
BRING = """([kind, type, data, name]) => {
    const bytes = Uint8Array.from(atob(data), (char) => char.charCodeAt(0));
    const transfer = new DataTransfer();
    transfer.items.add(new File([bytes], name, { type }));
    const event = kind === "paste"
        ? new ClipboardEvent("paste", { clipboardData: transfer, bubbles: true, cancelable: true })
        : new DragEvent("drop", { dataTransfer: transfer, bubbles: true, cancelable: true });
    document.getElementById("prompt").dispatchEvent(event);
}"""


def png(width: int, height: int) -> bytes:
    """A red image."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = zlib.compress((b"\0" + b"\xff\0\0" * width) * height)
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


@pytest.fixture
def seeing(page: Any, scripted: Scripted) -> Any:
    scripted.seeing = {"m"}
    page.reload()
    page.wait_for_selector("#attach-button")
    return page


def bring(page: Any, kind: str, data: bytes, type: str = "image/png") -> None:
    page.evaluate(BRING, [kind, type, base64.b64encode(data).decode(), NAME])


def test_images_are_shown_and_sent(seeing: Any, scripted: Scripted) -> None:
    small = png(4, 3)
    seeing.set_input_files(INPUT, [{"name": NAME, "mimeType": "image/png", "buffer": small}])
    for count, kind in ((2, "paste"), (3, "drop")):
        bring(seeing, kind, small)
        seeing.get_by_alt_text(f"Image {count} of the message").wait_for()
    seeing.get_by_role("button", name="Remove image 2").click()
    assert seeing.locator(THUMBS).count() == 2
    answered(seeing, "What is it?")
    assert seeing.locator(THUMBS).count() == 0
    assert seeing.locator("#messages > li.user .images img").count() == 2
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + base64.b64encode(small).decode()}}
    (message,) = scripted.requests[-1]["messages"]
    assert message["content"] == [part, part, {"type": "text", "text": "What is it?"}]
    seeing.reload()
    assert seeing.locator("#messages > li.user .images img").count() == 2
    assert seeing.evaluate("document.querySelector('.images img').naturalWidth") == 4


def test_a_message_may_be_an_image_alone_and_an_edit_keeps_it(seeing: Any, scripted: Scripted) -> None:
    bring(seeing, "drop", png(4, 3))
    seeing.wait_for_selector(THUMBS)
    seeing.click("#send-button")
    ended(seeing)
    assert [part["type"] for part in scripted.requests[-1]["messages"][0]["content"]] == ["image_url"]
    seeing.press("#prompt", "ArrowUp")
    seeing.fill(".editor textarea", "and a text")
    seeing.press(".editor textarea", "Enter")
    ended(seeing)
    assert [part["type"] for part in scripted.requests[-1]["messages"][0]["content"]] == ["image_url", "text"]


def test_sizes_are_bounded(seeing: Any, scripted: Scripted) -> None:
    bring(seeing, "paste", png(4000, 1000))
    seeing.wait_for_selector(THUMBS)
    size = seeing.evaluate(f"(i => [i.naturalWidth, i.naturalHeight])(document.querySelector('{THUMBS}'))")
    assert size == [1536, 384]
    files = [{"name": "a.png", "mimeType": "image/png", "buffer": png(4, 3)}] * 8
    seeing.set_input_files(INPUT, files)
    seeing.get_by_text("At most 8 images go with a message.").wait_for()
    assert seeing.locator(THUMBS).count() == 8


@pytest.mark.parametrize(
    ("type", "data", "says"),
    [
        (
            "image/svg+xml",
            b"<svg xmlns='http://www.w3.org/2000/svg' onload='alert(1)'/>",
            "Only images can be attached",
        ),
        ("text/html", b"<script>alert(1)</script>", "Only images can be attached"),
        ("image/png", b"<script>alert(1)</script>", "This image cannot be read."),
    ],
)
def test_xss_what_is_no_image_is_refused(seeing: Any, type: str, data: bytes, says: str) -> None:
    bring(seeing, "drop", data, type)
    seeing.get_by_text(says).wait_for()
    assert seeing.locator(THUMBS).count() == 0


def test_models_without_images_have_no_button(page: Any, scripted: Scripted) -> None:
    scripted.models, scripted.seeing = ("blind", "sees"), {"sees"}
    page.reload()
    page.wait_for_selector("#model:enabled")
    assert page.locator("#attach-button").is_hidden()
    bring(page, "drop", png(4, 3))
    page.select_option("#model", "sees")
    page.wait_for_selector("#attach-button")
    assert page.locator(THUMBS).count() == 0
    bring(page, "drop", png(4, 3))
    page.wait_for_selector(THUMBS)
    page.select_option("#model", "blind")
    assert page.locator(THUMBS).count() == 0
    answered(page, "Hi")
    assert scripted.requests[-1]["messages"][-1]["content"] == "Hi"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_images_are_accessible(seeing: Any, scheme: str) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe is not installed").Axe()
    seeing.emulate_media(color_scheme=scheme)
    seeing.set_viewport_size({"width": 360, "height": 700})
    bring(seeing, "drop", png(40, 30))
    seeing.wait_for_selector(THUMBS)
    found = axe.run(seeing).response["violations"]
    answered(seeing, "What is it?")
    found += axe.run(seeing).response["violations"]
    assert [(item["id"], item["nodes"][0]["html"]) for item in found] == []
    assert seeing.evaluate("document.documentElement.scrollWidth") == 360
