# SPDX-License-Identifier: Apache-2.0
"""The page in a real browser: no network, no console errors, nothing cut, and a click shows an architecture."""

import shutil

import pytest
from report_runs import write_run

from puzzle.reports.build import build

webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
WebDriverWait = pytest.importorskip("selenium.webdriver.support.wait").WebDriverWait
CHROMIUM, DRIVER = shutil.which("chromium") or shutil.which("google-chrome"), shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="no Chromium with chromedriver on this machine")


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    run = write_run(tmp_path_factory.mktemp("browser") / "run", layers=30)
    build(run)
    return (run.path / "report" / "index.html").as_uri()


@pytest.fixture(scope="module")
def browser():
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-background-networking"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    yield driver
    driver.quit()


def test_a_click_on_a_point_shows_its_architecture(browser, page):
    browser.set_window_size(1280, 1000)
    browser.get(page)
    points = WebDriverWait(browser, 20).until(
        lambda b: b.find_elements("css selector", "#plot .scatterlayer .points path")
    )
    shown = browser.find_element("css selector", ".solution.shown")
    assert shown.find_element("tag name", "h3").text == "The child"
    browser.execute_script("arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})", points[0])
    webdriver.ActionChains(browser).move_to_element(points[0]).pause(0.5).click().pause(0.2).perform()
    hover = browser.find_element("css selector", "#plot .hoverlayer").text
    shown = browser.find_element("css selector", ".solution.shown")
    assert shown.get_attribute("id") == "solution-0"
    assert "best found for this speed" in hover and "tokens/s predicted" in hover
    assert "Attention, 1 KV head: layer" in shown.text
    requested = browser.execute_script("return performance.getEntriesByType('resource').map(e => e.name)")
    assert [r for r in requested if not r.startswith("data:")] == []
    assert browser.get_log("browser") == []


@pytest.mark.parametrize("width", [390, 768, 1280, 1920])
def test_nothing_sticks_out(browser, page, width):
    browser.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride", {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    )
    browser.get(page)
    WebDriverWait(browser, 20).until(lambda b: b.find_elements("css selector", "#plot .points path"))
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    cut = browser.execute_script(
        "return [...document.querySelectorAll('.scroll, pre, th, td, .tiles div')]"
        ".filter(e => e.scrollWidth > e.clientWidth + 1).map(e => e.outerHTML.slice(0, 200))"
    )
    assert cut == []
    outside = browser.execute_script(
        "return [...document.querySelectorAll('figure svg')].filter(s => s.clientWidth).flatMap(s => {"
        " const b = s.getBoundingClientRect();"
        " return [...s.querySelectorAll('text')].filter(t => { const r = t.getBoundingClientRect();"
        "  return r.left < b.left - 1 || r.right > b.right + 1 || r.bottom > b.bottom + 1 || r.top < b.top - 1 })"
        " .map(t => t.textContent) })"
    )
    assert outside == []
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_all_is_there_without_javascript(browser, page):
    browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    try:
        browser.get("about:blank")  # else the loaded page would only jump to the fragment
        browser.get(page + "#solution-2")
        visible = [
            s.get_attribute("id") for s in browser.find_elements("css selector", ".solution") if s.is_displayed()
        ]
        assert visible == ["solution-2"]
        assert browser.find_element("css selector", "#front .static svg.wide").is_displayed()
    finally:
        browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})
