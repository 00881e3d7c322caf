"""The README's recipes in bash, dash and zsh as printed, and what scripts do with the wrappers: loops, pipes, nohup, xargs."""

import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import DEMO, RETRY, ROOT, SINGLE, needs_namespaces, run_cli
from private_host import Host, host, needs_system_python

__all__ = ["host"]
README = (ROOT / "README.md").read_text()
SH_BLOCKS = re.findall(r"```sh\n(.*?)```", README, re.DOTALL)
CONSOLE_BLOCKS = re.findall(r"```console\n(.*?)```", README, re.DOTALL)
# The strictest way each has; this dash knows no pipefail.
STRICT = {"bash": "set -euo pipefail", "dash": "set -eu", "zsh": "set -euo pipefail"}
pytestmark = [pytest.mark.field, pytest.mark.parametrize("shell", STRICT)]


@pytest.fixture(autouse=True)
def needs_shell(shell: str) -> Iterator[None]:
    if not shutil.which(shell):
        pytest.skip(f"needs {shell}")
    yield


def script(shell: str, text: str, here: Path, code: int = 0) -> str:
    """What it prints, both streams, in a folder with the wrappers and the demo."""
    for file in (RETRY, SINGLE, DEMO):
        shutil.copy(file, here)
    text = re.sub(r"\bSINGLE\b", "./single_run.py --lock lock", text)
    text = re.sub(r"\bRETRY\b", "./retry_command.py --retry-code 75 --initial-delay-ms 0", text)
    return run_cli(shell, "-c", f"exec 2>&1\n{text}", cwd=here, code=code).stdout.decode()


def numbers(last: int) -> str:
    return "".join(f"{n}\n" for n in range(1, last + 1))


@pytest.mark.parametrize("block", SH_BLOCKS)
def test_each_block_parses(shell: str, block: str) -> None:
    end = run_cli(shell, "-n", input=block.encode(), code=0)
    assert (end.stdout, end.stderr) == (b"", b"")


@pytest.mark.parametrize("block", CONSOLE_BLOCKS)
def test_console_block(shell: str, block: str, here: Path) -> None:
    """What is shown there is what any of them shows."""
    shutil.copy(ROOT / "README.md", here)
    commands = re.findall(r"^\$ (.*)$", block, re.MULTILINE)
    session = "".join(f"code=$?; printf '%s\\n' {shlex.quote('$ ' + command)}; (exit $code); {command}\n" for command in commands)
    assert script(shell, f"{session}true", here) == block


@needs_namespaces
@needs_system_python
def test_recipes(shell: str, host: Host) -> None:
    """They run in order, stopped by no error; the stubs say what they were called with and read. The network fails once."""
    said = 'echo "${0##*/} $* $(tr "\\n" ,)" >>/run/said'
    for job in ("opt/bill/job", "opt/bill/upload", "opt/data/report", "opt/data/import"):
        host.program(job, said)
    host.program("usr/local/bin/pg_dump", "seq 3")
    host.program("usr/local/bin/curl", f'{said}; [ "$RETRY_WRAPPER_ATTEMPT" = 2 ] || exit 28')
    recipes = "\n".join(re.findall(r"Recipes:\n\n```sh\n(.*?)```", README, re.DOTALL))
    end = host.run(shell, "-c", f"{STRICT[shell]}\ncd /run\n{recipes}", code=0)
    assert (end.stdout, end.stderr) == (b"", b"")
    curl = "curl -fsS https://example.org/ \n"
    jobs = "job  \n", "upload  1,2,3,\n", 2 * "job  \n", 2 * curl, 2 * "job  \n", "report  \nimport  \njob  \n"
    assert (host.root / "run/said").read_text() == "".join(jobs)


@pytest.mark.parametrize(
    ("text", "shown"),
    (
        # The wrappers do not eat the loop's input; inherit shows that a job could.
        ('seq 3 | while read -r n; do SINGLE -- sh -c "cat; echo got $n"; done', "got 1\ngot 2\ngot 3\n"),
        ('seq 3 | while read -r n; do RETRY -- sh -c "cat; echo got $n"; done', "got 1\ngot 2\ngot 3\n"),
        ('seq 3 | while read -r n; do SINGLE -- RETRY -- sh -c "cat; echo got $n"; done', "got 1\ngot 2\ngot 3\n"),
        ('seq 3 | while read -r n; do SINGLE --stdin inherit -- sh -c "cat; echo got $n"; done', "2\n3\ngot 1\n"),
        ("seq 3 | RETRY --stdin replay -- sort -r | SINGLE --stdin inherit -- head -n 2", "3\n2\n"),
        ("RETRY -- seq 100000 | head -n 1 || true", "1\n"),
        # $( ) gets the output of a success alone.
        ('x=$(RETRY -- ./demo_job.py); echo "<$x>"', '<{"status":"ok","attempt":3}>\n'),
        ('x=$(RETRY -- sh -c "echo half; exit 65" 2>/dev/null) || echo "$? <$x>"', "65 <>\n"),
        ('if SINGLE -E 9 -- SINGLE -E 9 -- true 2>/dev/null; then echo ran; else echo "busy $?"; fi', "busy 9\n"),
        ('SINGLE -- sh -c "exit 7" & wait $! || echo "waited: $?"', "waited: 7\n"),
        ("(trap '' INT; RETRY -- sh -c 'kill -INT $$; echo lives')", "lives\n"),
        # nohup's SIGHUP stays ignored, by the wrapper (the job's parent) and by the job.
        ("nohup SINGLE -- sh -c 'kill -HUP $PPID $$; echo lives'", "lives\n"),
        ("nohup RETRY -- sh -c 'kill -HUP $PPID $$; echo lives'", "lives\n"),
        ('env -i PATH="$PATH" SINGLE -- env | sed /^PATH=/d', ""),
        ('env -i PATH="$PATH" RETRY -- env | sed -n "s/RETRY_WRAPPER_.*ATTEMPT/ATT/p" | sort', "ATT=1\nATTS=3\n"),
        # Eight at once. With --wait-ms each gets its turn, and mkdir fails where two are at work.
        ("seq 20 | xargs -P 8 -I% SINGLE --wait-ms 99999 -- sh -c 'mkdir alone && rmdir alone && echo %' | sort -n", numbers(20)),
        ("seq 20 | xargs -P 8 -I% RETRY -- sh -c '[ $RETRY_WRAPPER_ATTEMPT = 3 ] || exit 75; echo %' | sort -n", numbers(20)),
    ),
)
def test_in_a_strict_script(shell: str, text: str, shown: str, here: Path) -> None:
    assert script(shell, f"{STRICT[shell]}\n{text}", here) == shown


@pytest.mark.parametrize(
    ("text", "codes"),
    (
        ("SINGLE -- SINGLE -- true 2>/dev/null; echo not reached", (75, 75)),
        ("RETRY -- sh -c 'exit 65' 2>/dev/null; echo not reached", (65, 65)),
        ("RETRY -- sh -c 'exit 65' 2>/dev/null | cat; exit 3", (65, 3)),
        ("seq 3 | xargs -n 1 RETRY -- sh -c 'exit 65' 2>/dev/null; echo not reached", (123, 123)),
    ),
)
def test_the_exit_code_stops_a_strict_script(shell: str, text: str, codes: tuple[int, int], here: Path) -> None:
    """The second code is that of a shell without pipefail."""
    assert script(shell, f"{STRICT[shell]}\n{text}", here, codes["pipefail" not in STRICT[shell]]) == ""
