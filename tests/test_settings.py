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


def test_every_field_of_settings_is_in_the_table_and_in_its_docstring():
    for field in fields(Settings):
        assert f"\n    {field.name}\n        {SETTINGS[field.name].help}" in Settings.__doc__


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
