"""What ZeRO predicts, as closed forms in exact integers for any N, any row, and any of the lab's options.

Stated from the papers, and not read from the code that they are compared with: they share only the bands'
names and the rows with the rest, and never see a run.
"""

from zerosim.theory.forms import (
    STATES,
    Bytes,
    Flow,
    Job,
    copies,
    flops,
    flows,
    host_resident,
    messages,
    outside,
    padding,
    padding_sent,
    resident,
    scalars,
    traffic,
)
from zerosim.theory.peaks import host_peak, moments, peak, peak_without_activations

__all__ = [
    "STATES", "Bytes", "Flow", "Job", "copies", "flops", "flows", "host_peak", "host_resident", "messages", "moments",
    "outside",
    "padding", "padding_sent", "peak", "peak_without_activations", "resident", "scalars", "traffic",
]  # fmt: skip
