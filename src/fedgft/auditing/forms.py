"""Forms that are filled from an audit: for a model card, for a law of New York City, for the EU.

`make_form` checks what the user stated and calls the module of the form:
`fedgft.auditing.form_ll144`, `form_ai_act` or `form_model_card`. Each of them names the texts that
it relies on, and where and when they were read.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

from fedgft.auditing import form_ai_act, form_ll144, form_model_card
from fedgft.auditing.form_page import Form
from fedgft.auditing.report_files import FormName
from fedgft.errors import FedgftError
from fedgft.formatting import one_line
from fedgft.sums import is_text
from fedgft.validation import check_choice, format_value

if TYPE_CHECKING:
    from fedgft.auditing.report import Audit

NAMES: tuple[FormName, ...] = get_args(FormName)
MAX_TEXT = 2_000  # characters of a fact
COLUMNS = ("sex", "race")  # that a form can ask for


class _Kind(NamedTuple):
    """How a form is made, and the facts that a user can state for it: a term by name."""

    build: Callable[..., Form]
    facts: Mapping[str, str]


KINDS: dict[FormName, _Kind] = {
    "ll144": _Kind(form_ll144.build, form_ll144.FACTS),
    "ai-act": _Kind(form_ai_act.build, form_ai_act.FACTS),
    "model-card": _Kind(form_model_card.build, form_model_card.FACTS),
}


def make_form(
    audit: "Audit",
    name: str,
    *,
    columns: Mapping[str, Any] | None = None,
    facts: Mapping[str, Any] | None = None,
) -> Form:
    """Fill a form from an audit: see `fedgft.auditing.Audit.form`."""
    known = check_name(name)
    stated = check_facts([known], facts)
    named = check_columns([known], columns)
    return KINDS[known].build(audit, columns=named, facts=stated)


def make_forms(
    audit: "Audit", names: Sequence[FormName], columns: Mapping[str, str], facts: Mapping[str, str]
) -> list[Form]:
    """Fill several forms; each gets the columns and facts that it knows (they are checked)."""
    made = []
    for name in names:
        known = {key: text for key, text in facts.items() if key in KINDS[name].facts}
        made.append(KINDS[name].build(audit, columns=columns, facts=known))
    return made


def check_name(name: Any) -> FormName:
    """Return the name of a form; raise a `FedgftError` for any other value."""
    return check_choice("form", name, NAMES)


def check_facts(names: Sequence[FormName], facts: Any) -> dict[str, str]:
    """Return the stated facts as texts in one line; raise a `FedgftError` for anything else.

    Parameters
    ----------
    names
        The forms. A fact that none of them has is an error.
    facts
        Texts by name; a hyphen in a name counts as an underscore. None: there are none.
    """
    if facts is not None and not isinstance(facts, Mapping):
        text = f"must be like {{'data_source': '...'}}, not {format_value(facts)}"
        raise FedgftError(text, field="form_facts")
    known = [key for name in names for key in KINDS[name].facts]
    found = {}
    for key, text in (facts or {}).items():
        plain = key.replace("-", "_") if isinstance(key, str) else key
        if plain not in known:
            listed = ", ".join(dict.fromkeys(known))
            problem = f"{format_value(key)} is no fact of {' or '.join(names)}; there are {listed}"
            raise FedgftError(f"`form_facts` {problem}")
        if not is_text(text) or not text.strip():
            problem = f"{plain} must be a text that is not empty, not {format_value(text)}"
            raise FedgftError(f"`form_facts` {problem}")
        if plain in found:
            raise FedgftError(f"`form_facts` {plain} is given twice", kind="conflict")
        found[plain] = one_line(text, MAX_TEXT)
    return found


def check_columns(names: Sequence[FormName], columns: Any) -> dict[str, str]:
    """Return the names of the columns of sex and of race; raise a `FedgftError` otherwise."""
    if columns is not None and not isinstance(columns, Mapping):
        text = f"must be like {{'sex': 'gender'}}, not {format_value(columns)}"
        raise FedgftError(text, field="form_columns")
    if columns and "ll144" not in names:
        raise FedgftError("`form_columns` is for the form ll144 alone", kind="conflict")
    for role, column in (columns or {}).items():
        if role not in COLUMNS or not isinstance(column, str):
            given = f"{format_value(role)}={format_value(column)}"
            raise FedgftError(f"`form_columns` {given}: write sex=COLUMN race=COLUMN")
    return dict(columns or {})
