"""The well-known frameworks beside the simulator: DDP, ZeroRedundancyOptimizer, FSDP2, DeepSpeed."""
