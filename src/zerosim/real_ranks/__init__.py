"""The simulator held to real torch.distributed ranks: how they are started, watched, measured and compared."""
