"""A job for the tests that says what happens to it: probe.py FIFO [WORD ...]

It opens FIFO (a test reads the other end), then acts on the words in order. While any process that came from it lives,
the FIFO has a writer: its end of file tells the test that all are gone.

    say:TEXT      a line to the FIFO: {pid} {pgid} {attempt} in it are filled in
    out:TEXT      to stdout; err:TEXT to stderr (no newline is added)
    echo          from here on every catchable signal is a line "got NAME" in the FIFO, and nothing else happens
    on:NAME=CODE  from here on signal NAME is a line and ends the probe with CODE
    ignore:NAME   ignore signal NAME; default:NAME lets it do what it does by default
    join          join the process group of the parent
    fork          the rest of the words is also done by a child, which first says "child PID"
    leave:CODE    the rest of the words is done by a child; this process ends with CODE once the child waits or stops
    only:N        go on only in attempt N or later; before it exit 75
    wait          wait for signals, until killed
    stop          stop this process (SIGSTOP)
    tty           read a line from /dev/tty and say it
    exit:CODE     end now (the default at the end is 0); die:NAME ends by that signal
"""

import os
import signal
import sys
import time


def signal_name(number: int) -> str:
    """SIGUSR1 and the like; real-time signals, and what this Python has no name for, stay numbers."""
    return signal.Signals(number).name if number < 34 and number in set(signal.Signals) else str(int(number))


def main(fifo: str, words: list[str]) -> int:
    channel = os.open(fifo, os.O_WRONLY)

    def say(text: str) -> None:
        os.write(channel, text.encode() + b"\n")

    def got(number: int, _frame: object) -> None:
        say(f"got {signal_name(number)}")

    parent, busy = os.pipe()
    attempt = os.environ.get("RETRY_WRAPPER_ATTEMPT", "0")
    for word in words:
        name, _, value = word.partition(":")
        if name == "say":
            say(value.format(pid=os.getpid(), pgid=os.getpgrp(), attempt=attempt))
        elif name in ("out", "err"):
            os.write(1 if name == "out" else 2, os.fsencode(value))
        elif name == "echo":
            for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD}:
                signal.signal(number, got)
        elif name == "on":
            which, _, code = value.partition("=")

            def end(number: int, frame: object, code: int = int(code)) -> None:
                got(number, frame)
                os._exit(code)

            signal.signal(signal.Signals[f"SIG{which}"], end)
        elif name == "ignore":
            signal.signal(signal.Signals[f"SIG{value}"], signal.SIG_IGN)
        elif name == "default":
            signal.signal(signal.Signals[f"SIG{value}"], signal.SIG_DFL)
        elif name == "join":
            os.setpgid(0, os.getpgid(os.getppid()))
        elif name == "fork":
            if not os.fork():
                say(f"child {os.getpid()}")
        elif name == "leave":
            if os.fork():
                os.close(busy)
                os.read(parent, 1)
                return int(value)
        elif name == "only":
            if int(attempt) < int(value):
                return 75
        elif name == "wait":
            os.closerange(busy, busy + 1)  # it may be closed already
            while True:
                time.sleep(0.05)  # pause() would sleep through a signal that comes just before it
        elif name == "stop":
            os.closerange(busy, busy + 1)
            os.kill(os.getpid(), signal.SIGSTOP)
        elif name == "tty":
            with open("/dev/tty", "rb", buffering=0) as tty:
                say("read " + tty.readline().decode().strip())
        elif name == "exit":
            return int(value)
        elif name == "die":
            os.kill(os.getpid(), signal.Signals[f"SIG{value}"])
        else:
            raise SystemExit(f"probe: {word}?")
    return 0


if __name__ == "__main__":
    os._exit(main(sys.argv[1], sys.argv[2:]))
