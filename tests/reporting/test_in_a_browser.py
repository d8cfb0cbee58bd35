"""The page as a person meets it. Skipped, with a reason, where no browser is installed."""

from __future__ import annotations

import base64
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

SPEC = importlib.util.spec_from_file_location("report_browser", Path(__file__).with_name("browser.py"))
assert SPEC is not None
assert SPEC.loader is not None
browser_module = importlib.util.module_from_spec(SPEC)
sys.modules[SPEC.name] = browser_module
SPEC.loader.exec_module(browser_module)

pytestmark = [
    pytest.mark.skipif(browser_module.find() is None, reason="no browser here: install Debian's chromium"),
    pytest.mark.xdist_group("browser"),
]


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with browser_module.Browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.fixture(params=["run", "comparison"])
def page(request: pytest.FixtureRequest, browser: Any, run_folder: Path, comparison_file: Path) -> Any:
    browser.media()
    browser.resize(1100, 900)
    browser.open(run_folder / "public" / "report.html" if request.param == "run" else comparison_file)
    return browser


def test_every_chart_is_drawn_without_complaints_and_without_network(page: Any) -> None:
    marks = "c => c.querySelectorAll('svg [role=\"graphics-symbol\"]').length"
    drawn = page.evaluate(f"[...document.querySelectorAll('.chart')].map({marks})")
    assert len(drawn) >= 4
    assert min(drawn) > 0
    assert page.complaints() == []
    outside = [address for address in page.requests() if not address.startswith(("file:", "data:", "about:"))]
    assert outside == []


def test_the_page_cannot_reach_the_network_even_if_it_tried(page: Any) -> None:
    tried = page.evaluate("fetch('https://example.org/').then(() => 'reached', () => 'refused')")
    assert tried == "refused"


@pytest.mark.parametrize("width", [320, 390, 768, 1400])
def test_nothing_sticks_out_at_any_width(page: Any, width: int) -> None:
    page.resize(width, 800)
    page.evaluate("new Promise(done => setTimeout(done, 400))")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    widest = page.evaluate(
        "Math.max(...[...document.querySelectorAll('.chart svg')].map(s => s.getBoundingClientRect().right))"
    )
    assert widest <= width


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_enough_contrast_in_light_and_dark(page: Any, scheme: str) -> None:
    page.media(scheme=scheme)
    back = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (_luminance(back) > 0.5) == (scheme == "light")
    for selector in ("h1", "p", "thead th", "figcaption", "summary", ".kind"):
        colour = page.evaluate(
            f"getComputedStyle(document.querySelector('main {selector}, {selector}')).color"
        )
        assert _contrast(colour, back) >= 4.5, selector
    label = page.evaluate("getComputedStyle(document.querySelector('.chart svg text')).fill")
    assert _contrast(label, back) >= 4.5


def test_the_button_changes_the_colours_and_says_so(page: Any) -> None:
    before = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.evaluate("document.getElementById('theme').focus()")
    page.press("Enter")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != before
    assert page.evaluate("document.getElementById('theme').textContent") == "Light colors"


def test_everything_can_be_reached_and_read_with_the_keyboard(page: Any) -> None:
    reached = set()
    for _ in range(150):
        page.press("Tab")
        reached.add(page.evaluate("(e => e.id || e.classList[0] || e.tagName)(document.activeElement)"))
    assert {"skip", "theme", "chart", "SUMMARY", "scroll"} <= reached
    page.evaluate("document.querySelector('.chart').focus()")
    page.press("ArrowRight")
    first = page.evaluate("document.querySelector('.reading').textContent")
    page.press("ArrowRight")
    second = page.evaluate("document.querySelector('.reading').textContent")
    assert first
    assert second
    assert first != second


def test_every_chart_and_region_has_a_name_for_those_who_listen(page: Any) -> None:
    unnamed = page.evaluate(
        "[...document.querySelectorAll('.chart, section, [role=region], nav')]"
        ".filter(e => !(e.getAttribute('aria-label') || e.getAttribute('aria-labelledby'))).length"
    )
    assert unnamed == 0
    assert page.evaluate("document.querySelectorAll('h1').length") == 1


def test_on_paper_it_is_black_on_white_with_everything_opened(page: Any) -> None:
    page.media(scheme="dark", kind="print")
    assert _luminance(page.evaluate("getComputedStyle(document.body).backgroundColor")) > 0.9
    assert page.evaluate("getComputedStyle(document.querySelector('nav')).display") == "none"
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert page.evaluate("[...document.querySelectorAll('details')].every(part => part.open)")
    pdf = base64.b64decode(page.call("Page.printToPDF", printBackground=True)["data"])
    assert pdf.startswith(b"%PDF")


def _luminance(colour: str) -> float:
    parts = [float(part) / 255 for part in colour[colour.index("(") + 1 : -1].split(",")[:3]]
    red, green, blue = (
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def _contrast(one: str, other: str) -> float:
    low, high = sorted((_luminance(one), _luminance(other)))
    return (high + 0.05) / (low + 0.05)
