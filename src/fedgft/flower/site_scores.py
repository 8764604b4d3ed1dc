"""What a site sends about the final model: its report, its scores and the decisions of a rule.

All of them are the text of a file of sums (`fedgft measure`), with the site's own limits applied:

    message      rows       content
    report       held out   counts and histograms of scores
    scores       training   the same; the server fits a decision rule to them
    decisions    held out   counts of the decisions of a rule that the server sends

With noise, the scores draw on the budget of the rounds, since they describe the same rows. Held-out
rows have a budget of their own, which the report spends, so there are no decisions of a rule.
"""

from hashlib import sha256
from typing import Any

import numpy as np
from flwr.app import ConfigRecord, Context, Message, RecordDict

from fedgft.errors import FedgftError, LazyModule
from fedgft.flower.client import Site, arrays_of, predict
from fedgft.flower.messages import RECORD, VERSION, check_version, read_request
from fedgft.privacy.ledger import model_digest, open_ledger
from fedgft.privacy.noise import Budget, epsilon_of, total_rho
from fedgft.privacy.policy import SitePolicy

# Needed only for the last messages of a run.
measurement = LazyModule("fedgft.auditing.measurement")
decision_rules = LazyModule("fedgft.rules")

RELEASES = "rule.releases"  # field of a request: the share of the budget for the scores
RULE = "rule"  # field of a request: the text of a rule
SCORES_KEY = "scores "  # prefix of the ledger's key for released scores


def report_reply(message: Message, context: Context, site: Site) -> Message:
    """Send the site's file of sums (`fedgft measure`) for the received model on held-out rows.

    Held-out rows and training rows describe different people. Noise on the sums of held-out rows
    therefore draws on a budget of its own, once, and not on that of the rounds.
    """
    policy, budget = _begin(message, context, site, "report")
    text = policy.release_report(
        lambda: _measure(site, site.held_out, _protection(budget)),
        budget,
        model_digest(arrays_of(message)),
    )
    return _reply(message, site, text)


def scores_reply(message: Message, context: Context, site: Site) -> Message:
    """Send the site's file of sums for the received model on training rows."""
    policy, budget = _begin(message, context, site, "scores", held_out=False)
    if budget.epsilon is None:
        text = _measure(site, site.rows, _protection(budget))
    else:
        text = _release_scores(policy, site, budget, model_digest(arrays_of(message)))
    return _reply(message, site, text)


def decisions_reply(message: Message, context: Context, site: Site) -> Message:
    """Send the site's file of sums for the decisions of the server's rule on held-out rows.

    Rows of a group that the rule does not know have no decision, and the file counts them. The
    coins of a randomized rule have a key made of the site's own rows: the server can neither choose
    them nor draw new ones by asking again.
    """
    policy, budget = _begin(message, context, site, "decisions of a rule")
    if budget.epsilon is not None:
        raise _refusal(site, "decisions of a rule", "its report spends the budget")
    rule = decision_rules.DecisionRule.from_json(
        str(policy.request.get(RULE, "")), source="the server's rule"
    )
    if rule.is_blind or rule.attributes != (site.attribute,):
        problem = f"the rule must decide by {site.attribute}"
        raise _refusal(site, "decisions of a rule", problem)
    if budget.min_count and rule.reads == "score":  # thresholds in turn would tell the scores
        raise _refusal(site, "decisions of a rule", "it withholds its scores (min-count)")
    labels, scores, groups = _score_rows(site, site.held_out)
    known = {group for name, (group,) in rule.cells if name in (None, site.name)} | {None}
    decided = np.array([group in known for group in groups])
    if rule.is_random:
        rows = repr((site.name, labels, groups)).encode("utf-8", "replace")
        rule = rule.with_key(sha256(scores.tobytes() + rows).hexdigest())
    inputs = scores >= 0.5 if rule.reads == "decision" else scores
    positive = rule.decide(
        inputs[decided],
        {site.attribute: [group for group in groups if group in known]},
        sites=site.name if rule.per_site else None,
        ids=[f"{site.name} {row}" for row in np.flatnonzero(decided)],
    )
    decisions = np.full(len(labels), None, object)
    decisions[decided] = [site.names.classes[int(each)] for each in positive]
    sums = measurement.measure(
        labels,
        decisions.tolist(),
        sensitive_features={site.attribute: groups},
        site=site.name,
        **_names(site),
        **_protection(budget),
    )
    return _reply(message, site, sums.to_json())


def scores_epsilon(budget: Budget, releases: int) -> float:
    """Return the epsilon, at the budget's delta, of a histogram that counts as `releases`."""
    return epsilon_of(budget.rho(releases, counts=0), budget.delta)


def _begin(
    message: Message, context: Context, site: Site, what: str, *, held_out: bool = True
) -> tuple[SitePolicy, Budget]:
    """Check the request against the site's policy, and load the model."""
    policy = SitePolicy(context, site.name, read_request(message))
    check_version(policy.request, "the server")
    budget = policy.agree()
    if "privacy.secure" in policy.request or (held_out and site.held_out is None):
        reason = "it holds no rows out, or gives its sums to secure sums only"
        raise _refusal(site, what, reason)
    if what != "report" and len(site.names.classes) != 2:
        raise _refusal(site, what, f"a rule is for two classes, it has {len(site.names.classes)}")
    site.load(arrays_of(message))
    return policy, budget


def _refusal(site: Site, what: str, reason: str) -> FedgftError:
    return FedgftError(f"site '{site.name}' gives no {what}: {reason}")


def _reply(message: Message, site: Site, text: str) -> Message:
    record = ConfigRecord({"version": VERSION, "site": site.name, "sums": text})
    return Message(RecordDict({RECORD: record}), reply_to=message)


def _protection(budget: Budget) -> dict[str, Any]:
    """Return the keywords of `measure` that protect the sums."""
    if budget.epsilon is not None:
        return {"epsilon": budget.epsilon, "delta": budget.delta}
    return {"min_cell": max(budget.min_count, 3) if budget.min_count else 0}


def _names(site: Site) -> dict[str, Any]:
    return {"classes": site.names.classes, "values": {site.attribute: site.names.groups}}


def _release_scores(policy: SitePolicy, site: Site, budget: Budget, model: str) -> str:
    """Return the noisy scores of this model; a run has those of a single model.

    They count as so many releases of the run's budget as the server says. A second request for the
    same model gets the same text. The ledger keeps it beside the report, which comes first.
    """
    releases = policy.request.get(RELEASES)
    if type(releases) is not int or releases < 1:
        raise FedgftError(f"the server's {RELEASES} is no whole number above 0")
    epsilon = scores_epsilon(budget, releases)
    with open_ledger(policy.context, site.name) as ledger:
        terms = [float(budget.epsilon or 0), budget.delta, float(budget.releases), 0.0]
        run = ledger.run(policy.context.run_id, terms)
        key = SCORES_KEY + model
        if not run.reports.get(key):
            is_second = any(name.startswith(SCORES_KEY) for name in run.reports)
            if is_second or run.released + releases > budget.releases:
                raise _refusal(site, "scores", "their budget in this run is spent")
            policy.charge(ledger, total_rho(epsilon, budget.delta))
            run.released += releases
            noise = {"epsilon": epsilon, "delta": budget.delta}
            run.reports[key] = _measure(site, site.rows, noise)
        return run.reports[key]


def _measure(site: Site, rows: Any, protection: dict[str, Any]) -> str:
    """Return the text of the site's file of sums for its current model."""
    labels, scores, groups = _score_rows(site, rows)
    group = {site.attribute: groups}
    sums = measurement.measure(
        labels, scores, sensitive_features=group, site=site.name, **_names(site), **protection
    )
    return sums.to_json()


def _score_rows(site: Site, rows: Any) -> tuple[list[str], np.ndarray, list[str | None]]:
    """Return the label names, the scores and the group names of rows."""
    scores = []
    labels: list[str] = []
    groups: list[str | None] = []
    for x, y, a in site.batches(rows):
        scores.append(predict(site.model, x))
        labels += [site.names.classes[i] for i in y.tolist()]
        groups += [None if i < 0 else site.names.groups[i] for i in a.tolist()]
    probs = np.concatenate(scores)
    return labels, probs[:, 1] if probs.shape[1] == 2 else probs, groups
