"""zerosim: ZeRO made measurable. N virtual GPUs train a real model, and every byte is counted where it is."""

import zerosim.schemes  # noqa: F401  a row can be called wherever it was imported from
