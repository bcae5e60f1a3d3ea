"""``python -m caraml.worker FOLDER``: measure the point of an attempt's folder, alone or as one rank of several."""

import os
import signal
import sys
import time
import traceback
from contextlib import nullcontext
from pathlib import Path

from caraml.base.processes import keep_temporary_files_private
from caraml.base.signals import die_with_parent, end_with_caller, on_termination
from caraml.system.affinity import bind_early

keep_temporary_files_private()  # before torch is imported: it looks once
bind_early()  # likewise: its OpenMP looks once
end_with_caller()  # likewise: loading may take a minute
signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # the batch system's warning, until the worker hears of it
from caraml.base.errors import is_out_of_memory  # noqa: E402
from caraml.base.format import human  # noqa: E402
from caraml.base.limits import read_json  # noqa: E402
from caraml.results.finish import note_start, reason_of  # noqa: E402
from caraml.suite.model import Point  # noqa: E402
from caraml.system.host import MEMORY, limit_memory  # noqa: E402
from caraml.worker.training import Worker  # noqa: E402

_NO_STACK = "can't start new thread"
"""What Python says where the limit of memory leaves no room for a thread's stack."""


def main(folder: Path) -> None:
    """Measure the point of an attempt's folder. What fails is noted there and raised."""
    point = Point.model_validate_json(read_json(folder / "point.json"))
    die_with_parent()
    if os.environ.get("RANK", "0") == "0":
        note_start(folder, point.world)
    worker = Worker(folder, point)
    signal.signal(signal.SIGUSR1, lambda number, frame: worker.hurry())  # what `sbatch --signal` sends before the time is over
    signal.signal(signal.SIGCONT, lambda number, frame: worker.resumed.append(time.monotonic()))
    signal.siginterrupt(signal.SIGCONT, False)  # whoever waits in the system goes on as without a handler
    # Launchers, and what starts the ranks where one of them has ended, ask a process to end before they end it.
    with on_termination(lambda number: worker.rescue()) if worker.rank == 0 else nullcontext():
        _run(worker)


def _run(worker: Worker) -> None:
    point, limit = worker.point, None
    try:
        limit = limit_memory(point.devices) if point.device_class == "cpu" else None
        worker.run()
    except BaseException as error:
        full = is_out_of_memory(error) or (limit is not None and _NO_STACK in str(error))
        of = f"; the worker may take {human(limit, 'B')} ({MEMORY} sets another limit)" if full and limit else ""
        trace = f"rank {worker.rank}: {traceback.format_exc()}"
        if worker.note("oom" if full else "failed", reason_of(error) + worker.where + of, trace) or worker.rank == 0:
            worker.rescue()
        raise


main(Path(sys.argv[1]))
# Everything is written. Torch's own threads may still be on their way out, and an interpreter that is taken down around them aborts.
sys.stdout.flush()
sys.stderr.flush()
os._exit(0)
