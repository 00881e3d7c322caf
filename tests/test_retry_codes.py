"""What is worth another attempt: exit codes by number, range or name, and signals by name."""

import os
from pathlib import Path

import pytest
from conftest import RETRY, failed, run_cli

LISTS = (  # --retry-code, codes that are retried, codes next to them that are not
    (("75",), (75,), (74, 76)),
    (("69-71",), (69, 70, 71), (68, 72)),
    (("75,111",), (75, 111), (11, 110)),
    (("111,75",), (75, 111), ()),
    (("TEMPFAIL",), (75,), (74,)),
    (("EX_TEMPFAIL",), (75,), (74,)),
    (("UNAVAILABLE,1-3,TEMPFAIL,9",), (69, 1, 2, 3, 9, 75), (4, 8, 10)),
    (("75", "69-71", "75,75", "70"), (75, 69, 70, 71), (72,)),
    (("1-124",), (1, 124), (125, 126, 127, 255)),
    (("5-5",), (5,), (4, 6)),
    (("075",), (75,), ()),
)


@pytest.mark.parametrize(
    ("lists", "code", "retried"),
    [(lists, code, True) for lists, yes, _ in LISTS for code in yes]
    + [(lists, code, False) for lists, _, no in LISTS for code in no],
)
def test_listed_codes_are_retried(lists: tuple[str, ...], code: int, retried: bool) -> None:
    words = [word for codes in lists for word in ("--retry-code", codes)]
    done = run_cli(RETRY, *words, "--initial-delay-ms", "0", "--max-attempts", "2", "--", "sh", "-c", f"exit {code}", code=code)
    events = (failed(code, 1, 0, 2) + failed(code, 2, max_attempts=2)) if retried else failed(code, max_attempts=2)
    assert done.stderr == events and done.stdout == b""


@pytest.mark.parametrize("name", [name for name in dir(os) if name.startswith("EX_") and name not in ("EX_OK", "EX_NOTFOUND")])
def test_each_name_of_sysexits(name: str) -> None:
    code = getattr(os, name)
    done = run_cli(RETRY, "--retry-code", name[3:], "--initial-delay-ms", "0", "--", "sh", "-c", f"exit {code}", code=code)
    assert done.stderr.count(b"\n") == 3


REFUSED = (  # --retry-code, the part that the message names
    *(
        (part, part)
        for part in ("71-69", "70-", "-71", "-", "1--2", "1-2-3", "0", "0-5", "00", "125", "120-125", "256", "9" * 5000)
    ),
    *((part, part) for part in ("FOO", "tempfail", "Tempfail", "EX_", "OK", "EX_OK", "TEMP", "KILL", "75.0", "0x4b", "1e1", "*")),
    *(
        (part, part)
        for part in (
            "+75",
            "75+",
            "7 5",
            " 75",
            "75 ",
            "7_5",
            "٣",
            "\uff17\uff15",
            "²",
            "75\n",
            "69 - 71",
            "TEMPFAIL-75",
            "69..71",
        )
    ),
    *((text, "''") for text in ("", ",", "75,", ",75", "75,,76")),
    ("75,FOO,76", "'FOO'"),
    ("69-71,200", "'200'"),
    ("75;76", "75;76"),
)


def refused(tmp_path: Path, option: str, value: str, part: str) -> None:
    more = () if option == "--retry-code" else ("--retry-code", "75")
    done = run_cli(RETRY, *more, f"{option}={value}", "--", "touch", "started", cwd=tmp_path, code=2)
    assert done.stdout == b"" and not os.listdir(tmp_path)
    last = done.stderr.decode().splitlines()[-1]
    assert last.startswith(f"retry_command.py: error: argument {option}: ")
    assert part[:60] in last or repr(part)[1:-1] in last


@pytest.mark.parametrize(("value", "part"), REFUSED, ids=lambda text: repr(text)[:20])
def test_refused_codes(tmp_path: Path, value: str, part: str) -> None:
    refused(tmp_path, "--retry-code", value, part)


@pytest.mark.parametrize(
    "value", ("FOO", "kill", "9", "-9", "KILL,", "", "KILL,FOO", "SIG", "_IGN", "SIG_IGN", "SIGSIGKILL", " KILL")
)
def test_refused_signals(tmp_path: Path, value: str) -> None:
    refused(tmp_path, "--retry-signal", value, value.removeprefix("KILL,"))


SIGNALS = (  # --retry-signal, how the job dies, its return code, whether that is retried
    (("KILL",), "KILL", -9, True),
    (("SIGKILL",), "KILL", -9, True),
    (("SEGV,KILL",), "KILL", -9, True),
    (("SEGV", "KILL"), "SEGV", -11, True),
    (("KILL",), "TERM", -15, False),
    ((), "KILL", -9, False),
)


@pytest.mark.parametrize(("names", "death", "returncode", "retried"), SIGNALS)
def test_listed_signals_are_retried(names: tuple[str, ...], death: str, returncode: int, retried: bool) -> None:
    words = [word for name in names for word in ("--retry-signal", name)]
    job = ("sh", "-c", f"ulimit -c 0; kill -{death} $$")
    done = run_cli(
        RETRY, "--retry-code", "75", *words, "--max-attempts", "2", "--initial-delay-ms", "0", "--", *job, code=128 - returncode
    )
    assert done.stderr == (
        failed(returncode, 1, 0, 2) + failed(returncode, 2, max_attempts=2) if retried else failed(returncode, max_attempts=2)
    )


def test_a_shells_number_for_a_signal_is_none_of_ours() -> None:
    """A job that exits with 137 by itself has not died."""
    done = run_cli(RETRY, "--retry-code", "75", "--retry-signal", "KILL", "--", "sh", "-c", "exit 137", code=137)
    assert done.stderr == failed(137)
