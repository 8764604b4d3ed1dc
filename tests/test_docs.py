"""Every code block of every page runs, or this file states why it does not."""

import re
import shlex
import shutil
import subprocess
import sys
from contextlib import chdir, suppress
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

from fedgft.bench import TRACKS
from fedgft.cli import main
from fedgft.cli.app import app

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


# Pages with text that is no output of the block above.
TEXT = {"deployment.md": "configurations of systemd and nginx; compared with the commands below"}
# Commands with one of these words are parsed but not run.
PARSED = {
    "demo": "twenty replicates of Adult, which must be fetched",
    "reproduce": "the paper: minutes (tests/test_reproduce.py)",
    "deploy": "starts the engine's processes (tests/test_deploy.py)",
    "adult": "fetches a data set",
    "compas": "fetches a data set",
    **dict.fromkeys(TRACKS, "fetches a data set"),
    "board": "the whole benchmark (tests/test_bench_runner.py)",
    "--shard": "half of the benchmark (tests/test_bench_runner.py)",
    "examples/bench_sklearn.py": "fetches a data set (tests/test_examples.py)",
    "submission.csv": "what this example writes (tests/test_bench_submission_commands.py)",
    "examples/audit_sites.py": "compared with the page below",
    "--images": "pictures of the reader (tests/test_image_commands.py)",
}
NEEDS = {"torchvision"}  # no dependency: blocks that import it are only compiled
PIP = r"install (-c constraints\.txt )?(\.|'\.\[\w+\]'|fedgft-[\d.]+-py3-none-any\.whl)"
OTHERS = {  # other programs in shell blocks, and a check of their arguments
    "make": lambda rest: re.search(rf"^{rest.split()[0]}:", (ROOT / "Makefile").read_text(), re.M),
    "pip": lambda rest: re.fullmatch(PIP, rest),
    "python": lambda rest: (ROOT / rest.split()[0]).is_file(),
    "source": lambda rest: rest == ".venv/bin/activate",
    "head": lambda rest: re.fullmatch(r"-\d+ \w+\.csv", rest),
}
spec = spec_from_file_location("refresh_outputs", ROOT / "docs" / "refresh_outputs.py")
outputs = module_from_spec(spec)
sys.modules["refresh_outputs"] = outputs
spec.loader.exec_module(outputs)


def fences(page: Path) -> list[tuple[str, str]]:
    """All code blocks of a page, in order: language and text."""
    return [(block.language, block.text) for block in outputs.read_blocks(page.read_text())]


def blocks(language: str) -> list[tuple[str, str]]:
    return [(p.name, text) for p in PAGES for kind, text in fences(p) if kind == language]


def lines_of(text: str) -> list[str]:
    """The commands of a shell block, without their comments."""
    return [line for each in text.splitlines() if (line := each.split(" #")[0].strip())]


def commands() -> list[str]:
    lines = [line for _, text in blocks("sh") for line in lines_of(text)]
    return [line.replace(" --quiet", "") for line in lines if line.startswith("fedgft ")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_code_block_is_run_or_exempt(page):
    """A block is Python, shell or the output of the block above; none is indented."""
    found = list(outputs.read_blocks(page.read_text()))
    assert {block.language for block in found} <= {"python", "sh", "text"}
    shown = sum(block.output is not None for block in found)
    texts = sum(block.language == "text" for block in found)
    assert shown == texts or page.name in TEXT
    tokens = MarkdownIt("commonmark").parse(page.read_text())
    kinds = [token.info for token in tokens if token.type in ("fence", "code_block")]
    assert kinds == [block.language for block in found]


@pytest.mark.parametrize("page", PAGES[1:], ids=lambda page: page.name)
def test_every_command_is_followed_by_what_it_prints(page):
    """Except where it prints nothing (which a run checks) or cannot run on one host."""
    for block in outputs.read_blocks(page.read_text()):
        if block.language == "sh" and not outputs.ELSEWHERE.search(block.text):
            silent = all(" --quiet" in line or line == "" for line in block.text.splitlines())
            assert block.output or silent, block.text
        if block.output:
            assert block.output.text.strip(" .\n"), f"no output yet: {block.text}"
            assert not re.search(r"/(work|usr|root|home|tmp)/|site-packages", block.output.text)


@pytest.mark.parametrize("line", sorted(set(commands())))
def test_commands_parse(line):
    parsed = app.parse_args(shlex.split(line)[1:], exit_on_error=False, print_error=False)
    assert callable(parsed[0])


def test_other_lines_of_shell_blocks_can_be_run():
    lines = {line for _, text in blocks("sh") for line in lines_of(text)}
    lines = {line for line in lines if not line.startswith("fedgft ")}
    assert len(lines) >= 3
    for line in lines:
        name, _, rest = line.partition(" ")
        assert name in OTHERS and OTHERS[name](rest), line


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    """The sample tables, which all pages use."""
    folder = tmp_path_factory.mktemp("tables")
    with chdir(folder):
        main(["data", "get", "loans"])
    return folder


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_runs_from_top_to_bottom(page, tables, tmp_path):
    """Run every block, and compare what it prints with the page.

    Training whose output the page does not show uses fewer replicates and rounds.
    """
    folder = shutil.copytree(tables, tmp_path / "pages")
    for block in outputs.read_blocks(page.read_text()):
        is_shell = block.language == "sh"
        if is_shell and block.output and is_parsed_only(block.text):
            continue
        if block.output:
            printed = outputs.run_block(block, folder)
            shown = outputs.select(printed, block.selection)
            if "varies" not in block.selection.split():
                same = outputs.is_same_output(block.output.text, shown)
                assert same, f"python docs/refresh_outputs.py {page.stem}\n{block.text}\n{shown}"
        elif is_shell:
            with chdir(folder):
                run_shell(block.text)
        elif block.language == "python":
            code = compile(block.text, page.name, "exec")
            if not any(re.search(rf"^(import|from) {name}\b", block.text, re.M) for name in NEEDS):
                with chdir(folder):
                    exec(code, {})


def is_parsed_only(text):
    lines = [shlex.split(line, comments=True) for line in text.splitlines()]
    return outputs.ELSEWHERE.search(text) or any(PARSED.keys() & set(words) for words in lines)


def test_a_page_that_prints_something_else_is_noticed():
    assert outputs.is_same_output("gap 0.123", "gap  0.124")
    assert not outputs.is_same_output("gap 0.123", "gap 0.133")
    assert not outputs.is_same_output("gap 0.123", "accuracy 0.123")
    assert not outputs.is_same_output("gap 0.123", "gap 0.123 0.123")
    assert not outputs.is_same_output("12,000 rows", "13,000 rows")
    assert not outputs.is_same_output("gap 2.0 points", "gap 2.6 points")
    assert outputs.is_same_output("after 2.1 s on 2026-11-19", "after 13 s on 2026-12-01")


def test_lines_of_an_output_are_selected():
    text = "one\ntwo\nthree\nfour\n"
    assert outputs.select(text, "") == outputs.select(text, "varies") == text
    assert outputs.select(text, "head 1 tail 1") == "one\n...\nfour\n"
    assert outputs.select(text, 'from "two" 2') == "...\ntwo\nthree\n...\n"
    assert outputs.select(text, 'match "o"') == "one\ntwo\n...\nfour\n"
    with pytest.raises(SystemExit, match="no line"):
        outputs.select(text, 'from "five" 1')


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
    from fedgft.deploy.server import FLEET_PATHS

    page = (ROOT / "docs" / "deployment.md").read_text()
    found = list(outputs.read_blocks(page))
    shown = {block.output.start for block in found if block.output}
    texts = [b.text for b in found if b.language == "text" and b.start not in shown]
    service, proxy = texts
    (paths,) = re.findall(r'"\^/v1/fleet/\((.*)\)\$"', proxy)
    assert {f"/v1/fleet/{path}".encode() for path in paths.split("|")} == FLEET_PATHS
    (command,) = re.findall(r"ExecStart=\S*/fedgft (.*)", service)
    parsed = app.parse_args(shlex.split(command), exit_on_error=False, print_error=False)
    assert callable(parsed[0])


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
    page = (ROOT / "docs" / "audit.md").read_text()
    (block,) = [b for b in outputs.read_blocks(page) if b.text.startswith("python examples/")]
    quoted = [line for line in block.output.text.splitlines() if line != "..."]
    assert len(quoted) >= 4 and set(quoted) <= set(said)
    sizes = [path.stat().st_size for path in (tmp_path / "sites" / "sums").glob("*.json")]
    assert len(sizes) == 15 and max(sizes) < 3 * 1024 < 5 * min(sizes)


def test_the_python_page_has_every_public_name_by_task():
    """The table names each of them, and the reference has each under one task."""
    import fedgft

    spec = spec_from_file_location("reference", ROOT / "docs" / "reference.py")
    reference = module_from_spec(spec)
    spec.loader.exec_module(reference)
    listed = [name for names in reference.TASKS.values() for name in names]
    assert sorted(listed) == sorted(fedgft.__all__)
    text = (ROOT / "docs" / "python.md").read_text()
    table = "".join(line for line in text.splitlines() if line.startswith("| "))
    assert [name for name in listed if not re.search(rf"`{name}\b", table)] == []
    for named in re.findall(r"`(?:fedgft\.)([\w.]+)", table):
        value = fedgft
        for part in named.split("."):
            value = getattr(value, part)


def test_tables_are_those_of_the_results():
    """`python docs/tables.py` writes the tables; no number in them is typed by hand."""
    command = [sys.executable, str(ROOT / "docs" / "tables.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


BRITISH = re.compile(
    r"""\b\w*(equalis|optimis|standardis|normalis|organis|summaris|recognis|generalis|minimis|maximis
    |colour|behaviour|favour|neighbour|labelled|modell(ed|ing)|\bcentre|analyse(?!s:\ )|licence
    |offence)\w*""",
    re.IGNORECASE | re.VERBOSE,
)


NAMES_OF_COLUMNS = {"centre", "organisation"}  # of tables, which the commands recognize


@pytest.mark.parametrize(
    "folder", ["docs", "examples", "src/fedgft", "results", "benchmarks", "hardening", "."]
)
def test_spelling_is_american(folder):
    """Names in code, such as the old names in the changelog, may differ."""
    paths = [path for path in (ROOT / folder).glob("*.md" if folder == "." else "**/*")]
    for path in paths:
        if path.suffix in (".md", ".py", ".html", ".ipynb"):
            text = re.sub(r"`[^`\n]+`", "", path.read_text("utf-8"))
            found = {each[0] for each in BRITISH.finditer(text)}
            found -= NAMES_OF_COLUMNS if path.name == "study_session.py" else set()
            assert not found, f"{path.relative_to(ROOT)}: {found}"


def test_pictures_exist_and_are_small():
    folder = ROOT / "docs" / "pictures"
    named = set()
    for page in PAGES:
        for link in re.findall(r"!\[([^\]]*)\]\(([^)]+)\)", page.read_text()):
            assert len(link[0]) > 10, f"{page.name}: {link[1]} has no description"
            assert (page.parent / link[1]).is_file(), f"{page.name}: {link[1]}"
            named.add((page.parent / link[1]).resolve())
    assert {path for path in folder.iterdir() if path not in named} == set()
    assert all(path.stat().st_size < 150_000 for path in folder.iterdir())
    for path in folder.glob("*.svg"):
        assert "http" not in re.sub(r'xmlns[:\w]*="[^"]*"', "", path.read_text())


def test_the_readme_is_short():
    """A newcomer reads it in three minutes: at most 650 words, with code and tables."""
    assert len((ROOT / "README.md").read_text().split()) <= 650
