"""Arguments: what is ours is checked before anything starts, what is right of the first `--` reaches the job untouched."""

import os
from pathlib import Path

import pytest
from conftest import CLEAN_ENV, RETRY, RETRY_75, ended, run_cli, started

Words = tuple[str | bytes, ...]
BOUNDS = (  # option, lowest, highest
    ("--retry-code", 1, 124),
    ("--max-attempts", 1, 10),
    ("--initial-delay-ms", 0, 60000),
    ("--backoff-factor", 1, 10),
    ("--max-delay-ms", 0, 60000),
    ("--kill-after-ms", 0, 604800000),
)
NO_NUMBERS: Words = (
    "",
    " ",
    " 3",
    "3 ",
    "3\n",
    "+3",
    "-3",
    "3_0",
    "1e3",
    "0x3",
    "3.0",
    "3x",
    "x",
    "\u0663",
    "\uff13",
    "\u00b2",
    b"\xff",
    "9" * 5000,
)
MALFORMED: tuple[Words, ...] = (
    (),
    ("--retry-code",),
    ("--retry-code", "75"),
    ("--retry-code", "75", "true"),
    ("--retry-code", "75", "--"),
    ("--retry-code", "--", "true"),
    ("--", "true"),
    ("--max-attempts", "3", "--", "true"),
    *(
        ("--retry-code", "75", *words, "--", "touch", "started")
        for words in (
            ("true",),
            ("",),
            ("75",),
            ("-x",),
            ("-",),
            ("--unknown",),
            ("--unknown", "3"),
            (b"--\xff",),
            (b"\xff",),
            ("--retry", "76"),
            ("--retry=76",),
            ("--retry-cod", "76"),
            ("--max-attempt", "3"),
            ("--initial", "3"),
            ("--backoff", "3"),
            ("--max-delay", "3000"),
            ("--kill", "3"),
            ("--kill-after", "3"),
            ("--hel",),
            ("--RETRY-CODE", "76"),
            ("-retry-code", "76"),
            ("--max-attempts",),
            ("--initial-delay-ms", "2", "--max-delay-ms", "1"),
            ("--initial-delay-ms", "30001"),
            ("--max-delay-ms", "999"),
            ("--max-delay-ms", "0"),
        )
    ),
)


def refused(folder: Path, *command_lines: Words) -> None:
    for process in [started(RETRY, *words, cwd=folder) for words in command_lines]:
        done = ended(process, 2)
        assert done.stdout == b""
        assert b"usage" in done.stderr.lower() and b"Traceback" not in done.stderr
    assert not list(folder.iterdir())


@pytest.mark.parametrize("words", MALFORMED, ids=repr)
def test_malformed_command_lines_are_refused(tmp_path: Path, words: Words) -> None:
    refused(tmp_path, words)


@pytest.mark.parametrize(("option", "lowest", "highest"), BOUNDS)
def test_bad_values_are_refused(tmp_path: Path, option: str, lowest: int, highest: int) -> None:
    values: Words = (*NO_NUMBERS, *map(str, (lowest - 1, highest + 1, 10**10, 10**20)))
    refused(tmp_path, *(("--retry-code", "75", option, value, "--", "touch", "started") for value in values))


@pytest.mark.parametrize("redirections", ("2>&-", "2>/dev/full", ">&-", "<&- >&- 2>&-"))
def test_refused_also_where_nobody_reads_it(tmp_path: Path, redirections: str) -> None:
    words = (RETRY, "--retry-code", "0", "--", "touch", "started")
    run_cli("sh", "-c", f'exec "$@" {redirections}', "sh", *words, cwd=tmp_path, code=2)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("option", "value"), [(name, str(value)) for name, *ends in BOUNDS for value in ends])
def test_the_bounds_are_allowed(option: str, value: str) -> None:
    fitting = ("--initial-delay-ms", "0") if option == "--max-delay-ms" else ("--max-delay-ms", "60000")
    assert run_cli(RETRY, "--retry-code", "75", *fitting, option, value, "--", "echo", "x", code=0).stdout == b"x\n"


@pytest.mark.parametrize("zeros", ("0", "00", "0" * 20))
def test_leading_zeros_are_digits(zeros: str) -> None:
    job = ("sh", "-c", "echo $RETRY_WRAPPER_MAX_ATTEMPTS; [ $RETRY_WRAPPER_ATTEMPT = 2 ] || exit 75")
    options = ("--retry-code", f"{zeros}75", "--max-attempts", f"{zeros}4", "--initial-delay-ms", zeros)
    assert run_cli(RETRY, *options, "--", *job, code=0).stdout == b"4\n"


ARGUMENTS: Words = (
    "",
    " ",
    "a b",
    "$HOME",
    "*",
    "?",
    "~",
    "'",
    '"',
    "`id`",
    "\\",
    "\\n",
    "a\nb",
    "\t",
    b"\xff",
    b"\xc3\xa9",
    b"\xed\xb2\x80",
    "%s",
    "{pid}",
    "-",
    "--",
    "--help",
    "--version",
    "--retry-code",
    "0",
    "--max-attempts=99",
    "-h",
    "--",
    "x" * 100_000,
)


def test_arguments_reach_the_job_unchanged(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = run_cli(*RETRY_75, "--", "printf", "%s\\0", *ARGUMENTS, cwd=tmp_path, code=0)
    assert done.stdout.split(b"\0") == [*map(os.fsencode, ARGUMENTS), b""]


def test_argv_is_the_jobs_from_its_first_word_on(tmp_path: Path) -> None:
    done = run_cli(*RETRY_75, "--", "cat", "--", "/proc/self/cmdline", cwd=tmp_path, code=0)
    assert done.stdout == b"cat\0--\0/proc/self/cmdline\0"


@pytest.mark.parametrize("name", (b"--help", b"--", b"a b", b"$HOME", b"*", b"\xff", b"a\nb", b"caf\xc3\xa9", b"a=b"))
def test_any_name_of_a_program(tmp_path: Path, name: bytes) -> None:
    (tmp_path / os.fsdecode(name)).symlink_to("/bin/sh")
    env = {**CLEAN_ENV, "PATH": f"{CLEAN_ENV['PATH']}:{tmp_path}"}
    assert run_cli(*RETRY_75, "--", name, "-c", 'echo "$0"', env=env, code=0).stdout == name + b"\n"


@pytest.mark.parametrize("words", (("--help",), ("--retry-code", "75", "--help"), ("--help", "--", "touch", "started")), ids=repr)
def test_help(tmp_path: Path, words: Words) -> None:
    done = run_cli(RETRY, *words, cwd=tmp_path, code=0)
    page = done.stdout.decode()
    assert done.stderr == b"" and "usage" in page.lower()
    assert [name for name, *_ in BOUNDS if name not in page] == []
    assert [code for code in ("0", "2", "125", "126", "127", "128+n", "130", "141") if code not in page.split()] == []
    assert not list(tmp_path.iterdir())
