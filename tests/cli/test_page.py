"""The command line's reference page names every command, option and format."""

import re
from pathlib import Path

import pytest

from tpplan.cli.finding_options import FORMATS
from tpplan.cli.main import main

TEXT = (Path(__file__).parents[2] / "docs" / "cli.md").read_text(encoding="utf-8")


def test_every_command_and_format_is_on_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    commands = re.findall(r"^    (\w+)(?: |$)", capsys.readouterr().out, re.MULTILINE)
    assert len(commands) == 14
    assert all(f"| `{word}` |" in TEXT for word in [*commands, *FORMATS])


OPTIONED = ["validate", "diff", "suggest", "export", "plans", "env", "rule", "checkpoint inspect", "checkpoint check"]


@pytest.mark.parametrize("command", OPTIONED)
def test_every_option_is_on_the_page(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command.split(), "--help"]) == 0
    options = set(re.findall(r"(?<!\w)--[a-z]+", capsys.readouterr().out)) - {"--help"}
    assert [option for option in sorted(options) if option not in TEXT] == []


def test_the_example_output_is_real(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ((command, output),) = re.findall(r"```console\n\$ tpplan (.*?)\n(.*?)```", TEXT, re.DOTALL)
    (tmp_path / "my.yaml").write_text("version: 1\nmodules:\n\n  model.layers.*.mlp.up_proj: colwize\n")
    monkeypatch.chdir(tmp_path)
    assert main(command.split()) == 1
    assert capsys.readouterr().out == output
