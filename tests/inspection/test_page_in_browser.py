"""The page of `aotc inspect --html` in a real browser: it loads nothing, works from the keyboard, and can be read."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from sample_builds import sample_store
from selenium import webdriver
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from test_page import HOSTILE, hostile_store

from aotc.store.layout.bundle import read_bundle
from aotc.store.layout.store import Store
from aotc.store.reference import Reference
from aotc.tools.inspection.bundle_page import render_page

BROWSER = shutil.which("chromium")
DRIVER = shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(
    (BROWSER is None or DRIVER is None) and "CI" not in os.environ, reason="chromium and its driver are not installed"
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    options = webdriver.ChromeOptions()
    options.binary_location = str(BROWSER)
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(str(DRIVER)))
    yield driver
    driver.quit()


class Server(ThreadingHTTPServer):
    """Serves a folder and remembers what was asked for."""

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), partial(_Handler, directory=str(folder)))
        self.requests: list[str] = []


class _Handler(SimpleHTTPRequestHandler):
    server: Server

    def log_message(self, format: str, *arguments: Any) -> None:
        self.server.requests.append(self.path)


def page_of(store: Store) -> str:
    return render_page(store, read_bundle(store, Reference(None, "gpt", tag="latest")), "gpt")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("site")
    stores = {
        "page": sample_store(folder / "store"),
        "many": sample_store(folder / "large", buckets=64),
        "hostile": hostile_store(folder / "hostile"),
    }
    for name, store in stores.items():
        (folder / f"{name}.html").write_text(page_of(store), encoding="utf-8")
    server = Server(folder)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def show(browser: Any, site: Server) -> Any:
    """Opens a page of the site in a window of that width, in a colour scheme."""

    def open_page(name: str, width: int = 1280, scheme: str = "light") -> Any:
        browser.execute_cdp_cmd(
            "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
        )
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        browser.get_log("browser")
        browser.get("about:blank")
        site.requests.clear()
        browser.get(f"http://127.0.0.1:{site.server_port}/{name}.html")
        return browser

    return open_page


def open_all(browser: Any) -> None:
    browser.execute_script("document.querySelectorAll('details').forEach(part => part.open = true)")


def press(browser: Any, *keys: str) -> Any:
    ActionChains(browser).send_keys(*keys).perform()
    return browser.switch_to.active_element


@pytest.mark.parametrize("name", ["page", "many", "hostile"])
def test_it_loads_itself_and_nothing_else(show: Any, site: Server, name: str) -> None:
    browser = show(name)
    open_all(browser)
    assert site.requests == [f"/{name}.html"]
    assert browser.get_log("browser") == []
    assert browser.execute_script("return performance.getEntriesByType('resource').length") == 0


def test_its_own_style_is_allowed_and_any_other_is_not(show: Any) -> None:
    browser = show("page")
    added = (
        "let s = document.createElement('style'); s.textContent = 'h1 { color: rgb(1, 2, 3) }'; document.head.append(s)"
    )
    browser.execute_script(added)
    colour = browser.execute_script("return getComputedStyle(document.querySelector('h1')).color")
    assert colour not in ("rgb(1, 2, 3)", "rgb(0, 0, 0)")
    assert "Content Security Policy" in browser.get_log("browser")[0]["message"]


def test_hostile_texts_are_shown_and_not_run(show: Any) -> None:
    browser = show("hostile")
    open_all(browser)
    assert not browser.find_elements(By.CSS_SELECTOR, "script, img")
    name = browser.find_element(By.CSS_SELECTOR, ".kernels code").text
    assert name == HOSTILE.replace("\x1b", "\\u001b").replace("\u202e", "\\u202e")


# -- the keyboard -----------------------------------------------------------------------------------------------------


def test_the_first_stop_skips_to_the_content(show: Any) -> None:
    browser = show("page")
    skip = press(browser, Keys.TAB)
    assert skip.text == "Skip to the content" and skip.rect["y"] >= 0
    assert press(browser, Keys.ENTER).get_attribute("id") == "content"


@pytest.mark.parametrize("key", [Keys.ENTER, Keys.SPACE])
def test_a_kernel_s_source_opens_from_the_keyboard(show: Any, key: str) -> None:
    browser = show("page")
    press(browser, Keys.TAB)
    press(browser, Keys.ENTER)
    while (summary := press(browser, Keys.TAB)).tag_name != "summary":
        pass  # the tables, and the filter
    assert summary.tag_name == "summary" and "triton_per_fused_add_native_layer_norm_view_1" in summary.text
    source = browser.find_element(By.CSS_SELECTOR, ".kernels pre")
    assert not source.is_displayed()
    press(browser, key)
    assert source.is_displayed() and "tl.load(in_out_ptr0" in source.text
    assert press(browser, Keys.TAB) == source  # so that the arrow keys scroll it
    press(browser, Keys.ARROW_DOWN)
    ActionChains(browser).key_down(Keys.SHIFT).send_keys(Keys.TAB).key_up(Keys.SHIFT).perform()
    press(browser, key)
    assert not source.is_displayed()


def test_every_stop_is_visible_and_has_a_ring(show: Any) -> None:
    browser = show("page")
    stops = []
    while (stop := press(browser, Keys.TAB)).tag_name != "body" and len(stops) < 100:
        outline = stop.value_of_css_property("outline-style")
        stops.append((stop.tag_name, outline, stop.is_displayed()))
    assert 20 < len(stops) < 60  # what is closed is not on the way
    assert {outline for _, outline, _ in stops} == {"solid"} and all(visible for _, _, visible in stops)


def test_an_operator_leads_to_its_kernel(show: Any) -> None:
    browser = show("page")
    link = browser.find_element(By.LINK_TEXT, "triton_poi_fused_addmm_gelu_view_2")
    link.send_keys(Keys.ENTER)
    target = browser.execute_script("return document.querySelector(':target').innerText")
    assert "triton_poi_fused_addmm_gelu_view_2" in target


def shown_kernels(browser: Any) -> list[str]:
    names = browser.find_elements(By.CSS_SELECTOR, ".kernels .kernel-name code")
    return [name.text for name in names if name.is_displayed()]


def test_kernels_are_filtered_by_kind_and_by_operator_from_the_keyboard(show: Any) -> None:
    norm, gelu = "triton_per_fused_add_native_layer_norm_view_1", "triton_poi_fused_addmm_gelu_view_2"
    attention = "_scaled_dot_product_flash_attention"
    browser = show("page")
    assert set(shown_kernels(browser)) == {norm, gelu, attention, "addmm_out"}
    choices = browser.find_elements(By.CSS_SELECTOR, ".filter label")
    radios = {choice.text.split()[0]: choice.find_element(By.TAG_NAME, "input") for choice in choices}
    radios["gelu"].send_keys(Keys.SPACE)
    assert shown_kernels(browser) == [gelu]
    radios["addmm"].send_keys(Keys.SPACE)
    assert set(shown_kernels(browser)) == {gelu, "addmm_out"}
    radios["generated"].send_keys(Keys.SPACE)
    assert set(shown_kernels(browser)) == {norm, gelu}
    press(browser, Keys.ARROW_RIGHT)
    assert set(shown_kernels(browser)) == {attention, "addmm_out"}


# -- reading ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["page", "hostile"])
def test_on_a_telephone_nothing_is_cut(show: Any, name: str) -> None:
    """Neither by an edge, nor so that a reader would have to scroll sideways."""
    browser = show(name, 390)
    open_all(browser)
    cut = """
    const visible = e => e.clientWidth > 1 && !e.closest('.hidden, thead, svg');
    const wide = e => e.scrollWidth > e.clientWidth + 1;
    const outside = e => e.getBoundingClientRect().right > 390 || e.getBoundingClientRect().left < 0;
    return [...document.querySelectorAll('body *')].filter(e => visible(e) && (wide(e) || outside(e)))
      .map(e => `${e.tagName}.${e.className}: ${e.textContent.slice(0, 60)}`);
    """
    assert browser.execute_script(cut) == []


@pytest.mark.parametrize("name", ["page", "hostile"])
@pytest.mark.parametrize("width", [320, 390, 800, 1600])
def test_no_width_makes_the_page_scroll_sideways(show: Any, name: str, width: int) -> None:
    browser = show(name, width)
    open_all(browser)
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width


CONTRASTS = """
const parts = text => text.match(/[\\d.]+/g).map(Number);
const light = ([r, g, b]) => {
  const [x, y, z] = [r, g, b].map(v => v / 255).map(v => v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4);
  return .2126 * x + .7152 * y + .0722 * z;
};
const ground = element => {
  for (let e = element; e; e = e.parentElement) {
    const colour = parts(getComputedStyle(e).backgroundColor);
    if (colour.length === 3 || colour[3] === 1) return colour;
  }
};
const found = [];
const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (walker.nextNode()) {
  const element = walker.currentNode.parentElement;
  if (!walker.currentNode.data.trim() || element.closest('svg')) continue;
  const [a, b] = [light(parts(getComputedStyle(element).color)), light(ground(element))];
  found.push([(Math.max(a, b) + .05) / (Math.min(a, b) + .05), element.className + ' ' + walker.currentNode.data]);
}
return found;
"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_has_the_contrast_that_wcag_aa_asks_for(show: Any, scheme: str) -> None:
    """4.5 to 1: WCAG 2.2, success criterion 1.4.3. https://www.w3.org/TR/WCAG22/#contrast-minimum"""
    browser = show("page", scheme=scheme)
    open_all(browser)
    contrasts = browser.execute_script(CONTRASTS)
    assert len(contrasts) > 500
    assert not [text for contrast, text in contrasts if contrast < 4.5]


def test_the_colour_schemes_differ(show: Any) -> None:
    grounds = [
        show("page", scheme=scheme).execute_script("return getComputedStyle(document.body).backgroundColor")
        for scheme in ("light", "dark")
    ]
    assert grounds[0] != grounds[1]


def test_headings_go_down_one_level_at_a_time_and_every_table_has_a_caption(show: Any) -> None:
    browser = show("page")
    headings = browser.execute_script("return [...document.querySelectorAll('h1,h2,h3,h4')].map(h => +h.tagName[1])")
    assert headings[0] == 1 and headings.count(1) == 1
    assert all(after - before <= 1 for before, after in pairwise(headings))
    tables, captions = (browser.find_elements(By.CSS_SELECTOR, selector) for selector in ("table", "table > caption"))
    assert len(tables) == len(captions) >= 10


def test_64_buckets_stay_a_page_that_one_can_scroll(show: Any) -> None:
    heights = [show(name).execute_script("return document.documentElement.scrollHeight") for name in ("page", "many")]
    assert heights[1] < 2 * heights[0]
    assert len(show("many").find_elements(By.CSS_SELECTOR, ".kernels > li")) == 4
