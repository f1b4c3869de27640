"""What holds a run to account: the comparisons, training written a second time, and a stricter world."""
