"""A small GPT that predicts the next byte of a text, like nanoGPT (A. Karpathy).

    python -m raytrain_ddp.fit examples/char-lm.toml --data.source "src/**/*.py"

The text is a file, a folder of .txt files, or a glob. It is evaluated on its last tenth, in nats
per byte.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from glob import glob
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention

from raytrain_ddp import ArraySource, Data, Task, TrainConfig
from raytrain_ddp.errors import ConfigError, DataError


class Block(nn.Module):
    """Causal self-attention, then a two-layer perceptron, each with a residual connection."""

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
        return x + self.dropout(self.narrow(gelu(self.wide(self.norm2(x)))))


class GPT(nn.Module):
    """Logits of the next symbol at each place, (n, length) -> (n, length, symbols)."""

    def __init__(
        self, symbols: int, length: int, width: int, depth: int, heads: int, dropout: float
    ) -> None:
        super().__init__()
        self.symbols = nn.Embedding(symbols, width)
        self.places = nn.Embedding(length, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.Sequential(*(Block(width, heads, dropout) for _ in range(depth)))
        self.norm = nn.LayerNorm(width, bias=False)
        self.head = nn.Linear(width, symbols, bias=False)
        self.head.weight = self.symbols.weight
        for name, weight in self.named_parameters():
            if weight.ndim > 1:
                ends_block = name.endswith(("attended.weight", "narrow.weight"))
                nn.init.normal_(weight, std=0.02 / math.sqrt(2 * depth) if ends_block else 0.02)

    def forward(self, x: Tensor) -> Tensor:
        inputs = self.symbols(x) + self.places.weight[: x.shape[1]]
        return self.head(self.norm(self.blocks(self.dropout(inputs))))


class CharLM(Task):
    """Predicts the next byte of text files.

    Args:
        length: bytes per window.
        width, depth, heads, dropout: of the GPT.
    """

    monitor, goal, unit = "loss", "min", "windows"

    def __init__(
        self,
        config: TrainConfig,
        length: int = 256,
        width: int = 384,
        depth: int = 6,
        heads: int = 6,
        dropout: float = 0.2,
    ) -> None:
        if min(length, width, depth, heads) < 1 or width % heads or not 0 <= dropout < 1:
            raise ConfigError(
                f"task_options = {config.task_options}: sizes must be above 0, width a multiple of "
                f"heads = {heads}, and dropout 0 or more and below 1."
            )
        text = np.frombuffer(read(config.data.source), np.uint8)
        symbols, numbers = np.unique(text, return_inverse=True)
        border = int(len(text) * 0.9)
        parts = (numbers.astype(np.uint8) for numbers in np.split(numbers, [border]))
        self._train, self._eval = (windows(part, length, config.data.source) for part in parts)
        self._sizes = len(symbols), length, width, depth, heads, dropout

    def model(self) -> nn.Module:
        return GPT(*self._sizes)

    def train_data(self) -> Data:
        return Data(self._train, batch_of)

    def eval_data(self) -> Data:
        return Data(self._eval, batch_of)

    def loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        return cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten())

    def metrics(self) -> dict[str, Any]:
        from torchmetrics import MeanMetric

        return {"loss": MeanMetric()}

    def evaluate(self, model: nn.Module, batch: Mapping[str, Tensor], metrics: Any) -> None:
        logits = model(batch["x"]).transpose(1, 2)
        metrics["loss"].update(cross_entropy(logits.float(), batch["y"], reduction="none"))


def read(source: str) -> bytes:
    """Returns the content of the files, concatenated in the order of their paths."""
    pattern = f"{source}/**/*.txt" if Path(source).is_dir() else source
    paths = [path for path in map(Path, sorted(glob(pattern, recursive=True))) if path.is_file()]
    if not paths and Path(source).is_file():  # its name has wildcard characters
        paths = [Path(source)]
    if not paths:
        raise DataError(f"data.source = {source}: no such file, folder of .txt files, or match.")
    try:
        return b"".join(path.read_bytes() for path in paths).replace(b"\r\n", b"\n")
    except OSError as error:
        raise DataError(f"{error.filename}: cannot be read: {error.strerror}.") from None


def windows(numbers: np.ndarray, length: int, source: str) -> ArraySource:
    """Returns windows, (rows, length + 1). The last symbol of a window is the first of the next
    one, so each symbol is predicted once per epoch, except the first one and those after the last
    window."""
    rows = (len(numbers) - 1) // length
    if rows < 1:
        raise DataError(
            f"{source}: a part has {len(numbers)} bytes, but a window needs {length + 1}: use more "
            "text or a shorter task_options.length."
        )
    views = np.lib.stride_tricks.sliding_window_view(numbers, length + 1)
    return ArraySource({"window": views[::length][:rows]}, rows_per_block=256)


def batch_of(records: Mapping[str, np.ndarray]) -> dict[str, Tensor]:
    window = torch.from_numpy(records["window"].astype(np.int64))
    return {"x": window[:, :-1].contiguous(), "y": window[:, 1:].contiguous()}
