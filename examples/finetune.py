"""Fine-tune a model of timm on a folder of photos: first its head, then all of it.

    python examples/finetune.py photos timm:convnext_tiny.fb_in22k

The folder has one folder for each class. The same command goes on after a kill, with the same bits.
With `fit` instead of `fit_locally`, Ray runs it. As flags: docs/fine-tune.md.
"""

from argparse import ArgumentParser
from dataclasses import replace

import raytrain_ddp as rt


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("model", help="timm:NAME.TAG, or timm:NAME with --weights")
    parser.add_argument("--weights", help="a .safetensors or .pth file")
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--storage", default="runs")
    args = parser.parse_args()
    head = rt.TrainConfig(
        name="finetune-head",
        storage=args.storage,
        epochs=2,
        data=rt.DataConfig(source=args.folder, holdout=0.2, image_size=args.size),
        model=rt.ModelConfig(args.model, weights=args.weights, freeze=("backbone",)),
        optim=rt.OptimConfig(name="adamw", lr=5e-4, weight_decay=0.05, layer_decay=0.75),
        schedule=rt.ScheduleConfig(warmup_epochs=1.0),
        ema=rt.EmaConfig(decay=0.99),
    )
    rt.fit_locally(head)
    model = rt.ModelConfig(args.model, weights=f"{args.storage}/{head.name}")
    result = rt.fit_locally(replace(head, name="finetune", epochs=args.epochs, model=model))
    print(f"best: {result.best}, {result.best_checkpoint}")


if __name__ == "__main__":
    main()
