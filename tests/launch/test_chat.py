"""Conversations: their tokens, which of them count, samples, and the loss over exactly what the assistant says."""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_loco.launch import byte_tokens, chat_tokens, corpus, pretrain_gpt, stdlib_chat
from megatron_loco.launch.chat_tokens import ASSISTANT, END, USER

Turns = Sequence[tuple[str, str]]


def written(tokens: Sequence[int] | np.ndarray) -> str:
    """Tokens in letters; roles as ``<``, ``>``, the end as ``.``."""
    return "".join({USER: "<", ASSISTANT: ">", END: "."}.get(int(t)) or chr(t) for t in tokens)


@pytest.mark.parametrize(
    ("turns", "tokens", "counted"),
    [
        ([("hi", "yes")], "<hi>yes.", "____yyyy"),
        ([("a", "b"), ("c", "de")], "<a>b.<c>de.", "___yy___yyy"),
        ([("q", "")], "<q>.", "___y"),
        # An end inside a question or bytes that look like one are text.
        ([("", "\u00fc")], "<>\u00c3\u00bc.", "__yyy"),
    ],
)
def test_what_the_assistant_says_and_its_end_count(turns: Turns, tokens: str, counted: str) -> None:
    document = chat_tokens.encode(turns)
    assert written(document) == tokens
    assert "".join("y" if c else "_" for c in chat_tokens.is_counted(document)) == counted
    for length in range(1, len(document) + 1):  # cut off anywhere, the rest is as it was
        assert (chat_tokens.is_counted(document[:length]) == chat_tokens.is_counted(document)[:length]).all()


def test_nothing_before_an_assistant_counts_and_text_cannot_pretend() -> None:
    assert not chat_tokens.is_counted(np.array([65, 66, END, USER, 67], dtype=np.uint16)).any()
    # Also where an answer lacks its end, and where text is made of the characters with these numbers.
    assert chat_tokens.is_counted(np.array([ASSISTANT, 65, USER, 66], dtype=np.uint16)).tolist() == [0, 1, 0, 0]
    forged = chat_tokens.encode([(chr(END) + chr(ASSISTANT), "x")])
    assert forged.tolist().count(ASSISTANT) == 1


CONVERSATIONS: list[Turns] = [[("hi", "yes")], [("a", "b"), ("c", "de")], [("long", "answer to it")], [("u", "v")]]


@pytest.fixture
def dataset(tmp_path: Path) -> Callable[..., Any]:
    """A data set of :data:`CONVERSATIONS`, or other documents, with samples of 8 tokens."""
    from megatron.core.datasets.gpt_dataset import GPTDatasetConfig
    from megatron.core.datasets.utils import Split
    from megatron.core.tokenizers.text.libraries.null_tokenizer import NullTokenizer

    from megatron_loco.launch.chat_dataset import ChatDataset

    def build(documents: list[np.ndarray] | None = None, num_samples: int | None = 12, **changes: Any) -> Any:
        documents = [chat_tokens.encode(turns) for turns in CONVERSATIONS] if documents is None else documents
        byte_tokens.write_tokens(documents, tmp_path / "chat", chat_tokens.is_counted)
        settings: dict[str, Any] = {"sequence_length": 8, "random_seed": 1, "create_attention_mask": True, **changes}
        config = GPTDatasetConfig(
            blend=([str(tmp_path / "chat")], None),
            split="1,0,0",
            reset_position_ids=False,
            reset_attention_mask=False,
            eod_mask_loss=False,
            tokenizer=NullTokenizer(chat_tokens.VOCAB_SIZE),
            **settings,
        )
        low_level = ChatDataset.build_low_level_dataset(str(tmp_path / "chat"), config)
        indices = np.arange(ChatDataset.numel_low_level_dataset(low_level))
        return ChatDataset(low_level, str(tmp_path / "chat"), indices, num_samples, Split.train, config)

    return build


def test_samples_are_conversations_with_labels_one_further_on(dataset: Callable[..., Any]) -> None:
    samples = [dataset()[k] for k in range(4)]
    found = {}
    for sample in samples:
        tokens, labels, mask = (sample[name] for name in ("tokens", "labels", "loss_mask"))
        assert (tokens[1:] == labels[:-1]).all()
        assert sample["position_ids"].tolist() == list(range(8))
        found[written(tokens)] = (written(labels), written(labels[mask.bool()]))
        assert set(mask.tolist()) <= {0.0, 1.0}
    assert found == {
        "<hi>yes.": ("hi>yes..", "yes."),  # the last label is padding
        "<a>b.<c>": ("a>b.<c>d", "b.d"),  # cut off
        "<long>an": ("long>ans", "ans"),
        "<u>v....": ("u>v.....", "v."),
    }
    mask = samples[0]["attention_mask"]
    assert mask.shape == (1, 8, 8)
    assert (mask[0] == (torch.arange(8)[:, None] < torch.arange(8))).all()  # true: not seen


def test_every_epoch_has_each_conversation_once_in_an_order_of_its_own(dataset: Callable[..., Any]) -> None:
    def order(data: Any, first: int = 0) -> list[str]:
        return [written(data[k]["tokens"]) for k in range(first, len(data))]

    data = dataset(num_samples=40)
    epochs = [order(data)[k : k + 4] for k in range(0, 40, 4)]
    assert all(set(epoch) == set(epochs[0]) and len(set(epoch)) == 4 for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 1
    assert order(dataset(num_samples=40), first=7) == order(data)[7:]  # as after a resume
    assert order(dataset(num_samples=40, random_seed=2)) != order(data)
    assert len(dataset(num_samples=None)) == 4


def test_a_sample_that_fills_a_batch_counts_nothing(dataset: Callable[..., Any]) -> None:
    assert not dataset()[None]["loss_mask"].any()
    assert "attention_mask" not in dataset(create_attention_mask=False)[0]


def test_plain_text_is_refused(dataset: Callable[..., Any]) -> None:
    data = dataset([np.array([72, 105, END], dtype=np.uint16)])
    with pytest.raises(ValueError, match=r"document 0 holds no token 258.*run\.corpus=stdlib-chat"):
        data[0]


def test_the_loss_is_the_sum_over_counted_tokens_and_their_number(
    dataset: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pretrain_gpt, "get_args", lambda: types.SimpleNamespace(check_for_nan_in_loss_and_grad=False))
    data = dataset()
    batch = torch.utils.data.default_collate([data[k] for k in range(4)])
    # Every token loss is a power of two of its label's kind, so that the sum tells which were taken.
    losses = torch.where(batch["labels"] == END, 1000.0, 1.0)
    total, num_tokens, logged = pretrain_gpt.loss(batch["loss_mask"], losses)
    assert int(num_tokens) == 4 + 3 + 3 + 2
    assert float(total) == 1000.0 * 3 + 9
    assert logged["lm loss"].tolist() == [3009.0, 12.0]


# ------------------------------------------------------------------------------------------- the corpus


LIBRARY = '''"""What the module
is for.

More of it."""
def f(a, *, b: int = 1) -> str:
    """Do a thing
    in two lines.

    Not this."""
    def inner():
        """Not a question either."""
def _private():
    """Private functions are not asked about."""
class C:
    """A class of things."""
    async def method(self, x=None):
        """Short."""
'''


def test_pairs_are_questions_on_public_names(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    for name in ("package/__init__.py", "package/_hidden.py"):
        (tmp_path / name).write_text(LIBRARY, encoding="utf-8")
    assert sorted(stdlib_chat.pairs(tmp_path)) == [
        ("What does package.f do?", "Do a thing in two lines."),
        ("What is the class package.C?", "A class of things."),
        ("What is the module package for?", "What the module is for."),
        ("Which arguments does package.C.method take?", "method(self, x=None)"),
        ("Which arguments does package.f take?", "f(a, *, b: int=1)"),
    ]


def test_the_prepared_corpus(tiny_library: Path, tmp_path: Path) -> None:
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    (tiny_library / "asked.py").write_text(LIBRARY, encoding="utf-8")
    prepared = corpus.prepare("stdlib-chat", tmp_path / "data")
    settings = prepared.megatron_settings()
    assert (settings["vocab-size"], prepared.data_format) == (chat_tokens.VOCAB_SIZE, "chat")
    data = IndexedDataset(str(settings["data-path"]))
    pairs = stdlib_chat.pairs(tiny_library)
    assert len(pairs) == len(data) == prepared.documents > 5
    for document, pair in zip(data, pairs, strict=True):
        assert document.tolist() == chat_tokens.encode([pair]).tolist()
    # The entropy is that of what counts: the answers and their ends.
    counts = np.zeros(257, dtype=np.int64)
    for _, answer in pairs:
        counts += np.bincount([*answer.encode(), END], minlength=257)
    assert prepared.entropy_nats == pytest.approx(byte_tokens.unigram_entropy(counts))
    assert corpus.find("stdlib", tmp_path / "data") is None
    assert corpus.prepare("stdlib-chat", tmp_path / "data") == prepared


def test_both_vocabularies_have_the_same_padded_size() -> None:
    rows = {-(-size // 128) * 128 for size in (byte_tokens.VOCAB_SIZE, chat_tokens.VOCAB_SIZE)}
    assert rows == {384}
