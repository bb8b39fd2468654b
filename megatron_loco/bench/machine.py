"""What a figure depends on besides the code: machine and versions, without naming the machine."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch


def describe_machine(device: torch.device | None = None) -> dict[str, Any]:
    """Return CPU or GPU model, number of cores, and the versions of what takes part; ready for JSON."""
    about: dict[str, Any] = {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 2),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    if device is not None and device.type == "cuda":
        about["gpu"] = torch.cuda.get_device_name(device)
        about["cuda"] = torch.version.cuda
        try:
            about["triton"] = version("triton")
        except PackageNotFoundError:
            about["triton"] = None
    return about


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.machine()
