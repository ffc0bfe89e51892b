"""The command line, called in this process: what a command prints, and what a refused one says."""

from __future__ import annotations

import pytest

from surefoot.cli.main import main


def output_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What a command prints that succeeds; what was printed before it is forgotten."""
    capsys.readouterr()
    main(list(arguments))
    return capsys.readouterr().out


def error_of(capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 2) -> str:
    """What a command says that ends with this status."""
    with pytest.raises(SystemExit) as end:
        main(list(arguments))
    assert end.value.code == status
    return capsys.readouterr().err
