"""One real card beside the plan: bytes allocated, reserved and of libraries' workspaces, and the time of a step.

    python benchmarks/card.py              # a table
    python benchmarks/card.py --record     # and keep it in recorded/measured_card.json, for docs/measured.md

Needs a CUDA build of torch and one GPU with 8 GB that is otherwise idle. Trains one language model in four ways:
plain, its blocks checkpointed, its loss by chunks of tokens, and under FSDP2 on one rank. Owns these runs; what is
planned is ``zs.plan`` of the same module.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import zerosim as zs

RECORDED = Path(__file__).parents[1] / "recorded" / "measured_card.json"
WIDTH, BLOCKS, HEADS, VOCABULARY = 1024, 12, 16, 32_000
ROWS, TOKENS, CHUNKS = 4, 1024, 8
WARM, TIMED = 3, 10  # steps


class Block(nn.Module):  # type: ignore[misc]
    """A pre-norm transformer block."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Any) -> Any:
        """Hidden states [rows, tokens, width] to the next."""
        rows, tokens, _ = x.shape
        q, k, v = (each.view(rows, tokens, HEADS, -1).transpose(1, 2) for each in self.qkv(self.before(x)).chunk(3, -1))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, tokens, WIDTH))
        return x + self.down(nn.functional.gelu(self.up(self.after(x))))


class Language(nn.Module):  # type: ignore[misc]
    """Token numbers [rows, tokens] to logits; ``again``: blocks run forward again in the backward."""

    def __init__(self, *, again: bool = False) -> None:
        super().__init__()
        self.again = again
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Any) -> Any:
        """The logits [rows, tokens, vocabulary]."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.again else block(x)
        return self.head(self.norm(x))


def whole(logits: Any, target: Any) -> Any:
    """The mean cross entropy, in fp32."""
    return nn.functional.cross_entropy(logits.float().flatten(0, -2), target.flatten())


def chunked(logits: Any, target: Any) -> Any:
    """The same by chunks of tokens, each of which runs again in the backward."""
    parts = zip(logits.flatten(0, -2).chunk(CHUNKS), target.flatten().chunk(CHUNKS), strict=True)
    sums = [
        checkpoint(lambda x, y: nn.functional.cross_entropy(x.float(), y, reduction="sum"), *part, use_reentrant=False)
        for part in parts
    ]
    return torch.stack(sums).sum() / target.numel()


@dataclass(frozen=True)
class Way:
    """How the model is trained, and by which row and recipe that is planned."""

    again: bool = False
    loss: Callable[[Any, Any], Any] = whole
    fsdp: bool = False

    def plan(self) -> Any:
        """The plan's cell."""
        with torch.device("meta"):
            model = Language()
        found = zs.plan(
            model, gpus=1, rows=[zs.ZeRO3 if self.fsdp else zs.DP], precision="fsdp" if self.fsdp else "pure-bf16",
            micro_batch=ROWS, seq=TOKENS, checkpoint="full" if self.again else "none", wrap=Block, loss=self.loss,
            target=lambda rows, seq: torch.empty((rows, seq), dtype=torch.int64),
        )  # fmt: skip
        [cell] = found.record.cells
        return cell


WAYS = {
    "plain": Way(), "checkpointed": Way(again=True), "chunked loss": Way(loss=chunked),
    "FSDP2 on one rank": Way(fsdp=True),
}  # fmt: skip


def trained(way: Way) -> dict[str, Any]:
    """Train on the card; what the allocator counted and how long a step took."""
    torch.manual_seed(0)
    model: Any = Language(again=way.again).cuda()
    model = _fully_sharded(model) if way.fsdp else model.bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    tokens = torch.randint(VOCABULARY, (ROWS, TOKENS), device="cuda")
    times = []
    for step in range(WARM + TIMED):
        if step == WARM:
            torch.cuda.reset_peak_memory_stats()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        way.loss(model(tokens), tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1000)
    return {
        "rest": torch.cuda.memory_allocated(),
        "peak": torch.cuda.max_memory_allocated(),
        "reserved": torch.cuda.max_memory_reserved(),
        "seconds": statistics.median(times[WARM:]),
    }


def _fully_sharded(model: Any) -> Any:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mp_policy=policy)
    return fully_shard(model, mp_policy=policy)


def beside(name: str, way: Way) -> dict[str, Any]:
    """A run and its plan. What is held at rest beyond the plan are libraries' workspaces."""
    cell, found = way.plan(), trained(way)
    torch.cuda.empty_cache()
    planned = {"rest": cell.at_rest, "peak": cell.peak.total}
    return {"way": name, "measured": found, "plan": planned, "workspace": found["rest"] - cell.at_rest}


def main(arguments: list[str]) -> int:
    """Run all ways, print them, and keep them if asked; 2 where there is no card."""
    if not torch.cuda.is_available():
        print(f"card.py needs a CUDA build of torch and a GPU; this is torch {torch.__version__}", file=sys.stderr)
        return 2
    os.environ.setdefault("MASTER_ADDR", "localhost")
    os.environ.setdefault("MASTER_PORT", "29511")
    torch.distributed.init_process_group("nccl", rank=0, world_size=1)
    rows = [beside(name, way) for name, way in WAYS.items()]
    torch.distributed.destroy_process_group()
    print(f"{'MiB':<20}{'at rest':>10}{'plan':>10}{'peak':>10}{'plan':>10}{'ratio':>8}{'reserved':>10}{'ms':>8}")
    for row in rows:
        found, plan = row["measured"], row["plan"]
        sizes = [each / 2**20 for each in (found["rest"], plan["rest"], found["peak"], plan["peak"])]
        ratio = plan["peak"] / found["peak"]
        print(f"{row['way']:<20}{''.join(f'{size:>10,.1f}' for size in sizes)}{ratio:>8.3f}", end="")
        print(f"{found['reserved'] / 2**20:>10,.0f}{1000 * found['seconds']:>8.1f}")
    if "--record" in arguments:
        card = torch.cuda.get_device_properties(0)
        about = {"card": card.name, "memory": card.total_memory, "torch": torch.__version__}
        RECORDED.write_text(json.dumps(about | {"rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
