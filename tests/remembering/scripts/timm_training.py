"""A training loop as timm has it: channels last, label smoothing, mixup, an average of the weights, validation."""

from copy import deepcopy

import torch
import torch.nn.functional as F
from models import ConvNet

import aotc


class ModelEma(torch.nn.Module):
    def __init__(self, model, decay):
        super().__init__()
        self.module, self.decay = deepcopy(model).eval(), decay

    @torch.no_grad()
    def update(self, model):
        for ema, now in zip(self.module.state_dict().values(), model.state_dict().values(), strict=True):
            ema.copy_(self.decay * ema + (1 - self.decay) * now if ema.is_floating_point() else now)


def mixup(images, labels, share):
    one_hot = F.one_hot(labels, 5).float() * 0.9 + 0.02
    return images * share + images.flip(0) * (1 - share), one_hot * share + one_hot.flip(0) * (1 - share)


@torch.no_grad()
def validate(model, loader):
    model.eval()
    right, losses = 0, 0.0
    for images, labels in loader:
        logits = model(images.contiguous(memory_format=torch.channels_last))
        losses += F.cross_entropy(logits, labels, reduction="sum").item()
        right += (logits.argmax(1) == labels).sum().item()
    return right, losses


def main():
    torch.manual_seed(0)
    images, labels = torch.randn(24, 3, 16, 16), torch.randint(0, 5, (24,))
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(images, labels), batch_size=8)
    model = aotc.compile(ConvNet().to(memory_format=torch.channels_last), train=True)
    ema = ModelEma(model, 0.9)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-4)
    for epoch in range(2):
        model.train()
        for number, (batch, target) in enumerate(loader):
            batch = batch.contiguous(memory_format=torch.channels_last)
            batch, target = mixup(batch, target, 0.5 + 0.1 * number)
            loss = F.cross_entropy(model(batch), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            ema.update(model)
            print(f"{epoch}: {loss.item():.5f}")
        for each in (model, ema.module):
            right, losses = validate(each, loader)
            print(f"{epoch}: {right} right, {losses:.4f}")


if __name__ == "__main__":
    main()
