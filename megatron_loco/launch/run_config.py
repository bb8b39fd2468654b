"""The ``run`` section: the launcher's own settings."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from megatron_loco.launch.sections import nearest
from megatron_loco.launch.values import Setting, Value, located, text, whole_number

DEVICES = ("auto", "cpu", "cuda")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Settings of the launcher.

    Attributes:
        name: Name of the run; the name of the configuration file without its ending.
        device: ``cpu``, ``cuda``, or ``auto``: cuda if torch sees a GPU, else cpu.
        nproc_per_node: Ranks on each node; on cuda at most the number of its GPUs.
        nnodes: Nodes. More than one needs NODE_RANK, MASTER_ADDR and MASTER_PORT in the environment of each.
        output_dir: Folder of everything that the run writes; ``runs/<name>``.
        corpus: A corpus that the launcher prepares and trains on, ``stdlib``, or ``None``: the file sets ``data-path``.
        data_dir: Folder where prepared corpora are kept.

    Raises:
        ValueError: a value is not one of those.
    """

    name: str
    device: str = "auto"
    nproc_per_node: int = 1
    nnodes: int = 1
    output_dir: str = ""
    corpus: str | None = None
    data_dir: str = "data"

    def __post_init__(self) -> None:
        if not self.name or "/" in self.name or self.name in (".", ".."):
            raise ValueError(f"name must be usable as the name of a folder, got {self.name!r}")
        if self.device not in DEVICES:
            raise ValueError(f"device must be one of {', '.join(DEVICES)}, got {self.device!r}")
        for field in ("nproc_per_node", "nnodes"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field} must be at least 1, got {getattr(self, field)}")
        if not self.data_dir:
            raise ValueError("data_dir must name a folder")
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
