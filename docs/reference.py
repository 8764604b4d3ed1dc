"""What the reference pages say, read from the code: signatures, docstrings, help texts."""

import ast
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

from cyclopts import App
from markdown_it import MarkdownIt
from markupsafe import Markup

PACKAGES = (  # of fedgft, which is the first
    "", "metrics", "federated", "engine", "data", "audit", "experiments", "theory", "flower",
)  # fmt: skip
_plain = MarkdownIt("zero").enable("backticks")  # docstrings are no Markdown, but have code in them


def inline(text: str) -> Markup:
    """Text as HTML: escaped, with `code` as code."""
    return Markup(_plain.renderInline(text))


@dataclass(frozen=True)
class Item:
    """An option or a parameter."""

    name: str
    about: str
    default: str = ""
    choices: str = ""


@dataclass(frozen=True)
class Entry:
    """A command or a public name."""

    name: str
    anchor: str
    paragraphs: list[str]
    items: list[Item]
    signature: str = ""
    also: str = ""  # where it is told, if not here
    methods: tuple["Entry", ...] = ()


@dataclass(frozen=True)
class Section:
    name: str
    anchor: str
    about: str
    entries: list[Entry]


# --- the command line


def walk(app: App, path: tuple[str, ...] = ("fedgft",)) -> Iterator[tuple[str, App]]:
    """Every command, also those of commands."""
    if app.default_command is not None:
        yield " ".join(path), app
    for name in app:
        if not name.startswith("-"):
            yield from walk(app[name], (*path, name))


def commands() -> list[Entry]:
    from fedgft.cli.commands import app

    everywhere = _command("fedgft", app.meta)
    about = ["Options that go with any command, before or behind its name."]
    return [replace(everywhere, paragraphs=about), *(_command(n, each) for n, each in walk(app))]


def _command(name: str, app: App) -> Entry:
    text = inspect.getdoc(app.default_command) or ""
    said = text.partition("\nParameters\n")[0]
    arguments = app.assemble_argument_collection(parse_docstring=True)
    options = [_option(each) for each in arguments if each.show]
    return Entry(name, name.replace(" ", "-"), _paragraphs(said), options)


def _option(argument: Any) -> Item:
    help_ = " ".join((argument.parameter.help or "").split())
    said, _, default = help_.partition("[default:")
    if default:
        default = default.rpartition("]")[0].strip()
    elif argument.required:
        default = "required"
    elif argument.show_default and argument.field_info.default not in (False, ()):
        value = argument.field_info.default
        default = argument.show_default(value) if callable(argument.show_default) else str(value)
    rest = help_.rpartition("]")[2].strip(" .") if "[default:" in help_ else ""
    about = " ".join(part for part in (said.strip(), rest) if part)
    about += "." if about[-1:].isalnum() or about.endswith(")") else ""
    choices = [str(choice) for choice in argument.get_choices() or ()]
    told = all(re.search(rf"(?<![\w-]){re.escape(choice)}(?![\w-])", about) for choice in choices)
    return Item(", ".join(argument.names), about, default, "" if told else ", ".join(choices))


# --- Python


def sections() -> list[Section]:
    """Every name is told once: in the package that has it, or else in `fedgft` itself."""
    made, told = [], dict[int, str]()
    for package in PACKAGES[1:]:
        module = import_module(f"fedgft.{package}")
        for name in module.__all__:
            told.setdefault(id(getattr(module, name)), f"{module.__name__}.{name}")
    for package in PACKAGES:
        module = import_module(f"fedgft.{package}".rstrip("."))
        entries = [_entry(module, name, told) for name in sorted(module.__all__, key=str.lower)]
        about = _paragraphs(inspect.getdoc(module) or "")[0]
        made.append(Section(module.__name__, module.__name__, about, entries))
    return made


def _entry(module: Any, name: str, told: dict[int, str]) -> Entry:
    value, anchor = getattr(module, name), f"{module.__name__}.{name}"
    home = told.setdefault(id(value), anchor)
    paragraphs = _paragraphs(doc(module, name, value))
    if home != anchor or inspect.ismodule(value):
        return Entry(name, anchor, paragraphs[:1], [], also=home)
    if not (inspect.isclass(value) or inspect.isfunction(value)):
        return Entry(name, anchor, paragraphs, [])
    items = _parameters(value)
    methods = tuple(_methods(value, anchor)) if inspect.isclass(value) else ()
    return Entry(name, anchor, paragraphs, items, _signature(value), methods=methods)


def doc(module: Any, name: str, value: Any) -> str:
    """A docstring, or of a constant the string below it; what dataclasses write does not count."""
    if inspect.ismodule(value) or inspect.isfunction(value):
        return inspect.getdoc(value) or ""
    if inspect.isclass(value):
        text = value.__doc__ or ""
        return "" if text.startswith(f"{value.__name__}(") else inspect.cleandoc(text)
    return _constants(Path(module.__file__).parent).get(name, "")


@cache
def _constants(package: Path) -> dict[str, str]:
    """Strings that stand below a constant, by its name."""
    found = {}
    for text in (path.read_text("utf-8") for path in sorted(package.rglob("*.py"))):
        if not re.search(r'^"[^"]', text, re.MULTILINE):
            continue
        for at, below in pairwise(ast.parse(text).body):
            targets = at.targets if isinstance(at, ast.Assign) else [getattr(at, "target", None)]
            if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
                names = [each.id for each in targets if isinstance(each, ast.Name)]
                found |= dict.fromkeys(names, str(below.value.value))
    return found


def _methods(cls: type, anchor: str) -> Iterator[Entry]:
    for name, value in vars(cls).items():
        function = getattr(value, "__func__", getattr(value, "fget", value))
        if not name.startswith("_") and inspect.isfunction(function) and function.__doc__:
            shown = name if isinstance(value, property) else name + _signature(function)
            about = _paragraphs(inspect.getdoc(function) or "")[:1]
            yield Entry(name, f"{anchor}.{name}", about, [], shown)


def _shown(value: Any) -> list[inspect.Parameter]:
    try:
        found = inspect.signature(value).parameters.values()
    except ValueError:  # an exception
        return []
    return [each for each in found if not each.name.startswith("_") and each.name != "self"]


def _signature(value: Any) -> str:
    parts, bare = [], True  # a bare star goes before the first keyword, unless *args was there
    for each in _shown(value):
        if each.kind is each.KEYWORD_ONLY and bare:
            parts.append("*")
        bare = bare and each.kind not in (each.KEYWORD_ONLY, each.VAR_POSITIONAL)
        parts.append(str(each.replace(annotation=each.empty, default=each.empty)))
    return f"({', '.join(parts)})"


def _parameters(value: Any) -> list[Item]:
    source = inspect.getsource(value)
    return [Item(each.name + _type(each), _comment(source, each.name), _default(each))
            for each in _shown(value)]  # fmt: skip


def _type(parameter: inspect.Parameter) -> str:
    if parameter.annotation in (parameter.empty, Any):
        return ""
    text = inspect.formatannotation(parameter.annotation).replace("'", '"')
    return ": " + re.sub(r"\b(?:[A-Za-z_]\w*\.)+(?=\w)", "", text)


def _default(parameter: inspect.Parameter) -> str:
    default = parameter.default
    if default is parameter.empty:
        return ""
    if inspect.isfunction(default):
        return default.__name__
    text = repr(default)
    return "made anew" if text == "<factory>" else text


def _comment(source: str, name: str) -> str:
    """What stands behind a field of a dataclass."""
    found = re.search(rf"^    {re.escape(name)}: [^#\n]*#\s*(.*)$", source, re.MULTILINE)
    return found[1] if found else ""


def _paragraphs(text: str) -> list[str]:
    return [part for part in text.split("\n\n") if part.strip()] or [""]
