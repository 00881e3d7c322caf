"""On a Python that is too old each script says in one line what it needs."""

import ast
import os
import re
import shutil
from pathlib import Path

import pytest
from conftest import DEMO, RETRY, SINGLE, run_cli

OLD = ("3.7", "3.8", "3.9")


def interpreter(version: str) -> str | None:
    """Of a version manager, by its real path, or the system's."""
    built = sorted(Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")).glob(f"versions/{version}.*/bin/python{version}"))
    return str(built[-1]) if built else shutil.which(f"python{version}", path="/usr/local/bin:/usr/bin:/bin")


@pytest.mark.parametrize("script", (SINGLE, RETRY, DEMO), ids=lambda path: path.name)
def test_it_parses_as_3_7(script: Path) -> None:
    ast.parse(script.read_text(), feature_version=(3, 7))


@pytest.mark.parametrize("version", OLD)
@pytest.mark.parametrize("script", (SINGLE, RETRY), ids=lambda path: path.name)
@pytest.mark.parametrize("flags", ((), ("-IS",)), ids=("plain", "isolated"))
def test_it_says_what_it_needs(here: Path, version: str, script: Path, flags: tuple[str, ...]) -> None:
    python = interpreter(version)
    if not python:
        pytest.skip(f"no Python {version} here")
    for words in (("--help",), (), ("--lock", "lock", "--retry-code", "1", "--", "echo", "started")):
        end = run_cli(python, *flags, script, *words)
        assert end.returncode not in (0, 75) and end.stdout == b"" and re.fullmatch(rb"[^\n]*\b3\.10\b[^\n]*\n", end.stderr)
    assert os.listdir() == []
