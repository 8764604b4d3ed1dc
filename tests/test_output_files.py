"""Written files: no symbolic links are followed, sums and histories are private to their owner,
and texts from data cannot run in spreadsheets or Markdown viewers.
"""

import csv
import io
import json
import os
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from fedgft.auditing import measure, read_sums, write_sums
from fedgft.data.table import escape_formulas, write_table
from fedgft.engine.state import Snapshot
from fedgft.errors import FedgftError
from fedgft.formatting import Table, escape_markdown, unescape_markdown
from fedgft.paper.section import list_pages
from fedgft.store import (
    atomic_write,
    exclusive_lock,
    make_private_folder,
    open_folder,
    open_private_file,
    stage_files,
)
from fedgft.study.cache import Checkpoints, ResultCache
from test_cli import QUICK, run
from test_file_system_faults import command, inputs, one_line

__all__ = ["inputs"]  # a fixture

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::fedgft.metrics.NotEstimableWarning"),
]
SECRET = "a file of somebody else\n"


@pytest.fixture
def victim(tmp_path) -> Path:
    """A file that no command was asked to write."""
    path = tmp_path / "elsewhere" / "victim.txt"
    path.parent.mkdir()
    path.write_text(SECRET)
    return path


@pytest.fixture
def usual_umask() -> Iterator[None]:
    """Files are readable by everybody unless they are made otherwise."""
    before = os.umask(0o022)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def modes(folder: Path) -> dict[str, int]:
    """Of every file and folder below, by name."""
    return {str(p.relative_to(folder)): mode(p) for p in sorted(folder.rglob("*"))}


# Symbolic links


def test_a_link_planted_as_the_temporary_file_is_not_followed(inputs, victim, tmp_path, capsys):
    """`predict --out scored.csv`, where .scored.csv.part points to another file."""
    out = tmp_path / "out"
    out.mkdir()
    (out / ".x.csv.part").symlink_to(victim)
    assert run(capsys, *command("csv", inputs, out))[0] == 0
    assert victim.read_text() == SECRET
    assert not (out / "x.csv").is_symlink() and pl.read_csv(out / "x.csv").height == 400
    assert os.listdir(out) == ["x.csv"]


def test_a_hard_link_planted_as_the_temporary_file_is_not_written_to(victim, tmp_path):
    os.link(victim, tmp_path / ".x.part")
    with atomic_write(tmp_path / "x") as part:
        part.write(b"ours")
    assert victim.read_text() == SECRET and (tmp_path / "x").read_text() == "ours"


def test_a_temporary_file_that_becomes_a_link_meanwhile_is_not_followed(victim, tmp_path):
    """What is written goes to the file that was opened, whatever its name means by then."""
    with pytest.raises(FedgftError, match=r"x: cannot be written \(.*was replaced"):  # noqa: SIM117
        with atomic_write(tmp_path / "x") as part:
            (tmp_path / ".x.part").unlink()
            (tmp_path / ".x.part").symlink_to(victim)
            part.write(b"ours")
    assert victim.read_text() == SECRET and not (tmp_path / "x").exists()


def test_a_pipe_or_folder_planted_as_the_temporary_file_stops_nothing_for_ever(tmp_path):
    os.mkfifo(tmp_path / ".a.part")
    with atomic_write(tmp_path / "a") as part:
        part.write(b"ours")
    assert (tmp_path / "a").read_text() == "ours" and os.listdir(tmp_path) == ["a"]
    (tmp_path / ".b.part").mkdir()
    with pytest.raises(FedgftError, match="b: cannot be written") as caught:  # noqa: SIM117
        with atomic_write(tmp_path / "b"):
            pass
    assert caught.value.kind == "file"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make another user's file")
def test_another_users_temporary_file_is_neither_waited_for_nor_written_to(tmp_path):
    theirs = tmp_path / ".x.part"
    theirs.write_text("theirs")
    os.chown(theirs, 12345, 12345)
    with open(theirs) as opened:
        with atomic_write(tmp_path / "x", private=True) as part:
            part.write(b"ours")
        assert opened.read() == "theirs"
    assert (tmp_path / "x").stat().st_uid == os.geteuid() and mode(tmp_path / "x") == 0o600


def test_what_a_killed_run_left_is_replaced_and_a_running_one_is_waited_for(tmp_path):
    path = tmp_path / "x"
    order = []
    (tmp_path / ".x.part").write_text("half of")
    started = threading.Event()

    def second() -> None:
        started.wait()
        with atomic_write(path) as part:
            order.append("second")
            part.write(b"second")

    other = threading.Thread(target=second)
    other.start()
    with atomic_write(path) as part:
        started.set()
        part.write(b"first")
        other.join(0.3)
        order.append("first")
    other.join()
    assert order == ["first", "second"] and path.read_text() == "second"
    assert os.listdir(tmp_path) == ["x"]


@pytest.mark.parametrize("name", ["csv", "parquet", "measure", "audit"])
def test_an_output_that_is_a_link_is_refused(name, inputs, victim, tmp_path, capsys):
    files = {"csv": "x.csv", "parquet": "x.parquet", "measure": "n.json", "audit": "report.md"}
    out = tmp_path / "out"
    out.mkdir()
    link = out / files[name]
    link.symlink_to(victim)
    code, _, err = run(capsys, *command(name, inputs, out))
    assert code == 2 and "symbolic link" in one_line(err) and str(link) in err
    assert victim.read_text() == SECRET and link.is_symlink()
    assert os.listdir(out) == [files[name]]


@pytest.mark.parametrize(
    ("name", "file"), [("train", "model.safetensors"), ("compare", "rows.parquet")]
)
def test_a_link_among_the_results_is_replaced_and_not_followed(
    name, file, inputs, victim, tmp_path, capsys
):
    """To refuse it when all is computed would cost the user the work."""
    out = tmp_path / "out"
    out.mkdir()
    (out / file).symlink_to(victim)
    assert run(capsys, *command(name, inputs, out), "--overwrite")[0] == 0
    assert victim.read_text() == SECRET
    assert (out / file).is_file() and not (out / file).is_symlink()


def test_a_device_or_a_pipe_is_not_replaced_by_a_file(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(FedgftError, match=r"pipe: cannot be written \(it is no"):  # noqa: SIM117
        with atomic_write(tmp_path / "pipe"):
            pass
    with (
        pytest.raises(FedgftError, match="pipe: cannot be written"),
        stage_files(tmp_path) as place,
    ):
        (place / "pipe").write_text("ours")
    assert stat.S_ISFIFO((tmp_path / "pipe").lstat().st_mode) and os.listdir(tmp_path) == ["pipe"]


@pytest.mark.parametrize("name", ["audit", "train", "compare", "reproduce"])
def test_an_output_folder_that_is_a_link_is_refused(name, inputs, victim, tmp_path, capsys):
    link = tmp_path / "out"
    link.symlink_to(victim.parent)
    code, _, err = run(capsys, *command(name, inputs, link))
    assert code == 2 and f"--out {link}: is a symbolic link" in one_line(err)
    assert os.listdir(victim.parent) == ["victim.txt"]


def test_a_report_folder_that_is_a_link_is_refused(inputs, victim, tmp_path, capsys):
    link = tmp_path / "report"
    link.symlink_to(victim.parent)
    given = command("measure", inputs, tmp_path)
    code, _, err = run(capsys, *given, "--report", link)
    assert code == 2 and f"--report {link}: is a symbolic link" in one_line(err)
    assert os.listdir(victim.parent) == ["victim.txt"]


def test_links_planted_inside_an_output_folder_are_not_followed(victim, tmp_path):
    """The stage, the lock, the logs, a folder of figures."""
    out = tmp_path / "out"
    out.mkdir()
    (out / ".fedgft.part").symlink_to(victim.parent)
    with open_folder(out), stage_files(out) as place:
        assert not place.is_symlink()
        (place / "one").write_text("ours")
    assert os.listdir(out) == ["one"]
    (out / "cells").mkdir()
    (out / "cells" / ".lock").symlink_to(victim)
    (out / "figures").symlink_to(victim.parent)
    (victim.parent / ".x.png.part").write_text("theirs")
    with (
        pytest.raises(FedgftError, match=r"\.lock: is a symbolic link"),
        exclusive_lock(out / "cells"),
    ):
        pass
    (out / "cells" / ".lock").unlink()
    with exclusive_lock(out / "cells"):
        assert (victim.parent / ".x.png.part").exists()
    (out / "logs").symlink_to(victim.parent)
    with pytest.raises(FedgftError, match="logs: is a symbolic link"):
        make_private_folder(out / "logs")
    (out / "log").symlink_to(victim)
    for how in ("wb", "ab"):
        with pytest.raises(FedgftError, match="log: is a symbolic link"):
            open_private_file(out / "log", how)
    assert victim.read_text() == SECRET


def test_a_link_among_the_parents_is_followed(tmp_path):
    """As /tmp or /home are on some systems."""
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with open_folder(tmp_path / "link" / "out") as out, atomic_write(out / "x") as part:
        part.write(b"ours")
    assert (tmp_path / "real" / "out" / "x").read_text() == "ours"


# Permissions


def test_private_files_are_their_owners_alone_whatever_was_there(usual_umask, tmp_path):
    for path in (tmp_path / "x", tmp_path / ".x.part"):
        path.write_text("old")
        path.chmod(0o666)
    with atomic_write(tmp_path / "x", private=True) as part:
        assert mode(tmp_path / ".x.part") == 0o600  # from its first byte on
        part.write(b"new")
    with atomic_write(tmp_path / "y") as part:
        part.write(b"to publish")
    assert modes(tmp_path) == {"x": 0o600, "y": 0o644}
    (tmp_path / "log").write_text("old\n")
    (tmp_path / "log").chmod(0o666)
    with open_private_file(tmp_path / "log", "ab") as file:
        file.write(b"new\n")
    assert (tmp_path / "log").read_text() == "old\nnew\n" and mode(tmp_path / "log") == 0o600
    (tmp_path / "folder").mkdir(0o755)
    assert mode(make_private_folder(tmp_path / "folder")) == 0o700


def test_what_measure_and_audit_write(usual_umask, inputs, tmp_path, capsys):
    """Sums for their owner; the report, which is made to be handed on, by the umask."""
    (tmp_path / "n.json").write_bytes((inputs / "north.json").read_bytes())
    (tmp_path / "n.json").chmod(0o644)
    given = command("measure", inputs, tmp_path)
    assert run(capsys, *given, "--report", tmp_path / "report")[0] == 0
    published = {"report.html": 0o644, "report.md": 0o644, "audit.json": 0o644}
    assert mode(tmp_path / "n.json") == 0o600 and modes(tmp_path / "report") == published
    assert run(capsys, "audit", tmp_path / "n.json", "--out", tmp_path / "audit")[0] == 0
    assert modes(tmp_path / "audit") == published
    sums = measure([1, 0], [1, 0], sensitive_features=["a", "b"], site="north")
    assert mode(write_sums(sums, tmp_path / "other.json")) == 0o600


def test_what_train_writes(usual_umask, inputs, tmp_path, capsys):
    out = tmp_path / "out"
    assert run(capsys, *command("train", inputs, out))[0] == 0
    expected = {
        "model.safetensors": 0o644,
        "rows.parquet": 0o600,
        "rounds.parquet": 0o600,
        "rounds.png": 0o644,
        "rounds.svg": 0o644,
        "before-after.png": 0o644,
        "before-after.svg": 0o644,
        "run.json": 0o600,
    }
    assert expected.items() <= modes(out).items()


def test_what_an_interrupted_run_keeps(usual_umask, tmp_path):
    folder = tmp_path / "checkpoints"
    folder.mkdir(0o755)
    kept = Checkpoints(folder)
    with kept.guarded():
        assert mode(folder) == 0o700
        for _ in range(2):
            kept.put("0" * 32, 1, lambda: Snapshot(1, {}, {"x": np.zeros(1)}))
        assert modes(folder) == {".lock": 0o600, f"{'0' * 32}.safetensors": 0o600}
        kept.found()[0].chmod(0o644)
        kept.put("0" * 32, 1, lambda: Snapshot(2, {}, {"x": np.zeros(1)}))
        assert mode(kept.found()[0]) == 0o600
    ResultCache(tmp_path / "cells").put("key", {"rows": 3})
    assert mode(tmp_path / "cells") == 0o700 and modes(tmp_path / "cells") == {"key.json": 0o600}


def test_what_a_deployed_run_writes(usual_umask, tmp_path):
    """The app's two halves in one process: its checkpoint, history, notes, schema, sites' sums."""
    pytest.importorskip("flwr")

    from flwr.app import Context, RecordDict
    from flwr.serverapp import strategy as flower

    from fedgft.deploy.init import read_app_config
    from fedgft.deploy.processes import Processes
    from fedgft.flower.client_app import make_client_app
    from fedgft.flower.server_app import serve
    from fedgft.privacy.ledger import open_ledger
    from fedgft.privacy.policy import SitePolicy
    from in_process_grid import InProcessGrid

    rng = np.random.default_rng(0)
    sites = []
    for name in ("north", "south", "east"):
        group = rng.choice(["f", "m"], 200)
        x = rng.normal(size=200).round(3)
        ok = (x + (group == "m") + rng.normal(size=200) > 0.5).astype(int)
        pl.DataFrame({"x": x, "sex": group, "ok": ok}).write_csv(tmp_path / f"{name}.csv")
        sites.append({"site": name, "data": str(tmp_path / f"{name}.csv")})
    out = tmp_path / "run"
    (out / "sites").mkdir(parents=True)
    config = read_app_config(None) | {
        "data": "csv",
        "label": "ok",
        "group": "sex",
        "sites": 3,
        "rounds": 2,
        "out": str(out),
    }
    grid = InProcessGrid([make_client_app()] * 3, sites)
    server = Context(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config=config)
    for context in grid.contexts.values():
        context.run_config = config
    serve(grid, server, flower.FedAvg(min_train_nodes=1, min_available_nodes=1))
    assert modes(out) == {
        "checkpoint.safetensors": 0o600,
        "history.json": 0o600,
        "progress.jsonl": 0o600,
        "schema.json": 0o600,
        "sites": 0o700,
        "sites/site-0.json": 0o600,
        "sites/site-1.json": 0o600,
        "sites/site-2.json": 0o600,
        "model.safetensors": 0o644,
        "report.html": 0o644,
        "report.md": 0o644,
        "audit.json": 0o644,
    }
    node = {"max-epsilon": 5.0, "ledger": str(tmp_path / "ledger.json")}
    context = Context(run_id=1, node_id=1, node_config=node, state=RecordDict(), run_config={})
    with open_ledger(context, "north") as ledger:
        SitePolicy(context, "north").charge(ledger, 0.01)
    assert mode(tmp_path / "ledger.json") == 0o600
    with Processes(tmp_path, tmp_path / "home", tmp_path / "logs") as processes:
        processes.start("one", ["true"])
    assert mode(tmp_path / "logs") == 0o700 and modes(tmp_path / "logs") == {"one.log": 0o600}


# CSV


def formula(cell: str) -> bool:
    """What OWASP's page on CSV injection warns of, and no number."""
    try:
        float(cell)
    except ValueError:
        return cell[:1] in tuple("=+-@\t\r\n") and cell != ""
    return False


def hostile_table(path: Path) -> Path:
    """Classes, groups and sites that are formulas, and numbers that are negative."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=300).round(3)
    pl.DataFrame(
        {
            "=x": x,
            "y": -np.abs(x),
            "town": rng.choice(["@SUM(A1)", "-2+3", "\t=1", "Ulm"], 300),
            "sex": rng.choice(["+f", "m"], 300),
            "ok": np.where(x + rng.normal(size=300) > 0, "=1+1", "-1"),
        }
    ).write_csv(path)
    return path


def test_a_class_that_is_a_formula_is_text_in_what_predict_writes(tmp_path, capsys):
    """From training on such a table to the written and the printed CSV."""
    file = hostile_table(tmp_path / "t.csv")
    train = (
        "train",
        "--data",
        file,
        "--label",
        "ok",
        "--group",
        "sex",
        *QUICK,
        "--method",
        "fedavg",
        "--out",
        tmp_path,
    )
    assert run(capsys, *train)[0] == 0
    predict = ("predict", tmp_path / "model.safetensors", file)
    code, _, err = run(capsys, *predict, "-o", tmp_path / "s.csv")
    assert code == 0 and "that a spreadsheet would run as a formula" in " ".join(err.split())
    code, printed, err = run(capsys, *predict)
    assert code == 0 and "that a spreadsheet would run as a formula" in " ".join(err.split())
    assert printed == (tmp_path / "s.csv").read_text()
    header, *rows = csv.reader(io.StringIO(printed, newline=""))
    assert header == ["'=x", "y", "town", "sex", "ok", "score", "decision"]
    assert not [cell for row in (header, *rows) for cell in row if formula(cell)]
    assert {row[-1] for row in rows} == {"-1", "'=1+1"}  # a class that is a number stays one
    before = pl.read_csv(file)
    assert [float(row[1]) for row in rows] == before["y"].to_list() and before["y"].max() <= 0
    towns = [row[2].removeprefix("'") for row in rows]
    assert towns == before["town"].to_list()
    code, text, err = run(capsys, *predict, "--json", "-o", tmp_path / "s.parquet")
    assert code == 0 and "formulas" not in err
    assert {row["decision"] for row in json.loads(text)} == {"-1", "=1+1"}
    assert set(pl.read_parquet(tmp_path / "s.parquet")["decision"]) == {"-1", "=1+1"}
    code, text, _ = run(capsys, *predict, "--json", "-o", tmp_path / "s.csv")
    assert {row["decision"] for row in json.loads(text)} == {"-1", "=1+1"}


@given(st.lists(st.text("=+-@\t\r\n'\",;.0159eE x＝", max_size=6), min_size=1, max_size=8))
def test_no_text_leads_a_cell_as_a_formula(texts):
    frame = pl.DataFrame({"t": texts, "c": pl.Series(texts, dtype=pl.Categorical)})
    safe, changed = escape_formulas(frame)
    assert changed == 2 * sum(a != b for a, b in zip(texts, safe["t"], strict=True))
    for before, after in zip(texts, safe["t"], strict=True):
        assert after in (before, f"'{before}") and not formula(after)
        if before[:1] not in tuple("=+-@\t\r\n＝"):
            assert after == before
    assert safe["c"].cast(pl.String).to_list() == safe["t"].to_list()
    assert escape_formulas(safe)[1] == 0


def test_numbers_stay_numbers_in_csv(tmp_path):
    frame = pl.DataFrame(
        {
            "a": [-0.5, 1e-9],
            "b": [-3, 4],
            "c": ["-0.5", "+1e5"],
            "d": [None, "-.5"],
            "-e": [1, 2],
            "=f": ["x", "y"],
            "'=f": ["x", "y"],
        }
    )
    path = write_table(frame, tmp_path / "x.csv")
    found = list(csv.reader(path.read_text().splitlines()))
    assert found[0] == ["a", "b", "c", "d", "'-e", "''=f", "'=f"]
    assert [row[1:4] for row in found[1:]] == [["-3", "-0.5", ""], ["4", "+1e5", "-.5"]]


# Markdown

PARSER = MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"])
OURS = {
    "heading",
    "bullet_list",
    "list_item",
    "paragraph",
    "table",
    "thead",
    "tbody",
    "tr",
    "th",
    "td",
    "strong",
    "text",
    "inline",
    "softbreak",
}


def elements(text: str) -> list[tuple[str, str]]:
    """What a viewer makes of Markdown: kinds of elements with what they hold."""
    found = []
    for token in PARSER.parse(text):
        for one in (token, *(token.children or ())):
            found.append((one.type.removesuffix("_open").removesuffix("_close"), one.content))
    return found


HOSTILE = (
    "[north](javascript:alert(1))",
    "](javascript:alert(1))",
    "![x](http://evil.example/t.png)",
    "<img src=x onerror=alert(1)>",
    "<http://evil.example>",
    "`code`",
    "**bold** _it_ ~~no~~",
    "a | b | c",
    "# heading",
    "&lt;script&gt;",
    "[x]: http://evil.example",
    "line\n\n# two",
    "\\[x](javascript:alert(1))",
    "\\",
    "-",
    "1. list",
    "```",
    "$x$",
    "</td><script>",
)


SECTIONS = (
    "In short",
    "Verdicts",
    "Caveats",
    "About this audit",
    "Input files (SHA-256)",
    "Numbers",
    "Definitions",
    "What this audit can and cannot tell you",
)


def test_names_of_sites_are_text_in_a_report(tmp_path, capsys):
    """Every site of `fedgft measure --name` with such a name, to the written report.md."""
    rng = np.random.default_rng(0)
    files = []
    for i, name in enumerate(HOSTILE):
        frame = pl.DataFrame(
            {
                "ok": rng.integers(0, 2, 60),
                "d": rng.integers(0, 2, 60),
                "[sex](javascript:alert(2))": rng.choice([HOSTILE[i], "m"], 60),
            }
        )
        frame.write_csv(tmp_path / "rows.csv")
        files.append(tmp_path / f"{i}.json")
        given = (
            "measure",
            tmp_path / "rows.csv",
            "--label",
            "ok",
            "--decision",
            "d",
            "--group",
            frame.columns[2],
            f"--name={name}",
            "--out",
            files[-1],
        )
        code, _, err = run(capsys, *given)
        assert code == 0, err
    assert run(capsys, "audit", *files, "--out", tmp_path / "out")[0] == 0
    text = (tmp_path / "out" / "report.md").read_text()
    found = elements(text)
    kinds = {kind for kind, _ in found}
    assert kinds - OURS == {"html_block"}, kinds - OURS
    assert [held for kind, held in found if kind == "html_block"] == ["<!-- fedgft audit -->\n"]
    titles = [line for line in text.splitlines() if line.startswith("#")]
    assert titles == ["# Fairness audit", *(f"## {title}" for title in SECTIONS)]
    shown = {held for kind, held in found if kind == "text"}
    for name in HOSTILE:
        assert " ".join(name.split()) in shown or name.count("\n")


@given(st.text("[]()<>!*_`~|#-+=1.)$&;:/\\@ \tawhtps\n", max_size=30) | st.sampled_from(HOSTILE))
def test_an_escaped_text_is_shown_as_it_is_and_is_nothing_else(text):
    clean = " ".join(text.split())
    for page in (escape_markdown(text), f"- ✓ {escape_markdown(text)}"):
        found = elements(page)
        assert {kind for kind, _ in found} <= OURS - {"heading", "strong", "table"}
        shown = "".join(held for kind, held in found if kind == "text")
        assert shown.removeprefix("✓").strip() == clean
    assert unescape_markdown(escape_markdown(text)) == clean


@given(st.lists(st.sampled_from(HOSTILE), min_size=2, max_size=2))
def test_cells_titles_and_notes_of_a_table_are_text(texts):
    first, second = texts
    text = Table(first, (first, second), ((second, first),), 1, (first,)).markdown()
    found = elements(text)
    assert {kind for kind, _ in found} <= OURS - {"heading", "bullet_list", "list_item"}
    assert sum(kind == "td" for kind, _ in found) == 4  # two cells, opened and closed


def test_the_title_of_a_planted_page_is_no_link(tmp_path):
    """README.md of `reproduce` lists pages by their first lines."""
    (tmp_path / "table1.md").write_text("# x](javascript:alert(1)) [y\n- ✓ good\n")
    (tmp_path / "pure.md").write_text("# Pure \\_clients\\_\n")
    found = PARSER.parse(list_pages(tmp_path))
    links = [t.attrs["href"] for one in found for t in one.children or () if t.type == "link_open"]
    assert links == ["table1.md", "pure.md"]
    assert "[Pure \\_clients\\_](pure.md)" in list_pages(tmp_path)


def test_a_site_file_that_is_written_again_is_read_again(usual_umask, tmp_path):
    sums = measure([1, 0, 1], [1, 0, 0], sensitive_features=["=a", "b", "b"], site="=north")
    path = write_sums(sums, tmp_path / "n.json")
    assert list(read_sums(write_sums(read_sums(path), path)).sites) == ["=north"]
