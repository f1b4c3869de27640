"""The colours: one for each band of memory, and a row of them for schemes, the same in everything that is drawn.

Owns them and nothing else. Plain hex strings, so that a page can use them as well as a figure.

Chosen by a search for the largest smallest distance (OKLab) between any two of a set, seen with
normal and with three kinds of colour-blind eyes (Machado et al. 2009), under a limit on the
contrast with white and with near-black. The tests measure both again.

Model states are cold, from violet to sky; what comes and goes within a step is warm, or grey
where it does not scale with the parameters. Momentum, which takes the place of Adam's two moments,
takes the first one's colour. Scalars, what a checkpoint copies and the optimizer's scales came last, to what room
was left. A scheme takes the colour of its place among those that are drawn (``looks.py``); the
first four of ``PLACES`` are as far apart as can be, the others as far from these as the limits leave.
"""

from collections.abc import Mapping, Sequence

from zerosim.bands import Band

BANDS: Mapping[str, str] = {
    Band.PARAMS: "#624777",
    Band.GRADS: "#4050B8",
    Band.MAIN_GRADS: "#9000FC",
    Band.MASTER: "#277EB0",
    Band.EXP_AVG: "#1E94F8",
    Band.EXP_AVG_SQ: "#1DC4F3",
    Band.MOMENTUM: "#1E94F8",
    Band.GATHERED: "#E7A72E",
    Band.SECONDARY: "#F22DD2",
    Band.UNREDUCED: "#CF5C00",
    Band.PARTIAL: "#DB814E",
    Band.BLOCKS: "#912223",
    Band.SCALARS: "#878796",
    Band.ACTIVATIONS: "#A79E96",
    Band.BUFFERS: "#B43C00",
    Band.CHECKPOINT: "#96C387",
    Band.BUCKET: "#9C606C",
    Band.SCALES: "#3C3C96",
}
PLACES: Sequence[str] = (
    "#8F8F8F", "#1860F0", "#DE6D12", "#8E4A8A", "#0C9CE4", "#B400C0", "#B43C00", "#787860",
)  # fmt: skip
