"""A module imports only from the layers below it (pyproject.toml, `tool.importlinter`)."""

from importlinter.cli import lint_imports


def test_layers(pytestconfig, capsys):
    broken = lint_imports(str(pytestconfig.rootpath / "pyproject.toml"), no_cache=True)
    assert not broken, capsys.readouterr().out
