"""Made for torch.distributed.launch: the launcher adds --local-rank=N to the arguments.

python -m torch.distributed.launch --nproc-per-node 2 launch_local_rank.py
"""

import argparse
import hashlib
import json
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", "--local-rank", type=int, default=0)
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--batch-size", type=int, default=50, help="of all processes together")
parser.add_argument("--resume", default="", help="a checkpoint")
parser.add_argument("--save", default="model.pth")
parser.add_argument("--out", default="result.json")


class Spirals(Dataset):
    """Two spirals, one wound into the other: which one is a point on?"""

    def __init__(self, count, seed):
        generator = torch.Generator().manual_seed(seed)
        turn = 6 * torch.rand(count, generator=generator) + 1
        self.label = torch.randint(0, 2, (count,), generator=generator)
        angle = turn + self.label * torch.pi
        self.point = torch.stack([turn * angle.cos(), turn * angle.sin()], dim=1) / 7
        self.point += 0.02 * torch.randn(count, 2, generator=generator)

    def __len__(self):
        return len(self.label)

    def __getitem__(self, index):
        return self.point[index], self.label[index]


class AverageMeter:
    def __init__(self):
        self.sum, self.count = 0.0, 0

    def update(self, value, n):
        self.sum += value * n
        self.count += n

    def all_reduce(self, device):
        both = torch.tensor([self.sum, self.count], dtype=torch.float64, device=device)
        dist.all_reduce(both)
        return (both[0] / both[1]).item()


def run_epoch(model, loader, device, optimizer=None):
    meter = AverageMeter()
    model.train(optimizer is not None)
    with torch.set_grad_enabled(optimizer is not None):
        for point, label in loader:
            logits = model(point.to(device))
            if optimizer is not None:
                optimizer.zero_grad()
                nn.functional.cross_entropy(logits, label.to(device)).backward()
                optimizer.step()
            meter.update((logits.argmax(1).cpu() == label).float().mean().item(), len(label))
    return meter.all_reduce(device)


def main():
    args = parser.parse_args()
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(args.local_rank)
    dist.init_process_group(backend="nccl" if cuda else "gloo", init_method="env://")
    device = torch.device(f"cuda:{args.local_rank}" if cuda else "cpu")
    is_main = dist.get_rank() == 0
    torch.manual_seed(0)

    model = nn.Sequential(nn.Linear(2, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 2))
    model = nn.SyncBatchNorm.convert_sync_batchnorm(model) if cuda else model
    model = model.to(device)
    device_ids = [args.local_rank] if cuda else None
    model = nn.parallel.DistributedDataParallel(
        model, device_ids=device_ids, output_device=args.local_rank if cuda else None
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    start_epoch = 0
    if args.resume and os.path.isfile(args.resume):
        checkpoint = torch.load(args.resume, map_location=device)
        model.load_state_dict(checkpoint["state_dict"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        start_epoch = checkpoint["epoch"]
        if is_main:
            print(f"=> resumed {args.resume} at epoch {start_epoch}")

    batch_size = args.batch_size // dist.get_world_size()
    train_set, test_set = Spirals(1500, seed=1), Spirals(500, seed=2)
    train_sampler = DistributedSampler(train_set)
    train_loader = DataLoader(train_set, batch_size, sampler=train_sampler, num_workers=1)
    test_loader = DataLoader(test_set, 100, sampler=DistributedSampler(test_set, shuffle=False))

    for epoch in range(start_epoch, args.epochs):
        train_sampler.set_epoch(epoch)
        top1 = run_epoch(model, train_loader, device, optimizer)
        if is_main:
            print(f"Epoch: [{epoch}] Acc@1 {100 * top1:.2f}")
            torch.save(
                {
                    "epoch": epoch + 1,
                    "state_dict": model.state_dict(),
                    "optimizer": optimizer.state_dict(),
                },
                args.save,
            )
        dist.barrier()

    top1 = run_epoch(model, test_loader, device)
    if is_main:
        print(f"* Acc@1 {100 * top1:.2f}")
        flat = torch.cat([p.detach().flatten().cpu() for p in model.parameters()])
        digest = hashlib.sha256(flat.numpy().tobytes()).hexdigest()
        with open(args.out, "w") as f:
            json.dump({"accuracy": top1, "weights": digest}, f)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
