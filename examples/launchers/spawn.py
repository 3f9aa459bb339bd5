"""Starts its processes itself with mp.spawn: one call on each node.

python spawn.py --gpus 2                                    # one node, two processes
python spawn.py --nodes 2 --nr 0 --master 10.0.0.1 --port 29500 --gpus 2    # and --nr 1 there
"""

import argparse
import hashlib
import json
import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 3)
        self.fc = nn.Linear(8 * 6 * 6, 4)

    def forward(self, x):
        return self.fc(torch.relu(self.conv(x)).flatten(1))


def bars(count, seed):
    """8 x 8 images with a bright row, column or diagonal, or none; which of these?"""
    generator = torch.Generator().manual_seed(seed)
    kinds = torch.randint(0, 4, (count,), generator=generator)
    places = torch.randint(0, 8, (count,), generator=generator)
    images = 0.4 * torch.randn(count, 1, 8, 8, generator=generator)
    for image, kind, place in zip(images[:, 0], kinds.tolist(), places.tolist(), strict=True):
        if kind == 0:
            image[place] += 1
        elif kind == 1:
            image[:, place] += 1
        elif kind == 2:
            image.diagonal().add_(1)
    return TensorDataset(images, kinds)


def train(gpu, args):
    rank = args.nr * args.gpus + gpu
    world_size = args.gpus * args.nodes
    cuda = torch.cuda.is_available()
    where = f"tcp://{args.master}:{args.port}"
    backend = "nccl" if cuda else "gloo"
    dist.init_process_group(backend, init_method=where, world_size=world_size, rank=rank)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    device = torch.device("cuda", gpu) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    model = Net().to(device)
    ddp_model = DistributedDataParallel(model, device_ids=[gpu] if cuda else None)
    optimizer = torch.optim.SGD(ddp_model.parameters(), lr=0.05, momentum=0.9)

    start = 0
    if os.path.exists(args.checkpoint):
        dist.barrier()
        saved = torch.load(args.checkpoint, map_location={"cuda:0": f"cuda:{gpu}"})
        ddp_model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        start = saved["epochs"]

    dataset, test = bars(1200, seed=1), bars(400, seed=2)
    sampler = DistributedSampler(dataset, num_replicas=world_size, rank=rank)
    loader = DataLoader(dataset, batch_size=30, shuffle=False, sampler=sampler)
    for epoch in range(start, args.epochs):
        sampler.set_epoch(epoch)
        for i, (images, labels) in enumerate(loader):
            outputs = ddp_model(images.to(device))
            loss = nn.functional.cross_entropy(outputs, labels.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if i % 10 == 0 and gpu == 0:
                print(f"epoch {epoch + 1}/{args.epochs}, step {i}, loss {loss.item():.4f}")
        if rank == 0:
            state = {"model": ddp_model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({**state, "epochs": epoch + 1}, args.checkpoint)
        dist.barrier()

    images, labels = test.tensors
    with torch.no_grad():
        mine = ddp_model(images[rank::world_size].to(device)).argmax(1).cpu()
    right = torch.tensor(float((mine == labels[rank::world_size]).sum()), device=device)
    dist.all_reduce(right, op=dist.ReduceOp.SUM)
    if rank == 0:
        accuracy = right.item() / len(labels)
        flat = nn.utils.parameters_to_vector(model.parameters()).detach().cpu()
        digest = hashlib.sha256(flat.numpy().tobytes()).hexdigest()
        print(f"accuracy {accuracy:.3f}")
        with open(args.out, "w") as file:
            json.dump({"accuracy": accuracy, "weights": digest}, file)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("-n", "--nodes", type=int, default=1)
    parser.add_argument("-g", "--gpus", type=int, default=torch.cuda.device_count() or 2)
    parser.add_argument("-nr", "--nr", type=int, default=0, help="rank of this node")
    parser.add_argument("--master", default="localhost")
    parser.add_argument("--port", default="29500")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--checkpoint", default="model.checkpoint")
    parser.add_argument("--out", default="result.json")
    args = parser.parse_args()
    mp.spawn(train, nprocs=args.gpus, args=(args,))
