"""Package metadata. `requirements.lock` pins what this file leaves open; `scripts/bootstrap.sh` installs the lock.

After a change here, renew the lock with the command in its first lines.
"""

from setuptools import find_packages, setup

REQUIRED = [
    # The lock has the version that is tested; the next minor is let in after a look.
    "torch>=2.9,<2.15",
    # The patch layer checks the source of what it replaces, so a new minor has to be looked at first. What 0.16 to 0.18
    # themselves need is not listed: from 0.17 to 0.18 their megatron.training imports PyYAML without declaring it.
    "megatron-core>=0.16.1,<0.20",
    # Index arithmetic of the data set and of checkpoints; also what Megatron itself computes indices with.
    "numpy",
    # YAML 1.2: `1e-4` is a number and `on` a string, and a duplicate key is an error.
    "ruamel.yaml",
    # Ranks of a node that start together compile the CPU kernels once; torch needs it too.
    "filelock",
    # Whether installed versions are supported ones, for `megatron-loco doctor`; megatron-core needs it too.
    "packaging",
    # Tables and progress in the launcher and the benchmarks.
    "rich",
    # Two that Megatron imports in a `try` and does not declare; without them it starts, then stops half-way:
    "psutil",  # writing a torch_dist checkpoint
    "einops",  # Megatron-FSDP's device mesh and hierarchical context parallel groups
    # A Megatron-LM checkout (MEGATRON_LM_DIR) compiles its index builder at the first start.
    "pybind11",
    # Megatron's scalars; its console prints the mean of two iterations after a resume, TensorBoard does not.
    "tensorboard",
]

EXTRAS = {
    # Fused layers and optimizers for CUDA 13 (for CUDA 12 install transformer-engine[pytorch,core_cu12]). Its torch
    # part is compiled on the spot: pip install --no-build-isolation -e '.[gpu]', with nvcc and cuDNN present.
    # Apex is not listed: with Transformer Engine it is optional, and the registry's package named `apex` is
    # something else (a web framework's add-on).
    "gpu": ["transformer-engine[pytorch,core_cu13]"],
    # Figures of the benchmark reports.
    "plot": ["matplotlib"],
    # Tests, lint, types; uv installs the lock in scripts/bootstrap.sh about three times as fast as pip.
    "dev": ["pytest", "ruff", "mypy", "uv"],
}

setup(
    name="megatron-loco",
    version="0.1.0",
    description="4-bit gradient communication with error feedback for Megatron-LM",
    license="Apache-2.0",
    license_files=["LICENSE"],
    # megatron-core 0.19 needs 3.12 and has no wheel for 3.14.
    python_requires=">=3.12,<3.14",
    packages=find_packages(include=["megatron_loco", "megatron_loco.*"]),
    package_data={"megatron_loco": ["py.typed"], "megatron_loco.kernels": ["*.cpp"]},
    install_requires=REQUIRED,
    extras_require=EXTRAS,
    entry_points={"console_scripts": ["megatron-loco = megatron_loco.launch.cli:main"]},
)
