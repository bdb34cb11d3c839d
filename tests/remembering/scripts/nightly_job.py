"""A nightly job: ten models over the same tables."""

import torch
from models import ConvNet, Denoiser, Layer

import aotc

JOBS = {
    **{f"layer of {width}": (lambda w=width: Layer(w), (4, width)) for width in (2, 4, 6, 10, 12, 14)},
    **{f"classifier of {width}": (lambda w=width: ConvNet(w), (2, 3, 8, 8)) for width in (2, 4)},
    **{f"denoiser of {width}": (lambda w=width: Denoiser(2, w), None) for width in (2, 4)},
}


@torch.inference_mode()
def main():
    for name, (make, shape) in JOBS.items():
        torch.manual_seed(0)
        model = aotc.compile(make().eval())
        for _ in range(3):
            if shape is not None:
                y = model(torch.randn(shape))
            else:
                y = model(torch.randn(2, 2, 4, 4), torch.rand(2), context=torch.randn(2, 3, model.width))
            print(f"{name}: {y.sum().item():.4f}")


if __name__ == "__main__":
    main()
