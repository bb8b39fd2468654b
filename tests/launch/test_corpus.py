"""Prepared corpora: what is in them, that they are reused, and that damage is seen."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import numpy as np
import pytest

from megatron_loco.launch import byte_tokens, corpus, stdlib_text
from tests.launch.conftest import LONG

TEXTS = {LONG, f"C. {LONG}", f"\u00fc {LONG}", "Topic."}


def test_documents_are_topics_and_long_docstrings_without_tests(tiny_library: Path) -> None:
    texts = stdlib_text.documents(tiny_library)
    assert set(texts) == TEXTS
    assert len(texts) == len(TEXTS)
    assert texts == stdlib_text.documents(tiny_library)


def test_contents(tiny_library: Path, tmp_path: Path) -> None:
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    prepared = corpus.prepare("stdlib", tmp_path / "data")
    num_bytes = sum(len(text.encode()) for text in TEXTS)
    assert (prepared.documents, prepared.bytes, prepared.tokens) == (4, num_bytes, num_bytes + 4)
    assert prepared.source == stdlib_text.SOURCE
    assert json.loads(Path(prepared.folder, "corpus.json").read_text())["sha256"] == prepared.sha256
    assert prepared.folder.endswith(prepared.sha256[:12])
    settings = prepared.megatron_settings()
    data = IndexedDataset(str(settings["data-path"]))
    assert [bytes(data[i][:-1].astype(np.uint8)).decode() for i in range(4)] == stdlib_text.documents(tiny_library)
    assert {int(data[i][-1]) for i in range(4)} == {256}
    assert settings["vocab-size"] == 257


def test_second_call_reuses_and_rebuilding_gives_the_same_bytes(
    tiny_library: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = corpus.prepare("stdlib", tmp_path / "data")
    capsys.readouterr()
    assert corpus.prepare("stdlib", tmp_path / "data") == first
    assert capsys.readouterr().out.startswith(f"corpus stdlib: reusing {first.folder} (4 documents,")
    other = corpus.prepare("stdlib", tmp_path / "other")
    for suffix in ("bin", "idx"):
        name = f"text_document.{suffix}"
        assert Path(other.folder, name).read_bytes() == Path(first.folder, name).read_bytes()
    assert os.listdir(tmp_path / "data") == [Path(first.folder).name]


@pytest.mark.parametrize("damage", ["short .bin", "no .bin", "short .idx", "no corpus.json"])
def test_damage_is_told_and_repaired(
    tiny_library: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: str
) -> None:
    first = corpus.prepare("stdlib", tmp_path / "data")
    content = Path(first.folder, "text_document.bin").read_bytes()
    kind, name = damage.split()
    path = Path(first.folder, name if name == "corpus.json" else f"text_document{name}")
    if kind == "no":
        path.unlink()
    else:
        os.truncate(path, 10)
    capsys.readouterr()
    assert corpus.prepare("stdlib", tmp_path / "data") == first
    assert f"{first.folder} does not match its corpus.json, rebuilding it\n" in capsys.readouterr().out
    assert Path(first.folder, "text_document.bin").read_bytes() == content
    corpus.prepare("stdlib", tmp_path / "data")
    assert "reusing" in capsys.readouterr().out


def test_another_library_is_another_corpus(tiny_library: Path, tmp_path: Path) -> None:
    first = corpus.prepare("stdlib", tmp_path / "data")
    (tiny_library / "third.py").write_text(f'"""Third. {LONG}"""\n', encoding="utf-8")
    assert corpus.find("stdlib", tmp_path / "data") is None
    second = corpus.prepare("stdlib", tmp_path / "data")
    assert (second.documents, first.is_complete()) == (5, True)
    assert corpus.find("stdlib", tmp_path / "data") == second


def test_a_failed_preparation_leaves_nothing(
    tiny_library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(folder: Path) -> list[str]:
        raise OSError("disk full")

    monkeypatch.setattr(stdlib_text, "documents", fail)
    with pytest.raises(OSError, match="disk full"):
        corpus.prepare("stdlib", tmp_path / "data")
    assert os.listdir(tmp_path / "data") == []


def test_the_faster_of_two_processes_wins(tiny_library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = corpus.prepare("stdlib", tmp_path / "data")
    monkeypatch.setattr(corpus, "find", lambda name, data_dir: None)  # looked before the other was there
    assert corpus.prepare("stdlib", tmp_path / "data") == first
    assert os.listdir(tmp_path / "data") == [Path(first.folder).name]


def test_entropy_by_hand(tmp_path: Path) -> None:
    assert byte_tokens.unigram_entropy([1, 1, 0, 2]) == pytest.approx(1.5 * math.log(2))
    assert byte_tokens.unigram_entropy([5]) == 0
    # "aab" and the end: a twice, b once, 256 once
    written = byte_tokens.write(["aab"], tmp_path / "text")
    assert written.entropy_nats == pytest.approx(1.5 * math.log(2))
    assert (written.documents, written.bytes, written.tokens) == (1, 3, 4)
    assert (tmp_path / "text.bin").read_bytes() == b"a\0a\0b\0\0\1"


def test_unknown_corpus(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"unknown corpus 'wiki' \(known: stdlib, stdlib-chat\)"):
        corpus.prepare("wiki", tmp_path)


def test_the_real_library_is_found() -> None:
    names = {path.name for path in stdlib_text.source_files(stdlib_text.library_folder())}
    assert "argparse.py" in names
    assert "test_argparse.py" not in names
    assert "assert" in stdlib_text.topics()
