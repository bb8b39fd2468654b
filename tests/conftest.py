"""Settings of every test session."""

from __future__ import annotations

import os

# All tests run on CPU ranks, also on a machine with a GPU; whoever wants to see one there sets the variable.
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

import torch

# The tensors of the tests are small, and several ranks share the cores: threads would only wait for each other.
torch.set_num_threads(1)
