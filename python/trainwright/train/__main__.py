"""``torchrun --nproc-per-node 2 -m trainwright.train``, or ``python -m trainwright.train`` for one process."""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback

from trainwright.train.config import RunError, parse


def finish(message: str, code: int) -> None:
    """End a failed process. Rank 0 says why; the others wait, or torchrun would end it before it has spoken."""
    if os.environ.get("RANK", "0") == "0":
        print(f"trainwright.train: error: {message}", file=sys.stderr, flush=True)
    else:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(3.0)
    sys.stdout.flush()
    os._exit(code)  # a process group whose peers are gone must not hold us up


def main(argv: list[str]) -> None:
    try:
        given = parse(argv)
        from trainwright.train.loop import run

        code = run(given)
        sys.stdout.flush()
        os._exit(code)  # threads that wait on the network would make an orderly exit a gamble
    except RunError as error:
        finish(str(error), error.code)
    except KeyboardInterrupt:
        finish("interrupted again: stopped without a checkpoint of this step", 130)
    except ModuleNotFoundError as error:
        finish(f"{error.name} is not installed: pip install 'trainwright[train]'", 1)
    except OSError as error:
        finish(f"{error.filename or 'a file'}: {error.strerror or error}", 1)
    except Exception:
        traceback.print_exc()
        finish("unexpected error, see the traceback above", 1)


if __name__ == "__main__":
    main(sys.argv[1:])
