"""`python -m keepstep.library.child VERB …`: a command that stops, and saves, when the process that started it is gone.

A restarted notebook kernel must not leave a training behind that nobody sees and that holds the run's folder.
"""

import os
import signal
import threading

from keepstep.cli.main import main


def _stop_when_stdin_closes() -> None:
    # Not sys.stdin: a thread inside its lock makes Python abort at exit.
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    threading.Thread(target=_stop_when_stdin_closes, name="caller-watch", daemon=True).start()
    raise SystemExit(main())
