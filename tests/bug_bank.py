"""Kinds of bugs that users of compressed or low-precision gradient communication reported elsewhere.

Each kind has tests that carry its number, ``@pytest.mark.kind(17)``; ``pytest --kind 17`` runs them, and
``tests/test_bug_bank.py`` fails if a kind has none. A report is one example of its kind; what was reported is retold in
our own words. Numbers have gaps: they are those of a longer list.
"""

from __future__ import annotations

from dataclasses import dataclass

_GITHUB = "https://github.com/"


@dataclass(frozen=True)
class Kind:
    """One kind of bug.

    Attributes:
        number: As in ``@pytest.mark.kind(number)``.
        name: What goes wrong.
        report: Address of the public report that stands for the kind.
        later: The part of the kind that no test can cover yet, because the project lacks the feature; empty if none.
    """

    number: int
    name: str
    report: str
    later: str = ""


def _kind(number: int, name: str, report: str, later: str = "") -> Kind:
    return Kind(number, name, _GITHUB + report, later)


KINDS: dict[int, Kind] = {
    kind.number: kind
    for kind in (
        _kind(1, "an overflow step poisons the error state", "deepspeedai/DeepSpeed/issues/753"),
        _kind(3, "a non-finite value on one rank is lost", "epfLLM/Megatron-LLM/pull/34"),
        _kind(4, "a step runs again and the state has already moved", "NVIDIA/Megatron-LM/issues/3884"),
        _kind(5, "switched on or off across a resume", "pytorch/pytorch/issues/148252"),
        _kind(6, "checkpoint loaded by another number of ranks", "NVIDIA/Megatron-LM/issues/659"),
        _kind(9, "the error of one bucket is added to another", "pytorch/pytorch/pull/51427"),
        _kind(12, "tied embeddings on two pipeline stages", "NVIDIA/Megatron-LM/issues/844"),
        _kind(13, "one reduction is dispatched twice", "NVIDIA/Megatron-LM/issues/775"),
        _kind(15, "a wait() that waits for nothing", "pytorch/pytorch/issues/122807"),
        _kind(17, "size not divisible by ranks and codes per byte", "deepspeedai/DeepSpeed/issues/5054"),
        _kind(19, "scale held up by a floor, or underflowing", "pytorch/ao/pull/4534"),
        _kind(20, "expert gradients divided by the wrong number", "deepspeedai/DeepSpeed/pull/6546"),
        _kind(21, "ranks run different numbers of collectives", "NVIDIA/Megatron-LM/issues/1462"),
        _kind(22, "accumulation reduces at the wrong micro-batch", "NVIDIA/Megatron-LM/pull/7186"),
        _kind(23, "replicas end with different values", "local-inference-lab/b12x/pull/44"),
        _kind(25, "a documented configuration fails, or dtypes do not match", "deepspeedai/DeepSpeed/issues/3809"),
        _kind(26, "CUDA is taken for granted", "flagos-ai/FlagScale/issues/1289"),
        _kind(27, "state of the reduction cannot be saved", "pytorch/pytorch/issues/75666"),
        _kind(28, "frozen parameters", "NVIDIA/Megatron-LM/pull/688"),
        _kind(29, "a parameter that the forward pass does not use", "NVIDIA/Megatron-LM/issues/1150"),
        _kind(31, "a partial last block reads what lies behind it", "bitsandbytes-foundation/bitsandbytes/pull/1884"),
        _kind(32, "a launcher falls back and hides the fault", "mlc-ai/pith-train/pull/91"),
        _kind(34, "types of YAML scalars", "hiyouga/LLaMA-Factory/issues/4014"),
        _kind(35, "a sum where the mean was asked", "pytorch/pytorch/issues/162338"),
        _kind(36, "runs that should be equal differ", "NVIDIA/Megatron-LM/issues/2369"),
        _kind(38, "a block of zeros", "bitsandbytes-foundation/bitsandbytes/issues/1744"),
        _kind(39, "strides ignored, or heeded by one backend only", "bitsandbytes-foundation/bitsandbytes/issues/1995"),
        _kind(
            40,
            "slower than without, and measured wrongly",
            "deepspeedai/DeepSpeed/issues/4386",
            "benchmark of step times: warm-up, spread, synchronisation, a model that does not learn",
        ),
    )
}
