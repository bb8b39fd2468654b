"""LLaMA under PyTorch's DistributedDataParallel, with 4-bit gradients.

torchrun --nproc-per-node 2 scripts/examples/ddp_llama.py [--steps 100] [--bits 4|off] [--save DIR] [--load DIR]
"""

import argparse
import logging
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import megatron_loco.ddp
from megatron_loco.bench.llama import Batches, Llama

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--bits", default="4", help="4, 8, ..., or off")
parser.add_argument("--save", type=Path, help="folder of the checkpoint after the last step")
parser.add_argument("--load", type=Path, help="folder of a checkpoint to go on from")
args = parser.parse_args()

device = "cuda" if torch.cuda.is_available() else "cpu"
dist.init_process_group("nccl" if device == "cuda" else "gloo")
rank = dist.get_rank()
if device == "cuda":
    torch.cuda.set_device(rank % torch.cuda.device_count())
logging.basicConfig(level=logging.INFO if rank == 0 else logging.ERROR, format="%(message)s")
torch.manual_seed(1234)
model = DistributedDataParallel(Llama().to(device), bucket_cap_mb=1)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.1)

# The hook:
loco = None
if args.bits != "off":
    config = megatron_loco.LoCoConfig(bits=int(args.bits))
    loco = megatron_loco.ddp.apply(model, megatron_loco.ddp.LoCoState(config, gather_dtype=torch.bfloat16))

first = 0
if args.load:
    saved = torch.load(args.load / "model.pt", map_location=device)
    model.module.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    first = saved["step"]
    if loco is not None:  # every rank has its own
        loco.load_state_dict(torch.load(args.load / f"loco_{rank}.pt", weights_only=False))

batches = Batches(rank)
for step in range(first, first + args.steps):
    loss = model(batches(step).to(device))
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if (step + 1) % 10 == 0:
        mean = loss.detach()
        dist.all_reduce(mean, op=dist.ReduceOp.AVG)
        if rank == 0:
            print(f"step {step + 1}: loss {mean.item():.4f}", flush=True)
if loco is not None and rank == 0:
    traffic = loco.model_states.traffic
    print(f"gradients: {traffic.sent_bytes / 1e6:.2f} MB sent; in bf16 {traffic.bf16_bytes / 1e6:.2f} MB")
if args.save:
    args.save.mkdir(parents=True, exist_ok=True)
    if loco is not None:
        torch.save(loco.state_dict(), args.save / f"loco_{rank}.pt")
    if rank == 0:
        saved = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "step": first + args.steps}
        torch.save(saved, args.save / "model.pt")
dist.destroy_process_group()
