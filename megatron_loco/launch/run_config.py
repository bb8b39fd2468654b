"""The ``run`` section: the launcher's own settings."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath

from megatron_loco.launch.sections import nearest
from megatron_loco.launch.values import Setting, Value, located, text, whole_number

DEVICES = ("auto", "cpu", "cuda")
BASELINES = ("bf16", "fp32")
DATA_FORMATS = ("text", "chat")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Settings of the launcher.

    Attributes:
        name: Name of the run; the name of the configuration file without its ending.
        device: ``cpu``, ``cuda``, or ``auto``: cuda if torch sees a GPU, else cpu.
        nproc_per_node: Ranks on each node; on cuda at most the number of its GPUs.
        nnodes: Nodes. More than one needs NODE_RANK, MASTER_ADDR and MASTER_PORT in the environment of each.
        script: Training script of the Megatron-LM checkout in MEGATRON_LM_DIR; without a checkout only
            ``pretrain_gpt.py``, whose work our own script does.
        rendezvous_timeout_s: Seconds for all nodes to come, torchrun's own by default. One node waits for nobody.
        output_dir: Folder of everything that the run writes; ``runs/<name>``.
        corpus: A corpus that the launcher prepares and trains on, ``stdlib`` or ``stdlib-chat``, or ``None``: the file
            sets ``data-path``.
        data_dir: Folder where prepared corpora are kept.
        data_format: ``text``, or ``chat``: each document is a conversation in role tokens, and only the assistant's
            tokens count.
        freeze: Parameters that are not trained: shell patterns of names with commas between, or ``None``.
        baseline: ``bf16`` or ``fp32``: the same run without LoCo, with gradients that Megatron reduces in that type.

    Raises:
        ValueError: a value is not one of those.
    """

    name: str
    device: str = "auto"
    nproc_per_node: int = 1
    nnodes: int = 1
    script: str = "pretrain_gpt.py"
    rendezvous_timeout_s: int = 900
    output_dir: str = ""
    corpus: str | None = None
    data_dir: str = "data"
    data_format: str = "text"
    freeze: str | None = None
    baseline: str | None = None

    def __post_init__(self) -> None:
        if not self.name or "/" in self.name or self.name in (".", ".."):
            raise ValueError(f"name must be usable as the name of a folder, got {self.name!r}")
        if self.device not in DEVICES:
            raise ValueError(f"device must be one of {', '.join(DEVICES)}, got {self.device!r}")
        for field in ("nproc_per_node", "nnodes", "rendezvous_timeout_s"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field} must be at least 1, got {getattr(self, field)}")
        if not self.script or PurePath(self.script).is_absolute() or ".." in PurePath(self.script).parts:
            raise ValueError(f"script must be a path inside the checkout in MEGATRON_LM_DIR, got {self.script!r}")
        if not self.data_dir:
            raise ValueError("data_dir must name a folder")
        if self.data_format not in DATA_FORMATS:
            raise ValueError(f"data_format must be one of {', '.join(DATA_FORMATS)}, got {self.data_format!r}")
        if self.baseline not in (None, *BASELINES):
            raise ValueError(f"baseline must be one of {', '.join(BASELINES)}, got {self.baseline!r}")
        if self.freeze is not None and not all(pattern.strip() for pattern in self.freeze.split(",")):
            raise ValueError(f"freeze must be patterns with commas between, got {self.freeze!r}")
        if not self.output_dir:
            object.__setattr__(self, "output_dir", f"runs/{self.name}")

    @classmethod
    def from_section(cls, section: Mapping[str, Setting], *, config_file: str | Path) -> RunConfig:
        """Build from the ``run`` section.

        Args:
            section: Canonical key -> setting. null means the default.
            config_file: Gives the name of the run where the section does not.

        Returns:
            The settings; ``device`` may still be ``auto``.

        Raises:
            ValueError: a key is unknown, or a value has the wrong type or is not allowed.
        """
        values: dict[str, Value] = {"name": Path(config_file).stem}
        where = f"{config_file}: run"
        fields = {field.name: str(field.type) for field in dataclasses.fields(cls)}
        for key, setting in section.items():
            if key not in fields:
                raise located(setting.where, f"run.{key}", f"unknown setting{nearest(key, fields)}")
            if setting.value is None:
                continue
            try:
                take = whole_number if fields[key] == "int" else text
                values[key] = take(setting.value)
                cls(**{"name": "run", key: values[key]})  # type: ignore[arg-type]  # one at a time, to know its line
            except ValueError as error:
                raise located(setting.where, f"run.{key}", error) from None
        try:
            return cls(**values)  # type: ignore[arg-type]  # types were checked by name above
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None


def settle_device(run: RunConfig) -> RunConfig:
    """Replace ``device: auto`` by what this machine has.

    Args:
        run: The settings.

    Returns:
        Settings whose device is ``cpu`` or ``cuda``.
    """
    if run.device != "auto":
        return run
    import torch

    return dataclasses.replace(run, device="cuda" if torch.cuda.is_available() else "cpu")
