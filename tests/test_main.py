import importlib

import pytest

from deepspec.__main__ import COMMANDS, main


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_command_has_a_main_that_takes_arguments(name):
    module = importlib.import_module(COMMANDS[name][0])
    assert module.main.__code__.co_argcount >= 1


def test_help_lists_the_commands_and_an_unknown_one_is_an_error(capsys):
    assert main(["--help"]) == 0
    listed = capsys.readouterr().out
    assert all(f"deepspec {name}" in listed for name in COMMANDS)
    assert main(["trian"]) == 2
    assert "unknown command 'trian'" in capsys.readouterr().err
