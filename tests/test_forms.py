"""Forms: hostile names, files that are written together, options of the command line."""

import json
import re
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from markdown_it import MarkdownIt

import fedgft
from fedgft.auditing.form_page import NO_ADVICE
from fedgft.auditing.forms import KINDS, NAMES
from fedgft.errors import FedgftError
from test_audit_commands import run
from test_html_escaping import HOSTILE, check

yaml = pytest.importorskip("yaml")

EVIL = (  # in YAML, in Markdown, in HTML
    'a"\nlicense: evil',
    "x: [1, 2] # comment",
    "---",
    "&anchor !!python/object:os.system",
    "'; drop",
    "{a: b}",
    "line\u2028next\x85end",
    "| cell | `code` **bold**",
    "\\",
    "null",
    "1e5",
)
DIGEST = "ab" * 32


def make_audit(names: tuple[str, ...] = ("F", "M"), seed: int = 0, **about) -> fedgft.Audit:
    rng = np.random.default_rng(seed)
    n = 400
    groups = {"sex": rng.choice(names, n), "race": rng.choice([*names, "B"], n)}
    y = rng.integers(0, 2, n)
    sums = [
        fedgft.measure(
            y, np.clip(0.3 * y + 0.7 * rng.random(n), 0, 1), sensitive_features=groups, site=site
        )
        for site in names
    ]
    return fedgft.audit(sums, about={"files": {"north.json": DIGEST}} | about)


# Every form


@pytest.mark.parametrize("name", NAMES)
def test_every_form_states_date_version_digests_and_that_it_is_no_advice(name) -> None:
    form = make_audit(date="2026-05-04", model="Screener").form(name)
    texts = [form.to_html(), form.to_markdown(), form.to_json()]
    for text in texts:
        assert "no legal advice" in text and form.version in text
        assert DIGEST in text and "north.json" in text
        assert "2026-05-04" in text and "Screener" in text
    assert form.to_dict()["notice"] == NO_ADVICE
    assert json.loads(texts[2]) == form.to_dict()
    assert "95% interval" in texts[0]


@pytest.mark.parametrize("name", NAMES)
def test_what_only_people_know_is_open_until_they_state_it(name) -> None:
    audit = make_audit(model="Screener", version="3")
    plain = audit.form(name)
    facts = {key: f"fact number {i}" for i, key in enumerate(KINDS[name].facts)}
    facts = facts | {"data_kind": "test", "score_step": "0.0001"} if name == "ll144" else facts
    stated = audit.form(name, facts=facts)
    assert set(stated.to_complete) < set(plain.to_complete)
    assert stated.to_complete == []
    for key, text in facts.items():
        assert text in stated.to_markdown() or key == "score_step"
    assert all("to be completed" not in text for text in facts.values())


@pytest.mark.parametrize("name", NAMES)
def test_names_from_data_are_text_in_every_file(name, tmp_path) -> None:
    audit = make_audit((*HOSTILE[:3], EVIL[7]), model=HOSTILE[0], prepared_by=HOSTILE[1])
    free = [key for key in KINDS[name].facts if key not in ("score_step", "data_kind")]
    facts = {key: (*EVIL, *HOSTILE)[i] for i, key in enumerate(free)}
    form = audit.form(name, facts=facts)
    html, markdown, numbers = form.save(tmp_path)
    check(html, own={"link"}, names=HOSTILE[:3])
    text = markdown.read_text("utf-8")
    body = text.partition("\n---\n")[2] if name == "model-card" else text
    tokens = MarkdownIt("commonmark").enable("table").parse(body)
    inline = [each for token in tokens for each in token.children or ()]
    kinds = {each.type for each in inline}
    assert kinds <= {"text", "softbreak", "strong_open", "strong_close", "text_special"}
    assert {t.type for t in tokens if t.type.startswith("html")} <= {"html_block"}
    assert sum(t.type == "html_block" for t in tokens) == (name != "model-card")
    titles = [token.tag for token in tokens if token.type == "heading_open"]
    sections = len(form.sections) + 1  # and the files
    assert titles == ["h1", *["h2"] * sections]
    assert json.loads(numbers.read_text("utf-8")) == form.to_dict()


def read_header(form) -> dict:
    text = form.to_markdown()
    assert text.startswith("---\n# fedgft model-card\n")
    return yaml.safe_load(text.split("\n---\n")[0].removeprefix("---\n"))


@pytest.mark.parametrize("name", [*EVIL, *HOSTILE])
def test_names_cannot_leave_their_place_in_the_yaml_header(name) -> None:
    audit = make_audit(model=name)
    facts = {"license": name, "evaluation_data": name}
    header = read_header(audit.form("model-card", facts=facts))
    assert list(header) == ["license", "tags", "model-index"]
    shown = " ".join(audit.about["model"].split())
    assert header["license"] == header["model-index"][0]["name"] == shown
    (result,) = header["model-index"][0]["results"]
    assert list(result) == ["task", "dataset", "metrics"]
    assert result["dataset"]["name"] == shown


def test_the_header_holds_the_results_as_hugging_face_reads_them() -> None:
    audit = make_audit(model="Screener")
    (entry,) = read_header(audit.form("model-card"))["model-index"]
    (result,) = entry["results"]
    assert entry["name"] == "Screener"
    assert {"type", "name"} <= result["dataset"].keys() and "type" in result["task"]
    values = {metric["type"]: metric["value"] for metric in result["metrics"]}
    assert values["accuracy"] == pytest.approx(audit.accuracy.value, abs=1e-6)
    for name in ("sp", "eop", "fpr", "predictive-parity", "acc"):
        assert values[f"{name}_gap"] == pytest.approx(audit.gaps[name].value, abs=1e-6)


def test_a_gap_that_is_not_estimable_is_not_in_the_header() -> None:
    rows = ([1] * 40 + [0] * 40, [1, 0] * 40, {"sex": ["F"] * 40 + ["M"] * 40})
    audit = fedgft.audit({"north": rows})
    assert audit.gaps["eop"].value is None
    (entry,) = read_header(audit.form("model-card"))["model-index"]
    names = [metric["type"] for metric in entry["results"][0]["metrics"]]
    assert "eop_gap" not in names and "sp_gap" in names
    assert "not estimable" in audit.form("model-card").to_markdown()
    assert "not estimable" in audit.form("ai-act").to_markdown()


@pytest.mark.parametrize("name", ["ai-act", "model-card"])
def test_tables_show_the_numbers_of_the_audit(name) -> None:
    audit = make_audit()
    form = audit.form(name)
    tables = {table.title: table for section in form.sections for table in section.tables}
    for title, results in audit.attributes.items():
        gaps = tables[f"Gaps by {title}, points"]
        for (_, pair, _, gap, interval), metric in zip(
            gaps.rows, ("sp", "eop", "fpr", "predictive-parity", "acc"), strict=True
        ):
            found = results.gaps[metric]
            assert gap == f"{100 * found.value:.1f}"
            assert interval == f"{100 * found.low:.1f} to {100 * found.high:.1f}"
            assert pair == " / ".join(found.pair)
        for row in tables[f"Rates by {title}, percent"].rows:
            rate = results.rates["sp"][row[0]]
            assert row[2].startswith(f"{100 * rate.value:.1f} (")
    assert form.to_dict()["numbers"]["accuracy"]["rate"] == audit.accuracy.value


def test_unitary_and_intersectional_results_are_apart() -> None:
    sections = {s.title: s for s in make_audit().form("model-card").sections}
    unitary = sections["Quantitative analyses: unitary results"].tables
    both = sections["Quantitative analyses: intersectional results"].tables
    assert {table.title.split(",")[0] for table in unitary} == {
        "Gaps by sex",
        "Rates by sex",
        "Gaps by race",
        "Rates by race",
    }
    assert [table.title.split(",")[0] for table in both] == [
        "Gaps by sex & race",
        "Rates by sex & race",
    ]


def test_forms_of_several_classes() -> None:
    rng = np.random.default_rng(0)
    y = rng.choice(["a", "b", "c"], 300)
    decided = rng.choice(["a", "b", "c"], 300)
    audit = fedgft.audit({"n": (y, decided, {"sex": rng.choice(["F", "M"], 300)})})
    for name in ("ai-act", "model-card"):
        assert "| F | " in audit.form(name).to_markdown()


def test_the_annex_names_groups_with_too_few_rows() -> None:
    sex = ["F"] * 5 + ["M"] * 75
    audit = fedgft.audit({"n": ([1, 0] * 40, [1, 1, 0, 0] * 20, {"sex": sex})})
    section = next(s for s in audit.form("ai-act").sections if "10(2)(h)" in s.title)
    assert [*section.items] == ["Too few rows for an interval: F (sex): 5 rows."]


@pytest.mark.parametrize("name", ["l144", "LL144 ", "", 3])
def test_forms_that_do_not_exist(name) -> None:
    audit = make_audit()
    with pytest.raises((FedgftError, TypeError)) as error:
        audit.form(name)
    if isinstance(name, str):
        assert (error.value.field, error.value.kind) == ("form", "invalid")


# Files


def test_a_form_replaces_only_a_form_of_its_name(tmp_path) -> None:
    audit = make_audit()
    form = audit.form("ll144")
    assert [path.name for path in form.save(tmp_path)] == ["ll144.html", "ll144.md", "ll144.json"]
    form.save(tmp_path)
    audit.form("model-card").save(tmp_path)
    (tmp_path / "ll144.md").write_text("my notes\n")
    with pytest.raises(FedgftError) as error:
        form.save(tmp_path)
    assert error.value.kind == "file"
    assert (tmp_path / "ll144.md").read_text() == "my notes\n"


@pytest.fixture
def site(tmp_path: Path, monkeypatch) -> Path:
    rng = np.random.default_rng(0)
    n = 500
    y = rng.integers(0, 2, n)
    frame = pl.DataFrame(
        {
            "y": y,
            "sex": rng.choice(["F", "M"], n),
            "race": rng.choice(["A", "B"], n),
            "p": np.clip(0.3 * y + 0.7 * rng.random(n), 0, 1),
        }
    )
    frame.write_csv(tmp_path / "north.csv")
    columns = {"label": "y", "group": ["sex", "race"], "score": "p"}
    fedgft.measure_file(tmp_path / "north.csv", **columns).save(tmp_path / "north.json")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow
def test_the_command_writes_the_forms_beside_the_report(site, capsys) -> None:
    asked = ("audit", "north.json", "--out", "report", "--form", "ll144,model-card", "ai-act")
    facts = ("--form-facts", "auditor=Smith, Jones & Co", "distribution-date=2026-01-05")
    code, _, err = run(capsys, *asked, *facts)
    assert code == 0
    names = [f"{name}.{end}" for name in NAMES for end in ("html", "md", "json")]
    wanted = sorted([*names, "report.html", "report.md", "audit.json"])
    assert sorted(path.name for path in (site / "report").iterdir() if path.is_file()) == wanted
    assert "ll144, to be completed (--form-facts states facts)" in " ".join(err.split())
    text = (site / "report/ll144.md").read_text()
    assert "Smith, Jones & Co" in text and "2026-01-05" in text
    audit = fedgft.audit(fedgft.read_sums("north.json"), about={"files": ["north.json"]})
    made = json.loads((site / "report/ll144.json").read_text())
    assert made["numbers"] == audit.form("ll144").to_dict()["numbers"]
    assert re.fullmatch("[0-9a-f]{64}", made["files"]["north.json"])


@pytest.mark.slow
def test_nothing_is_half_written_where_one_file_may_not_be_replaced(site, capsys) -> None:
    asked = ("audit", "north.json", "--out", "report", "--form", "ll144")
    assert run(capsys, *asked, "--title", "One")[0] == 0
    assert run(capsys, *asked, "--title", "One")[0] == 0  # the same again
    before = {path.name: path.read_bytes() for path in (site / "report").iterdir()}
    code, _, err = run(capsys, *asked, "--title", "One", "--form-facts", "auditor=Smith")
    assert code == 2 and "--overwrite" in err and "ll144" in err
    assert {path.name: path.read_bytes() for path in (site / "report").iterdir()} == before
    more = ("--form-facts", "auditor=Smith", "--overwrite")
    assert run(capsys, *asked, "--title", "One", *more)[0] == 0
    assert "Smith" in (site / "report/ll144.md").read_text()
    (site / "report/ai-act.md").write_text("my notes\n")
    code, _, err = run(capsys, *asked[:-1], "ai-act", "--overwrite")
    assert code == 2 and not (site / "report/ai-act.html").exists()


@pytest.mark.slow
def test_forms_in_the_folder_of_site_files_are_no_site_files(site, capsys) -> None:
    asked = ("audit", ".", "--out", ".", "--form", "ll144", "model-card", "ai-act")
    assert run(capsys, *asked)[0] == 0
    assert run(capsys, *asked, "--overwrite")[0] == 0


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (["--form", "ll145", "--out", "r"], "ll144, ai-act, model-card"),
        (["--form", "ll144"], "--out"),
        (["--form"], "--form"),
        (["--form-columns", "sex=sex"], "--form"),
        (["--form", "ll144", "--form-columns", "sex", "--out", "r"], "KEY=VALUE"),
        (["--form", "ll144", "--form-columns", "sex=gendre", "--out", "r"], "gendre"),
        (["--form", "ai-act", "--form-columns", "sex=sex", "--out", "r"], "ll144"),
        (["--form", "ll144", "--form-facts", "auditor", "--out", "r"], "KEY=VALUE"),
        (["--form", "ll144", "--form-facts", "boss=me", "--out", "r"], "distribution_date"),
        (["--form", "ll144", "--form-facts", "auditor=a", "auditor=b", "--out", "r"], "twice"),
        (["--form", "ll144", "--form-facts", "score_step=2", "--out", "r"], "score_step"),
        (["--form", "ll144", "--compare", "a", "b"], "--form"),
    ],
)
def test_bad_options_write_nothing(site, capsys, options, word) -> None:
    files = [] if "--compare" in options else ["north.json"]
    code, out, err = run(capsys, "audit", *files, *options)
    assert code == 2 and out == "" and word in err
    assert len(err.strip().splitlines()) <= 4  # one sentence, which a terminal may wrap
    assert not (site / "r").exists()
