"""Which group the others are compared with."""

from collections.abc import Sequence

from fedgft.audit.views import View


def reference_of(seen: View, references: Sequence[str]) -> int | None:
    """The view's reference group: named itself, as `column=value`, or value by value.

    `race=White` and `sex=Male` together are the reference of race, of sex, and of both.
    """
    plain = [name.partition("=")[2] if _qualified(seen, name) else name for name in references]
    for name in plain:
        if name in seen.names:
            return seen.names.index(name)
    values = dict(name.split("=", 1) for name in references if "=" in name)
    wanted = " & ".join(values.get(a, "") for a in seen.attributes)
    if len(seen.attributes) > 1 and wanted in seen.names:
        return seen.names.index(wanted)
    return None


def _qualified(seen: View, name: str) -> bool:
    return len(seen.attributes) == 1 and name.startswith(f"{seen.attributes[0]}=")
