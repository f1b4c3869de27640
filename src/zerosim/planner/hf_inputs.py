"""What a Hugging Face model is called with in a plan, and the loss that its output is given.

Owns shapes of inputs by the names of a forward's arguments, and the loss by the names of an
output's fields. Must not know how a module came about, nor what is measured of it.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from math import prod
from typing import Any

import torch

from zerosim.planner.model_source import Inputs

TEXT = ("input_ids", "decoder_input_ids")


def tokens(rows: int, sequence: int | None) -> torch.Tensor:
    """Token numbers [rows, sequence], without values."""
    return torch.empty((rows, sequence or 1), dtype=torch.int64, device="meta")


def candidates(module: Any) -> Iterator[tuple[Inputs, bool]]:
    """What the module may be called with, the likeliest first, and whether its rows have a length of their own.

    Text where it takes text, so that a model of several kinds of input is planned as the language model in it; its
    main input where that is something else; and both where neither is enough.
    """
    names = set(inspect.signature(module.forward).parameters)
    main = getattr(module, "main_input_name", "input_ids")
    encodes = bool(getattr(module.config, "is_encoder_decoder", False)) and "decoder_input_ids" in names
    text = ["input_ids"] if "input_ids" in names else []
    decoder = ["decoder_input_ids"] if encodes else []
    others = [
        name for name in (main, "pixel_values", "input_features", "input_values") if name in names - {"input_ids"}
    ]
    if text:
        yield _inputs(module, text + decoder), True
    for other in dict.fromkeys(others):
        yield _inputs(module, [other, *decoder]), encodes or not other.startswith("pixel")
        if text:
            yield _inputs(module, [*text, other, *decoder]), True
    if not text and not others and names:
        yield _inputs(module, [next(iter(names))]), True


def _inputs(module: Any, names: list[str]) -> Inputs:
    def make(rows: int, sequence: int | None) -> dict[str, torch.Tensor]:
        return {name: _input(module, name, rows, sequence) for name in names}

    return make


def _input(module: Any, name: str, rows: int, sequence: int | None) -> torch.Tensor:
    config = module.config
    if name.startswith("pixel_values"):
        shape = [
            rows,
            *_frames(config),
            _first(config, "num_channels", "in_channels", "in_chans") or 3,
            *_image(config),
        ]
        return torch.empty(shape, device="meta")
    if name == "input_features":
        features = _first(config, "num_mel_bins", "input_feat_per_channel", "feature_size", "input_dim", "n_mels") or 80
        longest = _first(config, "max_source_positions")
        if getattr(module.config, "num_mel_bins", None) and longest:  # Whisper's: always as long as its table
            return torch.empty((rows, features, 2 * longest), device="meta")
        return torch.empty((rows, sequence or 1, features), device="meta")
    if name == "input_values":
        strides = _first(config, "conv_stride", "upsampling_ratios")
        return torch.empty((rows, (sequence or 1) * (prod(strides) if strides else 1)), device="meta")
    return tokens(rows, sequence)


def _first(config: Any, *names: str) -> Any:
    """The first of these keys that the configuration has, or one of its parts."""
    parts = [config, *(getattr(config, name, None) for name in getattr(config, "sub_configs", ()))]
    return next((value for name in names for part in parts if (value := getattr(part, name, None)) is not None), None)


def _image(config: Any) -> tuple[int, int]:
    size = _first(config, "image_size", "img_size", "crop_size")
    if isinstance(size, Mapping):
        return int(size.get("height", 224)), int(size.get("width", 224))
    if isinstance(size, (list, tuple)):
        return (int(size[0]), int(size[-1]))
    return (int(size), int(size)) if size else (224, 224)


def _frames(config: Any) -> tuple[int, ...]:
    frames = _first(config, "num_frames", "frames_per_clip")
    return (int(frames),) if isinstance(frames, int) and frames > 1 else ()


# -- the loss


CHUNKS = 8  # as torchtune has them


class _Fused(torch.autograd.Function):  # type: ignore[misc]
    """Cross entropy in one kernel, which keeps nothing: the gradient is all that its backward makes."""

    @staticmethod
    def forward(ctx: Any, logits: Any, target: Any) -> Any:
        """[tokens, classes] and [tokens] to one number."""
        ctx.shape, ctx.dtype = logits.shape, logits.dtype
        return torch.empty((), dtype=torch.float32, device=logits.device)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        """The gradient of the logits, in their dtype."""
        return torch.empty(ctx.shape, dtype=ctx.dtype, device=grad.device), None


class Kept(torch.autograd.Function):  # type: ignore[misc]
    """What comes in, kept until the backward, as by a loop that still has a name for it."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        """The same."""
        ctx.save_for_backward(x)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        """The same."""
        return grad


def cross_entropy(logits: Any, target: Any, kind: str) -> Any:
    """The mean over [tokens, classes]: in ``"fp32"``, in the logits' own dtype (``"bf16"``), by chunks, or fused;
    ``"fp32-kept"`` of logits that are kept in fp32 until after the backward."""
    entropy = torch.nn.functional.cross_entropy
    if kind == "bf16":
        return entropy(logits, target)
    if kind == "fused":
        return _Fused.apply(logits, target)
    if kind == "chunked":
        pieces = zip(logits.chunk(CHUNKS), target.chunk(CHUNKS), strict=True)
        return sum(entropy(piece.float(), wanted, reduction="sum") for piece, wanted in pieces) / len(target)
    wide = logits.float()
    return entropy(Kept.apply(wide) if kind == "fp32-kept" else wide, target)


def loss(output: Any, target: Any, *, kind: str = "fp32") -> Any:
    """The usual loss of what the model returns, its cross entropy computed as ``kind`` says.

    The mean cross entropy of ``logits`` [..., classes], or of the places where an answer starts and ends;
    where there are neither, as in a base model, the mean square of the first of its outputs stands for one.
    """
    if (logits := _logits(output)) is not None:
        return cross_entropy(logits.flatten(0, -2), target.flatten(), kind)
    if (start := getattr(output, "start_logits", None)) is not None and start.dim() == 2:
        ends = (start, output.end_logits)
        return sum(torch.nn.functional.cross_entropy(each.float(), target) for each in ends) / 2
    return first(output).float().square().mean()


def target(output: Any) -> torch.Tensor:
    """What that loss is given beside the output."""
    if (logits := _logits(output)) is not None:
        return torch.empty(logits.shape[:-1], dtype=torch.int64, device="meta")
    rows = first(output).shape[:1]
    return torch.empty(rows, dtype=torch.int64, device="meta")


def _logits(output: Any) -> Any:
    for name in ("logits", "prediction_logits"):
        logits = getattr(output, name, None)
        if isinstance(logits, torch.Tensor) and logits.dim() >= 2 and logits.requires_grad:
            return logits
    return None


def first(output: Any) -> torch.Tensor:
    """The first floating-point tensor of an output that has a gradient. ValueError if there is none."""
    found = [each for each in torch.utils._pytree.tree_flatten(output)[0] if isinstance(each, torch.Tensor)]
    for each in found:
        if each.is_floating_point() and each.requires_grad:
            return each
    raise ValueError("plan(MODEL): nothing that the model returns depends on a trainable parameter.")
