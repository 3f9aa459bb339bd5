"""A small GPT that predicts the next character of a text, as nanoGPT (A. Karpathy) has it.

An example of a task of your own, too: nothing else in the package knows it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from raytrain_ddp.config.train_config import TrainConfig
from raytrain_ddp.config.validation import require
from raytrain_ddp.data.loading.sources import Data
from raytrain_ddp.data.text_source import TextSource
from raytrain_ddp.tasks.task import Task

if TYPE_CHECKING:
    from torchmetrics import Metric


class Block(nn.Module):
    """Causal self-attention, then a perceptron of two layers, each beside the identity."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self._heads, self._dropout = heads, dropout
        self.norm1, self.norm2 = (nn.LayerNorm(width, bias=False) for _ in range(2))
        self.queries_keys_values = nn.Linear(width, 3 * width, bias=False)
        self.attended = nn.Linear(width, width, bias=False)
        self.wide = nn.Linear(width, 4 * width, bias=False)
        self.narrow = nn.Linear(4 * width, width, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:  # (n, length, width), the same
        parts = self.queries_keys_values(self.norm1(x)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (self._heads, -1)).transpose(1, 2) for part in parts)
        rate = self._dropout if self.training else 0.0
        heads = scaled_dot_product_attention(q, k, v, dropout_p=rate, is_causal=True)
        x = x + self.dropout(self.attended(heads.transpose(1, 2).flatten(2)))
        hidden = nn.functional.gelu(self.wide(self.norm2(x)))
        return x + self.dropout(self.narrow(hidden))  # type: ignore[no-any-return]


class GPT(nn.Module):
    """Logits of the next character at each place, (n, length) -> (n, length, characters)."""

    def __init__(
        self, characters: int, length: int, width: int, depth: int, heads: int, dropout: float
    ) -> None:
        super().__init__()
        self.characters = nn.Embedding(characters, width)
        self.places = nn.Embedding(length, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.Sequential(*(Block(width, heads, dropout) for _ in range(depth)))
        self.norm = nn.LayerNorm(width, bias=False)
        self.head = nn.Linear(width, characters, bias=False)
        self.head.weight = self.characters.weight
        for name, weight in self.named_parameters():
            if weight.ndim > 1:
                ends_block = name.endswith(("attended.weight", "narrow.weight"))
                nn.init.normal_(weight, std=0.02 / math.sqrt(2 * depth) if ends_block else 0.02)

    def forward(self, x: Tensor) -> Tensor:
        inputs = self.characters(x) + self.places.weight[: x.shape[1]]
        logits: Tensor = self.head(self.norm(self.blocks(self.dropout(inputs))))
        return logits


class CharLM(Task):
    """Predicts each character of the text `data.source` from those before it; evaluated on the
    last tenth, in nats per character.

    Args:
        length: characters of a window.
        width, depth, heads, dropout: of the GPT.
    """

    monitor = "loss"
    goal: Literal["min", "max"] = "min"
    unit = "windows"

    def __init__(
        self,
        config: TrainConfig,
        length: int = 256,
        width: int = 384,
        depth: int = 6,
        heads: int = 6,
        dropout: float = 0.2,
    ) -> None:
        sizes = {"length": length, "width": width, "depth": depth, "heads": heads}
        for name, size in sizes.items():
            require(size > 0, f"task_options.{name}", size, "must be above 0")
        rule = f"must be a multiple of heads = {heads}"
        require(width % heads == 0, "task_options.width", width, rule)
        require(0 <= dropout < 1, "task_options.dropout", dropout, "must be 0 or more and below 1")
        self._sizes = length, width, depth, heads, dropout
        source = config.data.source
        self._train = TextSource(source, length, part=(0.0, 0.9))
        self._eval = TextSource(source, length, part=(0.9, 1.0))

    def model(self) -> nn.Module:
        return GPT(len(self._train.characters), *self._sizes)

    def train_data(self) -> Data:
        return Data(self._train)

    def eval_data(self) -> Data:
        return Data(self._eval)

    def loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        return cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten())

    def metrics(self) -> dict[str, Metric]:
        from raytrain_ddp.tasks.class_metrics import Mean  # takes seconds to import

        return {"loss": Mean()}

    @torch.no_grad()
    def evaluate(
        self, model: nn.Module, batch: Mapping[str, Tensor], metrics: Mapping[str, Metric]
    ) -> None:
        logits = model(batch["x"]).transpose(1, 2)
        metrics["loss"].update(cross_entropy(logits.float(), batch["y"], reduction="none"))
