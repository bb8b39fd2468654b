"""LLaMA under PyTorch's FSDP2, with 4-bit gradients.

torchrun --nproc-per-node 2 scripts/examples/fsdp2_llama.py [--steps 100] [--bits 4|off] [--save DIR] [--load DIR]
"""

import argparse
import logging

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import megatron_loco.fsdp2
from megatron_loco.bench.llama import Batches, Llama

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--bits", default="4", help="4, 8, ..., or off")
parser.add_argument("--save", help="folder of the checkpoint after the last step")
parser.add_argument("--load", help="folder of a checkpoint to go on from")
args = parser.parse_args()

device = "cuda" if torch.cuda.is_available() else "cpu"
dist.init_process_group("nccl" if device == "cuda" else "gloo")
rank = dist.get_rank()
if device == "cuda":
    torch.cuda.set_device(rank % torch.cuda.device_count())
logging.basicConfig(level=logging.INFO if rank == 0 else logging.ERROR, format="%(message)s")
torch.manual_seed(1234)
model = Llama().to(device)
precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
for unit in (*model.blocks, model):
    fully_shard(unit, mp_policy=precision)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.1)

# The one line:
loco = None
if args.bits != "off":
    loco = megatron_loco.fsdp2.apply(model, megatron_loco.LoCoConfig(bits=int(args.bits)))

first = 0
if args.load:
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": moments, "step": torch.zeros((), dtype=torch.int64)}
    if loco is not None and loco.fits(args.load):  # else it starts with zero error, and says so
        state["loco"] = loco
    dcp.load(state, checkpoint_id=args.load)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    first = int(state["step"])

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
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": moments, "step": torch.tensor(first + args.steps)}
    dcp.save(state | ({"loco": loco} if loco is not None else {}), checkpoint_id=args.save)
dist.destroy_process_group()
