"""The report in a real browser: it opens from a file, the slider works, names are escaped."""

import shutil

import numpy as np
import pytest

from fedgft.auditing import audit, measure
from fedgft.auditing.report import compare

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine")

HOSTILE = [
    "<script>document.title='owned'</script>",
    "</script><script>document.title='owned'</script>",
    "\"'><img src=x onerror=\"document.title='owned'\">",
    "{{7*7}} ${7*7} `x` | a",
    "x" * 300,
    "👩🏽‍⚕️ 群 \u202e gnp",
    "datum['x'] = 1; \\ \n new line",
    "all sites",
]


@pytest.fixture(scope="module")
def made():
    generator = np.random.default_rng(0)
    parts = []
    for i, site in enumerate(HOSTILE):
        n = 300
        y = generator.integers(0, 2, n)
        g = generator.choice(HOSTILE[: 4 if i else 8], n)
        p = np.clip(0.3 * y + 0.1 * (g == HOSTILE[0]) + 0.6 * generator.random(n), 0, 1)
        parts.append(measure(y, p, sensitive_features={HOSTILE[1]: g}, site=site))
    return audit(parts, reference_groups=[HOSTILE[0]], adjust_to={"sp": 0.05})


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"]
        )
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def file(made, tmp_path_factory):
    path = tmp_path_factory.mktemp("report") / "report.html"
    path.write_text(made.to_html(), "utf-8")
    return path


def opened(browser, path, **options):
    """A page with everything it complains about or asks the network for."""
    page = browser.new_page(**options)
    page.trouble = []
    page.asked = []
    page.on("console", lambda message: page.trouble.append(message.text))
    page.on("pageerror", lambda error: page.trouble.append(str(error)))
    page.on("request", lambda request: page.asked.append(request.url))
    page.goto(path.as_uri())
    page.wait_for_function(
        "[...document.querySelectorAll('[data-chart]')].every(c => c.dataset.drawn === 'yes')"
    )
    return page


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1200])
def test_the_report_opens_complete_and_fits_the_screen(browser, file, width, scheme):
    size = {"width": width, "height": 900}
    page = opened(browser, file, viewport=size, color_scheme=scheme)
    assert page.trouble == []
    assert [url for url in page.asked if not url.startswith(("file:", "data:"))] == []
    figures = page.eval_on_selector_all("figure", "all => all.map(f => f.id)")
    assert figures == ["forest", "waterfall", "rates", "thresholds", "roc", "calibration"]
    assert page.locator("figure svg").count() == 6
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    ink, paper = (
        page.evaluate(f"getComputedStyle(document.body).{name}")
        for name in ("color", "backgroundColor")
    )
    assert paper == {"light": "rgb(255, 255, 255)", "dark": "rgb(21, 24, 28)"}[scheme]
    label = page.locator("#rates svg text").first
    assert label.evaluate("e => getComputedStyle(e).fill") == ink  # figures have the page's ink
    page.close()


@pytest.mark.slow
def test_the_slider_shows_accuracy_and_gap_at_its_threshold(browser, file, made):
    from fedgft.auditing.thresholds import sweep_thresholds

    page = opened(browser, file)
    found = sweep_thresholds(made.view)
    shown = "all => all.map(e => e.textContent).filter(t => /^[0-9]+\\.[0-9]$/.test(t))"
    for threshold in (0.5, 0.25, 0.8):
        page.locator("#thresholds input[type=range]").evaluate(
            "(e, v) => { e.value = v; e.dispatchEvent(new Event('input')); }", threshold
        )
        page.wait_for_timeout(300)
        i = round(100 * threshold)
        wanted = [f"{100 * found.accuracy[i]:.1f}"]
        wanted += [f"{100 * found.gaps[name][i]:.1f}" for name in ("sp", "eop", "fpr", "acc")]
        wanted += [f"{100 * rates[i]:.1f}" for rates in list(found.selected.values())[:4]]
        texts = page.eval_on_selector_all("#thresholds .mark-text.role-mark text", shown)
        assert sorted(texts) == sorted(wanted)
    assert page.trouble == []
    page.close()


@pytest.mark.slow
def test_the_menu_changes_the_metric(browser, file):
    page = opened(browser, file)
    before = page.locator("#waterfall svg").inner_html()
    page.select_option("#waterfall select", label="equal opportunity")
    page.wait_for_timeout(300)
    assert page.locator("#waterfall svg").inner_html() != before
    assert page.trouble == []
    page.close()


@pytest.mark.slow
def test_hostile_names_are_text_and_nothing_else(browser, file):
    page = opened(browser, file)
    assert page.title() == "Fairness audit"
    body = page.inner_text("body")
    assert HOSTILE[0] in body and "{{7*7}}" in body and "49 $" not in body
    assert page.locator("img").count() == 0
    for mark in page.locator("#forest .mark-symbol path").all()[:3]:  # tooltips are text too
        mark.hover(force=True)
        page.wait_for_timeout(150)
    assert page.locator("#vg-tooltip-element script, #vg-tooltip-element img").count() == 0
    assert page.trouble == [] and page.title() == "Fairness audit"
    page.close()


@pytest.mark.slow
def test_the_page_would_refuse_a_script_that_got_in(browser, file, tmp_path):
    """The second line of defense, and proof that trouble is noticed."""
    worse = tmp_path / "worse.html"
    worse.write_text(file.read_text().replace("<main>", f"<main>{HOSTILE[0]}"))
    page = opened(browser, worse)
    assert page.title() == "Fairness audit"
    assert any("Content Security Policy" in text for text in page.trouble)
    page.close()


@pytest.mark.slow
def test_the_report_can_be_printed(browser, file):
    page = opened(browser, file)
    pdf = page.pdf()
    assert pdf.startswith(b"%PDF") and pdf.count(b"/Type /Page\n") >= 3
    page.close()


@pytest.mark.slow
def test_a_comparison_needs_no_script_at_all(browser, made, tmp_path):
    path = tmp_path / "change.html"
    path.write_text(compare(made.to_dict(), made.to_dict()).to_html())
    page = browser.new_page()
    trouble = []
    page.on("console", lambda message: trouble.append(message.text))
    page.goto(path.as_uri())
    assert trouble == [] and page.title() == "Fairness audits, old and new"
    assert page.locator("script").count() == 0
    page.close()


def test_markdown_keeps_names_as_text(made):
    text = made.to_markdown()
    assert "<script" not in text and "<img" not in text
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert all(line.endswith("|") for line in rows)
