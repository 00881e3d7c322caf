"""single_run.py: the command line. Left of the first `--` is ours, all to its right is the command's."""

import json
import os
from pathlib import Path

import pytest
from conftest import PYTHON, SINGLE, json_line, run_cli, single, without

BAD: tuple[tuple[str | bytes, ...], ...] = (
    (),
    ("--",),
    ("--", "echo", "started"),
    ("--lock",),
    ("--lock", "--", "echo", "started"),
    ("--lock", "", "--", "echo", "started"),
    ("--lock=", "--", "echo", "started"),
    ("--lock", "lock"),
    ("--lock", "lock", "--"),
    ("--lock", "lock", "echo", "started"),
    ("--lock", "lock", "echo", "--", "echo", "started"),
    ("echo", "--lock", "lock", "--", "echo", "started"),
    ("lock", "--", "echo", "started"),
    ("--loc", "lock", "--", "echo", "started"),
    ("--loc=lock", "--", "echo", "started"),
    ("--lock", "lock", "--no-such-option", "--", "echo", "started"),
    ("--lock", "lock", "--no-such-option=1", "--", "echo", "started"),
    ("--lock", "lock", "-", "--", "echo", "started"),
    ("--lock", "lock", "-Q", "--", "echo", "started"),
    ("--lock", "lock", "--hel", "--", "echo", "started"),
    ("--lock", "lock", "", "--", "echo", "started"),
    ("--lock", "lock", b'--\xff"\\\n', "--", "echo", "started"),
)
WORDS: tuple[str | bytes, ...] = (
    "two words",
    " ",
    "$HOME",
    "*",
    "?",
    "~",
    "'single'",
    '"double"',
    "back\\slash",
    "`id`",
    "",
    b"\xff",
    "a\nb",
    "鍵",
    "--",
    "--help",
    "-h",
    "--lock",
    "other",
    "--lock=other",
    "--version",
    "--",
    "",
)


@pytest.mark.parametrize("words", BAD)
def test_bad_arguments(here: Path, words: tuple[str | bytes, ...]) -> None:
    end = run_cli(SINGLE, *words, code=2)
    message = json.loads(end.stderr.decode())["message"]
    assert message and end.stderr == json_line(status="error", reason="invalid_arguments", message=message)
    assert end.stdout == b"" and os.listdir() == []


@pytest.mark.parametrize("start", ((SINGLE,), (PYTHON, SINGLE)))
@pytest.mark.parametrize("option", (("--lock", "lock"), ("--lock=lock",)))
def test_argv_reaches_the_command_unchanged(here: Path, start: tuple[str | Path, ...], option: tuple[str, ...]) -> None:
    end = run_cli(*start, *option, "--", "printf", r"%s\0", *WORDS, code=0)
    assert end.stdout.split(b"\0")[:-1] == [os.fsencode(word) for word in WORDS]
    assert os.listdir() == ["lock"]


@pytest.mark.parametrize("words", (("--help",), ("--lock", "lock", "--help"), ("--help", "--", "echo", "started")))
def test_help(here: Path, words: tuple[str, ...]) -> None:
    end = run_cli(SINGLE, *words, code=0)
    assert (
        end.stderr == b""
        and b"single_run.py --lock LOCK_FILE [OPTIONS] -- COMMAND" in end.stdout
        and b"\nstarted\n" not in end.stdout
    )
    assert os.listdir() == []


def test_the_commands_help_is_the_commands(here: Path) -> None:
    assert b"--lock" not in single("lock", "cat", "--help", code=0).stdout


@pytest.mark.parametrize(("words", "code"), ((("--lock",), 2), (("--help",), 0), (("--lock", "lock", "--", "true"), 0)))
def test_without_a_stderr(here: Path, words: tuple[str, ...], code: int) -> None:
    end = run_cli(SINGLE, *words, code=code, preexec_fn=without(2))
    assert end.stdout == (run_cli(SINGLE, "--help").stdout if "--help" in words else b"")
