"""The error that users see, and imports that wait until they are needed.

This module imports nothing heavy: `fedgft --help` loads it and must not load NumPy.
"""

import re
from collections.abc import Callable, Mapping
from importlib import import_module
from types import ModuleType
from typing import Any, Literal

Kind = Literal["invalid", "missing", "conflict", "unsupported", "file", "data", "extra", "network"]
_NAME = re.compile(r"`(X|[a-z][a-z0-9_]*)`")

EXTRAS = {  # package that is imported: (name that people know, extra that installs it)
    "torch": ("PyTorch", "torch"),
    "flwr": ("Flower", "flower"),
    "opendp": ("OpenDP", "private"),
    "PIL": ("Pillow", "images"),
    "fairlearn": ("Fairlearn", "references"),
    "cryptography": ("cryptography", "flower"),
    "xgboost": ("XGBoost", "xgboost"),
    "lightgbm": ("LightGBM", "lightgbm"),
    "duckdb": ("DuckDB", "sql"),
    "psycopg": ("psycopg", "sql"),
    "sqlglot": ("sqlglot", "sql"),
    "pyspark": ("PySpark, which the extra leaves out for its size (pip install pyspark)", "sql"),
}


class FedgftError(ValueError):
    """An error that the user can fix, described in one line.

    Parameters
    ----------
    message
        What is wrong and what to do. Settings are written in backquotes, as in
        ``"`lam` must be >= 0, got -1"``. Python users read the text without the backquotes;
        the command line prints the option instead (``--lam``), see `render`.
    field
        The setting, argument or option that is wrong. None (default): the first name in backquotes.
        If the message does not mention the field, it is put in front: ``field="lam"`` and
        ``"must be >= 0"`` read ``lam must be >= 0``.
    kind
        What went wrong, for programs and tests, which should not depend on the wording: "invalid"
        (default), "missing", "conflict", "unsupported", "file", "data", "extra" (an optional
        package is not installed) or "network".

    Attributes
    ----------
    field
        The argument, or None if the error is not about a single one.
    kind
        As above.

    Examples
    --------
    >>> import fedgft
    >>> try:
    ...     fedgft.Settings(rounds=0)
    ... except fedgft.FedgftError as error:
    ...     print(error.field, error.kind, error, sep=" | ")
    rounds | invalid | rounds must be at least 1, got 0
    >>> error = fedgft.FedgftError("must be >= 0, got -1", field="lam")
    >>> str(error), error.field, error.kind
    ('lam must be >= 0, got -1', 'lam', 'invalid')
    >>> error.render(lambda name: "--" + name)
    '--lam must be >= 0, got -1'
    """

    def __init__(self, message: str, *, field: str | None = None, kind: Kind = "invalid") -> None:
        named = _NAME.findall(message)
        if field is not None and field not in named:
            message = f"`{field}` {message}"
        self.message = message
        self.field = field or (named[0] if named else None)
        self.kind: Kind = kind
        super().__init__(_NAME.sub(r"\1", message))

    def render(self, name_field: Callable[[str], str]) -> str:
        """The message with every name in backquotes replaced by `name_field(name)`."""
        return _NAME.sub(lambda found: name_field(found[1]), self.message)


class LazyModule(ModuleType):
    """A module that is imported when one of its names is first used.

    ``pl = LazyModule("polars")`` stands for ``import polars as pl`` where most users of the module
    need no table: a machine with only NumPy and PyTorch can still train.
    """

    def __getattr__(self, name: str) -> Any:
        return getattr(import_module(self.__name__), name)


def import_on_use(package: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
    """Return the `__getattr__` of a package whose public names are imported when first used.

    Parameters
    ----------
    package
        The package, for the error about an unknown name.
    modules
        The module of each public name, as in ``{"load": "fedgft.data.public"}``.
    """

    def import_name(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(modules[name]), name)

    return import_name


def import_extra(package: str, purpose: str = "this") -> ModuleType:
    """Import an optional package, or raise a `FedgftError` with the command that installs it.

    Parameters
    ----------
    package
        A key of `EXTRAS`, or a module inside one of those packages (``"torch.nn"``).
    purpose
        What needs the package: the subject of the sentence ``{purpose} needs PyTorch``.
    """
    root = package.partition(".")[0]
    try:
        return import_module(package)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != root:
            raise
        title, extra = EXTRAS[root]
        text = f"{purpose} needs {title}: pip install 'fedgft[{extra}]'"
        raise FedgftError(text, kind="extra") from error
