"""zerosim: ZeRO made measurable. N virtual GPUs train a real model, and every byte is counted where it is."""
