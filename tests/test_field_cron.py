"""The README's crontab in a real cron, hidden from the machine: when it mails, what its jobs see, and what a % is."""

import fcntl
import os
import re
import shutil
import time
from email import message_from_bytes

import pytest
from conftest import CLEAN_ENV, ROOT, children, ended, failed, json_line, started, until
from private_host import BILL, BUSY, FIELD, Host, host

__all__ = ["host"]
CRON = shutil.which("cron", path="/usr/sbin")
pytestmark = [*FIELD, pytest.mark.skipif(not CRON or not shutil.which("chronic"), reason="needs cron and chronic")]
BLOCK = "".join(re.findall(r"```crontab\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL))
EVERY_5_MINUTES, DAILY = (line for line in BLOCK.splitlines() if not line.startswith("#"))
SKIPPED = BUSY.decode()
UNFILTERED = EVERY_5_MINUTES.partition(" 2>&1 | ")[0]
SILENCED = f"{UNFILTERED} 2>/dev/null"
CHRONIC = UNFILTERED.replace("/usr/local/bin/single_run.py", "chronic /usr/local/bin/single_run.py")


def at_boot(line: str) -> str:
    """To be run when cron starts, as a whole minute is long to wait for."""
    return re.sub(r"^(\S+ ){5}", "@reboot ", line)


def mails(host: Host, crontab: str, a_minute: bool = False) -> list[tuple[str, str]]:
    """Receivers and texts of the mails that were sent when all jobs of the start, and maybe of one minute, have ended."""
    host.folder("run/mail", 0o1777)
    host.folder("run/bill", 0o700, BILL)
    host.folder("etc/cron.d", 0o755)
    host.write("etc/crontab", "")
    host.write("etc/cron.d/bill", f"{crontab}\n")
    # The users' crontabs come last: when this job runs, all others have been started.
    host.write("var/spool/cron/crontabs/root", "@reboot touch /run/begun\n", 0o600)
    host.program("usr/sbin/sendmail", "cat >$(mktemp /run/mail/XXXXXX)")
    for name in set(os.listdir("/usr/sbin")) - {"sendmail"}:  # all else that is there stays
        (host.root / "usr/sbin" / name).symlink_to(host.folder("sbin", 0o755) / name)
    host.mounts.append(("/usr/sbin", f"{host.root}/sbin"))
    for place in ("etc/cron.d", "etc/crontab", "var/spool/cron/crontabs", "usr/sbin"):
        host.mounts.append((f"{host.root}/{place}", f"/{place}"))
    cron = started(*host.command(CRON, "-f"), env={**CLEAN_ENV, "OURS": "must not be seen"})
    try:
        until((host.root / "run/begun").exists)
        if a_minute:
            time.sleep(60 - time.time() % 60)
            until((host.root / "run/bill/ran").exists)
        until(lambda: not children(children(cron.pid)[0]))
    finally:
        cron.kill()
        ended(cron)
    found = [message_from_bytes(file.read_bytes()) for file in (host.root / "run/mail").iterdir()]
    return [(str(mail["To"]), str(mail.get_payload())) for mail in found]


def runs(host: Host) -> int:
    ran = host.root / "run/bill/ran"
    return len(ran.read_text().splitlines()) if ran.exists() else 0


@pytest.mark.parametrize(("line", "sent"), ((EVERY_5_MINUTES, []), (SILENCED, []), (CHRONIC, []), (UNFILTERED, [SKIPPED])))
def test_a_skipped_run(host: Host, line: str, sent: list[str]) -> None:
    host.program("opt/bill/job", "echo >>/run/bill/ran")
    with host.write("run/bill/bill.lock", "", 0o644).open() as lock:
        os.chown(lock.fileno(), BILL, BILL)
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert [text for _, text in mails(host, at_boot(line))] == sent
    assert runs(host) == 0


HISTORY = "".join(failed(75, n, wait).decode() + f"no answer {n}\n" for n, wait in ((1, 1000), (2, 2000), (3, None)))
NOT_THERE = json_line(source="retry_wrapper", event="launch_error", attempt=1, max_attempts=3, kind="not_found", retrying=False)


@pytest.mark.parametrize(
    ("line", "job", "attempts", "sent"),
    (
        (EVERY_5_MINUTES, 'echo "no answer $RETRY_WRAPPER_ATTEMPT" >&2; exit 75', 3, [HISTORY]),
        (SILENCED, 'echo "no answer $RETRY_WRAPPER_ATTEMPT" >&2; exit 75', 3, []),
        (EVERY_5_MINUTES, "[ $RETRY_WRAPPER_ATTEMPT = 2 ] || { echo no answer >&2; exit 75; }", 2, []),
        (EVERY_5_MINUTES, "echo 3 bills", 1, ["3 bills\n"]),
        (EVERY_5_MINUTES, "", 0, [NOT_THERE.decode()]),
        (EVERY_5_MINUTES.replace("/run/", "/run/missing/"), "", 0, [SKIPPED.replace("/run/", "/run/missing/")]),
    ),
    ids=("fails", "fails, silenced", "succeeds at last", "prints", "is not there", "has no folder for its lock"),
)
def test_a_run(host: Host, line: str, job: str, attempts: int, sent: list[str]) -> None:
    if job:
        host.program("opt/bill/job", f"echo >>/run/bill/ran; {job}")
    sent = [text.replace('"busy","reason":"lock_held"', '"error","reason":"lock_parent_not_found"') for text in sent]
    assert mails(host, f"MAILTO=ops@example.org\n{at_boot(line)}") == [("ops@example.org", text) for text in sent]
    assert runs(host) == attempts


@pytest.mark.parametrize("escaped", (True, False))
def test_a_percent_sign(host: Host, escaped: bool) -> None:
    host.program("opt/bill/report", 'echo "$(id -un): $*"')
    (sent,) = mails(host, at_boot(DAILY if escaped else DAILY.replace(r"\%", "%")))
    assert sent[0] == "bill"
    assert bool(re.fullmatch(r"bill: \d{4}-\d\d-\d\d\n", sent[1])) == escaped
    assert (host.root / "run/bill/report.lock").exists() == escaped


def test_the_environment_is_crons(host: Host) -> None:
    """Nothing of who started cron, nothing of ours but the documented variables; and no XDG_RUNTIME_DIR."""
    both = UNFILTERED.replace("/opt/bill/job", "env")
    assert mails(host, at_boot(f"{both} >/run/bill/wrapped\n{at_boot('* * * * * bill env >/run/bill/bare')}")) == []
    wrapped, bare = (
        dict(re.findall("(.*?)=(.*)\n", (host.root / "run/bill" / name).read_text())) for name in ("wrapped", "bare")
    )
    assert {name for name in wrapped if name.startswith("RETRY_WRAPPER_")} == wrapped.keys() - bare.keys()
    assert {name: wrapped[name] for name in bare} == bare
    assert (bare["SHELL"], bare["HOME"], bare["LOGNAME"]) == ("/bin/sh", "/", "bill")
    assert bare["PATH"] != CLEAN_ENV["PATH"] and not {"OURS", "LC_ALL", "XDG_RUNTIME_DIR"} & bare.keys()


def test_at_a_real_minute(host: Host) -> None:
    host.program("opt/bill/job", "echo >>/run/bill/ran")
    assert mails(host, EVERY_5_MINUTES.replace("*/5", "*"), a_minute=True) == []
    assert runs(host)
