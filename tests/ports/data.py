"""Small data for the programs, and stand-ins for packages that would download data."""

from __future__ import annotations

import pickle
import random
from pathlib import Path

import numpy


def tokens(home: Path) -> None:
    """Two binary files of random tokens, as nanoGPT reads them."""
    folder = home / "data" / "synthetic"
    folder.mkdir(parents=True)
    generator = numpy.random.default_rng(0)
    for name in ("train", "val"):
        generator.integers(0, 20, 2000).astype(numpy.uint16).tofile(folder / f"{name}.bin")
    with (folder / "meta.pkl").open("wb") as file:
        pickle.dump({"vocab_size": 20}, file)


def words(home: Path) -> None:
    """Text files of random words."""
    folder = home / "data"
    folder.mkdir(parents=True, exist_ok=True)
    generator = random.Random(0)
    for name, lines in (("train", 60), ("valid", 12), ("test", 12)):
        text = [" ".join(f"word{generator.randrange(20)}" for _ in range(9)) for _ in range(lines)]
        (folder / f"{name}.txt").write_text("\n".join(text) + "\n")
    (folder / "wikitext-2.txt").write_text((folder / "train.txt").read_text() * 16)


def images(home: Path) -> None:
    """A stand-in for ``torchvision``: random images, transforms that do nothing, and a small network."""
    package = home / "standins" / "torchvision"
    package.mkdir(parents=True)
    for name, text in _TORCHVISION.items():
        (package / f"{name}.py").write_text(text)


def sentences(home: Path) -> None:
    """Pairs of sentences, a model and a tokenizer where the program looks for them, and a stand-in for ``evaluate``."""
    import torch
    from transformers import BertConfig, BertForSequenceClassification

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"word{number}" for number in range(20))]
    model = home / "bert-base-cased"
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(words), hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    )
    BertForSequenceClassification(config).save_pretrained(model)
    (model / "vocab.txt").write_text("\n".join(words) + "\n")
    (model / "tokenizer_config.json").write_text('{"tokenizer_class": "BertTokenizer", "do_lower_case": false}')

    folder = home / "nyu-mll" / "glue"
    folder.mkdir(parents=True)
    (folder / "README.md").write_text(_GLUE)
    generator = random.Random(0)
    for name, rows in (("train", 40), ("validation", 10)):
        lines = ["sentence1,sentence2,label,idx"]
        for index in range(rows):
            pair = [" ".join(generator.choices(words[5:], k=5)) for _ in range(2)]
            lines.append(f"{pair[0]},{pair[1]},{generator.randrange(2)},{index}")
        (folder / f"{name}.csv").write_text("\n".join(lines) + "\n")

    standins = home / "standins"
    standins.mkdir()
    (standins / "evaluate.py").write_text(_EVALUATE)


_GLUE = """\
---
configs:
- config_name: mrpc
  data_files:
  - split: train
    path: train.csv
  - split: validation
    path: validation.csv
---
"""

_EVALUATE = """
class Metric:
    def add_batch(self, predictions, references):
        pass

    def compute(self):
        return {}

def load(*names):
    return Metric()
"""

_TORCHVISION = {
    "__init__": "",
    "transforms": """
class Transform:
    def __init__(self, *args, **kwargs):
        pass

Compose = ToTensor = Normalize = Resize = CenterCrop = RandomResizedCrop = RandomHorizontalFlip = Transform
""",
    "datasets": """
import torch

class Images(torch.utils.data.TensorDataset):
    shape = (1, 28, 28)

    def __init__(self, *args, **kwargs):
        generator = torch.Generator().manual_seed(0)
        images = torch.rand(48, *self.shape, generator=generator)
        super().__init__(images, torch.randint(10, (48,), generator=generator))

class MNIST(Images):
    pass

class ImageFolder(Images):
    shape = (3, 8, 8)
""",
    "models": """
import torch

def small():
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(192, 16), torch.nn.ReLU(), torch.nn.Linear(16, 10))
""",
}
