"""What `--ema.decay` costs: a step of ResNet-18 on the CPU, with and without, one after another."""

from __future__ import annotations

import argparse
import time
from statistics import median

import torch
from torch.nn.functional import cross_entropy
from torchvision.models import resnet18

from raytrain_ddp.config.sections import EmaConfig, OptimConfig
from raytrain_ddp.training.optimizer.lr_schedule import build_optimizer
from raytrain_ddp.training.optimizer.weight_average import WeightAverage


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model = resnet18(num_classes=10)
    optimizer = build_optimizer(model, OptimConfig())
    average = WeightAverage(model, EmaConfig(decay=0.9999))
    images = torch.randn(args.batch, 3, args.image_size, args.image_size)
    labels = torch.randint(10, (args.batch,))
    finite = torch.tensor(False)
    plain_s, with_s, alone_s = [], [], []
    for number in range(2 * args.steps + 2):
        began = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        cross_entropy(model(images), labels).backward()
        optimizer.step()
        stepped = time.perf_counter()
        if number % 2:
            average.follow(finite, number)
            alone_s.append(time.perf_counter() - stepped)
        (with_s if number % 2 else plain_s).append(time.perf_counter() - began)
    plain, both, alone = (median(each[1:]) for each in (plain_s, with_s, alone_s))
    print(f"ResNet-18, {args.batch} x {args.image_size}^2, {args.threads} threads")
    print(f"step without an average  {1000 * plain:8.1f} ms")
    print(f"step with an average     {1000 * both:8.1f} ms  ({both / plain - 1:+.1%})")
    print(f"the average alone        {1000 * alone:8.1f} ms  ({alone / plain:.1%} of a step)")


if __name__ == "__main__":
    main()
