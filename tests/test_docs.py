"""Docs cannot drift: every block of every page runs, or says here why it does not."""

import json
import re
import shlex
import shutil
import subprocess
import sys
from contextlib import chdir, suppress
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

from fedgft.cli import main
from fedgft.cli.commands import app

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


# Blocks of text are what a command prints, or formulas; every other page must do without them.
TEXT = {
    "README.md": "the demo's table; compared below with what `make results` kept of it",
    "audit.md": "of what examples/audit_sites.py prints; compared with it below",
    "deployment.md": "configurations of systemd and nginx; compared with the commands below",
    "idea.md": "formulas",
}
# Commands that are only parsed here, by what they contain.
PARSED = {
    "demo": "twenty replicates of Adult, which must be fetched",
    "reproduce": "the paper: minutes (tests/test_reproduce.py)",
    "deploy": "starts the engine's processes (tests/test_deploy.py)",
    "get": "fetches a data set",
    "adult": "fetches a data set",
    "compas": "fetches a data set",
    "adult-sites/sums": "what examples/audit_sites.py makes; it is run below",
    "--images": "pictures that are the reader's own (tests/test_pictures.py)",
}
NEEDS = {"torchvision": "is no dependency of ours"}  # blocks that import it are only compiled
PIP = r"install (-c constraints\.txt )?(\.|'\.\[flower\]'|fedgft-[\d.]+-py3-none-any\.whl)"
OTHERS = {  # lines of shell blocks that are none of our commands, and whether they can be true
    "make": lambda rest: re.search(rf"^{rest.split()[0]}:", (ROOT / "Makefile").read_text(), re.M),
    "pip": lambda rest: re.fullmatch(PIP, rest),
    "python": lambda rest: (ROOT / rest.split()[0]).is_file(),
}
FENCE = re.compile(r"^( *)(```+|~~~+)([^\n]*)\n(.*?)^\1\2 *$", re.DOTALL | re.MULTILINE)


def fences(page: Path) -> list[tuple[str, str]]:
    """All code blocks of a page, in order: language and text."""
    return [(found[3].strip(), found[4]) for found in FENCE.finditer(page.read_text())]


def blocks(language: str) -> list[tuple[str, str]]:
    return [(p.name, text) for p in PAGES for kind, text in fences(p) if kind == language]


def lines_of(text: str) -> list[str]:
    """The commands of a shell block, without their comments."""
    return [line for each in text.splitlines() if (line := each.split(" #")[0].strip())]


def commands() -> list[str]:
    lines = [line for _, text in blocks("sh") for line in lines_of(text)]
    return [line for line in lines if line.startswith("fedgft ")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_block_escapes(page):
    """A block is Python, shell or, where TEXT says why, text; no other kind, and none indented."""
    kinds = {kind for kind, _ in fences(page)}
    assert kinds <= {"python", "sh", "text"}
    assert ("text" in kinds) == (page.name in TEXT)
    tokens = MarkdownIt("commonmark").parse(page.read_text())
    found = [token.info for token in tokens if token.type in ("fence", "code_block")]
    assert found == [kind for kind, _ in fences(page)]


@pytest.mark.parametrize("line", sorted(set(commands())))
def test_commands_parse(line):
    parsed = app.parse_args(shlex.split(line)[1:], exit_on_error=False, print_error=False)
    assert callable(parsed[0])


def test_other_lines_of_shell_blocks_can_be_run():
    lines = {line for _, text in blocks("sh") for line in lines_of(text)} - set(commands())
    assert len(lines) >= 3
    for line in lines:
        name, _, rest = line.partition(" ")
        assert name in OTHERS and OTHERS[name](rest), line


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    """The tables that the start page makes, which the other pages use."""
    folder = tmp_path_factory.mktemp("tables")
    (code,) = [text for kind, text in fences(ROOT / "docs" / "index.md") if kind == "python"]
    with chdir(folder):
        exec(compile(code, "index.md", "exec"), {})
    return folder


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_runs_from_top_to_bottom(page, tables, tmp_path):
    """Every block, in a folder with the tables; commands that train with fewer replicates and
    rounds."""
    folder = shutil.copytree(tables, tmp_path / "pages")
    with chdir(folder):
        for kind, text in fences(page):
            if kind == "python":
                code = compile(text, page.name, "exec")
                if not any(f"import {name}" in text for name in NEEDS):
                    exec(code, {})
            elif kind == "sh":
                run_shell(text)


def run_shell(text):
    for raw in text.splitlines():
        words = shlex.split(raw, comments=True)
        if words[:1] != ["fedgft"] or PARSED.keys() & set(words):
            continue
        if words[1] in ("train", "compare", "frontier"):
            words += [] if "--rounds" in words else ["--rounds", "3"]
            words += ["--seeds", "2"]
        try:
            main(words[1:])
            code = 0
        except SystemExit as ended:
            code = ended.code
        assert code == (3 if "exit code 3" in raw else 0), raw


@pytest.mark.parametrize(
    "name",
    [
        "",
        "deploy keys",
        "deploy init",
        "deploy server",
        "deploy gate",
        "deploy site",
        "deploy local",
        "data list",
        "data get",
        *(n for n in app if not n.startswith("-")),
    ],
)
def test_every_command_has_help(name, capsys):
    with suppress(SystemExit):
        main([*name.split(), "--help"])
    assert "Usage: fedgft" in capsys.readouterr().out


def test_configurations_of_other_programs_fit_ours():
    """The proxy passes what the gate passes; the service's command parses."""
    from fedgft.deploy.gate import PASSED

    service, proxy = (text for page, text in blocks("text") if page == "deployment.md")
    (paths,) = re.findall(r'"\^/v1/fleet/\((.*)\)\$"', proxy)
    assert {f"/v1/fleet/{path}".encode() for path in paths.split("|")} == PASSED
    (command,) = re.findall(r"ExecStart=\S*/fedgft (.*)", service)
    parsed = app.parse_args(shlex.split(command), exit_on_error=False, print_error=False)
    assert callable(parsed[0])


def test_there_is_something_to_test():
    assert len(blocks("python")) >= 20
    assert len(commands()) >= 50


def quotes() -> list[tuple[str, str]]:
    lines = [(page.name, line) for page in PAGES for line in page.read_text().splitlines()]
    return [(name, line[2:].strip()) for name, line in lines if line.startswith("> ")]


@pytest.mark.parametrize(("page", "line"), quotes())
def test_quoted_findings_are_in_the_results(page, line):
    found = "\n".join(path.read_text() for path in sorted((ROOT / "results").rglob("*.md")))
    assert f"- {line}\n" in found, f"{page} quotes what `make results` does not say"


def test_the_audit_of_adult_says_what_the_page_quotes(tmp_path):
    command = [sys.executable, str(ROOT / "examples" / "audit_sites.py"), str(tmp_path / "sites")]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    quoted = [
        line for page, text in blocks("text") if page == "audit.md" for line in text.splitlines()
    ]
    assert len(quoted) >= 4 and set(quoted) <= set(said)
    sizes = [path.stat().st_size for path in (tmp_path / "sites" / "sums").glob("*.json")]
    assert len(sizes) == 15 and max(sizes) < 3 * 1024 < 5 * min(sizes)


def test_results_are_complete_and_hold_what_was_asked_for():
    """The full run: every experiment, 20 replicates, no figure missing, and the main claims."""
    results = ROOT / "results"
    from fedgft.experiments.paper import NAMES

    for name in NAMES:
        text = (results / f"{name}.md").read_text()
        assert "20 replicates" in text or name == "simpson"
        for figure in re.findall(r"\]\((figures/.*?)\)", text):
            assert (results / figure).stat().st_size > 0
    table = (results / "table1.md").read_text()
    for line in (
        "✓ 72 of 72 published numbers of the four methods",
        "✓ 18 of 18 published numbers of FedGFT",
        "✓ FedGFT has the smallest gap of the four methods in 12 of 12 cells (paper protocol",
    ):
        assert f"- {line}" in table
    for data, least in (("Adult", 84), ("COMPAS", 64)):
        (said,) = re.findall(f"- · {data}, alpha 0.5, held out: (.*)", table)
        shares = [float(share) for share in re.findall(r"(\d+\.\d)%", said)]
        assert len(shares) == 2 and min(shares) >= least  # the SP runs and the EOP runs
    assert not re.search("- ✗ .*pure clients: the gap", (results / "pure.md").read_text())
    assert len(quotes()) >= 20


def test_the_demo_in_the_readme_is_the_demo():
    """Its table, its sentences and the gaps in its figure are those of one run."""
    kept = (ROOT / "results" / "demo.txt").read_text()
    ((_, table),) = [block for block in blocks("text") if block[0] == "README.md"]
    assert table.strip() in kept
    readme = (ROOT / "README.md").read_text()
    (sentences,) = re.findall(r"^On people nobody trained on.*$", readme, re.M)
    assert sentences in " ".join(kept.split())
    figure = (ROOT / "docs" / "sites.svg").read_text()
    for method in ("FedAvg", "LFT", "FedGFT"):
        (clients,) = re.findall(rf"^ {method}  .*?(\S+)±\S+ +\S+ +\S+$", table, re.M)
        assert f">{clients}<" in figure, method


def scores_of(text: str) -> dict[tuple[str, str], tuple[float, float]]:
    """(alpha, method) -> accuracy, SP gap of scores on the federation's rows; held out."""
    part = text.split("protocol heldout, 3 replicates: gaps of scores on the federation's")[1]
    rows = re.findall(r"^\| (\S+) \| (\w+) \| (\S+) ± \S+ \| (\S+) ±", part.split("\n\n")[1], re.M)
    return {(alpha, name): (float(right), float(gap)) for alpha, name, right, gap in rows}


def test_the_table_of_celeba_holds_what_was_asked_for():
    """Half the gap of FedAvg or less, for two points of accuracy or less, at every alpha."""
    found = scores_of((ROOT / "results" / "celeba" / "table1.md").read_text())
    assert len(found) == 12
    for alpha, least in (("100", 89.5), ("5", 88.0), ("0.5", 88.0)):
        (plain, gap), (fair, less) = found[alpha, "FedAvg"], found[alpha, "FedGFT"]
        assert plain >= least and less <= gap / 2 and fair >= plain - 2


@pytest.mark.parametrize("page", ["README.md", "docs/images.md"])
def test_speeds_on_a_gpu_are_those_that_were_printed(page):
    lines = (ROOT / "results" / "celeba" / "speed.jsonl").read_text().splitlines()
    rows, text = [json.loads(line) for line in lines], (ROOT / page).read_text()
    for size in (64, 224):
        *plain, fedavg, fair = [row for row in rows if row["size"] == size]
        told = [f"{row['images_per_second']:,}" for row in (*plain, fedavg, fair)]
        assert (
            f"| {size} | {' | '.join(told)} | {fair['seconds'] / fedavg['seconds']:.2f} |" in text
        )


@pytest.mark.parametrize(
    ("folder", "told"),
    [("results", "{bad} of {all} claims that were checked do not\nhold"),
     ("results/celeba", "{good} of {all}\nclaims holds")],
)  # fmt: skip
def test_the_readme_counts_the_claims(folder: str, told: str) -> None:
    pattern = r"^\| all \| (\d+) \| (\d+) \| (\d+) \|$"
    (row,) = re.findall(pattern, (ROOT / folder / "README.md").read_text(), re.M)
    told = told.format(all=row[0], good=row[1], bad=row[2])
    assert told in (ROOT / "README.md").read_text()


WORKLOADS = {
    "W1": "W1: 10 clients, 20 rounds", "W1x20": "W1x20: 20 replicates in one call",
    "W2a": "W2a: 100 clients", "W2b": "W2b: 1,000 clients", "mlp": "W1 with a hidden layer of 64",
}  # fmt: skip


def recorded(name: str) -> list[dict]:
    return [json.loads(line) for line in (ROOT / "results" / name).read_text().splitlines()]


def test_speeds_are_those_that_were_measured():
    text = (ROOT / "README.md").read_text()
    rows = {(row["case"], row["executor"]): row for row in recorded("speed.jsonl")}
    for (case, executor), row in rows.items():
        if case in WORKLOADS:
            ratio = f"{row['ratio']:.{0 if row['ratio'] >= 10 else 1}f}"
            assert (
                f"| {WORKLOADS[case]} | {executor} | {row['seconds']:.3f} | "
                f"{row['plain_seconds']:.1f} | {ratio} | {row['accuracy']:.4f} / "
                f"{row['plain_accuracy']:.4f} |" in text
            )
    growth, penalty, startup = (rows[c, "fused"] for c in ("growth", "penalty", "startup"))
    both, test = (penalty["ratios"][f"W1x20 {rows}"] for rows in ("both", "test"))
    flat = " ".join(text.split())
    assert f"a cohort of 100 costs {growth['ratio']:.1f} times what" in flat
    assert f"FedGFT takes {both:.2f} times as long as FedAvg" in flat
    assert f"and {test:.2f} times where FedAvg is measured" in flat
    assert f"A fresh process has W1 done after {startup['seconds']:.1f} s" in flat


def test_peers_are_those_that_were_timed():
    text = (ROOT / "README.md").read_text()
    for row in recorded("peers.jsonl"):
        assert (
            f"| {row['peer']} {row['version']} | {row['workload']} | {row['peer_seconds']:.1f} | "
            f"{row['seconds']:.3f} | {row['ratio']} | {row['peer_accuracy']:.4f} / "
            f"{row['accuracy']:.4f} |" in text
        )
