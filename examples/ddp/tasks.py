"""Two models and their data: handwritten digits, and the characters of this repository's text."""

import hashlib
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

ROOT = Path(__file__).resolve().parents[2]
DIGITS = ROOT / "examples" / "train" / "digits.bin"


class Digits:
    """Learns scikit-learn's 1,797 images of 8 by 8 pixels with a perceptron of 1.1 M parameters."""

    epochs = 20
    batch = 128
    held_out = 360

    def __init__(self, source):
        if source == "sklearn":
            from sklearn.datasets import load_digits

            images, labels = load_digits(return_X_y=True)
            self.images = torch.tensor(images, dtype=torch.float32) / 16
            self.labels = torch.tensor(labels, dtype=torch.int64)
        else:
            # Each sample has a byte for the label and a byte from 0 to 16 for each pixel.
            raw = Path(source or DIGITS).read_bytes()
            samples = torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(-1, 65)
            self.images = samples[:, 1:].float() / 16
            self.labels = samples[:, 0].long()
        self.source = f"{len(self.labels)} images"

    def model(self):
        return nn.Sequential(nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(),
                             nn.Linear(1024, 10))

    def optimizer(self, parameters):
        return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)

    def split(self, generator):
        order = torch.randperm(len(self.labels), generator=generator)
        return order[self.held_out:], order[:self.held_out]

    def batch_of(self, indices):
        return self.images[indices], self.labels[indices]

    def loss(self, output, target):
        return functional.cross_entropy(output, target)


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x, mask):
        y = self.before(x)
        x = x + self.attention(y, y, y, attn_mask=mask, need_weights=False)[0]
        return x + self.feed(self.after(x))


class Transformer(nn.Module):
    """Predicts the next character with two causal layers."""

    def __init__(self, characters, length, width=192, layers=2, heads=4):
        super().__init__()
        self.embed, self.place = nn.Embedding(characters, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, characters)
        mask = torch.triu(torch.ones(length, length, dtype=torch.bool), 1)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, text):
        length = text.shape[1]
        x = self.embed(text) + self.place(torch.arange(length, device=text.device))
        for block in self.blocks:
            x = block(x, self.mask[:length, :length])
        return self.head(self.norm(x))


class Text:
    """Learns the Rust sources of this repository, cut into pieces; a tenth is held out."""

    epochs = 4
    batch = 64
    length = 96

    def __init__(self, _source):
        files = sorted((ROOT / "src").rglob("*.rs"))
        text = "".join(path.read_text(encoding="utf-8") for path in files)
        alphabet = sorted(set(text))
        number = {character: index for index, character in enumerate(alphabet)}
        # Half a million characters suffice for the model to learn the style of the text.
        codes = torch.tensor([number[character] for character in text[:500_000]])
        pieces = len(codes) // (self.length + 1)
        self.pieces = codes[:pieces * (self.length + 1)].view(pieces, -1)
        self.characters = len(alphabet)
        digest = hashlib.sha256(text.encode()).hexdigest()[:12]
        self.source = f"{pieces} pieces of {self.length} characters, text {digest}"

    def model(self):
        return Transformer(self.characters, self.length)

    def optimizer(self, parameters):
        return torch.optim.AdamW(parameters, lr=2e-3)

    def split(self, generator):
        order = torch.randperm(len(self.pieces), generator=generator)
        held_out = len(order) // 10
        return order[held_out:], order[:held_out]

    def batch_of(self, indices):
        pieces = self.pieces[indices]
        return pieces[:, :-1], pieces[:, 1:]

    def loss(self, output, target):
        return functional.cross_entropy(output.flatten(0, 1), target.flatten())


TASKS = {"digits": Digits, "text": Text}
