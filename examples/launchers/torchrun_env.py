"""Made for torchrun, whose ranks come from the environment, or torch.distributed.launch, which adds
--local-rank=N to the arguments.

torchrun --nproc-per-node 2 torchrun_env.py
python -m torch.distributed.launch --nproc-per-node 2 torchrun_env.py
"""

import argparse
import hashlib
import json
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def points(count, seed):
    """Points around ten centers in 20 dimensions, and which center each belongs to."""
    centers = torch.randn(10, 20, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 10, (count,), generator=generator)
    noise = torch.randn(count, 20, generator=generator)
    return TensorDataset(centers[labels] + 1.5 * noise, labels)


def evaluate(model, loader, device):
    model.eval()
    counts = torch.zeros(2, device=device)  # right, all
    with torch.no_grad():
        for x, y in loader:
            counts[0] += (model(x.to(device)).argmax(1) == y.to(device)).sum()
            counts[1] += len(y)
    dist.all_reduce(counts)
    return (counts[0] / counts[1]).item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--lr", type=float, default=0.02)
    local_rank = os.environ.get("LOCAL_RANK")  # the older launcher sets it only with --use-env
    parser.add_argument("--local-rank", "--local_rank", type=int, default=local_rank)
    parser.add_argument("--checkpoint", default="checkpoint.pt")
    parser.add_argument("--out", default="result.json")
    args = parser.parse_args()

    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank, local_rank = dist.get_rank(), int(args.local_rank)
    device = torch.device("cpu")
    if torch.cuda.is_available():
        torch.cuda.set_device(local_rank)
        device = torch.device("cuda", local_rank)

    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 10)).to(device)
    ids = [local_rank] if device.type == "cuda" else None
    model = DistributedDataParallel(model, device_ids=ids)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)

    first_epoch = 0
    if os.path.exists(args.checkpoint):  # a restart by torchrun, or the same command again
        checkpoint = torch.load(args.checkpoint, map_location=device)
        model.module.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        first_epoch = checkpoint["epoch"] + 1
    dist.barrier()

    train, test = points(2000, seed=1), points(600, seed=2)
    sampler = DistributedSampler(train)
    loader = DataLoader(train, batch_size=32, sampler=sampler, num_workers=1)
    test_loader = DataLoader(test, batch_size=100, sampler=DistributedSampler(test, shuffle=False))

    for epoch in range(first_epoch, args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x.to(device)), y.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if rank == 0:
            print(f"epoch {epoch}: loss {loss.item():.3f}")
            state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({**state, "epoch": epoch}, args.checkpoint)
        dist.barrier()

    accuracy = evaluate(model, test_loader, device)
    if rank == 0:
        weights = b"".join(p.detach().cpu().numpy().tobytes() for p in model.parameters())
        digest = hashlib.sha256(weights).hexdigest()
        print(f"accuracy {accuracy:.3f}, weights {digest[:12]}")
        with open(args.out, "w") as file:
            json.dump({"accuracy": accuracy, "weights": digest}, file)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
