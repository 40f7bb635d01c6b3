"""Every topic of `explain` runs the package's code, and its counted numbers equal the formulas."""

import json
import re
import struct
from functools import cache

import numpy as np
import pytest
from click.testing import CliRunner

from mpitrain.cli import commands
from mpitrain.errors import ConfigError
from mpitrain.tools.plan.collective import collective, contents
from mpitrain.tools.textbook.explain import page, terminal
from mpitrain.tools.textbook.explain.explanation import ROOT
from mpitrain.tools.textbook.explain.links import Network, SlowTransport, parse_link
from mpitrain.tools.textbook.explain.picture import (
    READABLE,
    WALL,
    draw_for_a_wall,
    fitted,
    notes_of,
)
from mpitrain.tools.textbook.explain.tiling import RUNGS
from mpitrain.tools.textbook.explain.topics import PARTS, TOPICS
from mpitrain.tools.textbook.explain.toy import IN_FLIGHT, MIXED, Symbols, written
from mpitrain.tools.words import korean, text, width
from mpitrain.transport.threads import run_ranks
from tests.laws.transport import TransportLaws, laws_of

every_topic = pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.compile] * topic.compiled)
        for name, topic in TOPICS.items()
    ],
)


@cache
def recorded(name, ranks=None, link=None):
    """A recording that several tests read; none of them changes it."""
    return fresh(name, ranks, link)


def fresh(name, ranks=None, link=None):
    topic = TOPICS[name]
    return topic.explained(topic.setting(name, ranks, link))


def texts(found):
    """Every text of an explanation."""
    yield from (found.title, *found.sentences, found.legend, *found.rows)
    yield from (one.heading for one in found.columns)
    yield from (one.title for one in found.frames)
    yield from (one.name for one in found.formulas)
    yield from (title for title, _ in found.products)
    yield from (
        part[4] for _, all in found.products for one in all for part in one.parts if part[4]
    )


@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        pytest.param(name, ranks, marks=[pytest.mark.compile] * topic.compiled)
        for name, topic in TOPICS.items()
        for ranks in range(max(1, topic.least), min(4, topic.most) + 1)
    ],
)
def test_counted_numbers_of_a_topic_equal_their_formulas(name, ranks):
    found = recorded(name, ranks)
    assert [
        f"{each.counted} {each.words} {each.value}" for each in found.formulas if not each.agrees
    ] == []
    columns = sum(len(group.names) for group in found.columns)
    for frame in found.frames:
        assert len(frame.cells) == len(found.rows)
        assert {len(cells) for cells in frame.cells} == {columns}
        assert not {IN_FLIGHT, MIXED} & {cell for cells in frame.cells for cell in cells}


@every_topic
def test_a_topic_records_the_same_frames_twice(name):
    assert recorded(name).frames == fresh(name).frames


def test_the_command_of_a_topic_has_its_ranks_and_micro_batches():
    assert all(" -n 3 " in recorded(name, 3).command for name in ("ring", "star", "ddp", "column"))
    assert "batch.micro_batches=2 " in recorded("accumulation").command
    assert "micro_batches" not in recorded("ddp").command


@every_topic
def test_texts_sources_laws_and_commands_of_a_topic_exist(name):
    found = recorded(name)
    for each in texts(found):
        assert text(each, "ko") and text(each, "en") == each
    for each in found.formulas:
        words = terminal.formula_line(each, "ko").partition(": ")[2]
        assert "." in words or not re.search("[a-z]{4,} ", words)
    names = {name for group in found.columns for name in group.names}
    assert not {name for name in names if re.fullmatch("[a-z]{4,}", name)} - {*korean()}
    for source in found.sources:
        line = (ROOT / source.file).read_text().splitlines()[source.line - 1]
        begins = r"\s*(def|class)|extern .*void( __launch_bounds__\(.*\))?"
        assert re.match(rf"(@|({begins}) {source.name.split('.')[-1]}\b)", line), source
    for law in found.laws:
        assert (ROOT / law).exists()
    assert found.command.startswith("mpitrain ")


@pytest.mark.parametrize(
    ("name", "ranks", "frame", "cells"),
    [
        # Every sum is on every rank.
        ("ring", 3, -1, (("a0+a1+a2", "b0+b1+b2", "c0+c1+c2"),) * 3),
        ("ddp", 2, -1, (("w-(g0+g1)/2",) * 3 + ("(g0+g1)/2",) * 3,) * 2),
        # A slow worker pushes a stale gradient.
        ("async-server", 3, 3, (("w-(g0+h0)", ""), ("w", "g1"), ("w-(g0+g1+h0)", ""))),
    ],
)
def test_a_frame_has_these_contents(name, ranks, frame, cells):
    assert recorded(name, ranks).frames[frame].cells == cells


@pytest.mark.parametrize(
    ("name", "frame", "columns", "cells"),
    [
        # A bucket is on its way while an earlier unit computes. The loss has divided by the 2 rows.
        ("ddp", 2, slice(3, 6), {("", "g1/2→", "g1/2→"), ("", "g0/2→", "g0/2→")}),
        # ZeRO 3 makes one unit whole before its forward.
        ("zero3", 1, slice(6), {("w", "w", "w", "", "w", ""), ("w", "w", "", "w", "", "w")}),
        # Workers of local SGD differ until their average.
        ("local", 2, slice(1), {("w-g0",), ("w-g1",)}),
        ("local", -1, slice(1), {("w-(g0+g1+h0+h1)/2",)}),
        # A row-parallel layer adds the summands of its ranks.
        ("row", 1, slice(8, 9), {("x0+3x1",), ("2x2+x3",)}),
        ("row", 2, slice(8, 9), {("x0+3x1+2x2+x3",)}),
        # Alone, columns are gathered: of y forward, of dx backward.
        (
            "column-alone",
            1,
            slice(8, 12),
            {
                ("x0+3x1+2x2+x3", "2x0+x1+3x2+2x3", "", ""),
                ("", "", "3x0+2x1+x2+3x3", "x0+3x1+2x2+x3"),
            },
        ),
        ("row-alone", -2, slice(16, 18), {("", ""), ("d0+2d1+3d2+d3", "3d0+d1+2d2+3d3")}),
        # A master: rows out, replicas of the newest parameters, logits back, one loss, its gradient out.
        ("master", 0, slice(3), {("x0", "x1", "v"), ("", "", "w")}),
        ("master", 2, slice(3), {("x0", "", "v"), ("", "x1", "v")}),
        (
            "master",
            5,
            slice(3, 8),
            {("y0", "y1", "(l0+l1)/2", "d0/2", "d1/2"), ("", "y1", "", "", "")},
        ),
        ("master", 6, slice(6, 8), {("d0/2", ""), ("", "d1/2")}),
        ("master", -1, slice(2, 3), {("v-(g0+g1)/2",), ("v",)}),
        # The 1F1B of textbooks has whole backwards; train cuts them, but not on stage 0.
        ("1f1b", -1, slice(5), {("F0", "F1", ".", ".", "BW0"), (".", "F0", "BW0", "BW0", "F1")}),
        (
            "1f1b-cut",
            -1,
            slice(5),
            {("F0", "F1", ".", "BW0", "BW0"), (".", "F0", "B0", "W0", "F1")},
        ),
    ],
)
def test_columns_of_a_frame_have_these_contents_on_two_ranks(name, frame, columns, cells):
    assert {row[columns] for row in recorded(name, 2).frames[frame].cells} == cells


@pytest.mark.parametrize(
    ("name", "ranks", "words", "value"),
    [
        ("1f1b", 3, "(p-1) / (m+p-1)", 2 / 6),
        ("1f1b-cut", 3, "2 (p-1) / (3m + 2 (p-1))", 4 / 16),
        ("column-alone", 2, "3 (n-1)/n B T C", 3 / 2 * 8 * 16),
        ("row-alone", 3, "4 (n-1)/n B T C", 4 * 2 / 3 * 8 * 9),
        ("ddp", 4, "2 (n-1)/n S", 2 * 3 / 4 * 3 * 1024),
        ("master", 3, "(n-1) S", 2 * 768),
        ("master", 3, "(n-1) (X + Y), X of a row, Y of its target", 2 * 264),
        ("server", 3, "W times the part of S that a server holds, or S, a worker", 2 * 3 * 512),
    ],
)
def test_a_printed_formula_is_worth_the_number_beside_it(name, ranks, words, value):
    by_words = {each.words: each.value for each in recorded(name, ranks).formulas}
    assert by_words[words] == pytest.approx(value)


@pytest.mark.parametrize("name", ["ring", "star"])
def test_plan_and_explain_have_the_same_steps_and_contents(name):
    steps = collective("allreduce", name, ("host",) * 3)
    frames = recorded(name, 3).frames
    assert len(frames) == 1 + len(steps.steps)
    for frame, held in zip(frames, contents(steps), strict=True):
        for cells, chunks in zip(frame.cells, held, strict=True):
            of_chunk = chunks if len(chunks) == 3 else chunks * 3  # a star has one chunk
            for letter, cell, data in zip("abc", cells, of_chunk, strict=True):
                ranks = [rank for rank in range(3) if data >> rank & 1]
                assert cell == "+".join(f"{letter}{rank}" for rank in ranks)


def test_recomputation_frees_what_a_segment_makes_again():
    forward = recorded("recomputation").frames[4].cells
    assert [sum(map(bool, cells[1:])) for cells in forward] == [8, 5, 4]


@pytest.mark.parametrize(
    ("terms", "form"),
    [
        ({}, "0"),
        ({"a": 1.0}, "a"),
        ({"a": 1, "b": 1}, "a+b"),
        ({"w": 1, "g": -1}, "w-g"),
        ({"w": 1, "g": -1, "h": -1}, "w-(g+h)"),
        ({"a": 0.5, "b": 0.5}, "(a+b)/2"),
        ({"a": 2.0, "b": -0.75}, "2a-3b/4"),
        (dict.fromkeys("abcdef", 1), "a+..+f"),
    ],
)
def test_a_linear_form_is_written_as_a_sum(terms, form):
    assert written(terms) == form


def test_cells_in_flight_and_mixed_cells_are_no_sums():
    symbols = Symbols(["a", "b"])
    assert symbols.read(np.array([np.nan, 1.0])) == IN_FLIGHT
    assert symbols.read(np.array([1.0, 0.0, 0.0, 1.0])) == MIXED
    assert symbols.read(np.array([1.0, 0.0, 1.0, 0.0])) == "a"


@pytest.mark.parametrize(
    "words", ["", "200Mbit", "200,1", "1Mbit,2h", "1Mbit,1ms", "1Gbit,1s", "1..2Mbit,1ms"]
)
def test_a_link_that_is_none_is_refused(words):
    with pytest.raises(ConfigError, match="link"):
        parse_link(words)


def test_messages_to_one_rank_share_its_link_and_others_do_not():
    link = parse_link("80Mbit,5ms")
    network = Network(link)
    ends = [
        network.sent((sender,), sender, target, 10**6)
        for sender, target in ((1, 0), (2, 0), (3, 4))
    ]
    assert ends[1] - ends[0] == pytest.approx(10**6 / link.bandwidth)
    assert ends[2] < ends[1]
    assert network.arrival((1,)) == pytest.approx(ends[0] + link.latency)


@pytest.mark.parametrize("name", ["ring", "server", "zero3", "gossip", "ddp"])
def test_frames_over_slow_links_have_seconds(name):
    frames = recorded(name, None, parse_link("1Gbit,1ms")).frames
    seconds = [frame.seconds for frame in frames if frame.seconds is not None]
    assert seconds and min(seconds) > 1e-3


@pytest.mark.parametrize("language", ["en", "ko"])
@every_topic
def test_columns_of_a_frame_align_and_notes_of_a_picture_fit(name, language):
    found = recorded(name)
    assert max(map(width, notes_of(found, language, 80))) <= 80
    for lines in terminal.frames(found, language, 100):
        starts = {}
        for line in lines[2:]:
            label = line.split("  ")[0]
            if label:
                rest = line[len(label) :]
                starts.setdefault(width(label) + width(rest) - width(rest.lstrip()), []).append(
                    line
                )
        assert len(starts) == 1, lines


def test_a_page_has_all_frames_and_needs_no_network(tmp_path):
    page.write(recorded("ring"), tmp_path / "ring.html", "ko")
    html = (tmp_path / "ring.html").read_text()
    contents = json.loads(re.search(r'application/json">(.*?)</script>', html, re.S)[1])
    assert len(contents["frames"]) == 7
    assert contents["rows"][0] == "랭크 0"
    assert not re.search(r"(src|href)=|https?:|@import|url\((?!#)", html)


@pytest.mark.slow
@pytest.mark.compile
def test_the_pages_of_all_topics_have_an_index(tmp_path):
    assert [*page.write_all(tmp_path, "en")] == [*TOPICS]
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"index.html", *(f"{name}.html" for name in TOPICS)}
    lines = re.findall(
        r"<h2>(.*?)</h2>|<a href=.*>(.*?)</a>", (tmp_path / "index.html").read_text()
    )
    assert [each for pair in lines for each in pair if each] == [
        each for part, topics in PARTS.items() for each in (part, *topics)
    ]


@pytest.mark.slow
def test_pages_without_a_compiler_lack_the_topics_that_need_one(tmp_path, no_compiler):
    done = CliRunner().invoke(commands, ["explain", "--html", str(tmp_path)])
    assert done.exit_code == 0 and ": tiling" in done.output, done.output
    assert {path.stem for path in tmp_path.iterdir()} == {"index", *TOPICS} - {"tiling"}


@pytest.mark.slow
def test_a_picture_for_a_wall_has_each_frame_on_1280_x_720(tmp_path):
    pytest.importorskip("matplotlib")
    found = recorded("star", 3)
    assert found.frames[1].messages == ((1, 0, -1), (2, 0, -1))  # whole buffers, of no column
    _, files = draw_for_a_wall(found, tmp_path / "star.png", "en")
    assert [path.name for path in files] == [f"star-{n}.png" for n in (1, 2, 3, 4)]
    for path in files:
        assert struct.unpack(">II", path.read_bytes()[16:24]) == (1280, 720)


@pytest.fixture
def figures(monkeypatch):
    """The figures that are drawn, which would be closed."""
    pyplot = pytest.importorskip("matplotlib.pyplot")
    kept = []
    monkeypatch.setattr(pyplot, "close", kept.append)
    yield kept
    monkeypatch.undo()
    pyplot.close("all")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["1f1b", "async"])
def test_boxes_and_title_of_a_chart_are_those_of_the_run(name, figures, tmp_path):
    found = recorded(name)
    draw_for_a_wall(found, tmp_path / "a.png", "en")
    (figure,) = figures
    (axes,) = figure.axes
    cells = [["."] * len(found.frames[1:]) for _ in found.rows]
    for box, label in zip(axes.patches, axes.texts, strict=True):
        stage = round(box.get_y() + box.get_height() / 2)
        for slot in range(round(box.get_x()), round(box.get_x() + box.get_width())):
            cells[stage][slot] = label.get_text().replace("\n", "")
    ran = [row[:-1] for row in found.frames[-1].cells]
    assert cells == [[re.sub(r"^[BFW]+", "", cell) for cell in row] for row in ran]
    _, saved, idle, *_ = found.formulas
    assert f"{idle.counted:.1%} of the time" in axes.get_title()
    assert f"at most {saved.counted} micro-batches" in axes.get_title()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["zero1", "star"])
def test_cells_of_a_picture_are_those_of_the_run(name, figures, tmp_path):
    found = recorded(name)
    draw_for_a_wall(found, tmp_path / "a.png", "en")
    frames = [figure for figure in figures if not figure.axes[0].get_title()]
    assert len(frames) == len(found.frames)
    for number, (figure, frame) in enumerate(zip(frames, found.frames, strict=True)):
        shown = [text.get_text() for text in figure.axes[0].texts]
        changed = frame.changed(found.frames[number - 1] if number else None)
        assert {frame.cells[row][column] for row, column in changed} <= {*shown}
        arrows = [each for each in figure.axes[0].patches if hasattr(each, "get_arrowstyle")]
        assert len(arrows) == len(frame.messages)


@every_topic
def test_pictures_for_a_wall_fit_and_can_be_read(name):
    """Texts have 13 points or more: 8 points at 165%. What is too large is several pictures."""
    found = recorded(name)
    for language in ("en", "ko"):
        for number in found.stills:
            pictures = fitted(found, language, number)
            shown = [
                at
                for _, layout in pictures
                for band in layout.bands
                for run in band
                for at in range(run.first, run.stop)
            ]
            assert shown == sorted({*shown})
            frame, before = found.frames[number], found.frames[number - 1] if number else None
            assert {at for _, at in frame.changed(before)} <= {*shown}
            for percent, layout in pictures:
                assert percent >= READABLE
                size = (100 * inches / percent for inches in WALL)
                assert all(a <= b for a, b in zip(layout.panel, size, strict=True))


def cut(name, at, matrix):
    """The parts of a matrix: their places, sizes and labels."""
    _, matrices = recorded(name, 2).products[at]
    return [part[:5] for part in matrices[matrix].parts]


def test_matrices_are_cut_as_the_ranks_hold_them():
    columns = [(0, 0, 4, 2, "rank 0"), (0, 2, 4, 2, "rank 1")]
    rows = [(0, 0, 2, 4, "rank 0"), (2, 0, 2, 4, "rank 1")]
    whole, summed = [(0, 0, 4, 4, "every rank")], [(0, 0, 4, 4, "the sum of all ranks")]
    assert [cut("column", 0, m) for m in range(3)] == [whole, columns, columns]
    assert [cut("column", 1, m) for m in range(3)] == [columns, rows, summed]
    assert [cut("row", 0, m) for m in range(3)] == [columns, rows, summed]
    assert [cut("row", 1, m) for m in range(3)] == [whole, columns, columns]


def test_each_bucket_is_reduced_once_while_other_units_compute():
    bars = [(row, at // 3, wide // 3, label) for row, at, _, wide, label in cut("ddp", 0, 0)]
    computing = [(0, slot, 1, f"backward of {unit}") for slot, unit in enumerate("CBA")]
    reduced = [(row, row, 4 - row, f"all-reduce of {unit}") for row, unit in enumerate("CBA", 1)]
    assert bars == computing + reduced


@pytest.mark.compile
def test_a_tile_is_drawn_with_the_operands_that_its_block_reads():
    for (title, (a, b, c)), rung in zip(recorded("tiling").products, RUNGS.values(), strict=True):
        (tile,) = (part for part in c.parts if part[5] >= 0)
        assert tile[2:4] == rung.tile and f"{tile[2]} x {tile[3]}" in title
        assert len(c.parts) == 128 * 128 // (tile[2] * tile[3])
        assert a.parts[0][:4] == (tile[0], 0, tile[2], 32) and b.parts[0][:4] == (
            0,
            tile[1],
            32,
            tile[3],
        )


@pytest.mark.parametrize(
    "words",
    [
        ("nothing",),
        ("tiling", "--ranks", "2"),
        ("ring", "--ranks", "99"),
        ("ring", "--link", "fast"),
        ("--ranks", "3"),
        ("ring", "--alone"),
        ("1f1b", "--link", "1Gbit,1ms"),
        ("ring", "--png", "a.txt"),
        ("ring", "--html", "absent/a.html"),
    ],
)
def test_a_wrong_use_is_one_error(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(commands, ["explain", *words])
    assert isinstance(done.exception, ConfigError), done.output
    assert done.exception.exit_code == 2


def test_the_command_lists_topics_and_prints_one():
    listed = CliRunner().invoke(commands, ["explain", "--language", "ko"]).output
    assert len(listed.splitlines()) == len(TOPICS) + len(PARTS)
    printed = CliRunner().invoke(commands, ["explain", "star", "--ranks", "2", "--step"]).output
    assert "a0+a1*" in printed
    alone = CliRunner().invoke(commands, ["explain", "row", "--alone"]).output
    assert "backward: some columns of dx on each rank" in alone


@pytest.mark.compile
def test_the_page_of_systems_and_its_pictures_are_of_this_version():
    """If not: python jobs/prove/textbook.py."""
    found = {name: recorded(name) for name in TOPICS}
    folder = ROOT / page.PICTURES
    assert (folder / "README.md").read_text() == page.systems(found)
    assert (folder / page.FRAMES).read_text() == page.digests(found)
    pictures = [*folder.glob("*.png")]
    assert {path.stem for path in pictures} == {*TOPICS}
    assert sum(path.stat().st_size for path in pictures) < 2**20


def test_pages_and_pictures_of_the_tree_are_not_in_the_wheel():
    assert not [*(ROOT / page.PICTURES).glob("*.py")]
    assert "pictures" not in (ROOT / "setup.cfg").read_text()


LAST = "law_a_message_of_another_size_is_an_error_at_its_receiver"  # threads carry no more after it


def test_a_slow_transport_obeys_the_laws_of_transports():
    network = Network(parse_link("10Gbit,100us"))

    def obey(transport):
        slow = SlowTransport(transport, network)
        for name in laws_of(TransportLaws):
            if name != LAST:
                getattr(TransportLaws(), name)(slow)

    run_ranks(3, obey)
