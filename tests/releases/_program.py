"""What runs inside a release: gradient reductions on two Gloo ranks, then what the seams are like.

A program of its own, started by :mod:`tests.releases._runs`: for each folder on its command line a fork, which imports
Megatron from that folder alone and writes what it found to ``FOLDER.json``. What torch imports for Megatron's sake
takes far longer than Megatron; so it is done once, before the forks.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import importlib.util
import json
import multiprocessing
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch
import torch._inductor.compile_fx
import torch.distributed as dist
import torch.distributed.tensor
import torch.utils.cpp_extension

from megatron_loco import LoCoConfig, patch
from megatron_loco.bench.prescribed import Case, buckets, shards, train_step, wrap
from megatron_loco.cpu import device, placement
from megatron_loco.integrations.megatron import arguments as loco_arguments
from megatron_loco.integrations.megatron import static
from megatron_loco.integrations.megatron.releases import has_training, megatron_version, release_of
from megatron_loco.integrations.megatron.seams import Seams
from megatron_loco.patching import SeamError, apply, locate
from tests._ranks import TIMEOUT_S
from tests._releases import check_origin, environment

WORLD_SIZE = 2
NUM_STEPS = 3
CASES = {
    "one bucket": Case(multiple_of=WORLD_SIZE, num_micro_batches=2),
    "overlap": Case(multiple_of=WORLD_SIZE, num_micro_batches=2, overlap=True, bucket_size=400),
}
IDENTITY = LoCoConfig(bits=32, warmup_steps=0, min_bucket_numel=0, backend="reference")
LOCO = LoCoConfig(bits=4, block_size=32, warmup_steps=1, min_bucket_numel=0, backend="reference")
BUFFER = "megatron.core.distributed.param_and_grad_buffer"


def main(folders: list[str]) -> int:
    """Run everything in each of two folders at a time; return how many failed."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    assert not any(name.split(".")[0] == "megatron" for name in sys.modules)
    context = multiprocessing.get_context("fork")
    failed = 0
    for first in range(0, len(folders), 2):
        trees = [context.Process(target=_tree, args=(Path(folder),)) for folder in folders[first : first + 2]]
        for tree in trees:
            tree.start()
        for tree in trees:
            tree.join()
        failed += sum(tree.exitcode != 0 for tree in trees)
    return failed


def _tree(folder: Path) -> None:
    variables = environment(folder)
    os.environ.update(variables)
    sys.path[:0] = variables["PYTHONPATH"].split(os.pathsep)
    release = release_of(megatron_version())
    # The ranks are forks of this process: what is imported here is not imported by each of them.
    for seam in Seams().patches(release, training=has_training()):
        locate(seam.target)
    result: dict[str, Any] = {
        "version": importlib.metadata.version("megatron-core"),
        "training": has_training(),
        "static": sorted(static._decorated),
    }
    if static._decorated and static.missing_decorators(Seams().patches(release, training=has_training())):
        result |= _errors_where_partly_patched()
    else:
        ranks = _on_ranks(release)
        result["reductions"] = [digests for digests, _ in ranks]
        result["several instances"] = [error for _, error in ranks]
        result |= _static_contract() if static._decorated else _contract(release)
    check_origin()
    Path(f"{folder}.json").write_text(json.dumps(result))


def _on_ranks(release: str) -> list[tuple[dict[str, str], str]]:
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        arguments = [(rank, release, folder) for rank in range(WORLD_SIZE)]
        ranks = [context.Process(target=_rank, args=each) for each in arguments]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()
        assert all(rank.exitcode == 0 for rank in ranks), [rank.exitcode for rank in ranks]
        return [json.loads(Path(folder, str(rank)).read_text()) for rank in range(WORLD_SIZE)]


def _rank(rank: int, release: str, folder: str) -> None:
    store = dist.FileStore(f"{folder}/store", WORLD_SIZE)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD_SIZE, timeout=timedelta(seconds=TIMEOUT_S))
    with ExitStack() as stack:
        # Not the whole CPU runtime, which needs megatron.training.
        stack.enter_context(apply([*placement.PATCHES, *device.PATCHES]))
        stack.enter_context(placement.CudaMeansCpu())
        from megatron.core import parallel_state

        parallel_state.initialize_model_parallel()
        digests = {}
        for name, case in CASES.items():
            digests[f"{name}, stock"] = _reduce(case, rank)
            if not static._decorated:
                inactive = Seams().patches(release, training=False)
                digests[f"{name}, off"] = _reduce(case, rank, lambda: apply(inactive))  # noqa: B023
            digests[f"{name}, identity"] = _reduce(case, rank, lambda: patch(IDENTITY))
            digests[f"{name}, 4 bits"] = _reduce(case, rank, lambda: patch(LOCO), with_error=True)
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(num_distributed_optimizer_instances=WORLD_SIZE)
        with patch(LOCO):
            error = _error(lambda: wrap(Case(overlap=True, num_instances=WORLD_SIZE)))
    Path(folder, str(rank)).write_text(json.dumps((digests, error)))
    dist.barrier()
    dist.destroy_process_group()


def _reduce(case: Case, rank: int, install: Callable[[], Any] = ExitStack, with_error: bool = False) -> str:
    with install():
        ddp = wrap(case)
        assert len(ddp.bucket_groups) > 2 or not case.overlap
        tensors = []
        for step in range(NUM_STEPS):
            train_step(ddp, case, rank, step)
            tensors += shards(ddp)
        if with_error:  # the error is what the codes that were sent leave
            states = [state for group, _ in buckets(ddp) for _, state in group.loco_states]
            assert states
            tensors += [tensor for state in states for tensor in state.error.tensors().values()]
        # Two groups in flight at most, whatever the release does about it.
        pools = {state.scratch for _, state in getattr(ddp.bucket_groups[0], "loco_states", ())}
        assert all(len(pool._free) <= 4 for pool in pools)
    return _digest(tensors)


def _digest(tensors: Iterable[torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _contract(release: str) -> dict[str, Any]:
    training = has_training()
    seams = Seams().patches(release, training=training)
    before = {seam.target: _stored(seam.target) for seam in seams}
    with patch(LOCO) as handle:
        replaced = {target for target, value in before.items() if _stored(target) is not value}
        targets = set(handle.targets)
    result: dict[str, Any] = {
        "replaced": sorted(replaced),
        "targets": sorted(targets),
        "restored": all(_stored(target) is value for target, value in before.items()),
        "absent": sorted(
            seam.target for seam in Seams().table if not seam.is_in(release, training=training) and _exists(seam.target)
        ),
        "initialize has validate_args": training and _exists("megatron.training.initialize:validate_args"),
        "without a config": _error(patch) if not training else "",
        "refusals": _refusals() if training else [],
    }
    with _modified():
        result["modified"] = _error(lambda: patch(LOCO))
        with patch(LOCO, allow_unknown_source=True):
            result["allowed"] = True
    core = importlib.import_module("megatron.core")
    version, core.__version__ = core.__version__, "0.20.0"
    result["unknown version"] = _error(lambda: patch(LOCO))
    core.__version__ = version
    return result


def _refusals() -> list[str]:
    """Which refusals apply to a command line without ``--use-distributed-optimizer``; all of them are looked at."""
    arguments = importlib.import_module("megatron.training.arguments")
    with patch(), mock.patch.object(sys, "argv", ["pretrain_gpt.py", "--loco-bits", "4"]):
        parsed = arguments.parse_args()
    loco_arguments.resolve_loco_args(parsed)
    return [flag for flag, applies, _ in loco_arguments._UNSUPPORTED if applies(parsed)]


def _static_contract() -> dict[str, Any]:
    with patch(LOCO) as handle:
        result = {
            "targets": sorted(handle.targets),
            "second": patch(LOCO) is handle,
            "conflict": _error(lambda: patch(IDENTITY)),
            "active": static.shared().active() == LOCO,
        }
    return {**result, "inactive again": static.shared().active() is None}


def _errors_where_partly_patched() -> dict[str, str]:
    errors = {"by patch()": _error(lambda: patch(LOCO))}
    static.shared().config = LOCO  # as where the command line turns LoCo on, and nobody calls patch()
    return {**errors, "by itself": _error(static.shared().active)}


@contextmanager
def _modified() -> Iterator[None]:
    """One line of ``start_grad_sync`` is another, in a file."""
    module = sys.modules[BUFFER]
    text = Path(str(module.__file__)).read_text()
    line = "                bucket.grad_data *= bucket.gradient_scaling_factor\n"
    assert text.count(line.lstrip()) == 1
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "param_and_grad_buffer.py")
        path.write_text(text.replace(line.strip(), "bucket.grad_data.mul_(bucket.gradient_scaling_factor)"))
        spec = importlib.util.spec_from_file_location(BUFFER, path)
        assert spec is not None
        assert spec.loader is not None
        modified = importlib.util.module_from_spec(spec)
        sys.modules[BUFFER] = modified
        try:
            spec.loader.exec_module(modified)
            yield
        finally:
            sys.modules[BUFFER] = module


def _stored(target: str) -> Any:
    owner, name = locate(target)
    return vars(owner)[name]


def _exists(target: str) -> bool:
    try:
        owner, name = locate(target)
    except (ImportError, AttributeError):
        return False
    return isinstance(owner, ModuleType | type) and hasattr(owner, name)


def _error(call: Callable[[], Any]) -> str:
    try:
        call()
    except (SeamError, RuntimeError, ValueError) as error:
        return str(error)
    return ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
