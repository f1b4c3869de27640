"""Where the schedule runs: all ranks in one process, shapes alone, real processes."""
