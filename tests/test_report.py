"""The report in a real browser: it opens from a file, the slider works, names are escaped."""

import csv
import shutil

import numpy as np
import pytest

from fedgft.auditing import audit, measure, read_sums
from fedgft.auditing.report import compare
from fedgft.auditing.tables_and_charts import draw_forest, draw_thresholds
from fedgft.auditing.thresholds import compute_curves, find_exact_edges
from fedgft.formatting import GROUP_COLORS

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
    kinds = ("forest", "waterfall", "rates", "thresholds", "roc", "calibration", "cumulative")
    assert tuple(figures) == kinds
    assert page.locator("figure svg").count() == 7
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


@pytest.fixture(scope="module")
def loans(tmp_path_factory):
    """The report of the sample data: three banks, with the facts that a committee needs."""
    from fedgft.auditing import measure_file
    from fedgft.data.public import prepared_frame

    folder = tmp_path_factory.mktemp("loans")
    rows = prepared_frame("loans")
    sums = []
    for (site,), part in rows.partition_by("bank", as_dict=True).items():
        part.write_csv(folder / f"{site}.csv")
        asked = {"label": "repaid", "group": "sex", "score": "probability"}
        sums.append(measure_file(folder / f"{site}.csv", **asked))
    files = [each.save(folder / f"{i}.json") for i, each in enumerate(sums)]
    about = {
        "title": "Fairness of loan approvals",
        "model": "Loan model",
        "version": "2.1",
        "prepared_by": "Model risk",
        "purpose": "yearly review",
        "outcome": "approved",
        "files": files,
    }
    return audit([read_sums(path) for path in files], about=about)


@pytest.fixture(scope="module")
def loans_page(loans, tmp_path_factory):
    path = tmp_path_factory.mktemp("loans") / "report.html"
    path.write_text(loans.to_html(), "utf-8")
    return path


@pytest.mark.slow
def test_the_first_screen_answers_who_what_and_how_sure(browser, loans, loans_page):
    page = opened(browser, loans_page, viewport={"width": 1280, "height": 900})
    assert page.title() == "Fairness of loan approvals"
    for text in ("Loan model 2.1", "Model risk", loans.lead()):
        assert page.get_by_text(text).first.bounding_box()["y"] < 300
    for i, (question, answer) in enumerate(loans.report().answers):
        for text in (question, answer):
            box = page.get_by_text(text, exact=True).first.bounding_box()
            assert box["y"] + box["height"] < (700 if i < 4 else 900)  # the last: other sites
    assert "are approved" in loans.lead() and "more than the default tolerance" in loans.lead()
    page.close()


@pytest.mark.slow
def test_tables_can_be_downloaded_without_a_network(browser, loans, loans_page):
    page = opened(browser, loans_page)
    page.context.set_offline(True)
    tables = loans.report().tables
    links = page.get_by_role("link", name="Download as CSV").all()
    assert len(links) == len(tables)
    with page.expect_download() as download:
        links[1].click()
    assert download.value.suggested_filename == "rates-by-sex-percent.csv"
    text = download.value.path().read_text("utf-8")
    assert text == tables[1].csv()
    header = 'rate,group,%,"95% interval, low","95% interval, high",rows'
    assert text.splitlines()[0] == header
    assert page.trouble == []
    page.close()


@pytest.mark.slow
def test_charts_have_descriptions_and_the_roc_is_square(browser, loans, loans_page):
    page = opened(browser, loans_page)
    for figure in loans.report(figures=True).figures:
        drawn = page.locator(f"#{figure.name} [role=graphics-document]").first
        label = drawn.get_attribute("aria-label")
        assert label.startswith(f"{figure.title}. ") and figure.caption in label
    box = page.locator("#roc svg .role-frame .background").first.bounding_box()
    assert box["width"] == pytest.approx(box["height"], abs=2)
    legends = page.locator("#thresholds svg .role-legend").count()
    assert legends == 2 and "decided at 0.5" in page.locator("#thresholds svg").text_content()
    page.close()


UNBROKEN = """() => {
  const bad = [];
  for (const cell of document.querySelectorAll('th, td')) {
    const text = cell.firstChild;
    if (!text || text.nodeType !== 3) continue;
    for (const word of text.data.matchAll(/[^\\s-]+/g)) {
      const range = document.createRange();
      range.setStart(text, word.index);
      range.setEnd(text, word.index + word[0].length);
      if (range.getClientRects().length > 1) bad.push(word[0]);
    }
  }
  return bad;
}"""
OVERLAPPING = """() => {
  const bad = [];
  for (const axis of document.querySelectorAll('svg .role-axis-label')) {
    const labels = [...axis.querySelectorAll('text')]
      .filter(e => e.getAttribute('opacity') !== '0');
    const boxes = labels.map(e => e.getBoundingClientRect());
    for (let i = 1; i < boxes.length; i++) {
      const [a, b] = [boxes[i - 1], boxes[i]];
      const apart = a.right <= b.left || b.right <= a.left || a.bottom <= b.top + 3
        || b.bottom <= a.top + 3;
      if (!apart) bad.push(labels[i].textContent);
    }
  }
  return bad;
}"""
SMALLEST = """() => Math.min(...[...document.querySelectorAll('svg text')]
  .filter(e => e.textContent).map(e => e.getBoundingClientRect().height))"""


@pytest.mark.slow
def test_on_a_phone_no_word_is_split_and_no_ticks_collide(browser, loans_page, file):
    """D13: "statisti/cal", "0.91.0", and text of five pixels in the threshold explorer."""
    long_names = opened(browser, file, viewport={"width": 390, "height": 844})
    assert long_names.evaluate(SMALLEST) > 9
    long_names.close()
    page = opened(browser, loans_page, viewport={"width": 390, "height": 844})
    assert page.evaluate(UNBROKEN) == []
    assert page.evaluate(OVERLAPPING) == []
    assert page.evaluate(SMALLEST) > 9
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    page.close()


@pytest.mark.slow
def test_on_paper_charts_say_their_metric_and_no_word_is_split(browser, loans_page):
    """D14: the menus vanished in print, and so did the names of the metrics; "sou/th"."""
    page = opened(browser, loans_page, viewport={"width": 700, "height": 900})
    page.emulate_media(media="print")
    assert page.locator(".vega-bindings").first.is_hidden()
    titles = {"forest": "Statistical parity", "waterfall": "Statistical parity"}
    for figure, title in (titles | {"rates": "Selection rate"}).items():
        shown = page.locator(f"#{figure} svg .role-title-text").first
        assert shown.text_content() == title and shown.is_visible()
    assert page.evaluate(UNBROKEN) == []
    page.close()


def test_rates_have_their_own_names_and_every_table_one_unit(loans):
    """D8, D9: selection rates stood under "statistical parity", fractions beside points."""
    tables = {table.title: table for table in loans.report().tables}
    rates = tables["Rates by sex, percent"]
    assert list(dict.fromkeys(row[0] for row in rates.rows)) == [
        "selection rate",
        "true-positive rate",
        "precision",
        "accuracy",
        "false-positive rate",
    ]
    assert not any("parity" in cell for row in rates.rows for cell in row)
    units = ("points", "percent", "Spread", "Ratios", "Area")
    assert all(any(unit in title for unit in units) for title in tables)
    gaps = tables["Gaps by sex, points"]
    assert not {"TV", "DH", "ratio"} & set(gaps.header) and gaps.header[1] == "verdict"
    assert {"TV", "DH", "bound"} < set(tables["Spread over the sites by sex"].header)
    sites = tables["Sites, points"]
    assert len(sites.header) == 6 and len(set(sites.header)) == 6
    note = " ".join(sites.notes)
    assert "north holds 24% of all men but 57% of all women" in note and "of points" not in note


def test_captions_state_only_what_the_figures_show(loans):
    """Before: "exact, every 0.01" where ranges were merged, and dots at interpolated values."""
    figures = {figure.name: figure for figure in loans.report(figures=True).figures}
    curves = compute_curves(loans.view)
    merged = find_exact_edges(loans.view)
    assert 2 < merged.sum() < len(merged) == 101  # the sites merged ranges with few people
    caption = figures["thresholds"].caption
    assert "Values are exact where no site merged ranges" in caption and "every" not in caption
    assert f"{np.diff(np.flatnonzero(merged)).max() / 100:g}." in caption
    assert "less exactly" in figures["calibration"].caption
    dots = [row["exact"] for row in figures["roc"].spec["data"]["values"]]
    assert dots == [bool(x) for curve in curves for x in curve.exact] and not all(dots)
    assert "threshold of the decisions" in figures["roc"].caption + caption
    facts = dict(loans.report().facts)
    assert "a score of at least 0.5, which is also the default" in facts["Decided by"]
    assert "no row of data" not in loans.to_html()


def test_every_edge_is_exact_where_no_ranges_were_merged():
    rng = np.random.default_rng(0)
    y = rng.integers(0, 2, 400)
    sums = measure(y, rng.random(400), sensitive_features={"s": y})
    figures = {figure.name: figure.caption for figure in audit(sums).report(figures=True).figures}
    assert "Values are exact at every step of the slider, 0.01." in figures["thresholds"]
    assert "Scores are known to ± 0.005." in figures["calibration"]


def test_figures_of_decisions_speak_of_no_threshold():
    """Before: "The solid line is the threshold in use" in the report of `train`."""
    rng = np.random.default_rng(0)
    y = rng.integers(0, 2, 400)
    sums = measure(y, y, scores=rng.random(400), sensitive_features={"s": y})
    found = audit(sums, about={"decided_by": "the model"})
    assert found.summary["threshold"] is None and found.summary["sweep"] is not None
    for figure in found.report(figures=True).figures:
        assert "solid line" not in figure.caption and "large dots" not in figure.caption
    assert dict(found.report().facts)["Decided by"] == "the model"


def test_the_interval_over_all_sites_is_the_same_in_figure_and_table():
    """Before: with three groups, the figure had the narrower interval of one pair."""
    rng = np.random.default_rng(0)
    groups = rng.choice(list("abc"), 900)
    d = (rng.random(900) < 0.3 + 0.2 * (groups == "a")).astype(int)
    found = audit({"north": (d, d, groups), "south": (d, d, groups)})
    rows = draw_forest(found.summary)["data"]["values"]
    drawn = next(row for row in rows if row["metric"] == "sp" and row["kind"] == "all")
    gap = found.gaps["sp"]
    assert (drawn["low"], drawn["high"]) == pytest.approx((100 * gap.low, 100 * gap.high))


def test_the_bound_of_equalized_odds_is_that_of_both_conditions(loans):
    bound = loans.summary["bound"]
    assert bound["eo"] == max(bound["eop"], bound["fpr"]) > bound["eop"]


def test_the_text_has_all_that_the_page_has(loans):
    text = loans.to_markdown()
    for part in ("In short", "Verdicts", "About this audit", "Definitions"):
        assert f"## {part}" in text
    assert "## What this audit can and cannot tell you" in text
    assert "cannot all be met at once" in text and "binning error" in text
    assert "column “repaid”: “no” or “yes”" in text and "score of at least 0.5" in text
    assert all(digest in text for digest in loans.about["files"].values())


def test_a_cell_is_no_formula_in_a_spreadsheet():
    from fedgft.formatting import Table

    rows = (("=cmd()", "-0.6 to 1.2"), ("@x", "-3.4"), ("+1+2", "–"))
    text = Table("t", ("site", "gap"), rows, 1).csv()
    assert text == ('site,"gap, low","gap, high"\n' + "'=cmd(),-0.6,1.2\n'@x,-3.4,\n'+1+2,–,\n")
    names = Table("t", ("site", "gap"), (("1 to 2", "0.5"),), 1)
    assert names.csv() == "site,gap\n1 to 2,0.5\n"


def test_markdown_keeps_names_as_text(made):
    text = made.to_markdown()
    assert "<script" not in text and "<img" not in text
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert all(line.endswith("|") for line in rows)


def test_a_csv_has_one_number_per_cell(loans):
    """Before: "'-0.2 (-1.1 to 0.6)", with an apostrophe and three numbers."""
    gaps = next(table for table in loans.report().tables if table.title.startswith("Gaps"))
    header, *rows = csv.reader(gaps.csv().splitlines())
    name = "average within sites"
    assert header[-3:] == [name, f"{name}, low", f"{name}, high"]
    assert "'" not in gaps.csv() and {len(row) for row in rows} == {len(header)}
    first = dict(zip(header, rows[0], strict=True))
    assert float(first[f"{name}, low"]) < float(first[name]) < float(first[f"{name}, high"])
    assert float(first["95% interval, low"]) < float(first["gap"])


def test_the_threshold_explorer_shows_the_tolerance_and_no_group_color_for_gaps(loans):
    spec = draw_thresholds(loans.summary, loans.summary["sweep"])
    assert {"name": "tolerance", "value": 5} in spec["params"]
    colors = spec["vconcat"][1]["layer"][0]["encoding"]["color"]["scale"]["range"]
    assert not set(colors) & set(GROUP_COLORS[:7])
