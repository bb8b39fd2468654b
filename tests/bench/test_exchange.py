"""The benchmark of the exchange: its checks can fail, its figures follow from the times, and it cleans up."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_loco.bench import exchange
from megatron_loco.bench.exchange_arms import GLOO, LOCAL, ONE_CHUNK, RING_BF16, RING_FP32, Bench, Plan, model_spans
from megatron_loco.bench.exchange_checks import Check, Round, check_equal, check_sent
from megatron_loco.bench.exchange_report import quietest, summary
from megatron_loco.bench.links import burst_bytes, is_off
from megatron_loco.bench.rotated import rotated_reduce_scatter
from megatron_loco.collectives.reduce_scatter import reduce_scatter
from megatron_loco.collectives.scratch import ScratchPool
from megatron_loco.collectives.state import BucketState
from megatron_loco.config import LoCoConfig
from tests._buckets import CPU, layout_of, spans_of
from tests._ranks import RankPool


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPool]:
    with RankPool(4) as pool:
        yield pool


def _compare_point_to_point(group: dist.ProcessGroup, numel: int, chunk_bytes: int, dtype: torch.dtype) -> int:
    config = LoCoConfig(bits=4, block_size=32, warmup_steps=0, chunk_bytes=chunk_bytes, backend="reference")
    layout = layout_of(numel, group.size(), spans_of(numel), config, dtype)
    ours, other = (BucketState("bucket", layout, config, CPU, ScratchPool(CPU)) for _ in range(2))
    for step in range(3):  # the error of a step goes into the next
        generator = torch.Generator().manual_seed(10 * step + group.rank())
        grad = torch.randn(numel, generator=generator).to(dtype)
        expected, output = (torch.full((numel // group.size(),), float("nan"), dtype=dtype) for _ in range(2))
        reduce_scatter(expected, grad, ours, op=dist.ReduceOp.SUM, group=group)
        rotated_reduce_scatter(output, grad, other, group=group)
        assert torch.equal(output, expected)
        assert torch.equal(other.error.codes, ours.error.codes)
    assert other.scratch.num_allocations == 2  # lent again and again, so given back
    return len(other.chunks)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_point_to_point_equals_the_product(ranks: RankPool, size: int, dtype: torch.dtype) -> None:
    # 12000 elements in 4 bits: about 7 kB of codes, scales and exact values, in chunks of 1 kB and in one.
    assert min(ranks.run(_compare_point_to_point, size, 12_000, 1_000, dtype)) > 5
    assert ranks.run(_compare_point_to_point, size, 12_000, 10**6, dtype) == [1] * size
    # More chunks than blocks: some are empty.
    assert min(ranks.run(_compare_point_to_point, size, 240, 8, dtype)) > 5


PLAN = Plan(2**17, "bf16", (0, 8192), LoCoConfig(bits=4))


def _run_bench(group: dist.ProcessGroup, plan: Plan) -> tuple[Check, Round]:
    bench = Bench(plan, group)
    return bench.check(None), bench.round()


@pytest.mark.parametrize("size", [2, 4])
def test_arms_agree(ranks: RankPool, size: int) -> None:
    answers = ranks.run(_run_bench, size, PLAN)
    for check, timed in answers:
        names = [
            GLOO,
            RING_BF16,
            RING_FP32,
            ONE_CHUNK,
            "LoCo, chunks of 1024 KiB (auto)",
            "LoCo, chunks of 8 KiB",
            "LoCo, point-to-point, 1024 KiB",
            LOCAL,
        ]
        assert list(check.sent_bytes) == names
        assert list(timed.seconds) == list(timed.cpu_seconds) == names
        assert min(timed.seconds.values()) > 0
        # 2^17 elements: 64 KiB of codes and 2 KiB of scales in one payload per rank; 8 KiB is an eighth of them.
        assert [check.num_chunks[name] for name in names[3:7]] == [1, 1, 9, 1]
        assert check.wire_bytes[RING_BF16] == 2**18 * (size - 1) / size
        assert check.wire_bytes[RING_FP32] == 2**19 * (size - 1) / size
        assert check.wire_bytes[GLOO] is None
        # One norm weight of 1024 elements is exact; regions are aligned to 16 bytes.
        payloads = 1024 * 2 + (2**17 - 1024) * 4.125 / 8
        assert check.wire_bytes[ONE_CHUNK] == pytest.approx(payloads * (size - 1) / size, abs=16 * size)
        # What 4 bits cost on Gaussian blocks: see Bench; equal for all, since the results are.
        assert {check.relative_error[name] for name in names[3:7]} == {check.relative_error[ONE_CHUNK]}
        assert 0.05 < check.relative_error[ONE_CHUNK] < 0.2
        assert check.relative_error[RING_BF16] < 0.01


def _run_broken_bench(group: dist.ProcessGroup, broken: str) -> str:
    bench = Bench(PLAN, group)
    arm = bench.arms[broken]
    reduce = arm.reduce

    def wrong() -> None:
        reduce()
        arm.output[7] += 64.0

    arm.reduce = wrong
    with pytest.raises(RuntimeError) as caught:
        bench.check(None)
    return str(caught.value)


@pytest.mark.parametrize("broken", ["LoCo, chunks of 8 KiB", "LoCo, point-to-point, 1024 KiB"])
def test_one_wrong_element_of_loco_stops_the_measurement(ranks: RankPool, broken: str) -> None:
    message = f"{broken}: differs from 'LoCo, one chunk' in 1 elements; nothing is reported"
    assert ranks.run(_run_broken_bench, 2, broken) == [message] * 2


def test_a_wrong_exact_sum_stops_the_measurement(ranks: RankPool) -> None:
    # One element off by 64 among 2^16 of size sqrt(2): relative error 64 / (256 * 1.4) = 0.18.
    for message in ranks.run(_run_broken_bench, 2, GLOO):
        assert message.startswith("Gloo: relative error 0.1")


def test_results_are_compared_bit_for_bit() -> None:
    first = torch.tensor([0.0, 1.0], dtype=torch.bfloat16)
    check_equal({"a": first, "b": first.clone()})
    with pytest.raises(RuntimeError, match="b: differs from 'a' in 1 elements"):
        check_equal({"a": first, "b": torch.tensor([-0.0, 1.0], dtype=torch.bfloat16)})


def test_bytes_on_the_wire_may_be_off_by_two_percent() -> None:
    check_sent({"ring": 1019.0, "gloo": 5000.0, "local": 3.0}, {"ring": 1000.0, "gloo": None, "local": 0.0})
    with pytest.raises(RuntimeError, match="ring: sent 1021 bytes, not 1000"):
        check_sent({"ring": 1021.0}, {"ring": 1000.0})


def test_bucket_is_filled_with_layers() -> None:
    numel = 2**25
    spans = model_spans(numel)
    assert all(a.stop <= b.start for a, b in itertools.pairwise(spans))
    assert spans[0].start == 0
    assert spans[-1].stop == numel
    # A layer takes 11,274,240 elements: three begin in the bucket, each with two norm weights of 1024.
    assert sum(span.stop - span.start for span in spans if span.exact) == 3 * 2 * 1024


def test_figures_follow_from_the_times() -> None:
    names = (RING_BF16, RING_FP32, ONE_CHUNK)

    def timed(*seconds: float) -> Round:
        return Round(dict(zip(names, seconds, strict=True)), dict.fromkeys(names, 0.5), 1.0)

    rounds = [
        [timed(1.0, 2.0, 0.25), timed(1.1, 2.2, 0.2)],  # two ranks: 1.1, 2.2, 0.25
        [timed(9.0, 9.0, 9.0), timed(9.0, 9.0, 9.0)],  # disturbed
        [timed(1.2, 2.4, 0.30), timed(1.0, 2.0, 0.2)],
        [timed(1.3, 2.6, 0.35), timed(1.3, 2.6, 0.2)],
    ]
    foreign = [0.05, 0.9, 0.0, 0.2]
    kept = quietest(rounds, foreign, 3)
    assert kept == [0, 2, 3]
    sent = {RING_BF16: 1.5e8, RING_FP32: 3.0e8, ONE_CHUNK: 3.0e7}
    check = Check(sent, dict(sent), dict.fromkeys(names, 1), {ONE_CHUNK: 0.1}, "reference")
    result = summary(rounds, check, 1.0, foreign, kept)
    loco = result["arms"][ONE_CHUNK]
    assert loco["seconds"] == [0.25, 0.30, 0.35]
    assert (loco["median"], loco["min"], loco["max"]) == (0.30, 0.25, 0.35)
    assert loco["times ring bf16"] == pytest.approx(1.2 / 0.3)
    assert loco["times ring fp32"] == pytest.approx(2.4 / 0.3)
    assert loco["link_share"] == pytest.approx(3.0e7 * 8 / 1e9 / 0.3)
    assert result["arms"][RING_BF16]["link_share"] == pytest.approx(1.0)
    json.dumps(result)


def test_a_link_that_misses_its_rate_is_noticed() -> None:
    assert not is_off([0.955, 0.993])
    assert is_off([0.993, 0.94])
    assert is_off([1.06])
    # The bucket holds two frames of 64 KiB at least, and about as many per Gbit/s as a busy machine needs.
    assert [burst_bytes(gbit) for gbit in (0.25, 0.5, 1, 4, 10)] == [2**17, 2**17, 2**18, 2**18, 10 * 2**16]


class _WrongLinks:
    def __init__(self, shares: list[list[float]]) -> None:
        self.shares = shares

    def stream_shares(self, gbit: float, num_nodes: int) -> list[float]:
        return self.shares.pop(0)


def test_nothing_is_reported_of_links_that_miss_their_rate() -> None:
    once_disturbed = _WrongLinks([[0.8, 0.99], [0.99, 0.99]])
    assert exchange._stream_shares(once_disturbed, 1.0, 2) == [0.99, 0.99]  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match=r"reach 0\.500, 0\.990 of 2 Gbit/s, more than 5% off.*nothing is reported"):
        exchange._stream_shares(_WrongLinks([[0.5, 0.99]] * 3), 2.0, 2)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ranks", "1,2"], "--ranks must be at least 2, got 1"),
        (["--rates", "1,0"], "--rates must be positive, got 0"),
        (["--repeats", "0"], "--repeats must be at least 1, got 0"),
        (["--chunk-bytes", "0,-1"], "--chunk-bytes must not be negative, got -1"),
        (["--numel", "100"], "--numel must be at least 1024 for these --ranks, got 100"),
        (["--block-size", "33"], "--loco-block-size"),
    ],
)
def test_refuses_nonsense(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert exchange.main(arguments) == 2
    assert message in capsys.readouterr().err


def test_says_what_is_missing_without_rights(capsys: pytest.CaptureFixture[str]) -> None:
    with mock.patch.object(exchange, "enter_private_network", return_value=False):
        assert exchange.main([]) == 2
    assert capsys.readouterr().err == "error: emulated links need root, or unprivileged user namespaces\n"


# In a process of its own: it leaves its network namespace for good.
LINKS = """
import json, socket, subprocess
from megatron_loco.bench.links import LimitedLinks
from megatron_loco.bench.namespaces import NODE_INTERFACE, enter_private_network

def show(interface):
    words = ["tc", "-json", "qdisc", "show", "dev", interface]
    return json.loads(subprocess.run(words, check=True, capture_output=True, text=True).stdout)[0]

try:
    if not enter_private_network():
        raise RuntimeError("network namespaces are not allowed")
    links = LimitedLinks(2)
    links.limit(0.5)
    links.limit(None)
    unlimited = [show(links.nodes.port(node))["kind"] for node in range(2)]
except RuntimeError as error:
    print(json.dumps(str(error)))
else:
    links.limit(0.25)
    limits = [show(links.nodes.port(node)) for node in range(2)]
    for node in range(2):
        with links.nodes.inside(node):
            limits.append(show(NODE_INTERFACE))
    sender, receiver = links._connect(0, 1)
    receiver.settimeout(60)
    sender.sendall(b"hello")
    segment = sender.getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG)
    print(json.dumps([unlimited, limits, receiver.recv(5).decode(), segment]))
"""


def test_both_directions_of_every_link_are_limited() -> None:
    done = subprocess.run([sys.executable, "-c", LINKS], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    if isinstance(result, str):
        pytest.skip(result)
    unlimited, limits, received, segment = result
    assert unlimited == ["noqueue"] * 2
    assert received == "hello"
    assert segment == 9000 - 20 - 20 - 12  # headers of IP and TCP, and the timestamp option
    assert [limit["kind"] for limit in limits] == ["tbf"] * 4
    assert [limit["options"]["rate"] for limit in limits] == [0.25e9 / 8] * 4  # bytes per second


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_it_leaves_no_process(number: int) -> None:
    command = [sys.executable, "-m", "megatron_loco.bench.exchange", "--ranks", "2", "--numel", "262144"]
    # At this rate it takes minutes, if nobody interrupts it.
    process = subprocess.Popen([*command, "--rates", "0.001"], stderr=subprocess.PIPE, text=True)
    children: list[int] = []
    deadline = time.monotonic() + 120
    while len(children) < 3 and process.poll() is None and time.monotonic() < deadline:  # two ranks and their tracker
        time.sleep(0.05)
        children = _children(process.pid) if process.poll() is None else []
    if process.poll() is not None:
        assert process.stderr is not None
        message = process.stderr.read()
        assert "error: " in message, message
        pytest.skip(message)
    process.send_signal(number)
    assert process.wait(120) in (130, 143)
    while any(os.path.exists(f"/proc/{child}") for child in children):  # the tracker ends by itself
        assert time.monotonic() < deadline, children
        time.sleep(0.05)
