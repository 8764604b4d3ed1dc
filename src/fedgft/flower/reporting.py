"""At the end of a run: the fairness report of the audit, from every site's held-out rows."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.serverapp import Grid

from fedgft.audit.sitefile import from_json, to_json
from fedgft.data.schema import Schema
from fedgft.errors import FedgftError
from fedgft.files import private_folder, whole
from fedgft.flower.client import arrays_of
from fedgft.flower.gather import Replies, log, plain
from fedgft.flower.journal import HISTORY
from fedgft.flower.ledger import digest_of
from fedgft.flower.private import Budget
from fedgft.flower.shield import agreed, report_once
from fedgft.flower.site import Site
from fedgft.flower.terms import query
from fedgft.flower.wire import RECORD, REPORT, VERSION, check_version, prices, request_of
from fedgft.saved import write_model


def report_reply(message: Message, context: Context, own: Site) -> Message:
    """This site's file of sums (`fedgft measure`), of the model that it received.

    Held-out rows are other people than the training rows, so noise on their sums draws on another
    budget than the rounds do; but it draws on it once.
    """
    from fedgft.audit import measure

    request = request_of(message)
    check_version(request, "the server")
    budget = agreed(request, context, own.name)
    if own.held_out is None or "privacy.secure" in request:
        raise FedgftError(f"site '{own.name}' gives no report: it holds no rows out, or gives its "
                          "sums to secure sums only")  # fmt: skip
    noise: dict[str, Any] = {"min_cell": max(budget.min_count, 3) if budget.min_count else 0}
    if budget.epsilon is not None:
        noise = {"epsilon": budget.epsilon, "delta": budget.delta}
    own.load(arrays_of(message))

    def made() -> str:
        labels, scores, groups = _scored(own)
        sums = measure(
            labels, scores, sensitive_features={own.attribute: groups}, site=own.name,
            classes=own.names.classes, values={own.attribute: own.names.groups}, **noise,
        )  # fmt: skip
        return to_json(sums)

    text = report_once(made, budget, context, own.name, digest_of(arrays_of(message)))
    reply = ConfigRecord({"version": VERSION, "site": own.name, "sums": text})
    return Message(RecordDict({RECORD: reply}), reply_to=message)


def _scored(own: Site) -> tuple[list[str], Any, list[str | None]]:
    """Labels, scores and groups of the held-out rows, by their names."""
    import torch

    scores, labels, groups = [], [], []
    own.model.eval()
    with torch.no_grad():
        for x, y, a in own.batches(own.held_out):
            scores.append(own.model(x).double().softmax(-1).cpu())
            labels += [own.names.classes[i] for i in y.tolist()]
            groups += [None if i < 0 else own.names.groups[i] for i in a.tolist()]
    probs = torch.cat(scores).numpy()
    return labels, probs[:, 1] if probs.shape[1] == 2 else probs, groups


def collect(
    grid: Grid, arrays: ArrayRecord, nodes: Sequence[int], *, config: ConfigRecord, budget: Budget,
    timeout: float, owners: Mapping[str, int] | None = None,
) -> dict[str, str]:  # fmt: skip
    """Site -> its file of sums; who does not answer is left out, and named. `owners`: the node that
    each name belongs to; the report of another one under that name is left out."""
    request = prices(None, None, statistics="none", privacy=budget.asked("hard"))
    messages = [query(arrays, config, request, node, kind=f"query.{REPORT}") for node in nodes]
    found = Replies.of(grid.send_and_receive(messages, timeout=timeout))
    sums: dict[str, str] = {}
    for node, record in sorted(found.take().items()):
        try:
            text = str(record["sums"])
            (site,) = from_json(text, source=f"the report of node {node}").sites
        except (FedgftError, KeyError, TypeError, ValueError) as error:
            log.warning("fedgft: a report is left out: %s", plain(error))
            continue
        if site in sums or (owners or {}).get(site, node) != node:
            log.warning("fedgft: the report of node %d is left out: '%s' is another node's name",
                        node, plain(site, 100))  # fmt: skip
            continue
        sums[site] = text
    return sums


def write_results(
    folder: Path, arrays: ArrayRecord, *, schema: Schema, history: list[dict[str, Any]],
    sums: dict[str, str], about: dict[str, Any],
) -> None:  # fmt: skip
    """model.safetensors (for `fedgft predict`), the sites' sums, the audit's report of them, and
    history.json, last: where it is, all is."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: array.numpy().copy(order="C") for name, array in arrays.items()}
    known = {"columns": schema.encoder.columns, "classes": schema.classes, "groups": schema.groups,
             "encoder": schema.encoder.to_json()}  # fmt: skip
    write_model(tensors, (schema.mean, schema.spread), about | known, folder / "model.safetensors")
    try:
        made = _audited(folder, sums)
    except FedgftError as error:  # a report is no reason to lose a model
        log.warning("fedgft: there is no report: %s", error)
        made = {}
    summary = {"about": about, "sites": sorted(sums), "history": history, "held_out": made}
    summary |= {"leverage": _last(history, "leverage"), "clipped": _largest(history, "clipped")}
    with whole(folder / HISTORY, private=True) as part:
        part.write_text(json.dumps(summary, indent=1), "utf-8")


def _last(history: list[dict[str, Any]], key: str) -> dict[str, float]:
    """By site, as the last round that was measured has it."""
    return next((row[key] for row in reversed(history) if key in row), {})


def _largest(history: list[dict[str, Any]], key: str) -> dict[str, float]:
    """By site, the largest of all rounds."""
    found: dict[str, float] = {}
    for row in history:
        for site, value in row.get(key, {}).items():
            found[site] = max(value, found.get(site, 0.0))
    return found


def _audited(folder: Path, sums: dict[str, str]) -> dict[str, Any]:
    """The report, and the numbers that it begins with."""
    from fedgft.audit import audit
    from fedgft.audit.gathering import gather

    if not sums:
        log.warning("fedgft: no site sent its sums: there is no report")
        return {}
    place = private_folder(folder / "sites")
    files = []
    for number, (_, text) in enumerate(sorted(sums.items())):
        files.append(place / f"site-{number}.json")  # a site's name is no file name
        with whole(files[-1], private=True) as part:
            part.write_text(text, "utf-8")
    made = audit(gather(files))
    for name, text in (("report.html", made.to_html()), ("report.md", made.to_markdown()),
                       ("audit.json", made.to_json())):  # fmt: skip
        with whole(folder / name) as part:
            part.write_text(text, "utf-8")
    found = json.loads(made.to_json())
    return {key: found[key] for key in ("rows", "accuracy", "metrics", "scores")}
