"""Operations without values that are asked of torch once."""

from contextlib import nullcontext
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="modules need torch: pip install 'zerosim[torch]'")

from torch import nn  # noqa: E402

from torch_models.networks import squared  # noqa: E402
from zerosim.torch_models import meta_answers, meta_run  # noqa: E402
from zerosim.torch_models.meta_answers import Answers  # noqa: E402
from zerosim.torch_models.profile import measure  # noqa: E402
from zerosim.worlds.model_shapes import ModelShapes  # noqa: E402

pytestmark = pytest.mark.usefixtures("shapes_unchecked")


class Scan(nn.Module):  # type: ignore[misc]
    """A state that every token changes, in plain torch: with views, writes in place, several results and lists."""

    def __init__(self) -> None:
        super().__init__()
        self.gates = nn.Linear(5, 6)

    def forward(self, x: Any) -> Any:
        state, out = torch.zeros(x.shape[0], 3), []
        for token in range(x.shape[1]):
            keep, new = self.gates(x[:, token]).chunk(2, dim=-1)
            state = state * keep.sigmoid() + new.exp()
            most, _ = state.max(dim=-1, keepdim=True)
            out.append(state / (most + 1))
        return torch.stack(out, dim=1).masked_fill_(torch.zeros(3, dtype=torch.bool), 0.0)


def scanned(tokens: int) -> ModelShapes:
    x = torch.zeros(2, tokens, 5)
    return measure(nn.Sequential(Scan()), x, Scan, compute="fp32", loss=squared, target=torch.zeros(2, tokens, 3))


def test_a_loop_over_tokens_is_measured_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes, FLOPs and temporaries are the same where torch is asked at every token; otherwise it is asked as often
    for many tokens as for few."""
    asked: list[Any] = []
    once = meta_answers._layouts

    def counted(out: Any, given: Any) -> Any:
        asked.append(None)  # and no tensor, which would be kept alive
        return once(out, given)

    monkeypatch.setattr(meta_answers, "_layouts", counted)
    found, counts = [], []
    for tokens in (7, 29):
        asked.clear()
        found.append(scanned(tokens))
        counts.append(len(asked))
    assert 0 < counts[0] == counts[1]
    monkeypatch.setattr(meta_run, "Answers", nullcontext)
    assert [scanned(7), scanned(29)] == found


def test_what_is_new_is_told_apart_and_what_is_not_is_left_alone() -> None:
    """Results lie in memory of their own; views and writes in place lie in that of what they are of; and numbers that
    are equal are not taken for each other if their types differ."""
    x, whole = torch.empty(3, 5, device="meta"), torch.empty(3, 5, dtype=torch.int64, device="meta")

    def memory(tensor: Any) -> int:
        return int(tensor.untyped_storage()._cdata)

    with Answers():
        made = [x + x for _ in range(3)]
        assert len({memory(each) for each in (x, *made)}) == 4
        assert all((each.shape, each.stride(), each.dtype) == (x.shape, x.stride(), x.dtype) for each in made)
        assert [memory(x[1]), memory(x[1]), memory(x.add_(1)), memory(x.add_(1))] == [memory(x)] * 4
        views = [torch.ops.aten._unsafe_view(x, [5, 3]) for _ in range(2)]
        assert [memory(each) for each in views] == [memory(x)] * 2
        assert [(whole + 1).dtype, (whole + 1.0).dtype, (whole + 1).dtype] == [torch.int64, torch.float32, torch.int64]
        assert [(x.t() + x.t()).stride(), (x.t() + 1).stride(), (x + 1).stride()] == [(1, 5), (1, 5), (5, 1)]
        assert [[each.shape for each in x.max(dim=1)] for _ in range(2)] == [[(3,), (3,)]] * 2
