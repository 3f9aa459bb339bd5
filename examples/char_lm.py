"""A small GPT that predicts the next character of a text.

    python -m raytrain_ddp.fit --task examples/char_lm.py:CharLM --optim.name adamw \
        --optim.lr 0.001 --batch-size 32 --epochs 2 --task-options text "src/**/*.py"

As in nanoGPT (A. Karpathy), the last tenth of the text is evaluated on, in nats per character.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torchmetrics import MeanMetric, Metric

from raytrain_ddp import Data, Task, TextSource, TrainConfig


class GPT(nn.Module):
    """Logits of the next character at each place, (n, length) -> (n, length, characters)."""

    def __init__(self, characters: int, length: int, width: int, depth: int) -> None:
        super().__init__()
        self.characters = nn.Embedding(characters, width)
        self.places = nn.Embedding(length, width)
        layer = nn.TransformerEncoderLayer(
            width, 4, 4 * width, 0.1, "gelu", batch_first=True, norm_first=True, bias=False
        )
        self.blocks = nn.TransformerEncoder(layer, depth, nn.LayerNorm(width), False)
        self.head = nn.Linear(width, characters, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, x.device)
        inputs = self.characters(x) + self.places.weight[:length]
        logits: Tensor = self.head(self.blocks(inputs, mask, is_causal=True))
        return logits


class CharLM(Task):
    """Predicts each character from those before it."""

    monitor = "loss"
    goal = "min"
    unit = "windows"

    def __init__(
        self,
        config: TrainConfig,
        text: str,
        length: str = "256",
        width: str = "384",
        depth: str = "6",
    ) -> None:
        self._sizes = int(length), int(width), int(depth)
        self._train = TextSource(text, int(length), part=(0.0, 0.9))
        self._eval = TextSource(text, int(length), part=(0.9, 1.0))

    def model(self) -> nn.Module:
        return GPT(len(self._train.characters), *self._sizes)

    def train_data(self) -> Data:
        return Data(self._train)

    def eval_data(self) -> Data:
        return Data(self._eval)

    def loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        return cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten())

    def metrics(self) -> dict[str, Metric]:
        return {"loss": MeanMetric()}

    def evaluate(
        self, model: nn.Module, batch: Mapping[str, Tensor], metrics: Mapping[str, Metric]
    ) -> None:
        logits = model(batch["x"]).transpose(1, 2)
        metrics["loss"].update(cross_entropy(logits, batch["y"], reduction="none"))
