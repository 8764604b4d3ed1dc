"""Write what the commands of the docs print below them: `python docs/refresh_outputs.py`.

A ```text block that follows a ```sh or ```python block holds its output, as a terminal of 80
columns shows it. A comment between the two blocks selects lines of a long output:

    <!-- output: head 8 -->          the first eight lines
    <!-- output: tail 5 -->          the last five
    <!-- output: from "Sites" 6 -->  six lines from the first line that begins with "Sites"
    <!-- output: match "  south" -->  the lines that contain "  south"
    <!-- output: varies tail 5 -->   the same in every run only in its form: random noise, ports

Lines that are left out become a line with three dots. The blocks of a page run from top to bottom
in a folder with the sample tables. With `--check` nothing is written, and a page whose outputs
differ is listed; numbers may differ by what another processor rounds differently. Names of pages
limit the work: `python docs/refresh_outputs.py tutorial audit`.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
COLUMNS = 80
LIMIT = 1200  # seconds that one block may take
ELSEWHERE = re.compile(  # blocks with such a line need other hosts, pictures, hours or an install
    r"^(fedgft (deploy (server|gate|site|init)|demo|reproduce)|pip|make|source)\b"
    r"|^fedgft bench (merge|--out|--shard)|^fedgft bench score .*--board"
    r"|^fedgft .*--images",
    re.MULTILINE,
)
FENCE = re.compile(r"^( *)(```+|~~~+)([^\n]*)\n(.*?)^\1\2 *$", re.DOTALL | re.MULTILINE)
SELECTION = re.compile(r"\s*(?:<!-- output: ([^\n]*) -->\s*)?")
CODES = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")
NUMBER = re.compile(r"(?<![\w.])[-+]?\d[\d,]*(?:\.\d+)?")
VARYING = (  # what differs between runs: seconds, dates, digests
    (re.compile(r"\b\d+(\.\d+)? (s|seconds|minutes?)\b"), "TIME"),
    (re.compile(r"\b\d{4}-\d{2}-\d{2}\b|\b\d{1,2} [A-Z][a-z]+ \d{4}\b"), "DATE"),
    (re.compile(r"\b[0-9a-f]{8,64}\b"), "DIGEST"),
)
RUNNER = """
import os, pty, sys, fcntl, struct, termios
child, descriptor = pty.fork()
if child == 0:
    fcntl.ioctl(1, termios.TIOCSWINSZ, struct.pack("HHHH", 50, int(sys.argv[1]), 0, 0))
    os.execvp(sys.argv[2], sys.argv[2:])
while True:
    try:
        data = os.read(descriptor, 65536)
    except OSError:
        break
    if not data:
        break
    os.write(1, data)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@dataclass(frozen=True)
class Block:
    """A block of code on a page.

    Attributes
    ----------
    language, text
        "sh", "python" or "text", and the lines.
    start, end
        Where the text stands on the page.
    output
        The block that holds what this one prints, or None.
    selection
        The lines of the output that the page shows, such as "head 8"; empty for all.
    """

    language: str
    text: str
    start: int
    end: int
    output: "Block | None" = None
    selection: str = ""


def read_blocks(text: str) -> Iterator[Block]:
    """Yield the blocks of a page in order; a block with output is followed by its output."""
    found = list(FENCE.finditer(text))
    for position, match in enumerate(found):
        output = None
        selection = ""
        after = found[position + 1] if position + 1 < len(found) else None
        if match[3] in ("sh", "python") and after and after[3] == "text":
            gap = SELECTION.fullmatch(text, match.end(), after.start())
            if gap:
                output = Block("text", after[4], after.start(4), after.end(4))
                selection = gap[1] or ""
        yield Block(match[3], match[4], match.start(4), match.end(4), output, selection)


def run_block(block: Block, folder: Path) -> str:
    """Run a block in the folder, and return what it prints on a terminal of 80 columns.

    Ends the program if a command fails, unless its line says `# exit code 3`.
    """
    environment = {**os.environ, "NO_COLOR": "1", "TERM": "dumb", "COLUMNS": str(COLUMNS)}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment |= {"PYTHONPATH": str(ROOT / "src"), "PYTHONUNBUFFERED": "1"}
    if block.language == "python":
        environment["PYTHONWARNINGS"] = "ignore"  # they name files of this machine
        command = [sys.executable, "-c", block.text]
    else:
        lines = [f'fedgft() {{ "{sys.executable}" -m fedgft "$@"; }}']
        for line in filter(str.strip, block.text.splitlines()):
            found = re.search(r"exit code (\d)", line)
            expected = found[1] if found else 0
            lines += [line, f"code=$?; [ $code = {expected} ] || exit 99"]
        command = ["bash", "-c", "\n".join(lines)]
    command = [sys.executable, "-c", RUNNER, str(COLUMNS), *command]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, timeout=LIMIT, check=False
    )
    text = clean(done.stdout.decode("utf-8", "replace"), folder)
    if done.returncode:
        raise SystemExit(f"a block fails:\n{block.text}\n{text}{done.stderr.decode()}")
    return text


def clean(text: str, folder: Path) -> str:
    """The lines that remain on the screen, without codes of terminals."""
    lines = []
    for line in CODES.sub("", text.replace("\r\n", "\n")).split("\n"):
        lines.append(line.rsplit("\r", 1)[-1].rstrip())
    text = "\n".join(lines).replace(f"{folder}/", "").strip("\n")
    return f"{text}\n" if text else ""


def select(text: str, selection: str) -> str:
    """The lines of an output that the page shows."""
    lines = text.splitlines()
    if selection.replace("varies", "").strip() == "":
        return text
    shown = set()
    for found in re.finditer(r'(head|tail) (\d+)|from "([^"]+)" (\d+)|match "([^"]+)"', selection):
        if found[5]:
            shown |= {at for at, line in enumerate(lines) if found[5] in line}
        elif found[1] == "head":
            shown |= set(range(min(int(found[2]), len(lines))))
        elif found[1] == "tail":
            shown |= set(range(max(0, len(lines) - int(found[2])), len(lines)))
        else:
            starts = [at for at, line in enumerate(lines) if line.strip().startswith(found[3])]
            if not starts:
                raise SystemExit(f'no line of the output begins with "{found[3]}":\n{text}')
            shown |= set(range(starts[0], min(starts[0] + int(found[4]), len(lines))))
    kept = []
    for at, line in enumerate(lines):
        if at in shown:
            kept.append(line)
        elif not kept or kept[-1] != "...":
            kept.append("...")
    return "\n".join(kept) + "\n"


def is_same_output(one: str, other: str) -> bool:
    """Whether two outputs agree: the words exactly, the numbers up to differences of machines."""
    texts = []
    for text in (one, other):
        for pattern, name in VARYING:
            text = pattern.sub(name, text)
        texts.append(text)
    words = [re.sub(r"[─━═┄╌]+", "-", NUMBER.sub("#", text)).split() for text in texts]
    numbers = [[float(each.replace(",", "")) for each in NUMBER.findall(t)] for t in texts]
    if words[0] != words[1] or len(numbers[0]) != len(numbers[1]):
        return False
    return all(
        abs(a - b) <= max(0.3 if abs(a) > 1 else 0.005, 0.02 * abs(a))
        for a, b in zip(*numbers, strict=True)
    )


def make_tables(folder: Path) -> None:
    """Write the sample tables into the folder, and a link to the examples."""
    run_block(Block("sh", "fedgft data get loans\n", 0, 0), folder)
    (folder / "examples").symlink_to(ROOT / "examples")


def refresh(page: Path, *, skip: Collection[str] = ()) -> str:
    """Run the blocks of a page; return the page with every output as it is now.

    Commands of `ELSEWHERE`, and those that contain one of the words of `skip`, do not run; their
    outputs stay.
    """
    text = page.read_text("utf-8")
    blocks = list(read_blocks(text))
    if not any(block.output for block in blocks):
        return text
    last = max(block.start for block in blocks if block.output)
    replaced = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_tables(folder)
        for block in blocks:
            runs = block.language == "sh" or block.output  # programs leave nothing for commands
            if block.language == "text" or not runs or block.start > last:
                continue
            is_command = block.language == "sh"
            if is_command and (ELSEWHERE.search(block.text) or set(skip) & set(block.text.split())):
                continue
            printed = run_block(block, folder)
            if block.output:
                shown = select(printed, block.selection)
                replaced.append((block.output.start, block.output.end, shown))
    for start, end, shown in reversed(replaced):
        text = text[:start] + shown + text[end:]
    return text


def list_differences(text: str, now: str) -> list[tuple[str, str, str]]:
    """The blocks whose outputs differ: the command, what the page says, what it prints."""
    found = []
    for old, new in zip(read_blocks(text), read_blocks(now), strict=True):
        is_fixed = old.output and new.output and "varies" not in old.selection.split()
        if is_fixed and not is_same_output(old.output.text, new.output.text):
            found.append((old.text, old.output.text, new.output.text))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pages", nargs="*", help="names of pages, such as tutorial; all if none")
    parser.add_argument("--check", action="store_true", help="change nothing")
    parser.add_argument("--skip", nargs="*", default=(), help="leave out blocks with these words")
    given = parser.parse_args()
    pages = [page for page in PAGES if not given.pages or page.stem in given.pages]
    stale = []
    for page in pages:
        text = page.read_text("utf-8")
        now = refresh(page, skip=given.skip)
        if given.check:
            stale += [page.name] if list_differences(text, now) else []
        elif now != text:
            page.write_text(now, "utf-8")
            stale.append(page.name)
    if stale:
        print(("out of date: " if given.check else "written: ") + ", ".join(stale))
    sys.exit(bool(given.check and stale))


if __name__ == "__main__":
    main()
