"""Settings of every test session."""

from __future__ import annotations

import torch

# The tensors of the tests are small, and several ranks share the cores: threads would only wait for each other.
torch.set_num_threads(1)
