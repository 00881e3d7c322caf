"""demo_job.py: what it promises, and the main job on a bare copy of the three files."""

import shutil
import time
from pathlib import Path

import pytest
from conftest import CLEAN_ENV, DEMO, RETRY, SINGLE, ended, json_line, run_cli, started

RETRYING = ("./retry_command.py", "--retry-code", "75", "--initial-delay-ms", "1")
NESTED = ("./single_run.py", "--lock", "demo.lock", "--", *RETRYING, "--", "./demo_job.py")


@pytest.fixture
def copy(here: Path) -> Path:
    for script in (SINGLE, RETRY, DEMO):
        shutil.copy(script, here)
    return here


@pytest.mark.parametrize("attempt", ("1", "2", "3"))
def test_under_retry_it_succeeds_in_attempt_3(attempt: str) -> None:
    env = {**CLEAN_ENV, "RETRY_WRAPPER_ATTEMPT": attempt, "RETRY_WRAPPER_MAX_ATTEMPTS": "3"}
    end = run_cli(DEMO, env=env, code=0 if attempt == "3" else 75)
    if attempt == "3":
        assert (end.stdout, end.stderr) == (b'{"status":"ok","attempt":3}\n', b"")
    else:
        assert end.stdout == b"" and len(end.stderr) > 1 and end.stderr.find(b"\n") == len(end.stderr) - 1


def test_bare_it_says_what_to_run(here: Path) -> None:
    end = run_cli(DEMO, code=2)
    assert end.stdout == b"" and b"retry_command.py --retry-code 75 -- " in end.stderr and b"Traceback" not in end.stderr


@pytest.mark.parametrize("seconds", ("0", "31", "-1", "1.5", "x", "", "1e1", "0x1", " 1", "+1", "1_0", "\u0661"))
def test_seconds_out_of_range(seconds: str) -> None:
    end = run_cli(DEMO, "--seconds", seconds, code=2)
    assert end.stdout == b"" and end.stderr and b"Traceback" not in end.stderr


def test_seconds_holds_a_lock(copy: Path) -> None:
    start_s = time.monotonic()
    holder = started("./single_run.py", "--lock", "demo.lock", "--", "./demo_job.py", "--seconds", "1")
    while not (copy / "demo.lock").exists() or not (copy / "demo.lock").read_bytes():
        time.sleep(0.001)
    end = run_cli("./single_run.py", "--lock", "demo.lock", "--", "./demo_job.py", "--seconds", "1", code=75)
    assert (end.stdout, end.stderr) == (b"", json_line(status="busy", reason="lock_held", lock="demo.lock"))
    end = ended(holder, 0)
    assert (end.stdout, end.stderr) == (b'{"status":"ok","slept_seconds":1}\n', b"")
    assert time.monotonic() - start_s >= 1


@pytest.mark.parametrize("times", (1, 2))
def test_the_main_job(copy: Path, times: int) -> None:
    for _ in range(times):
        end = run_cli(*NESTED, code=0)
        assert (end.stdout, end.stderr) == (b'{"status":"ok","attempt":3}\n', b"")
    assert sorted(path.name for path in copy.iterdir()) == ["demo.lock", "demo_job.py", "retry_command.py", "single_run.py"]


def test_with_too_few_attempts_it_fails_as_the_job_does(copy: Path) -> None:
    end = run_cli(*RETRYING, "--max-attempts", "2", "--", "./demo_job.py", code=75)
    assert end.stdout == b"" and end.stderr.count(b'"event":"attempt_failed"') == 2
