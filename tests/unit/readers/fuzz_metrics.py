"""Metrics of a run that are damaged."""

import json
import random
from pathlib import Path

import numpy as np

from mpitrain.run.metrics import METRICS, past, read_metrics
from mpitrain.tools.bench.plot_loss import AXES, points
from mpitrain.tools.report.text import how_it_ended
from tests.unit.readers.fuzz_json import DEEP, OF_TEXTS
from tests.unit.readers.fuzz_readers import INVALID, Damaged, in_the_way


class Metrics:
    """Lines of metrics. By the contract of its reader a line that is no record is left out,
    whatever it is.
    """

    def __init__(self, folder: Path):
        self.records = [
            {"event": "start", "step": 0, "ranks": 2},
            {"step": 1, "loss": 2.5, "lr": 0.1, "wall_s": 1.0, "tokens_seen": 64},
            {"step": 2, "loss": None, "skipped": True, "nonfinite": True, "wall_s": 2.0},
            {"step": 2, "val_loss": 2.0},
            {"step": 3, "loss": 2.25, "grad_norm": 1.0, "wall_s": 3.0, "tokens_seen": 192},
            {"event": "end", "step": 3},
        ]

    @staticmethod
    def read(path):
        found = read_metrics(path)
        for over in AXES:
            assert all(map(np.isfinite, sum(points(found, "loss", over), ())))
        how_it_ended(found)
        past(path.parent, 2)
        return [json.dumps(record) for record in found]

    def damage(self, rng: random.Random, folder: Path) -> Damaged:
        path, at = folder / METRICS, rng.randrange(len(self.records))
        lines, record = [json.dumps(one).encode() for one in self.records], self.records[at]
        kind = rng.choice(
            [
                "type",
                "range",
                "range",
                "missing",
                "unknown",
                *(set(OF_TEXTS) - {"no JSON"}),
                "no JSON",
                "in the way",
                "swap",
                "line ends",
                "binary",
            ]
        )
        kept: list[bytes] = [*lines]
        if kind in ("type", "range"):
            name = rng.choice(sorted(record))
            new = rng.choice(
                [None, "5", [1], {"a": 1}, True]
                if kind == "type"
                else [10**400, -1, 2**63, 1e300, -(10**400), 2**63 - 1, 0, 0.5]
            )
            lines[at] = json.dumps({**record, name: new}).encode()
            is_record = name != "step" or (type(new) in (int, float) and 0 <= new < 2**63)
            kept[at : at + 1] = [lines[at]] if is_record else []
        elif kind in ("missing", "unknown"):
            changed = {
                **record,
                **(
                    {rng.choice(["more", "\x1b[2J"]): rng.choice([10**200, "x", [[]]])}
                    if kind == "unknown"
                    else {}
                ),
            }
            if kind == "missing":
                del changed[rng.choice(sorted(record))]
            lines[at] = kept[at] = json.dumps(changed).encode()
        elif kind in OF_TEXTS and kind not in ("no JSON", "encoding", "nesting"):
            lines[at] = OF_TEXTS[kind](rng, record, json.dumps)
            del kept[at]
        elif kind in ("no JSON", "encoding", "nesting", "binary"):
            lines[at] = rng.choice(
                {
                    "no JSON": [
                        b"NaN",
                        b'{"step": NaN}',
                        b"{'step': 1}",
                        b"5",
                        b"null",
                        b'"text"',
                        b"[1]",
                        b"",
                        b'{"step": 01}',
                        b'{"step": ' + b"9" * 5000 + b"}",
                    ],
                    "encoding": [
                        b'{"step": 1, "a": "\xff"}',
                        lines[at].decode().encode("utf-16"),
                        b"\xef\xbb\xbf" + lines[at],
                    ],
                    "nesting": [
                        b"[" * DEEP,
                        b'{"a":' * DEEP,
                        b'{"step": 1, "a": ' + b"[" * DEEP + b"]" * DEEP + b"}",
                    ],
                    "binary": [bytes(1000), b"\x00", b"\x1a\x85", bytes(range(11, 256))],
                }[kind]
            )
            del kept[at]
        elif kind == "swap":
            other = rng.randrange(len(lines))
            lines[at], lines[other] = lines[other], lines[at]
            kept = lines
        elif kind == "line ends":
            lines = [line + rng.choice([b"\r", b" ", b"\t", b""]) for line in lines]
        path.write_bytes(b"\n".join(lines) + rng.choice([b"\n", b"", b"\n\n"]))
        expected = [json.dumps(json.loads(line)) for line in kept]
        if kind == "in the way":
            in_the_way(rng, path)  # links below a run directory are not followed, either
            expected = (
                INVALID
                if path.is_symlink()
                or (path.exists() and path.stat().st_size != 0)
                or path.is_dir()
                or path.is_fifo()
                else []
            )
        return Damaged(kind, path, str(path), expected)
