"""``python -m caraml.worker FOLDER``: measure the point of an attempt's folder, alone or as one rank of several."""

import os
import sys
from pathlib import Path

from caraml.base.processes import keep_temporary_files_private
from caraml.system.affinity import bind_early

keep_temporary_files_private()  # before torch is imported: it looks once
bind_early()  # likewise: its OpenMP looks once
from caraml.worker.training import main  # noqa: E402

main(Path(sys.argv[1]))
# Everything is written. Torch's own threads may still be on their way out, and an interpreter that is taken down around them aborts.
sys.stdout.flush()
sys.stderr.flush()
os._exit(0)
