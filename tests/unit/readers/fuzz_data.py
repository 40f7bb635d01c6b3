"""Data files that are damaged: conversations in JSON lines, arrays of tokens (.npy), images (idx)."""

import gzip
import io
import json
import random
import struct
from pathlib import Path

import numpy as np

from mpitrain.data import open_source
from tests.unit.readers.fuzz_readers import INVALID, Damaged, in_the_way


class Conversations:
    """A file of conversations."""

    KINDS = (
        "missing key",
        "unknown key",
        "type",
        "twice",
        "cut line",
        "nested",
        "encoding",
        "number",
        "surrogate",
        "byte order mark",
        "two on a line",
        "truncation",
        "in the way",
        "too few",
        "blank lines",
        "swap",
        "line ends",
        "dropped",
        "more behind",
        "messages",
    )

    def __init__(self, folder: Path):
        self.pairs = [(f"{n} + 1?", str(n + 1)) for n in range(12)]

    @staticmethod
    def read(path):
        source = open_source(f"jsonl:{path}", 48, "float32")
        rows = source.batch(0, 0, source.samples, range(source.samples))
        held_out = source.held_out_rows(range(source.held_out))
        return [
            sorted((x.tobytes(), y.tobytes()) for x, y in zip(*some, strict=True))
            for some in (rows, held_out)
        ]

    def damage(self, rng: random.Random, folder: Path) -> Damaged:
        path, kind, pairs = folder / "data.jsonl", rng.choice(self.KINDS), [*self.pairs]
        at, is_valid, end = rng.randrange(len(pairs)), False, "\n"
        if kind == "swap":
            other = rng.randrange(len(pairs))
            pairs[at], pairs[other], is_valid = pairs[other], pairs[at], True
        elif kind == "dropped":
            is_valid = bool(pairs.pop(at))
        elif kind == "more behind":
            is_valid = not pairs.append(("one more", "yes"))
        elif kind == "too few":
            pairs = pairs[: rng.randrange(2)]
        lines = [json.dumps({"prompt": prompt, "answer": answer}) for prompt, answer in pairs]
        line = lines[at % len(lines)] if lines else ""
        if kind == "missing key":
            line = rng.choice(['{"prompt": "a"}', '{"answer": "a"}', "{}", '{"messages": null}'])
        elif kind == "unknown key":
            line = line[:-1] + ', "more": 1}'
        elif kind == "type":
            line = rng.choice(["3", "[]", "null", "true", '"a"', '{"prompt": "a", "answer": 1}'])
        elif kind == "twice":
            line = line[:-1] + ', "answer": "b"}'
        elif kind == "cut line":
            line = line[: rng.randrange(1, len(line))]
        elif kind == "nested":
            line = rng.choice(["[", '{"prompt":']) * 60_000
        elif kind == "number":
            line = line.replace(
                '"answer": ', f'"answer": {rng.choice(["NaN", "1e999", "-"])}, "b": '
            )
        elif kind == "surrogate":
            line = line.replace("+", "\\ud800")
        elif kind == "two on a line":
            line += line
        elif kind == "messages":
            turns = zip(("user", "assistant"), pairs[at], strict=True)
            line = json.dumps({"messages": [{"role": r, "content": c} for r, c in turns]})
            is_valid = True
        elif kind == "line ends":
            end, is_valid = "\r\n", True
        if lines:
            lines[at % len(lines)] = line
        if kind == "blank lines":
            lines.insert(at, rng.choice(["", "  ", "\t"]))
            is_valid = True
        data = "".join(one + end for one in lines).encode()
        if kind == "encoding":
            data = rng.choice([data.replace(b"+", b"\xff"), data.decode().encode("utf-16")])
        elif kind == "byte order mark":
            data = b"\xef\xbb\xbf" + data
        elif kind == "truncation":
            data = data[: rng.randrange(len(data))]
            whole = [b'"}' + rest for rest in data.split(b'"}')][1:]
            pairs = pairs[: len(whole)]
            is_valid = len(pairs) > 1 and data.rstrip(b"\n").endswith(b'"}')
        path.write_bytes(data)
        if kind == "in the way":
            is_valid = in_the_way(rng, path)
        return Damaged(kind, path, str(path), self.meant(pairs) if is_valid else INVALID)

    @staticmethod
    def meant(pairs):
        """Return the rows, computed from the definition in plain Python."""
        found = []
        for prompt, answer in pairs:
            head, tail = f"user: {prompt}\n\nassistant: ".encode(), f"{answer}\n\n".encode()
            inputs, targets = np.zeros(48, np.int64), np.full(48, -100, np.int64)
            inputs[: len(head + tail)] = [*(head + tail)]
            targets[len(head) - 1 : len(head) - 1 + len(tail)] = [*tail]
            found.append((inputs.tobytes(), targets.tobytes()))
        cut = len(pairs) - max(1, len(pairs) // 10)
        return [sorted(found[:cut]), sorted(found[cut:])]


class Arrays:
    """A NumPy file of tokens."""

    HEADERS = (
        (b"400", b"399"),
        (b"400", b"401"),
        (b"(400", b"(-40"),
        (b"descr", b"descs"),
        (b"'<u2'", b"'<u3'"),
        (b"{", b"["),
        (b"False", b"Falsy"),
    )
    DTYPES = ("<f4", "<i2", "<i8", ">u2", "<c8", "?", "S2", "<u8")
    KINDS = (
        "whole",
        "wide",
        "narrow",
        "dtype",
        "dims",
        "truncation",
        "more behind",
        "header",
        "magic",
        "version",
        "object",
        "order",
        "in the way",
        "too short",
    )

    def __init__(self, folder: Path):
        self.tokens = np.random.default_rng(0).integers(200, size=400)
        self.tokens[0] = 199

    @staticmethod
    def read(path):
        source = open_source(f"tokens:{path}", 8, "float32")
        return source.inputs, source.held_out, source.held_out_rows([0, 2])[0].tolist()

    def damage(self, rng: random.Random, folder: Path) -> Damaged:
        path, kind, is_valid = folder / "tokens.npy", rng.choice(self.KINDS), False
        array = self.tokens.astype("<u2")
        if kind in ("whole", "wide", "narrow", "order"):
            is_valid = True
            array = self.tokens.astype({"wide": "<u4", "narrow": "u1"}.get(kind, "<u2"))
            array = np.asfortranarray(array) if kind == "order" else array
        elif kind == "dtype":
            array = self.tokens.astype(rng.choice(self.DTYPES))
        elif kind == "dims":
            array = array.reshape(rng.choice([(2, 200), (400, 1), (1, 1, 400)]))
        elif kind == "object":
            array = array.astype(object)
        elif kind == "too short":
            array = array[: rng.randrange(80)]
        file = io.BytesIO()
        np.save(file, array, allow_pickle=True)
        data = bytearray(file.getvalue())
        if kind == "truncation":
            data = data[: rng.randrange(len(data))]
        elif kind == "more behind":
            data += bytes(rng.randrange(1, 9))
        elif kind == "header":
            old, new = rng.choice(self.HEADERS)
            data = bytearray(bytes(data).replace(old, new, 1))
        elif kind == "magic":
            data[rng.randrange(1, 6)] ^= 1
            is_valid = False
        elif kind == "version":
            data[6] = rng.choice([0, 4, 9, 255])
        path.write_bytes(data)
        if kind == "in the way":
            is_valid = in_the_way(rng, path)
        if kind == "magic":  # So it is a flat file, the header included.
            tokens = np.frombuffer(bytes(data), "<u2").astype(int)
        else:
            tokens = self.tokens
        expected = self.meant(tokens) if is_valid or kind == "magic" else INVALID
        return Damaged(kind, path, str(path), expected)

    @staticmethod
    def meant(tokens):
        """Return the sizes and two rows, computed from the definition in plain Python."""
        test = tokens[len(tokens) - len(tokens) // 10 :]
        rows = [test[8 * row : 8 * row + 8].tolist() for row in (0, 2)]
        return int(max(tokens)) + 1, (len(test) - 1) // 8, rows


class Images:
    """Four files of images and labels."""

    NAMES = {
        "train-images-idx3-ubyte": (20, 3, 2),
        "train-labels-idx1-ubyte": (20,),
        "t10k-images-idx3-ubyte": (6, 3, 2),
        "t10k-labels-idx1-ubyte": (6,),
    }
    KINDS = (
        "whole",
        "gzip",
        "pixel",
        "missing",
        "truncation",
        "more behind",
        "magic",
        "type",
        "dims",
        "sizes",
        "no elements",
        "gzip cut",
        "gzip byte",
        "not gzip",
        "in the way",
        "number of labels",
        "other size",
    )

    def __init__(self, folder: Path):
        drawn = np.random.default_rng(0)
        self.arrays = {
            name: drawn.integers(10, size=shape).astype("u1") for name, shape in self.NAMES.items()
        }

    @staticmethod
    def read(path):
        source = open_source(f"idx:{path}", 8, "float64")
        images, labels = source.held_out_rows(range(6))
        return source.samples, np.rint(images * 255).astype(int).tolist(), labels.tolist()

    def damage(self, rng: random.Random, folder: Path) -> Damaged:
        kind, name = rng.choice(self.KINDS), rng.choice([*self.NAMES])
        arrays, is_valid = {name: array.copy() for name, array in self.arrays.items()}, False
        for one, array in arrays.items():
            head = bytes((0, 0, 8, array.ndim)) + struct.pack(f">{array.ndim}I", *array.shape)
            (folder / one).write_bytes(head + array.tobytes())
        path, data = folder / name, bytearray((folder / name).read_bytes())
        start = 4 + 4 * arrays[name].ndim
        if kind == "whole":
            is_valid = True
        elif kind == "pixel":
            data[start + rng.randrange(6)] = value = rng.randrange(10)
            arrays[name] = np.frombuffer(bytes(data[start:]), "u1").reshape(arrays[name].shape)
            is_valid = value >= 0
        elif kind == "truncation":
            data = data[: rng.randrange(len(data))]
        elif kind == "more behind":
            data += bytes(rng.randrange(1, 9))
        elif kind == "magic":
            data[rng.randrange(2)] = 1
        elif kind == "type":
            data[2] = rng.choice([9, 11, 12, 13, 14])
        elif kind == "dims":
            data[3] ^= rng.choice([1, 2, 4])
        elif kind == "sizes":
            at = 4 + 4 * rng.randrange(arrays[name].ndim)
            data[at : at + 4] = struct.pack(">I", rng.choice([1, 7, 2**31, 2**32 - 1]))
        elif kind == "other size":
            name = rng.choice(["train-images-idx3-ubyte", "t10k-images-idx3-ubyte"])
            path, data, start = folder / name, bytearray((folder / name).read_bytes()), 16
            data[8:16] = struct.pack(">2I", *rng.choice([(2, 3), (6, 1), (1, 6)]))
        elif kind == "no elements":
            at = 4 + 4 * rng.randrange(arrays[name].ndim)
            data = data[:start]
            data[at : at + 4] = bytes(4)
        elif kind == "number of labels":
            head = data[:4] + struct.pack(">I", 19) + data[8:start]
            data = head + data[start : start + 19 * max(1, len(data[start:]) // 20)]
            is_valid = False
        path.write_bytes(data)
        if "gzip" in kind:
            packed = bytearray(gzip.compress(bytes(data), mtime=0))
            is_valid = kind == "gzip"
            if kind == "gzip cut":
                packed = packed[: rng.randrange(len(packed))]
            elif kind == "gzip byte":
                packed[rng.randrange(len(packed) - 8, len(packed))] ^= 1
            elif kind == "not gzip":
                packed = data
            path.unlink()
            path.with_name(f"{name}.gz").write_bytes(packed)
        elif kind == "missing":
            path.unlink()
        elif kind == "in the way":
            is_valid = in_the_way(rng, path)
        return Damaged(kind, folder, str(folder), self.meant(arrays) if is_valid else INVALID)

    @staticmethod
    def meant(arrays):
        """Return the sizes and the held-out rows, computed from the definition in plain Python."""
        images, labels = arrays["t10k-images-idx3-ubyte"], arrays["t10k-labels-idx1-ubyte"]
        return 20, images.reshape(6, -1).astype(int).tolist(), labels.tolist()
