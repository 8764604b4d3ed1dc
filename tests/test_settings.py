"""The table of settings agrees with the library and checks values."""

import subprocess
import sys
from dataclasses import fields

import pytest

from fedgft.algorithms.objectives import SLOPES
from fedgft.algorithms.registry import BASES, METHODS
from fedgft.data.partition import KINDS
from fedgft.data.schema import SCALINGS
from fedgft.errors import FedgftError
from fedgft.metrics.metric import SPREADS
from fedgft.models import MODELS
from fedgft.optimizers import RULES
from fedgft.settings import OPTIONS, SETTINGS, Settings, check_setting
from fedgft.study.protocol import PROTOCOLS

REGISTRIES = {
    "penalty": SLOPES,
    "spread": SPREADS,
    "method": METHODS,
    "base": BASES,
    "model": MODELS,
    "optimizer": RULES,
    "partition": KINDS,
    "protocol": PROTOCOLS,
    "scaling": SCALINGS,
}


@pytest.mark.parametrize("name", REGISTRIES)
def test_choices_are_those_that_the_library_has(name):
    assert sorted(SETTINGS[name].choices) == sorted(REGISTRIES[name])


def test_the_docstring_of_settings_has_every_field_with_default_and_choices():
    text = Settings.__doc__
    names = [field.name for field in fields(Settings)]
    places = [text.index(f"\n    {name}\n") for name in names]
    assert places == sorted(places)
    ends = [*places[1:], text.index("    Examples")]
    for name, start, end in zip(names, places, ends, strict=True):
        entry = " ".join(text[start:end].split())
        assert entry.replace("- ", "-").startswith(f"{name} {SETTINGS[name].help}.")
        if name == "optimizer":
            assert "Default: ``Optimizer('adam')``" in entry
            continue
        default = str(getattr(Settings(), name))
        assert f"Default: {default}" in entry or f'Default: "{default}"' in entry
        assert all(f'"{choice}"' in entry for choice in SETTINGS[name].choices)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("rounds", "a whole number of at least 1"),
        ("noise", "a number of at least 0 and at most 1,000,000"),
        ("target", "a number of at least 0 and below 1"),
        ("lr", "a number above 0 and at most 1,000,000"),
        ("control", 'one of "decisions", "scores"'),
        ("lag", "True or False"),
        ("device", "a text"),
    ],
)
def test_allowed_values_in_words(name, text):
    assert SETTINGS[name].allowed_values() == text


@pytest.mark.parametrize("name", SETTINGS)
def test_every_default_is_valid(name):
    check_setting(name, SETTINGS[name].default)


@pytest.mark.parametrize("name", [name for group in OPTIONS.values() for name in group])
def test_help_is_one_sentence(name):
    text = SETTINGS[name].help_text()
    assert text.endswith(".") and not text.endswith("..") and "\n" not in text


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("rounds", 0),
        ("rounds", 2.0),
        ("rounds", True),
        ("rounds", None),
        ("rounds", 2**31),
        ("noise", -1),
        ("noise", float("nan")),
        ("alpha", float("inf")),
        ("lr", 0),
        ("lr", "fast"),
        ("target", 1),
        ("state", "kept"),
        ("state", ["keep"]),
        ("lag", 1),
        ("device", 0),
        ("seed", -1),
        ("max_influence", 0.0),
    ],
)
def test_a_wrong_value_is_named(name, value):
    with pytest.raises(FedgftError) as raised:
        check_setting(name, value)
    assert (raised.value.field, raised.value.kind) == (name, "invalid")


def test_the_table_loads_nothing_heavy():
    code = "import sys, fedgft.settings; print({'numpy', 'torch'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
