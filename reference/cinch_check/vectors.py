"""Test vectors: `reference/vectors/format-N.json` and `.bin`.

The JSON file has one line for each vector. A buffer is `{"offset", "bytes", "sha256"}` in the .bin file.
"""

import hashlib
import json
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from cinch_reference import FORMAT_VERSION, chunk, collectives, messages, published, random_numbers, tables
from cinch_reference.communicator import REDUCING, Arguments, Communicator
from cinch_reference.elements import BY_NAME, F32E, narrow
from cinch_reference.spec import parse

from . import codecs, values
from .collectives import Buffers, run_library, sizes_of
from .compare import Result, one_nan
from .library import CHUNK, PUBLISHED, Library, Ranks

FOLDER = Path(__file__).resolve().parent.parent / "vectors"
COUNT = 277
"""Elements of a vector of a codec: a block, and a tail of odd size."""

SLOT = 4096

EXPORTED = 25
"""Largest id of a tensor whose residuals a vector holds."""


class Pool:
    """Buffers of the .bin file, equal ones stored once."""

    def __init__(self, data: bytes = b""):
        self.data = bytearray(data)
        self.known: dict[str, dict] = {}

    def put(self, array: np.ndarray | None) -> dict | None:
        """Stores a buffer and returns its entry."""
        if array is None:
            return None
        data = np.ascontiguousarray(array).tobytes()
        digest = hashlib.sha256(data).hexdigest()
        if digest not in self.known:
            self.known[digest] = {"offset": len(self.data), "bytes": len(data), "sha256": digest}
            self.data += data
        return self.known[digest]

    def get(self, entry: dict | None, kind: type = np.uint8) -> np.ndarray | None:
        """Returns a stored buffer after a comparison of its digest."""
        if entry is None:
            return None
        data = bytes(self.data[entry["offset"] : entry["offset"] + entry["bytes"]])
        if hashlib.sha256(data).hexdigest() != entry["sha256"]:
            raise ValueError(f"the buffer at {entry['offset']} does not have its digest")
        return np.frombuffer(data, kind).copy()


def inputs(random: np.random.Generator, n: int) -> np.ndarray:
    """Returns finite fp32 numbers of several sizes, with special values in the last ones."""
    x = random.standard_normal(n).astype(np.float32)
    x[n // 4 : n // 2] *= np.float32(1e-3)
    x[: n // 8] = np.round(x[: n // 8] * 4) / 4
    x[-45:-5] = random.choice(values.floats(values.SPECIAL_BITS), 40)
    return x


def codec_vectors(
    pool: Pool, random: np.random.Generator, specs_of: dict[int, list[str]]
) -> list[dict]:
    """Returns the vectors of `cinch_encode` and `cinch_decode`, for the codecs of each layout."""
    found = []
    finite = inputs(random, COUNT)
    broken = finite.copy()
    broken[7:23] = values.floats(values.NON_FINITE_BITS)
    for layout, specs in specs_of.items():
        for spec in specs:
            codec = parse(spec)
            module = published if layout else chunk
            for element in codecs.ELEMENTS:
                base = {"codec": spec, "layout": layout, "dtype": element.name, "count": COUNT}
                for x in (finite, broken) if element is F32E else (broken,):
                    raw = narrow(element, x)
                    wire = module.encode_array(codec, element, raw, 5)
                    found.append(
                        {"operation": "encode", **base, "draw": 5}
                        | {"input": pool.put(raw), "output": pool.put(wire)}
                    )
                wires = [wire]
                if not layout:
                    wires.append(values.hostile(codec, random, wire, COUNT))
                for wire in wires:
                    raw = module.decode_array(codec, element, wire, COUNT)
                    entry = {"operation": "decode", **base}
                    found.append(entry | {"input": pool.put(wire), "output": pool.put(raw)})
    return found


def collective_vectors(pool: Pool, random: np.random.Generator) -> list[dict]:
    """Returns the vectors of collectives over three and four ranks, and of calls with state."""
    specs = ["raw", "linear8", "minmax4:seed=3", "cast16", "fp8_e4m3:block=32", "terngrad", "linear8:tensor=2"]
    shared = {
        nranks: [inputs(random, 1100 * (1 if nranks == 3 else 4)) for _ in range(nranks)]
        for nranks in (3, 4)
    }
    communicators = {nranks: Communicator(nranks, SLOT) for nranks in (3, 4)}
    found = call_vectors(pool, communicators, shared, specs, 0)
    found += export_vectors(pool, communicators[3])
    # Later additions follow, so that the vectors before them stay as they are.
    return found + call_vectors(pool, communicators, shared, ["linear8:seed=3", "dynamic8:seed=5"], 100)


def call_vectors(
    pool: Pool,
    communicators: dict[int, Communicator],
    shared: dict[int, list[np.ndarray]],
    specs: list[str],
    tensor: int,
) -> list[dict]:
    """Returns the vectors of calls with these codecs. Ids of tensors follow `tensor`."""
    found = []
    kinds = [
        ("all_reduce", "ring"), ("all_reduce", "tree"), ("all_reduce", "oneshot"), ("all_reduce", "direct"),
        ("reduce", "tree"), ("reduce", "direct"), ("reduce_scatter", "ring"), ("reduce_scatter", "direct"),
        ("all_gather", "ring"), ("all_to_all", "direct"),
    ]  # fmt: skip
    for spec in specs:
        codec = parse(spec)
        for at, (collective, algorithm) in enumerate(kinds):
            if codec.tensor and algorithm == "oneshot":
                continue
            nranks = 3 if collective in ("all_reduce", "reduce") else 4
            element = [F32E, BY_NAME["f16"], BY_NAME["bf16"]][at % 3]
            op = "sum" if collective not in REDUCING or at % 2 else "avg"
            # More than one pass for a one-shot, which has one part.
            count = 1100 if collective == "all_reduce" else 130
            arguments = Arguments(collective, element, count, algorithm, op, codec)
            tensor += 1
            arguments = replace(arguments, tensor=tensor if codec.tensor else 0)
            if collective == "all_reduce" and not codec.is_raw:
                arguments = replace(arguments, feedback=tensor)
            size, _ = sizes_of(arguments, nranks)
            raws = [narrow(element, np.clip(x[:size], -1e4, 1e4)) for x in shared[nranks]]
            comm = communicators[nranks]
            for _ in range(2 if codec.tensor or arguments.feedback else 1):
                sequence = comm.sequence
                outputs = collectives.call(comm, arguments, raws)
                entry = {
                    "operation": collective, "codec": spec, "dtype": element.name, "count": count,
                    "ranks": nranks, "algorithm": algorithm, "operator": op, "root": 0, "slot_bytes": SLOT,
                    "tensor": arguments.tensor, "feedback": arguments.feedback,
                    "sequence": sequence,
                    "inputs": [pool.put(raw) for raw in raws],
                    "outputs": [pool.put(output) for output in outputs],
                }  # fmt: skip
                found.append(entry)
    return found


def export_vectors(pool: Pool, comm: Communicator) -> list[dict]:
    """Returns the residuals of all tensors of the calls before, one vector for each rank."""
    found = []
    for rank in range(comm.size):
        for tensor in [t for t in comm.feedback[rank].tensors if t > EXPORTED]:
            comm.feedback[rank].forget(tensor)
        data = np.frombuffer(comm.feedback[rank].export(), np.uint8)
        found.append(
            {"operation": "feedback_export", "ranks": comm.size, "rank": rank, "slot_bytes": SLOT}
            | {"largest_tensor": EXPORTED, "output": pool.put(data)}
        )
    return found


def page_vectors(pool: Pool) -> list[dict]:
    """Returns vectors of tables, random numbers and a frame, which no function of the library returns."""
    found = []
    for spec in ("dynamic8", "static8", "static8:offset=-2", "mantissa8", "mantissa8:offset=3"):
        found.append({"operation": "table", "codec": spec, "output": pool.put(table_of(spec))})
    for words in ([1, 2, 3], [7, 5, 0], [255, 2**64 - 1, 15]):
        entry = {"operation": "random", "key": words, "first": 2**32 - 8, "count": 64}
        found.append(entry | {"output": pool.put(draws(words, 2**32 - 8, 64))})
    return [*found, {"operation": "frame", "output": pool.put(example_frame())}]


def table_of(spec: str) -> np.ndarray:
    """Returns the 128 magnitudes of a table."""
    codec = parse(spec)
    if codec.name == "dynamic8":
        return tables.dynamic8().values
    return (tables.static8 if codec.name == "static8" else tables.mantissa8)(codec.offset).values


def draws(words: list[int], first: int, count: int) -> np.ndarray:
    """Returns random numbers of a key."""
    return random_numbers.u(random_numbers.key(*words), first, count)


def example_frame() -> np.ndarray:
    """Returns the frame of section "Examples"."""
    arguments = Arguments("all_reduce", F32E, 1000, "direct", codec=parse("linear8"))
    return np.frombuffer(messages.frame(messages.signature(arguments, 2), 260, 0), np.uint8)


def write() -> str:
    """Writes the vectors and returns their sizes in words."""
    pool, random = Pool(), np.random.default_rng(FORMAT_VERSION)
    first = [spec for spec in codecs.SPECS if spec not in codecs.SEEDED_SPECS]
    found = page_vectors(pool)
    found += codec_vectors(pool, random, {CHUNK: first, PUBLISHED: codecs.PUBLISHED_SPECS})
    found += collective_vectors(pool, random)
    # Later additions follow, so that the vectors before them stay as they are.
    found += codec_vectors(pool, random, {CHUNK: codecs.SEEDED_SPECS})
    FOLDER.mkdir(exist_ok=True)
    digest = hashlib.sha256(pool.data).hexdigest()
    head = {"format": FORMAT_VERSION, "file": f"format-{FORMAT_VERSION}.bin", "sha256": digest}
    lines = ",\n".join(json.dumps(entry) for entry in found)
    text = json.dumps(head)[:-1] + ', "vectors": [\n' + lines + "\n]}\n"
    (FOLDER / f"format-{FORMAT_VERSION}.json").write_text(text)
    (FOLDER / head["file"]).write_bytes(pool.data)
    return f"{len(found)} vectors, {len(pool.data) + len(text)} bytes"


@dataclass
class Stored:
    """Vectors of the current format, and their buffers."""

    pool: Pool
    vectors: list[dict]


def load() -> Stored:
    """Returns the stored vectors."""
    head = json.loads((FOLDER / f"format-{FORMAT_VERSION}.json").read_text())
    data = (FOLDER / head["file"]).read_bytes()
    if head["format"] != FORMAT_VERSION or hashlib.sha256(data).hexdigest() != head["sha256"]:
        raise ValueError(f"{head['file']} does not belong to its JSON file")
    return Stored(Pool(data), head["vectors"])


def check_vectors(library: Library, elements: int, random: np.random.Generator) -> Result:
    """Compares the stored vectors with the reference and with the library."""
    result, stored = Result("vectors"), load()
    groups: dict[int, list[dict]] = {}
    for vector in stored.vectors:
        operation = vector["operation"]
        if operation in ("encode", "decode"):
            check_array(library, result, stored.pool, vector)
        elif operation == "table":
            result.compare(operation, 128, table_of(vector["codec"]), stored.pool.get(vector["output"]))
        elif operation == "random":
            ours = draws(vector["key"], vector["first"], vector["count"])
            result.compare(operation, ours.size, ours, stored.pool.get(vector["output"]))
        elif operation == "frame":
            result.compare(operation, 1, example_frame(), stored.pool.get(vector["output"]))
        else:
            groups.setdefault(vector["ranks"], []).append(vector)
    for vectors in groups.values():
        check_calls(library, result, stored.pool, vectors)
    return result


def check_array(library: Library, result: Result, pool: Pool, vector: dict) -> None:
    """Compares one encode or decode."""
    codec, element, n = parse(vector["codec"]), BY_NAME[vector["dtype"]], vector["count"]
    layout, expected = vector["layout"], pool.get(vector["output"])
    module = published if layout else chunk
    if vector["operation"] == "encode":
        raw = pool.get(vector["input"], element.storage)
        ours = module.encode_array(codec, element, raw, vector["draw"])
        theirs = library.encode(vector["codec"], layout, element, raw, vector["draw"])
    else:
        wire = pool.get(vector["input"])
        ours = module.decode_array(codec, element, wire, n)
        theirs = library.decode(vector["codec"], layout, element, wire, n)
    what = f"{vector['operation']} {vector['codec']} {element.name}"
    result.compare(f"reference, {what}", n, ours, expected)
    result.compare(f"{what} against the vector", n, expected, theirs)


def check_calls(library: Library, result: Result, pool: Pool, vectors: list[dict]) -> None:
    """Compares the calls of one communicator, in their order."""
    nranks = vectors[0]["ranks"]
    comm = Communicator(nranks, vectors[0]["slot_bytes"])
    with Ranks(library, nranks, vectors[0]["slot_bytes"]) as ranks:
        for vector in vectors:
            if vector["operation"] == "feedback_export":
                check_export(result, ranks, comm, vector, pool.get(vector["output"]))
                continue
            element = BY_NAME[vector["dtype"]]
            arguments = Arguments(
                vector["operation"], element, vector["count"], vector["algorithm"], vector["operator"],
                parse(vector["codec"]), root=vector["root"], tensor=vector["tensor"],
                feedback=vector["feedback"],
            )  # fmt: skip
            raws = [pool.get(entry, element.storage) for entry in vector["inputs"]]
            expected = [pool.get(entry, element.storage) for entry in vector["outputs"]]
            outputs = [None if output is None else np.zeros_like(output) for output in expected]
            run_library(ranks, arguments, Buffers(raws, outputs))
            ours = collectives.call(comm, arguments, raws)
            what = f"{vector['operation']} {vector['algorithm']} {vector['codec']} {element.name}"
            for rank in range(nranks):
                if expected[rank] is not None:
                    stored = one_nan(element, expected[rank])
                    n = stored.size
                    result.compare(f"reference, {what}", n, one_nan(element, ours[rank]), stored)
                    result.compare(f"{what} against the vector", n, stored, one_nan(element, outputs[rank]))


def check_export(
    result: Result, ranks: Ranks, comm: Communicator, vector: dict, stored: np.ndarray
) -> None:
    """Compares the residuals of one rank, without the tensors that the vector leaves out."""
    rank = vector["rank"]
    for tensor in list(comm.feedback[rank].tensors):
        if tensor > vector["largest_tensor"]:
            comm.feedback[rank].forget(tensor)
            ranks.feedback_forget(rank, tensor)
    export = np.frombuffer(comm.feedback[rank].export(), np.uint8)
    result.compare(f"reference, export of rank {rank}", 0, export, stored)
    theirs = np.frombuffer(ranks.feedback_export(rank), np.uint8)
    result.compare(f"export of rank {rank} against the vector", 0, stored, theirs)
