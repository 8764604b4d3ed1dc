"""Names that contain code are plain text in every page."""

import json
from dataclasses import asdict
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from fedgft.auditing import audit, measure
from fedgft.auditing.report import compare
from fedgft.formatting import Table
from fedgft.paper.claims import Finding
from fedgft.paper.section import FORMAT, Section, write_page
from fedgft.store import dump_checksummed
from test_cli import run

HOSTILE = (
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "</title></style></textarea>",
    "{{ 7*7 }}",
    "' onmouseover='alert(1)",
    "<!-- & -->",
    "</script><svg onload=alert(1)>",
)
TAGS = {"img", "script", "svg", "iframe", "object", "embed", "link", "base", "form", "textarea"}


class Page(HTMLParser):
    """What a browser would make of the text: elements, attributes, scripts."""

    def __init__(self, text: str) -> None:
        HTMLParser.__init__(self)
        self.found = []
        self.scripts = []
        self.text = []
        self.comments = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data):
        place = self.scripts if self.found[-1:] and self.found[-1][0] == "script" else self.text
        place.append(data)

    def handle_comment(self, data):
        self.comments.append(data)


def check(path: Path, *, own: set[str], names: tuple[str, ...]) -> Page:
    """No element, attribute, script or comment that is not ours; every name can be read."""
    text = path.read_text("utf-8")
    page = Page(text)
    assert {tag for tag, _ in page.found} & TAGS <= own
    assert not [n for _, attributes in page.found for n in attributes if n.startswith("on")]
    assert [a["href"][:5] for tag, a in page.found if tag == "link"] == ["data:"]
    assert len(page.comments) == 1 and "fedgft" in page.comments[0]
    shown = " ".join(page.text)
    assert all(name in shown for name in names)
    return page


@pytest.mark.slow
def test_names_in_a_report_are_text(tmp_path, capsys) -> None:
    """From a table whose columns, groups, labels and sites have such names, to the written page."""
    label = HOSTILE[0]
    group = HOSTILE[6]
    score = HOSTILE[2]
    rng = np.random.default_rng(0)
    files = []
    for i, site in enumerate((HOSTILE[3], HOSTILE[1])):
        frame = pl.DataFrame(
            {
                label: rng.choice([HOSTILE[4], "yes"], 80),
                group: rng.choice(HOSTILE[:2], 80),
                score: rng.random(80),
            }
        )
        frame.write_csv(tmp_path / "rows.csv")
        files.append(tmp_path / f"site-{i}.json")
        run(
            capsys,
            "measure",
            tmp_path / "rows.csv",
            "--label",
            label,
            "--group",
            group,
            "--score",
            score,
            "--name",
            site,
            "--out",
            files[-1],
        )
    assert run(capsys, "audit", *files, "--out", tmp_path / "out")[0] == 0
    page = check(
        tmp_path / "out/report.html", own={"link", "script"}, names=(*HOSTILE[:2], HOSTILE[6])
    )
    kinds = [a.get("type") for tag, a in page.found if tag == "script"]
    assert kinds.count(None) == 1 and set(kinds) == {None, "application/json"}
    specs = [text for text in page.scripts if text.startswith("{")]
    assert len(specs) == len(kinds) - 1 and all("<" not in text for text in specs)
    assert any(HOSTILE[0] in str(json.loads(text)) for text in specs)


def test_names_in_a_comparison_are_text(tmp_path) -> None:
    rng = np.random.default_rng(0)
    made = [
        audit(
            measure(
                rng.integers(0, 2, 90),
                rng.random(90),
                site=HOSTILE[1],
                sensitive_features={HOSTILE[2]: rng.choice(HOSTILE[:3], 90)},
            )
        ).to_dict()
        for _ in range(2)
    ]
    (tmp_path / "report.html").write_text(compare(*made).to_html(), "utf-8")
    check(tmp_path / "report.html", own={"link"}, names=HOSTILE[:3])


def test_words_in_the_page_of_the_paper_are_text(tmp_path) -> None:
    """Out of a section's file, which anybody can seal, into the page that is written from it."""
    bad = " ".join(HOSTILE)
    table = Table(bad, (bad, bad), ((bad, bad),), 1, (bad,))
    section = Section("table1", bad, bad, bad, bad, (Finding(bad),), (table,), (), (bad,), (bad,))
    text = dump_checksummed(
        json.loads(json.dumps({"stamp": "", "files": [], **asdict(section)})), FORMAT
    )
    (tmp_path / "table1.json").write_text(text, "utf-8")
    write_page(tmp_path)
    check(tmp_path / "index.html", own={"link"}, names=HOSTILE)


def test_a_section_names_no_figure_elsewhere(tmp_path) -> None:
    """A figure is put into the page: not one from another folder."""
    (tmp_path / "secret.svg").write_text("<svg>secret</svg>")
    (tmp_path / "page/figures").mkdir(parents=True)
    for name in ("../../secret", str(tmp_path / "secret")):
        section = Section("table1", "t", "c", "n", "h", (), (), ((name, "a figure"),))
        whole = json.loads(json.dumps({"stamp": "", "files": [], **asdict(section)}))
        (tmp_path / "page/table1.json").write_text(dump_checksummed(whole, FORMAT), "utf-8")
        write_page(tmp_path / "page")
        assert "data:image" not in (tmp_path / "page/index.html").read_text()
