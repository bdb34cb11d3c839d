"""An exponential moving average of the weights, as torch and timm keep it, which evaluates."""

from copy import deepcopy

import torch
from models import GPT
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import aotc


class ModelEma(torch.nn.Module):
    """As timm's `ModelEmaV2`."""

    def __init__(self, model, decay=0.9):
        super().__init__()
        self.module, self.decay = deepcopy(model).eval(), decay

    @torch.no_grad()
    def update(self, model):
        for ema, now in zip(self.module.state_dict().values(), model.state_dict().values(), strict=True):
            ema.copy_(self.decay * ema + (1 - self.decay) * now)


def main():
    torch.manual_seed(0)
    data = torch.randint(0, 50, (6, 4, 17))
    model = aotc.compile(GPT(), train=True)
    ema, averaged = ModelEma(model), AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for rows in data:
        _, loss = model(rows[:, :-1], rows[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        ema.update(model)
        averaged.update_parameters(model)
        with torch.no_grad():
            losses = [each(rows[:, :-1], rows[:, 1:])[1].item() for each in (ema.module, averaged.module.eval())]
        print(f"{loss.item():.5f} {losses[0]:.5f} {losses[1]:.5f}")


if __name__ == "__main__":
    main()
