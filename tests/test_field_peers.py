"""README, compared with: what is said of flock, timeout, retry, chronic and ours is what these programs do."""

import shutil
import signal
from pathlib import Path

import pytest
from conftest import HANG_S, PROBE, RETRY, ROOT, SINGLE, Fifo, ended, run_cli, send, started

pytestmark = pytest.mark.field
TABLE = (ROOT / "README.md").read_text().partition("\n## Compared with\n")[2].partition("\n## ")[0]
ROWS = dict(line.strip("| ").split(" (", 1) for line in TABLE.splitlines() if line.startswith("| `"))
PEERS = {"flock": ("flock", "lock"), "timeout": ("timeout", "60"), "retry": ("retry",), "chronic": ("chronic",)}
OURS = {"retry_command.py": (RETRY, "--retry-code", "75", "--"), "single_run.py": (SINGLE, "--lock", "lock", "--")}


def test_the_peers_are_those_of_the_table() -> None:
    assert {name.strip("`") for name in ROWS} == set(PEERS)


def peer(name: str) -> tuple[str, ...]:
    if not shutil.which(name):
        pytest.skip(f"needs {name}")
    return PEERS[name]


@pytest.mark.parametrize("name", (*PEERS, *OURS))
def test_who_passes_a_signal_on(here: Path, fifo: Fifo, name: str) -> None:
    wrapper = OURS.get(name) or peer(name)
    run = started(*wrapper, *PROBE, fifo.path, "on:TERM=7", "on:USR1=0", "say:{pid}", "wait")
    job = int(fifo.line())
    run.send_signal(signal.SIGTERM)
    if "TERM to it does not reach" in ROWS.get(f"`{name}`", ""):
        run.wait(HANG_S)  # the job still has its pipes
        send(job, signal.SIGUSR1)
        assert fifo.until_gone() == ["got SIGUSR1"]
    else:
        assert fifo.until_gone() == ["got SIGTERM"]
        ended(run)


@pytest.mark.parametrize("name", (*(name for name in PEERS if name != "retry"), *OURS))
def test_a_job_that_a_signal_killed(here: Path, name: str) -> None:
    """A shell's 128+n, which timeout gives by dying of the signal itself."""
    end = run_cli(*(OURS.get(name) or peer(name)), "sh", "-c", "kill -KILL $$")
    assert end.returncode % 256 == {"chronic": 1, "timeout": -9 % 256}.get(name, 137)


def test_timeouts_124_may_be_the_commands(here: Path) -> None:
    """Ours tells them apart."""
    for command in ("exit 124", "exec sleep 600"):
        run_cli(*peer("timeout")[:1], "0.2", "sh", "-c", command, code=124)
        end = run_cli(RETRY, "--retry-code", "75", "--attempt-timeout-ms", "200", "--", "sh", "-c", command, code=124)
        assert (b'"timed_out":true' in end.stderr) == (command != "exit 124")
