"""What `fedgft deploy local` was asked for, checked before any process is started."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedgft.errors import FedgftError
from fedgft.files import expanded

SITES = ("north", "south", "east", "west", "centre")


def site_files(data: list[str] | None, sites: int | None) -> list[Path]:
    """The sites' files, if --data names files."""
    named = [expanded(name) for name in data or []]
    tables = [path for path in named if path.suffix.lower() in (".csv", ".parquet")]
    if not tables:
        if len(named) > 1:
            raise FedgftError("--data: one public data set, or a file for every site")
        return []
    for path in named:
        if path not in tables or not path.is_file():
            raise FedgftError(f"--data {path}: no such file" if path in tables else
                              f"--data {path}: the ending must be .csv or .parquet")  # fmt: skip
    if sites is not None and sites != len(named):
        raise FedgftError(f"--sites {sites}: there are {len(named)} files, one for every site")
    return named


def site_names(count: int) -> tuple[str, ...]:
    if not 1 <= count <= 100:
        raise FedgftError(f"--sites must lie between 1 and 100 on one host, got {count}")
    return (
        tuple(SITES[:count])
        if count <= len(SITES)
        else tuple(f"site-{k + 1}" for k in range(count))
    )


def check_config(
    config: dict[str, Any], *, files: bool, lam: float | None, epsilon: float | None
) -> None:
    """What would otherwise be found out by processes, a minute later."""
    from fedgft.data import SOURCES
    from fedgft.federated.control import Controlled
    from fedgft.federated.penalty import Linearised
    from fedgft.metrics import get_metric

    _check_strategy(config["strategy"])
    from fedgft.flower.private import Budget

    for name in ("label", "group") if files else ():
        if not config[name]:
            raise FedgftError(f"--{name} must name a column of the files")
    if not files and config["data"] not in SOURCES:
        raise FedgftError(f"--data {config['data']}: choose from {', '.join(SOURCES)}, or files")
    metric = get_metric(config["metric"])
    Controlled(metric, config["target"])
    if lam is not None:
        Linearised(metric, lam)
    if epsilon is not None:
        Budget(epsilon, releases=config["rounds"]).noise("soft")
        if config["method"] == "fairfed":
            raise FedgftError("--epsilon: FairFed needs every client's own sums, without noise")
    for name, known in (("method", ("fedgft", "fairfed", "measured")),
                        ("channel", ("train", "query", "evaluate"))):  # fmt: skip
        if config[name] not in known:
            raise FedgftError(f"--{name} {config[name]!r} is not known: {', '.join(known)}")


def check_numbers(config: dict[str, Any], *, port: int | None, timeout: float) -> None:
    """Those that the engine would take, and stumble over later."""
    if not 0 < config["alpha"] < float("inf"):
        raise FedgftError(f"--alpha must be a positive number, got {config['alpha']:g}")
    if not 1 <= config["rounds"] <= 10_000:
        raise FedgftError(f"--rounds must lie between 1 and 10000, got {config['rounds']}")
    if not 0 <= config["seed"] < 2**63:
        raise FedgftError(f"--seed must lie between 0 and 2^63, got {config['seed']}")
    if port is not None and not 1 <= port <= 65535:
        raise FedgftError(f"--port {port}: must lie between 1 and 65535")
    if not 0 < timeout < float("inf"):
        raise FedgftError(f"--timeout must be a positive number of seconds, got {timeout:g}")


def check_files(files: Sequence[Path], label: str, group: str) -> None:
    """Every site's file can be read and has the columns."""
    from fedgft.audit.counting import header
    from fedgft.data.columns import suggestion
    from fedgft.data.roles import group_columns

    for path in files:
        known = header(path)
        asked = [("--label", label), *(("--group", name) for name in group_columns(group, known))]
        for option, name in asked:
            if name not in known:
                raise FedgftError(f"{path}: no column '{name}' ({option}){suggestion(name, known)}")


def check_terms(config: dict[str, Any], sites: int) -> None:
    """What the settings together amount to."""
    from fedgft.data.schema import Schema
    from fedgft.flower.private import Budget
    from fedgft.flower.settings import check_run
    from fedgft.flower.terms import Terms

    check_run(config)
    if config.get("schema"):
        Schema.from_file(Path(config["schema"]))
    if config.get("secure") and sites < 3:
        raise FedgftError("--set secure=true: a sum hides nobody among fewer than 3 sites")
    hidden = int(config.get("min-count", 0))
    budget = Budget(config["epsilon"] or None, config.get("delta", 1e-6), min_count=hidden)
    Terms(channel=config["channel"], secure=bool(config.get("secure")), budget=budget)


def _check_strategy(name: str) -> None:
    try:
        from flwr.serverapp import strategy
    except ModuleNotFoundError as error:
        raise FedgftError("fedgft deploy needs Flower: pip install 'fedgft[flower]'") from error
    known = [
        n for n in strategy.__all__ if n.startswith(("Fed", "Krum", "Multi", "QFed", "Bulyan"))
    ]
    if name not in known:
        raise FedgftError(f"--strategy {name!r} is not known: {', '.join(known)}")


def more_settings(given: list[str], own: Path | None, taken: dict[str, Any]) -> dict[str, Any]:
    """KEY=VALUE, the value as in TOML; the app must have such a setting."""
    from fedgft.data.columns import suggestion
    from fedgft.deploy.folder import app_settings

    known = app_settings(own)
    found = node_settings(given, taken)
    for key, value in found.items():
        if key not in known:
            raise FedgftError(f"--set {key}: no such setting{suggestion(key, list(known))}")
        found[key] = _typed(f"{key}={value}", value, known[key])
    for key in ("schema", "counts"):  # the server works in another folder than the user
        if found.get(key):
            found[key] = str(expanded(found[key]).resolve())
    return found


def node_settings(given: list[str], taken: dict[str, Any]) -> dict[str, Any]:
    """KEY=VALUE, the value as in TOML: what --set says, none of it an option of its own."""
    import tomllib
    from math import inf

    found: dict[str, Any] = {}
    for item in given:
        key, equals, value = item.partition("=")
        key = key.strip()
        try:
            held = tomllib.loads(f"x = {value}")["x"] if equals and key else None
        except (tomllib.TOMLDecodeError, RecursionError):
            held = value  # a word without quotes, as shells leave it
        if not isinstance(held, (str, int, float, bool)) or held in (inf, -inf) or held != held:
            raise FedgftError(f"--set {item}: write KEY=VALUE, such as lr=0.005")
        if key in taken:
            raise FedgftError(f"--set {item}: there is an option --{key}")
        if not re.fullmatch("[A-Za-z][A-Za-z0-9_-]*", key):
            raise FedgftError(f"--set {item}: {key!r} is not the name of a setting")
        found[key] = held
    return found


def _typed(item: str, value: Any, usual: Any) -> Any:
    """Of the type that the app's own value has: the engine is strict about it."""
    if isinstance(usual, float) and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if type(value) is not type(usual):
        raise FedgftError(f"--set {item}: must be like {usual!r}")
    return value
