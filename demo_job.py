#!/usr/bin/env -S python3 -IS
"""A tiny job to try the two wrappers with.

retry_command.py --retry-code 75 -- ./demo_job.py       fails with 75 in attempts 1 and 2, then succeeds
single_run.py --lock demo.lock -- ./demo_job.py --seconds N     sleeps for N seconds (1 to 30)
"""

import os
import sys
import time


def main(words: "list[str]") -> int:
    attempt = os.environ.get("RETRY_WRAPPER_ATTEMPT", "")
    if len(words) == 2 and words[0] == "--seconds" and words[1] in map(str, range(1, 31)):
        time.sleep(int(words[1]))
        print(f'{{"status":"ok","slept_seconds":{words[1]}}}')
        return 0
    if words or not (attempt.isascii() and attempt.isdigit()):
        print(f"demo_job.py: run it under a wrapper:\n{(__doc__ or '').partition(chr(10) * 2)[2]}", end="", file=sys.stderr)
        return 2
    if int(attempt) < 3:
        print(f"demo_job.py: attempt {attempt} fails, as it is meant to", file=sys.stderr)
        return 75
    print(f'{{"status":"ok","attempt":{int(attempt)}}}')
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
