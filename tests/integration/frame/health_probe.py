"""Asks a server for its health again and again, each time on a new connection, from a process of its own: what it
measures is the server, not the interpreter that an attack keeps busy."""

import subprocess
import sys
import threading
import time

import grpc

from wire import SERVING, check_health

PAUSE_S = 0.02
CHECK_S_MAX = 20


def check(address):
    """Seconds from no connection to the answer; the reason when there was no good one."""
    start = time.monotonic()
    try:
        with grpc.insecure_channel(address, [("grpc.use_local_subchannel_pool", 1)]) as fresh:
            status = check_health(fresh, timeout=CHECK_S_MAX)
    except grpc.RpcError as error:
        return f"{error.code().name} after {time.monotonic() - start:.3f} s: {error.details()}"
    return time.monotonic() - start if status == SERVING else f"status {status}"


def main(address):
    lock = threading.Lock()
    answers = [check(address)]

    def keep_checking():
        while True:
            with lock:
                answers.append(check(address))
            time.sleep(PAUSE_S)

    threading.Thread(target=keep_checking, daemon=True).start()
    print("ready", flush=True)
    for _ in sys.stdin:
        with lock:
            answers.append(check(address))
            failures = [answer for answer in answers if isinstance(answer, str)]
            print(failures[0] if failures else f"{len(answers)} {max(answers)}", flush=True)
            answers.clear()


class HealthProbe:
    """with HealthProbe(address) as probe: probe.slowest()"""

    def __init__(self, address):
        self.process = subprocess.Popen(
            [sys.executable, __file__, address], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._answer()

    def slowest(self):
        """(checks, seconds of the slowest) since the last call, with one that starts now."""
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        answer = self._answer()
        try:
            checks, seconds = answer.split()
            return int(checks), float(seconds)
        except ValueError:
            raise AssertionError(f"health: {answer}") from None

    def _answer(self):
        return self.process.stdout.readline().strip()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()


if __name__ == "__main__":
    main(sys.argv[1])
