"""A small text data set: tokenized lines of docstrings, labeled with the package that they come from."""

import functools
import inspect
from typing import Any

WORDS = 24


@functools.cache
def lines(package: str) -> list[str]:
    """Return lines of the docstrings of a package."""
    import importlib

    module = importlib.import_module(package)
    result = []
    for name in sorted(name for name in dir(module) if not name.startswith("_")):
        docstring = (inspect.getdoc(getattr(module, name)) or "").splitlines()
        result += [line.strip() for line in docstring[:30] if len(line.split()) > 5]
    return sorted(set(result))


@functools.cache
def dataset(count: int = 256) -> tuple[list[dict[str, Any]], int]:
    """Return ``count`` examples that alternate between two packages, and the size of the vocabulary."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordPiece
    from tokenizers.normalizers import Lowercase
    from tokenizers.pre_tokenizers import BertPreTokenizer
    from tokenizers.trainers import WordPieceTrainer

    texts = {label: lines(package) for label, package in enumerate(("torch.nn", "sklearn.metrics"))}
    tokenizer = Tokenizer(WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = Lowercase()
    tokenizer.pre_tokenizer = BertPreTokenizer()
    special = ["[PAD]", "[UNK]"]
    everything = [text for label in texts for text in texts[label]]
    tokenizer.train_from_iterator(
        everything, WordPieceTrainer(vocab_size=600, special_tokens=special, show_progress=False)
    )
    tokenizer.enable_truncation(WORDS)
    tokenizer.enable_padding(length=WORDS)
    examples = []
    for number in range(count):
        label, place = number % 2, number // 2
        step = len(texts[label]) // (count // 2)
        encoded = tokenizer.encode(texts[label][place * step])
        examples.append({"input_ids": encoded.ids, "attention_mask": encoded.attention_mask, "labels": label})
    return examples, tokenizer.get_vocab_size()
