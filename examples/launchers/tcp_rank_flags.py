"""Started by hand, once for each rank, with who it is and where to meet as flags.

Reads a text file, of which each rank takes every world-size-th line.

for rank in 0 1; do
  python tcp_rank_flags.py --dist-url tcp://127.0.0.1:29500 --world-size 2 --rank $rank &
done; wait
"""

import argparse
import hashlib
import json
import os
import pathlib
from itertools import islice

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

parser = argparse.ArgumentParser(description="Is a line of a review praise or complaint?")
parser.add_argument("--data", default=pathlib.Path(__file__).with_name("reviews.txt"))
parser.add_argument("--epochs", default=4, type=int)
parser.add_argument("-b", "--batch-size", default=8, type=int)
parser.add_argument("--lr", default=0.5, type=float)
parser.add_argument("--world-size", default=1, type=int, help="number of processes")
parser.add_argument("--rank", default=0, type=int, help="of this process")
parser.add_argument("--dist-url", default="tcp://127.0.0.1:29500")
parser.add_argument("--dist-backend", default="gloo")
parser.add_argument("--gpu", default=None, type=int)
parser.add_argument("--resume", default="", metavar="PATH")
parser.add_argument("--save", default="checkpoint.pth.tar")
parser.add_argument("--out", default="result.json")

WORDS = 512


def read_lines(path, rank, world_size):
    """Every world_size-th line from `rank` on; the last few go, so that all ranks have as many."""
    with open(path) as file:
        total = sum(1 for _ in file)
    total -= total % world_size
    with open(path) as file:
        return [line.rstrip("\n").split("\t") for line in islice(file, rank, total, world_size)]


def encode(lines):
    """Bags of hashed words, (lines, 512), and labels, (lines,)."""
    bags = torch.zeros(len(lines), WORDS)
    for bag, (_, text) in zip(bags, lines, strict=True):
        for word in text.lower().split():
            bag[int(hashlib.md5(word.encode()).hexdigest(), 16) % WORDS] += 1
    return bags, torch.tensor([float(label) for label, _ in lines])


def main():
    args = parser.parse_args()
    who = {"world_size": args.world_size, "rank": args.rank}
    dist.init_process_group(args.dist_backend, init_method=args.dist_url, **who)
    device = torch.device("cpu" if args.gpu is None else f"cuda:{args.gpu}")
    torch.manual_seed(args.rank)  # DDP takes the first weights from rank 0

    model = nn.parallel.DistributedDataParallel(
        nn.Linear(WORDS, 1).to(device), device_ids=None if args.gpu is None else [args.gpu]
    )
    optimizer = torch.optim.SGD(model.parameters(), args.lr)
    start_epoch = 0
    if args.resume:
        if os.path.isfile(args.resume):
            print(f"=> loading checkpoint '{args.resume}'")
            checkpoint = torch.load(args.resume, map_location=device)
            start_epoch = checkpoint["epoch"]
            model.load_state_dict(checkpoint["state_dict"])
            optimizer.load_state_dict(checkpoint["optimizer"])
        else:
            print(f"=> no checkpoint found at '{args.resume}'")

    data = TensorDataset(*encode(read_lines(args.data, args.rank, args.world_size)))
    # The lines are this rank's own already: the sampler only shuffles them, anew in each epoch.
    sampler = DistributedSampler(data, num_replicas=1, rank=0, seed=args.rank)
    loader = DataLoader(data, args.batch_size, sampler=sampler)
    for epoch in range(start_epoch, args.epochs):
        sampler.set_epoch(epoch)
        for bags, labels in loader:
            loss = nn.functional.binary_cross_entropy_with_logits(
                model(bags.to(device))[:, 0], labels.to(device)
            )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if args.rank == 0:
            print(f"epoch {epoch} loss {loss.item():.4f}")
            state = {"state_dict": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({**state, "epoch": epoch + 1}, args.save)
        dist.barrier()

    bags, labels = data.tensors
    with torch.no_grad():
        right = ((model(bags.to(device))[:, 0] > 0).float().cpu() == labels).sum()
    counts = torch.tensor([right, len(labels)])
    dist.all_reduce(counts)
    if args.rank == 0:
        accuracy = (counts[0] / counts[1]).item()
        print(f" * Acc@1 {accuracy:.3f} of {counts[1]} lines")
        weights = hashlib.sha256(model.module.weight.detach().cpu().numpy().tobytes()).hexdigest()
        with open(args.out, "w") as file:
            json.dump({"accuracy": accuracy, "lines": counts[1].item(), "weights": weights}, file)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
