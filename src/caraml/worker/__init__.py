"""One point in one process group: a training of ours, somebody's own loop, or any program; and the record of it."""
