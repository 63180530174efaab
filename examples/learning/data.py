"""Data of the tasks: images, tables and text that public packages ship, frozen in one file with a hash.

    python3 examples/learning/data.py full FILE.npz --text bible.txt   writes the full data
    python3 examples/learning/data.py small                            writes small.npz, the data of the short run

Writing needs scikit-image 0.26 and scikit-learn 1.9; reading needs numpy alone. The text is what the packages
bible-kjv and bible-kjv-text of Debian 12 print: `bible -f gen1:1-rev22:21 > bible.txt`.

| data | from | licence |
| --- | --- | --- |
| 14 photographs and textures, as grey values | scikit-image | CC0, public domain, or no known restrictions |
| china, flower | scikit-learn; by danielbuechele and vultilion | CC BY 2.0 |
| digits, diabetes, breast cancer | scikit-learn | CC BY 4.0 (UCI) and public tables |
| the Bible in the King James translation | Debian's bible-kjv-text | public domain |

An image is divided into square regions. Every fourth region along the diagonals is held back: no patch of the training
set has a pixel in it. The full data store images, from which `patches` cuts 32x32 pixels by a seeded rule.
"""

import argparse
import hashlib
import pathlib
from typing import Dict, NamedTuple

import numpy

HERE = pathlib.Path(__file__).resolve().parent
SMALL = HERE / "small.npz"
DIGITS = HERE.parent / "train" / "digits.bin"

#: Classes of the task textures, in the order of their labels.
IMAGES = (
    "astronaut",
    "brick",
    "camera",
    "cell",
    "chelsea",
    "china",
    "coffee",
    "coins",
    "flower",
    "grass",
    "gravel",
    "hubble",
    "immunohistochemistry",
    "moon",
    "retina",
    "rocket",
)
#: Edge of a region and of a patch, in pixels, in the full and the short form.
FULL_REGION, FULL_PATCH = 96, 32
SMALL_REGION, SMALL_PATCH = 24, 8
#: Patches of each class for training and for the test, in the full and the short form.
FULL_COUNTS = (1500, 640)
SMALL_COUNTS = (120, 60)
#: Largest edge of a stored image; larger ones are cut to their middle.
LARGEST = 960
#: Characters of the text in the short form.
SMALL_TEXT = 60_000


class Split(NamedTuple):
    """A data set in a training and a test part; labels are integers or, in a regression, numbers."""

    train: numpy.ndarray
    train_labels: numpy.ndarray
    test: numpy.ndarray
    test_labels: numpy.ndarray


def digest(arrays: Dict[str, numpy.ndarray]) -> str:
    """Returns the SHA-256 of names, types, shapes and bytes of arrays, which does not depend on compression."""
    found = hashlib.sha256()
    for name in sorted(arrays):
        value = numpy.ascontiguousarray(arrays[name])
        found.update(f"{name} {value.dtype.str} {value.shape} ".encode())
        found.update(value.tobytes())
    return found.hexdigest()


def load(path) -> Dict[str, numpy.ndarray]:
    """Returns the arrays of a frozen file. Raises ValueError if they are not those whose hash it holds."""
    with numpy.load(path) as file:
        arrays = {name: file[name] for name in file.files}
    stated = bytes(arrays.pop("sha256")).decode()
    if digest(arrays) != stated:
        raise ValueError(f"{path}: the data have the hash {digest(arrays)}, the file states {stated}")
    arrays["sha256"] = stated
    return arrays


def patches(image: numpy.ndarray, region: int, edge: int, counts, draws: numpy.random.Generator):
    """Cuts seeded patches of `edge` pixels: `counts[0]` from training regions, `counts[1]` from those held back."""
    rows, columns = image.shape[0] // region, image.shape[1] // region
    cells = [(row, column) for row in range(rows) for column in range(columns)]
    parts = []
    for held_back, count in ((False, counts[0]), (True, counts[1])):
        inside = [cell for cell in cells if (sum(cell) % 4 == 3) == held_back]
        places = draws.integers(0, region - edge + 1, (count, 2))
        chosen = draws.integers(0, len(inside), count)
        cut = [
            image[y : y + edge, x : x + edge]
            for (row, column), (dy, dx) in zip((inside[k] for k in chosen), places)
            for y, x in [(row * region + dy, column * region + dx)]
        ]
        parts.append(numpy.stack(cut))
    return parts


def textures(arrays: Dict[str, numpy.ndarray]) -> Split:
    """Returns the patches of the task textures, with values from -2 to 2."""
    edge = int(arrays["patch_edge"])
    small = edge == SMALL_PATCH
    region, counts = (SMALL_REGION, SMALL_COUNTS) if small else (FULL_REGION, FULL_COUNTS)
    draws = numpy.random.default_rng(20)
    parts = [patches(arrays[f"image_{name}"], region, edge, counts, draws) for name in IMAGES]
    split = []
    for part, count in enumerate(counts):
        values = numpy.concatenate([both[part] for both in parts]).astype(numpy.float32)
        values = values.reshape(len(values), -1) / 63.75 - 2
        split += [values, numpy.repeat(numpy.arange(len(IMAGES)), count)]
    return Split(*split)


def spectra(split: Split) -> Split:
    """Returns logarithms of the amplitudes of the patches' Fourier transforms: what a perceptron can tell textures by.

    A perceptron on pixels would have to learn each texture at each place. Values have mean 0 and deviation 1.
    """
    edge = int(split.train.shape[1] ** 0.5)
    parts = []
    for values in (split.train, split.test):
        amplitudes = numpy.abs(numpy.fft.rfft2(values.reshape(-1, edge, edge))) / edge
        parts.append(numpy.log(amplitudes.reshape(len(values), -1) + 0.03).astype(numpy.float32))
    mean, deviation = parts[0].mean(0), parts[0].std(0)
    train, test = ((part - mean) / deviation for part in parts)
    return Split(train, split.train_labels, test, split.test_labels)


def digits() -> Split:
    """Returns scikit-learn's digits: 1,000 images of 8x8 for training, 797 for the test."""
    raw = numpy.frombuffer(DIGITS.read_bytes(), numpy.uint8).reshape(-1, 65)
    order = numpy.random.default_rng(21).permutation(len(raw))
    images, labels = raw[order, 1:].astype(numpy.float32) / 16, raw[order, 0].astype(numpy.int64)
    return Split(images[797:], labels[797:], images[:797], labels[:797])


def diabetes(arrays: Dict[str, numpy.ndarray]) -> Split:
    """Returns the regression: ten columns of 442 patients and the progress of their disease, all standardised."""
    table = arrays["diabetes"].astype(numpy.float32)
    order = numpy.random.default_rng(22).permutation(len(table))
    table = table[order]
    train, test = table[:330], table[330:]
    mean, deviation = train.mean(0), train.std(0)
    train, test = (train - mean) / deviation, (test - mean) / deviation
    return Split(train[:, :-1], train[:, -1:], test[:, :-1], test[:, -1:])


def ratings(arrays: Dict[str, numpy.ndarray]) -> Split:
    """Returns pairs (sample, column) of the breast cancer table with their standardised values, as users rate items.

    A fifth of the cells is held back. A batch touches few of the 569 + 30 embeddings: their gradients are sparse.
    """
    table = arrays["breast_cancer"].astype(numpy.float32)
    # Columns are sizes with long tails.
    table = numpy.log(table + 1e-3)
    table = (table - table.mean(0)) / table.std(0)
    pairs = numpy.stack(numpy.meshgrid(*map(numpy.arange, table.shape), indexing="ij"), -1).reshape(-1, 2)
    order = numpy.random.default_rng(23).permutation(len(pairs))
    pairs, values = pairs[order], table.reshape(-1, 1)[order]
    held = len(pairs) // 5
    return Split(pairs[held:], values[held:], pairs[:held], values[:held])


def text(arrays: Dict[str, numpy.ndarray]):
    """Returns the text as codes below the number of characters: a training part, and the last tenth as the test."""
    raw = arrays["text"]
    alphabet = numpy.unique(raw)
    codes = numpy.searchsorted(alphabet, raw)
    border = len(codes) * 9 // 10
    return codes[:border], codes[border:], len(alphabet)


def _grey(name: str) -> numpy.ndarray:
    """Returns an image that a package ships as grey values, cut to its middle."""
    import skimage.color
    import skimage.data
    import sklearn.datasets

    if name in ("china", "flower"):
        image = sklearn.datasets.load_sample_image(f"{name}.jpg")
    else:
        image = getattr(skimage.data, "hubble_deep_field" if name == "hubble" else name)()
    if image.ndim == 3:
        image = numpy.rint(255 * skimage.color.rgb2gray(image[..., :3])).astype(numpy.uint8)
    top, left = (max(0, (length - LARGEST) // 2) for length in image.shape)
    return image[top : top + LARGEST, left : left + LARGEST]


def _shrunk(image: numpy.ndarray) -> numpy.ndarray:
    """Returns the means of 4x4 pixels, which keeps the parts of an image in a sixteenth of the bytes."""
    rows, columns = (length // 4 * 4 for length in image.shape)
    blocks = image[:rows, :columns].reshape(rows // 4, 4, columns // 4, 4).astype(numpy.float32)
    return numpy.rint(blocks.mean((1, 3))).astype(numpy.uint8)


def write(path, small: bool, bible) -> str:
    """Freezes the data in a file; returns its hash."""
    import sklearn.datasets

    arrays = {f"image_{name}": _shrunk(_grey(name)) if small else _grey(name) for name in IMAGES}
    arrays["patch_edge"] = numpy.int64(SMALL_PATCH if small else FULL_PATCH)
    table = sklearn.datasets.load_diabetes(scaled=False)
    arrays["diabetes"] = numpy.column_stack([table.data, table.target]).astype(numpy.float32)
    arrays["breast_cancer"] = sklearn.datasets.load_breast_cancer().data.astype(numpy.float32)
    raw = pathlib.Path(bible).read_bytes()
    arrays["text"] = numpy.frombuffer(raw[:SMALL_TEXT] if small else raw, numpy.uint8)
    stated = digest(arrays)
    numpy.savez_compressed(path, sha256=numpy.bytes_(stated), **arrays)
    return stated


def main() -> None:
    """Writes frozen data and prints their hash."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("form", choices=("full", "small"))
    parser.add_argument("file", nargs="?", type=pathlib.Path, default=SMALL)
    parser.add_argument("--text", type=pathlib.Path, default="bible.txt")
    options = parser.parse_args()
    print(write(options.file, options.form == "small", options.text), options.file.stat().st_size, "bytes")


if __name__ == "__main__":
    main()
