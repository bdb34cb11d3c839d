"""A classifier of sequences that returns its loss and its logits."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F


class Classifier(nn.Module):
    def __init__(self, width: int, layers: int, classes: int) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, nhead=4, dim_feedforward=2 * width, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """x: `[batch, length, width]`; labels: `[batch]`. Gives the loss, and logits `[batch, classes]`."""
        logits = self.head(self.encoder(x).mean(1))
        return F.cross_entropy(logits, labels), logits


def classifier(width: int = 32, layers: int = 1, classes: int = 4) -> nn.Module:
    return Classifier(width, layers, classes)
