"""How an audit is shown and kept: figures, notebooks, files, limits and comparisons."""

import re
import time
from io import BytesIO

import numpy as np
import pytest

import fedgft
from fedgft.auditing import Comparison, audit, compare, measure
from fedgft.auditing.plots import MAX_LINES
from fedgft.errors import FedgftError
from fedgft.metrics import CATALOG
from test_audit_objects import federation, people
from test_html_escaping import HOSTILE, TAGS, Page

Y = np.array([0, 1] * 20)
G = np.array(list("ffmm") * 10)


@pytest.fixture(scope="module")
def found():
    return audit(federation())


# Figures


def drawn(figure) -> BytesIO:
    """The figure as PNG; everything written in it lies inside its edges."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.text import Text

    out = BytesIO()
    canvas = FigureCanvasAgg(figure)
    canvas.print_png(out)
    edge = figure.bbox
    beyond = {
        label
        for axis in figure.axes
        for place, label in zip(axis.get_xticks(), axis.get_xticklabels(), strict=True)
        if not axis.get_xlim()[0] <= place <= axis.get_xlim()[1]
    }
    for text in figure.findobj(Text):
        if text.get_text() and text.get_visible() and text not in beyond:
            box = text.get_window_extent(canvas.get_renderer())
            inside = edge.x0 - 1 <= box.x0 and box.x1 <= edge.x1 + 1
            assert inside and edge.y0 - 1 <= box.y0 and box.y1 <= edge.y1 + 1, text.get_text()
    return out


def texts(figure) -> str:
    from matplotlib.text import Text

    return "\n".join(text.get_text() for text in figure.findobj(Text))


def test_the_figure_of_all_gaps(found):
    figure = found.plot()
    drawn(figure)
    (axis,) = figure.axes
    marks = [line.get_xdata()[0] for line in axis.lines]
    assert marks == pytest.approx([100 * gap.value for gap in found.gaps.values()])
    ends = sorted(float(s[:, 0].max()) for c in axis.collections for s in c.get_segments())
    limits = [100 * gap.high for gap in found.gaps.values()]
    floors = [100 * gap.noise_floor for gap in found.gaps.values()]
    assert ends == pytest.approx(sorted(limits + floors))
    shown = texts(figure)
    assert all(gap.title in shown for gap in found.gaps.values())
    assert "noise floor" in shown
    assert all(" / ".join(gap.pair) in shown for gap in found.gaps.values())


@pytest.mark.parametrize("metric", CATALOG)
def test_the_figure_of_a_metric(found, metric):
    figure = found.plot(metric)
    drawn(figure)
    left, right = figure.axes
    rates = [100 * rate.value for rate in found.rates[metric].values()]
    assert [line.get_xdata()[0] for line in left.lines] == pytest.approx(rates)
    marks = [float(line.get_xdata()[0]) for line in right.lines]
    local = [100 * site.gaps[metric].local.value for site in found.sites.values()]
    assert sorted(marks) == pytest.approx(sorted([*local, 100 * found.gaps[metric].value, 0.0]))
    assert "all sites" in texts(figure) and CATALOG[metric].title.capitalize() in texts(figure)


def test_one_site_has_one_panel():
    figure = audit({"n": people(100)}).plot("sp")
    drawn(figure)
    assert len(figure.axes) == 1


@pytest.mark.slow
def test_a_figure_shows_what_is_not_estimable_and_what_has_no_interval():
    groups = ["a"] * 30 + ["b"] * 30 + ["c"] * 4
    made = audit({"n": ([1, 0, 1] * 20 + [0] * 4, [1, 1, 0] * 20 + [1] * 4, groups)})
    figure = made.plot()
    drawn(figure)
    assert "among the groups that have a rate" in texts(figure)
    assert "no upper limit" in texts(figure)
    figure = made.plot("eop")
    drawn(figure)
    assert "not estimable" in texts(figure)
    figure = made.plot("sp")
    drawn(figure)
    assert "too few rows for an interval" in texts(figure)
    drawn(audit({"n": (Y, Y, ["f"] * 40)}).plot())


@pytest.mark.slow
def test_long_names_and_many_groups_stay_inside_the_figure():
    rng = np.random.default_rng(0)
    long = "Ministry of the interior of the northern provinces and their islands, department "
    names = [f"{long}{i}" for i in range(60)] + ["$x_1$ & <b>", "a\nb"]
    sites = {
        f"{long}{k}": (
            rng.choice([f"{long}no", f"{long}yes"], 900),
            rng.choice([f"{long}no", f"{long}yes"], 900),
            {long: rng.choice(names, 900)},
        )
        for k in range(40)
    }
    made = audit(sites)
    for figure in (made.plot(), made.plot("sp"), made.plot("eo")):
        drawn(figure)
    left, right = figure.axes
    assert len(left.get_yticks()) == MAX_LINES and len(right.get_yticks()) == MAX_LINES + 1
    assert f"{MAX_LINES} of 62 groups" in texts(figure)
    assert f"{MAX_LINES} of 40 sites" in texts(figure)


def test_figures_leave_the_state_of_matplotlib_alone(found):
    from matplotlib import pyplot, rcParams

    before = dict(rcParams)
    found.plot("sp")
    assert pyplot.get_fignums() == [] and dict(rcParams) == before
    with pytest.raises(FedgftError, match=r"^metric 'parity' is not known; choose from sp, eop"):
        found.plot("parity")


# Notebooks


def test_the_text_of_an_audit_has_lead_and_verdicts(found):
    lines = repr(found).splitlines()
    assert lines[0] == found.lead() and len(lines) == 1 + len(found.verdict())
    assert lines[1].startswith("✗ The gap in statistical parity exceeds 5 points, by sex & age: ")


def test_a_notebook_shows_the_report_without_scripts(found):
    found._repr_html_()  # templates are loaded once
    start = time.perf_counter()
    text = found._repr_html_()
    assert time.perf_counter() - start < 0.5
    assert len(text.encode()) < 50_000
    page = Page(text)
    tags = {tag for tag, _ in page.found}
    assert not tags & TAGS and "html" not in tags and "body" not in tags
    assert not [name for _, attrs in page.found for name in attrs if name.startswith("on")]
    assert not [name for _, attrs in page.found for name in attrs if name in ("id", "src", "href")]
    shown = " ".join(page.text)
    assert all(verdict.text in shown for verdict in found.verdict()) and "url(" not in text
    (style,) = re.findall("<style>(.*?)</style>", text, re.DOTALL)
    selectors = [s for rule in re.findall(r"([^{}]+)\{", style) for s in rule.split(",")]
    assert len(selectors) > 10
    assert all(selector.strip().startswith(".fedgft-report") for selector in selectors)
    assert all(c.startswith(("fedgft-", "tex2jax_ignore", "mathjax_ignore")) for c in classes(page))


def classes(page: Page) -> set[str]:
    return {c for _, attributes in page.found for c in attributes.get("class", "").split()}


def test_a_notebook_shows_names_as_text():
    rng = np.random.default_rng(0)
    groups = rng.choice(HOSTILE[:4], 200)
    made = audit(
        {
            name: (rng.choice([HOSTILE[4], "yes"], 200), rng.random(200), {HOSTILE[2]: groups})
            for name in HOSTILE[:2]
        }
    )
    page = Page(made._repr_html_())
    assert not {tag for tag, _ in page.found} & TAGS and not page.comments
    shown = " ".join(page.text)
    assert HOSTILE[0] in shown and HOSTILE[2] in shown
    compared = Page(made.compare(made)._repr_html_())
    assert not {tag for tag, _ in compared.found} & TAGS


@pytest.mark.slow
def test_a_large_audit_is_small_in_a_notebook():
    """150 groups of four attributes, names of 300 characters, 40 sites: a quick page of 150 KB."""
    rng = np.random.default_rng(0)
    long = "x" * 300
    sites = {}
    for k in range(40):
        groups = {f"{a}{long}": rng.choice([f"{c}{long}" for c in "uvw"], 600) for a in "abcd"}
        sites[f"{k}{long}"] = (rng.integers(0, 2, 600), rng.integers(0, 2, 600), groups)
    made = audit(sites)
    start = time.perf_counter()
    text = made._repr_html_()
    assert time.perf_counter() - start < 0.5
    assert len(text.encode()) < 150_000 and "The first 20 of 81 rows." in text


# Files, limits, comparison


@pytest.mark.slow
def test_save_writes_the_files_of_the_command(found, tmp_path, capsys):
    from test_cli import run

    folder = tmp_path / "new" / "report"
    paths = found.save(folder)
    assert [path.name for path in paths] == ["report.html", "report.md", "audit.json"]
    assert sorted(folder.iterdir()) == sorted(paths)
    files = []
    for name, (y, p, g) in federation().items():
        sums = measure(y, p, sensitive_features=g, site=name)
        files.append(sums.save(tmp_path / f"{name}.json", min_bin=1))
    read = audit([fedgft.read_sums(path) for path in files], about={"files": files})
    read.save(folder)  # its own report may be replaced
    assert run(capsys, "audit", *files, "--out", tmp_path / "other")[0] == 0
    for path in paths:
        assert path.read_bytes() == (tmp_path / "other" / path.name).read_bytes()
    compared = found.compare(read).save(tmp_path / "change")
    assert [path.name for path in compared] == ["report.html", "report.md", "comparison.json"]


def test_save_replaces_nothing_that_is_not_ours(found, tmp_path):
    (tmp_path / "report.md").write_text("my own notes")
    for act in (found.save, found.compare(found).save):
        with pytest.raises(FedgftError, match=r"^folder .*a report.md is there that is not ours"):
            act(tmp_path)
    with pytest.raises(FedgftError, match=r"^folder .*: cannot write there"):
        found.save(tmp_path / "report.md" / "folder")
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(FedgftError, match=r"^folder .*is a symbolic link"):
        found.save(tmp_path / "link")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "report.md"]


def test_check_is_quiet_or_names_metric_gap_and_limit(found):
    assert found.check(sp=0.9, acc=0.9) is None
    gap = found.attributes["sex"].gaps["sp"]
    with pytest.raises(FedgftError) as caught:
        found.check(sp=0.05, acc=0.9)
    said = str(caught.value)
    assert caught.value.kind == "data" and caught.value.field == "sp" and "acc" not in said
    reason = f"sp by sex is at least {100 * gap.low:.1f} points (95%; the gap is "
    assert f"{reason}{100 * gap.value:.1f}), above 5 points" in said
    assert said.endswith("above 5 points") and "\n" not in said
    found.check(sp=max(r.gaps["sp"].low for r in found.attributes.values()))  # not above it


def test_a_gap_that_cannot_be_judged_does_not_pass():
    made = audit({"n": ([1] * 40, Y, G)})
    with pytest.raises(FedgftError, match=r"^fpr by group is not estimable: no pass at"):
        made.check(fpr=0.9)
    with pytest.raises(FedgftError, match=r"^sp by group is not estimable"):
        audit({"n": (Y[:8], Y[:8], G[:8])}).check(sp=0.9)


@pytest.mark.parametrize(
    ("limits", "said"),
    [
        ({}, "name at least one metric"),
        ({"spp": 0.1}, "^metric 'spp' is no metric; choose from sp, eop"),
        ({"sp": 1.0}, "^sp must be a gap, 0 or more and below 1, not 1"),
        ({"sp": -0.1}, "^sp must be a gap"),
        ({"sp": float("nan")}, "^sp must be a finite number"),
    ],
)
def test_limits_of_a_check(found, limits, said):
    with pytest.raises(FedgftError, match=said):
        found.check(**limits)


@pytest.mark.slow
def test_the_command_and_check_agree(found, tmp_path, capsys):
    from test_cli import run

    files = []
    for name, (y, p, g) in federation().items():
        files.append(measure(y, p, sensitive_features=g, site=name).save(tmp_path / f"{name}.json"))
    for limit in (0.05, 0.9):
        code, _, err = run(capsys, "audit", *files, "--json", "--fail-above", f"sp={limit}")
        try:
            found.check(sp=limit)
            assert code == 0
        except FedgftError as error:
            assert code == 3
            assert all(reason in " ".join(err.split()) for reason in str(error).split("; sp "))


def test_audits_are_compared(found):
    y, p, g = people(2000, seed=9)
    fair = audit({"north": (y, (p - 0.2 * (g["sex"] == "m")).clip(0), g)})
    change = fair.compare(found)
    assert isinstance(change, Comparison)
    assert change.to_json() == compare(found, fair).to_json()
    assert change.to_json() == compare(found.to_dict(), fair.to_dict()).to_json()
    by_sex = change.to_dict()["views"]["sex"]["sp"]
    gaps = (fair.attributes["sex"].gaps["sp"].value, found.attributes["sex"].gaps["sp"].value)
    assert by_sex["change"] == pytest.approx(gaps[0] - gaps[1]) and by_sex["high"] < 0
    assert repr(change).splitlines()[1].startswith("✓ Statistical parity: ")
    assert "Fairness audits, old and new" in change._repr_html_()
    for wrong in (None, 3, {}, "audit.json"):
        with pytest.raises(FedgftError, match=r"^old must be an Audit, or what its to_dict"):
            found.compare(wrong)


def test_a_group_has_the_same_color_in_every_figure():
    """D16: men are blue and women orange, in the demo, in the paper's figure and in reports."""
    from matplotlib.colors import to_hex

    from fedgft.formatting import group_colors
    from fedgft.paper.tables_and_figures import plot_simpson

    colors = group_colors(["women", "men"])
    assert colors == {"women": "#d55e00", "men": "#0072b2"} == group_colors(["men", "women"])
    (axis,) = plot_simpson().axes
    bars = {bars.get_label(): bars[0].get_facecolor() for bars in axis.containers}
    assert {name: to_hex(color) for name, color in bars.items()} == colors
    assert len(set(group_colors(map(str, range(10))).values())) == 10
