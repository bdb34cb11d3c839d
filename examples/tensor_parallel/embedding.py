"""An embedding whose rows are split over the ranks: each rank's first row is a constant of its code."""

from __future__ import annotations

import torch
import torch.distributed._functional_collectives as collectives
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup


class Embedding(nn.Module):
    """Rows `first` and following of the table; a token of another rank gives zeros before the sum."""

    def __init__(self, rows: Tensor, first: int, group: ProcessGroup | None) -> None:
        super().__init__()
        self.rows, self.first, self.group = nn.Parameter(rows), first, group

    def forward(self, tokens: Tensor) -> Tensor:
        """int64 `[seq]` to `[seq, width]`."""
        place = tokens - self.first
        here = (place >= 0) & (place < len(self.rows))
        found = F.embedding(torch.where(here, place, 0), self.rows) * here[:, None]
        return found if self.group is None else collectives.all_reduce(found, "sum", self.group)


def embedding(vocabulary: int = 96, width: int = 32, group: ProcessGroup | None = None) -> Embedding:
    """This rank's part; the whole table without a group. A manifest's factory gets `group` from aotc."""
    table = torch.randn(vocabulary, width, generator=torch.Generator().manual_seed(0))
    if group is None:
        return Embedding(table, 0, None)
    parts = table.chunk(group.size())
    return Embedding(parts[group.rank()].clone(), group.rank() * len(parts[0]), group)
