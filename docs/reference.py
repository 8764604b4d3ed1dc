"""The generated pages of the reference: one per public name, package and command.

`write_pages` writes them to docs/api and docs/cli before Sphinx reads its sources. Git ignores both
folders. What the pages say comes from docstrings and from the table of settings.
"""

import re
import textwrap
from collections.abc import Iterator
from importlib import import_module
from inspect import cleandoc
from pathlib import Path
from typing import Any, get_args, get_origin

from docstring_parser import parse

DOCS = Path(__file__).resolve().parent
TASKS = {  # every name of `fedgft`, in the order in which the reference lists them
    "Train and predict": ("FairClassifier", "FairModel", "load_model"),
    "Load data": ("load", "Dataset"),
    "Simulate a federation": (
        "partition",
        "standardize",
        "simulate",
        "Settings",
        "History",
        "Federation",
    ),
    "Measure the gap of predictions": (
        "statistical_parity_difference",
        "demographic_parity_difference",
        "equal_opportunity_difference",
        "equalized_odds_difference",
        "false_positive_rate_difference",
        "predictive_parity_difference",
        "accuracy_parity_difference",
    ),
    "Audit across sites": ("measure", "measure_file", "read_sums", "SiteSums", "audit", "Audit"),
    "Make a finished model fair": ("adjust", "DecisionRule", "load_rule"),
    "Train in your own loop": ("Penalty", "price_objective"),
    "Metrics": ("get_metric", "Metric"),
    "Errors and warnings": ("FedgftError", "NotEstimableWarning", "TargetMissedWarning"),
}
PACKAGES = ("metrics", "algorithms", "engine", "data", "auditing", "study", "theory", "flower")
VALUES = {int: "number", float: "number", str: "text", Path: "path", bool: ""}


def write_pages() -> None:
    """Write all generated pages, and remove those of names and commands that no longer exist."""
    pages = {}
    package = import_module("fedgft")
    homes = {find_home(getattr(package, name)) for name in package.__all__}
    for title, names in TASKS.items():
        for name in names:
            pages[f"api/{file_name(name)}.md"] = describe_name(name, title)
    for short in PACKAGES:
        pages[f"api/{short}.md"] = describe_package(short, homes)
    for path, command in list_commands():
        pages[f"cli/{path.replace(' ', '-')}.md"] = describe_command(path, command)
    for folder in ("api", "cli"):
        (DOCS / folder).mkdir(exist_ok=True)
        for page in (DOCS / folder).glob("*.md"):
            if f"{folder}/{page.name}" not in pages:
                page.unlink()
    for name, text in pages.items():
        page = DOCS / name
        if not page.exists() or page.read_text("utf-8") != text:
            page.write_text(text, "utf-8")


def file_name(name: str) -> str:
    """The stem of the page of a name; some disks cannot hold `Audit.html` beside `audit.html`."""
    is_twin = name != name.lower() and name.lower() in import_module("fedgft").__all__
    return f"{name}-class" if is_twin else name


def find_home(value: Any) -> str:
    """The module and the name under which a class or function was defined."""
    return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', '')}"


def summarize(value: Any) -> str:
    """The first paragraph of a docstring, on one line."""
    return " ".join(cleandoc(value.__doc__ or "").partition("\n\n")[0].split())


def list_directive(path: str, value: Any) -> list[str]:
    """The lines that insert the docstring of a class or function."""
    if isinstance(value, type):
        # methods that scikit-learn adds, whose docstrings refer to its own pages
        added = [name for name in dir(value) if re.fullmatch(r"set_\w+_request", name)]
        excluded = [f"   :exclude-members: {', '.join(added)}"] if added else []
        return [f".. autoclass:: {path}", "   :members:", *excluded, ""]
    return [f".. autofunction:: {path}", ""]


def find_guides(name: str) -> list[str]:
    """Links to the pages of the documentation whose text or code names the object."""
    pattern = re.compile(rf"\bfedgft\.{name}\b|\bimport [^\n]*\b{name}\b|`{name}\b")
    links = []
    for page in sorted(DOCS.glob("*.md")):
        text = page.read_text("utf-8")
        title = re.search(r"^# (.+)$", text, re.MULTILINE)
        if title and page.stem not in ("python", "index") and pattern.search(text):
            links.append(f"[{title[1]}](../{page.name})")
    return links


def describe_name(name: str, task: str) -> str:
    """The page of one public name: docstring with types, guides that use it, and its neighbors."""
    value = getattr(import_module("fedgft"), name)
    lines = [f"# {name}", "", f"*{task}* · `import fedgft`", "", "```{eval-rst}"]
    lines += [*list_directive(f"fedgft.{name}", value), "```", ""]
    guides = find_guides(name)
    if guides:
        lines += [f"**Guides:** {', '.join(guides)}", ""]
    others = [f"[`{each}`]({file_name(each)}.md)" for each in TASKS[task] if each != name]
    lines += [f"**See also:** {', '.join([*others, '[all names](../python.md)'])}", ""]
    return "\n".join(lines)


def describe_package(short: str, elsewhere: set[str]) -> str:
    """The page of a package: its docstring, and every public name that has no page of its own."""
    package = import_module(f"fedgft.{short}")
    lines = [f"# fedgft.{short}", "", "```{eval-rst}", f".. automodule:: fedgft.{short}", "```", ""]
    seen = set(elsewhere)
    for name in sorted(package.__all__, key=str.casefold):
        value = getattr(package, name)
        home = find_home(value)
        if not callable(value) or not home.startswith("fedgft."):
            continue
        if home in elsewhere and name in import_module("fedgft").__all__:
            lines += [f"`{name}` is [`fedgft.{name}`]({file_name(name)}.md).", ""]
        elif home not in seen:
            seen.add(home)
            lines += [f"## {name}", "", "```{eval-rst}"]
            lines += [*list_directive(f"fedgft.{short}.{name}", value), "```", ""]
    return "\n".join(lines)


def list_commands(group: Any = None, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the words and the app of every command, such as "deploy local"."""
    cli = import_module("fedgft.cli.app")
    for name in group or cli.app:
        if name.startswith("-"):
            continue
        words = f"{path} {name}".strip()
        command = cli.load_command(words.split())
        if command.default_command is not None:
            yield words, command
        yield from list_commands(command, words)


def describe_command(path: str, command: Any) -> str:
    """The page of one command: purpose, examples, and every option with its type and default."""
    function = command.default_command
    parsed = parse(function.__doc__ or "")
    helps = {each.arg_name: each.description for each in parsed.params}
    lines = [f"# fedgft {path}", ""]
    for text in (parsed.short_description, parsed.long_description):
        if text:
            lines += [escape(textwrap.dedent(text)), ""]
    examples = re.search(r"^Examples\n-+\n(.*)", cleandoc(function.__doc__ or ""), re.M | re.S)
    if examples:
        lines += ["```sh", examples[1].strip(), "```", ""]
    tables: dict[str, list[str]] = {}
    for argument in command.assemble_argument_collection():
        title = next((group._name for group in argument.parameter.group or ()), "Parameters")
        text = argument.parameter.help or helps.get(argument.field_info.name) or ""
        if argument.names == ("*",) or argument.parameter.parse is False:
            continue
        tables.setdefault(title, []).append(describe_option(argument, " ".join(text.split())))
    for title, rows in tables.items():
        heading = {"Parameters": "Options"}.get(title, title)
        lines += [f"## {heading}", "", "| option | values | meaning |", "|---|---|---|"]
        lines += [*rows, ""]
    return "\n".join(lines)


def describe_option(argument: Any, text: str) -> str:
    """One row of the table of options."""
    default = argument.field_info.default
    shown = re.search(r"\s*\[default: (.+?)\]", text)
    text = escape(re.sub(r"\s*\[default: .+?\]", "", text))
    if shown:
        text += f" Default: {escape(shown[1])}."
    elif argument.required:
        text += " **Required.**"
    elif default not in (None, False, "", ()) and not isinstance(default, type):
        values = default if isinstance(default, tuple | list) else (default,)
        text += f" Default: `{' '.join(map(str, values))}`."
    names = " ".join(f"`{name}`" for name in argument.names)
    return f"| {names} | {name_values(argument.hint)} | {text} |"


def name_values(hint: Any) -> str:
    """What an option takes: choices, or a kind of value; "..." if it takes several."""
    kinds = [each for each in get_args(hint) if each is not type(None)]
    if get_origin(hint) in (tuple, list):
        return f"{name_values(kinds[0])} ..."
    if str(get_origin(hint)) == "typing.Literal":
        return ", ".join(f"`{choice}`" for choice in kinds)
    if kinds:
        return name_values(kinds[0])
    return VALUES.get(hint, "text")


def escape(text: str) -> str:
    """Text of a help message as Markdown, with options as code."""
    text = text.replace("|", "\\|").replace("*", "\\*").replace("<", "&lt;")
    return re.sub(r"(?<![\w`-])(--[a-z][a-z-]*[a-z])\b(?!`)", r"`\1`", text)


def list_names() -> str:
    """All public names by task, with their pages, for docs/python.md."""
    package = import_module("fedgft")
    lines = ["## Reference by task", ""]
    for title, names in TASKS.items():
        lines += [f"### {title}", "", "| name | purpose |", "|---|---|"]
        for name in names:
            summary = escape(summarize(getattr(package, name)))
            lines.append(f"| [`{name}`](api/{file_name(name)}.md) | {summary} |")
        lines.append("")
    lines += ["### Packages", "", "| package | content |", "|---|---|"]
    for short in PACKAGES:
        value = import_module(f"fedgft.{short}")
        lines.append(f"| [`fedgft.{short}`](api/{short}.md) | {escape(summarize(value))} |")
    pages = [f"api/{file_name(name)}" for names in TASKS.values() for name in names]
    return "\n".join([*lines, "", *list_tree([*pages, *(f"api/{name}" for name in PACKAGES)])])


def link_names(text: str) -> str:
    """The page with each public name in a table linked to its page."""
    names = {name for group in TASKS.values() for name in group}

    def link(found: re.Match[str]) -> str:
        name = found[1]
        return f"[`{name}`](api/{file_name(name)}.md)" if name in names else found[0]

    lines = text.splitlines()
    linked = (re.sub(r"`(\w+)`", link, line) if line.startswith("| ") else line for line in lines)
    return "\n".join(linked)


def list_help() -> str:
    """All commands by purpose, with their pages, for docs/commands.md."""
    cli = import_module("fedgft.cli.app")
    commands = dict(list_commands())
    lines = []
    for title, names in cli.COMMANDS.items():
        lines += [f"## {title}", "", "| command | purpose |", "|---|---|"]
        for path, command in commands.items():
            if path.split()[0] in names:
                summary = escape(summarize(command.default_command))
                lines.append(f"| [`fedgft {path}`](cli/{path.replace(' ', '-')}.md) | {summary} |")
        lines.append("")
    return "\n".join([*lines, *list_tree([f"cli/{path.replace(' ', '-')}" for path in commands])])


def list_tree(pages: list[str]) -> list[str]:
    """The lines that put pages into the menu."""
    return ["```{toctree}", ":hidden:", "", *pages, "```", ""]
