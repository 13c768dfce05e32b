"""A small text data set: tokenized lines of docstrings, labeled with the package that they come from."""

import functools
import inspect
from collections import Counter
from typing import Any

WORDS = 24
VOCABULARY = 600


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
    from tokenizers.models import WordLevel
    from tokenizers.normalizers import Lowercase
    from tokenizers.pre_tokenizers import BertPreTokenizer

    texts = {label: lines(package) for label, package in enumerate(("torch.nn", "sklearn.metrics"))}
    normalizer, splitter = Lowercase(), BertPreTokenizer()
    everything = normalizer.normalize_str("\n".join(text for label in texts for text in texts[label]))
    counts = Counter(word for word, _ in splitter.pre_tokenize_str(everything))
    # The trainers of tokenizers decide between equally common words at random: each process would have other data.
    words = sorted(counts, key=lambda word: (-counts[word], word))[: VOCABULARY - 2]
    vocabulary = {word: number for number, word in enumerate(["[PAD]", "[UNK]", *words])}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizer, splitter
    tokenizer.enable_truncation(WORDS)
    tokenizer.enable_padding(length=WORDS)
    examples = []
    for number in range(count):
        label, place = number % 2, number // 2
        step = len(texts[label]) // (count // 2)
        encoded = tokenizer.encode(texts[label][place * step])
        examples.append({"input_ids": encoded.ids, "attention_mask": encoded.attention_mask, "labels": label})
    return examples, tokenizer.get_vocab_size()
