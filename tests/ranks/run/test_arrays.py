"""Arrays as data: numbers of .npy, HDF5 and csv files, scaled alike in every layout, and as good as scikit-learn's."""

import json
import os
import shlex
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest

from mpitrain.config import read_toml
from mpitrain.data import open_source
from mpitrain.data.arrays import hdf5, table
from mpitrain.data.table import absolute
from mpitrain.errors import MpitrainError
from mpitrain.files import paths_of
from mpitrain.run.build import build, open_run
from mpitrain.run.build import configured as configured_run
from mpitrain.run.predictions import errors, predicted
from mpitrain.transport.threads import run_ranks
from tests.processes import SECONDS
from tests.runs import go
from tests.training import configured, near, stepped

try:
    import h5py
except ImportError:
    h5py = None

MLP = ["model.kind=mlp", "model.width=8", "model.layers=1", "batch.size=12", "device.kind=cpu"]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with the same 50 rows of 4 features and 2 targets in every kind of file."""
    monkeypatch.chdir(tmp_path)
    draw = np.random.default_rng(0)
    x = draw.standard_normal((50, 4)) * (1, 10, 1e-3, 5) + (0, 1e4, 0, 1)
    y = np.stack([3 * x[:, 0] + 100, x[:, 3] ** 2], 1)
    np.save("x.npy", x)
    np.save("y.npy", y)
    np.save("wide.npy", draw.standard_normal((50, 2, 2, 3)))
    np.save("classes.npy", draw.integers(3, size=50))
    np.save("images.npy", draw.standard_normal((50, 2, 8, 8)).astype("f4"))
    if h5py:
        with h5py.File("d.h5", "w") as file:
            file["x"], file["y"] = x, y
    np.savetxt("d.csv", np.hstack([y, x]), "%.17g", ",", header="u,v,a,b,c,d", comments="")
    return tmp_path


def curve(transport, config, steps=5):
    job = build(transport, config)
    results = stepped(job.trainer, job.data, range(steps))
    return [
        np.array([(r.loss, r.grad_norm) for r in results]),
        np.array([*errors(job, range(job.data.held_out)).values()]),
    ]


def test_every_kind_of_file_and_every_layout_gives_the_curve_of_one_rank(folder):
    every = [*MLP, "model.loss=mse", "precision.compute=float64", "data.validation=0.2"]
    truth = run_ranks(1, curve, configured(*every, "data.source=npy:x.npy,y.npy"))[0]
    assert np.isfinite(truth[0]).all() and np.isfinite(truth[1]).all()
    for ranks, source, *layout in (
        (3, "hdf5:d.h5:/x,/y", "replication.zero=3"),
        (2, "csv:d.csv:u,v", "layout.tp=2"),
        (2, "npy:x.npy,y.npy", "layout.pp=2", "batch.micro_batches=2"),
        (5, "hdf5:d.h5:x,y"),
    ):
        if "hdf5" in source and not h5py:
            continue
        for found in run_ranks(ranks, curve, configured(*every, f"data.source={source}", *layout)):
            assert near(truth, found), (source, layout)
    pytest.importorskip("h5py", reason="files of HDF5 were left out")


def test_targets_of_any_shape_classes_and_images_are_trained_and_predicted(folder):
    for source, width, *settings in (
        ("npy:x.npy,wide.npy", 12, "model.loss=mae"),
        ("npy:x.npy,classes.npy", 3),
        ("npy:images.npy,y.npy", 2, "model.kind=cnn", "model.loss=mse", "model.channels=[4]"),
    ):

        def outputs(transport, config):
            job = build(transport, config)
            stepped(job.trainer, job.data, range(2))
            rows = range(job.data.held_out)
            return [np.concatenate(both) for both in zip(*predicted(job, rows), strict=True)]

        every = [*MLP, "precision.compute=float64", f"data.source={source}", *settings]
        one = run_ranks(1, outputs, configured(*every))[0]
        assert one[0].shape == (5, width) and np.isfinite(one[0]).all()
        assert near(one, run_ranks(3, outputs, configured(*every))[2])


def test_a_run_keeps_its_scaling_and_evaluates_and_predicts_in_the_unit_of_the_data(folder):
    every = [*MLP, "data.source=npy:x.npy,y.npy", "model.loss=mse", f"run.out={folder}/run"]
    go(2, [*every, "run.steps=3", "run.log_every=1"])
    scaling = json.loads((folder / "run/scaling.json").read_text())
    assert scaling["y_shape"] == [2] and scaling["classes"] == 2

    def reopened(transport, *settings):
        job = open_run(
            transport, folder / "run", lambda: configured_run(folder / "run", [*settings])
        )
        assert job.data.scaling.model_dump() == scaling
        return np.concatenate([y for y, _ in predicted(job, range(job.data.held_out))])

    y = np.load("y.npy")
    whole = run_ranks(2, reopened, "data.source=npy:x.npy")[0]
    assert whole.shape == y.shape and np.abs(whole.mean(0) - y.mean(0)).max() < 3 * y.std(0).max()
    held = np.sort(np.random.default_rng(0).permutation(50)[:5])
    assert np.allclose(run_ranks(1, reopened)[0], whole[held], rtol=1e-5)
    np.save("x.npy", 2 * np.load("x.npy"))  # The scaling is that of the run, not of new rows.
    run_ranks(1, reopened, "data.source=npy:x.npy")
    go(1, [*every, "run.steps=4"], resume="yes")
    assert json.loads((folder / "run/scaling.json").read_text()) == scaling
    with pytest.raises(MpitrainError, match=r"4 features .* and 2 numbers of y .* has 4 and 1"):
        run_ranks(2, reopened, "data.source=npy:x.npy,classes.npy")
    path = folder / "run/scaling.json"
    text = path.read_text()
    for damage in (lambda: path.write_text(text.replace("[", "[1", 1)), path.unlink):
        damage()
        with pytest.raises(MpitrainError, match=r"belongs to .*run/scaling.json, which (has|is)"):
            run_ranks(2, reopened)
    path.write_text(text)
    changed("x.npy", "x.npy", 41, 2, np.nan)  # Nothing scans the rows again.
    with pytest.raises(MpitrainError, match="row 41 has nan in column 2"):
        run_ranks(1, reopened, "data.source=npy:x.npy")


@pytest.mark.parametrize("form", ["npy:x.npy,y.npy", "csv:d.csv:u,v"])
def test_numbers_as_targets_choose_their_loss_and_say_so(form, folder, capfd):
    every = ["model.kind=mlp", *MLP[1:], f"data.source={form}", f"run.out={folder}/run"]
    go(2, [*every, "run.steps=2"])
    said = f"note: the targets of {form} are numbers, so model.loss is mse"
    assert capfd.readouterr().err.count(said) == 1
    assert 'loss = "mse"' in (folder / "run/config.toml").read_text()
    go(2, [*every, "run.steps=3"], resume="yes")  # as with a file that leaves the key out


def test_csv_files_may_have_quotes_a_byte_order_mark_and_blank_lines(tmp_path):
    path = tmp_path / "t.csv"
    path.write_bytes(b'\xef\xbb\xbf\r\n"a, b",y\r\n"1",2\r\n\r\n3.5,4\r\n')
    source = table(f"csv:{path}:y")
    assert source.x.tolist() == [[1], [3.5]] and source.y.tolist() == [2, 4]
    assert source.y.dtype == np.int64
    path.write_text("a,y\n1,2\n3,inf\n")
    assert table(f"csv:{path}:y").y.tolist() == [2, np.inf]


def changed(name, other, row, column, value):
    array = np.load(name).astype(float)
    array[row, column] = value
    np.save(other, array)


def write_far(folder):
    """Write a file of HDF5 whose rows are elsewhere, damaged or many."""
    h5py = pytest.importorskip("h5py")
    rows = h5py.VirtualLayout((50, 4), "f8")
    rows[:] = h5py.VirtualSource("d.h5", "x", (50, 4))
    np.load("x.npy").tofile("d.raw")
    with h5py.File("far.h5", "w") as file:
        file["y"] = np.load("y.npy")
        file["link"], file["missing"] = (
            h5py.ExternalLink("d.h5", "/"),
            h5py.ExternalLink("pipe", "/x"),
        )
        file["soft"], file["itself"] = h5py.SoftLink("link"), h5py.SoftLink("/itself")
        file.create_virtual_dataset("virtual", rows)
        file.create_dataset("outside", (50, 4), "f8", external=[("d.raw", 0, 1600)])
        file.create_dataset("large", (50, 10**12), "f8", chunks=(1, 1000))
        sums = file.create_dataset(
            "x_of_old", data=np.ones((50, 4)), chunks=(50, 4), fletcher32=True
        )
        start = sums.id.get_chunk_info(0).byte_offset
    data = bytearray(Path("far.h5").read_bytes())
    data[start] ^= 1
    Path("far.h5").write_bytes(data)


def test_a_path_of_npy_may_have_commas(folder):
    Path("a,b").mkdir()
    for name in ("x", "y"):
        Path(f"{name}.npy").rename(f"a,b/{name},1.npy")
    own = "a,b/x,1.npy", "a,b/y,1.npy"
    assert paths_of(",".join(own)) == [*own] and paths_of(own[0]) == [own[0]]
    assert paths_of("y,1.npy,x,1.npy", folder / "a,b") == ["y,1.npy", "x,1.npy"]
    assert paths_of(f"{own[0]},gone") == [own[0], "gone"] and paths_of("a,b,c") == ["a", "b", "c"]
    Path("a,b/job.toml").write_text('[data]\nsource = "npy:x,1.npy,y,1.npy"\n')
    places = f"{folder}/a,b/x,1.npy", f"{folder}/a,b/y,1.npy"
    assert read_toml(folder / "a,b/job.toml")["data"]["source"] == f"npy:{','.join(places)}"
    assert absolute(f"npy:{','.join(own)}") == f"npy:{','.join(places)}"
    source = open_source(absolute(f"npy:{','.join(own)}"), 1, "float32")
    assert source.shape == (4,) and source.samples == 45


def test_one_file_is_made_of_several_as_the_message_says(folder):
    write_far(folder)
    with pytest.raises(MpitrainError) as raised:
        open_source("hdf5:far.h5:/virtual,/link/y", 1, "float32")
    words = shlex.split(raised.value.way_out.partition("python ")[2])
    subprocess.run([sys.executable, *words], check=True, timeout=SECONDS)
    assert np.array_equal(hdf5("hdf5:one.h5:/virtual,/link/y").x[[3, 7]], np.load("x.npy")[[3, 7]])


XY = "npy:x.npy,y.npy"
BAD = [
    ("npy:x.npy,short.npy", "", "equally many rows, but have 50 and 49"),
    ("npy:nan.npy,y.npy", "", "row 41 has nan in column 2"),
    ("npy:x.npy,inf.npy", "", "row 7 has inf in column 1"),
    ("npy:constant.npy,y.npy", "", "column 3 of x of .* is 0.1"),
    (XY, "model.loss=bce", "must lie in 0..1 with model.loss=bce"),
    (XY, "model.loss=cross-entropy", "takes classes as targets, but .* has numbers"),
    ("npy:x.npy", "", "has no targets to train on"),
    ("npy:x.npy,gone.npy", "", "gone.npy cannot be read"),
    (XY, "data.validation=npy:y.npy,y.npy", "must have one shape"),
    (XY, "data.validation=1.5", "data.validation must be"),
    ("hdf5:d.h5:/x,/z", "", "must have the dataset /z, but has x, y"),
    ("hdf5:x.npy:/x,/z", "", "x.npy cannot be read as HDF5"),
    ("hdf5:far.h5:/link/x,/y", "", r"/link/x is / of d.h5.*\n.*python -c 'import h5py; a = "),
    ("hdf5:far.h5:/missing,/y", "", "/missing is /x of pipe"),
    ("hdf5:far.h5:/soft,/y", "", "/soft is / of d.h5"),
    ("hdf5:far.h5:/virtual,/y", "", "/virtual is virtual, with rows of d.h5"),
    ("hdf5:far.h5:/outside,/y", "", "/outside has its rows in d.raw"),
    (
        "hdf5:far.h5:/itself,/y",
        "",
        "far.h5 cannot be read as HDF5: /itself is a link that leads to",
    ),
    ("hdf5:far.h5:/x_of_old,/y", "", "The dataset /x_of_old of far.h5 cannot be read as HDF5"),
    (
        "hdf5:far.h5:/large,/y",
        "",
        r"float64 of shape \(50, 1000000000000\) \(4e\+05 GB\) and .*, of which 16,000.00 GB must",
    ),
    *(
        (source, "", f"{name} cannot be read.*: it is not a regular file")
        for name in ("pipe", "to_pipe", "zeros")
        for source in (f"hdf5:{name}:/x,/y", f"npy:{name},y.npy", f"csv:{name}:u")
    ),
    ("csv:d.csv:w", "", "must have a column w, but has u, v, a, b, c, d"),
    ("csv:red.csv:u", "", "'red' to float64 at row 1, column 2; rows count from 0, columns from 1"),
    ("csv:alone.csv:u", "", "must have features"),
    ("csv:empty.csv:u", "", "2 names for 0 columns"),
    ("pydocs", "data.normalise=false model.loss=cross-entropy", "data.normalise is of data.source"),
]


@pytest.mark.parametrize(("source", "settings", "words"), BAD)
def test_bad_arrays_are_one_message_on_every_rank(folder, source, settings, words):
    if "hdf5" in source:
        pytest.importorskip("h5py")
    np.save("short.npy", np.ones(49))
    changed("x.npy", "nan.npy", 41, 2, np.nan)
    changed("y.npy", "inf.npy", 7, 1, np.inf)
    changed("x.npy", "constant.npy", slice(None), 3, 0.1)
    os.mkfifo("pipe")
    Path("to_pipe").symlink_to("pipe")
    Path("zeros").symlink_to("/dev/zero")
    if "far.h5" in source:
        write_far(folder)
    Path("red.csv").write_text("u,v\n1,2\n3,red\n")
    Path("alone.csv").write_text("u\n1\n")
    Path("empty.csv").write_text("u,v\n")
    own = MLP if source != "pydocs" else []
    every = ["model.loss=mse", *own, f"data.source={source}", *settings.split()]
    with pytest.raises(MpitrainError, match=words):
        run_ranks(3, lambda transport: build(transport, configured(*every)))


def california_like():
    """Rows like those of the California housing data: eight features, and a price that is not linear in them."""
    draw = np.random.default_rng(7)
    x = draw.lognormal(0, 0.5, (1200, 8))
    y = np.log(x[:, 0] * 3 + 1) + np.sin(2 * x[:, 6]) * x[:, 7] + 0.3 * x[:, 1] / x[:, 2]
    return x, y + 0.2 * draw.standard_normal(1200)


@pytest.mark.slow
def test_a_regression_is_as_good_as_that_of_scikit_learn(tmp_path, monkeypatch):
    """The median of three seeds, with the same network, batch, epochs and constant learning rate."""
    datasets = pytest.importorskip("sklearn.datasets")
    from sklearn.neural_network import MLPRegressor

    monkeypatch.chdir(tmp_path)
    flat = ["data.source=npy:x.npy,y.npy", "data.validation=0.2", "model.loss=mse"]
    flat += ["model.kind=mlp", "model.layers=1", "model.width=32", "batch.size=32"]
    flat += ["optimizer.lr=0.003", "optimizer.schedule=constant", "optimizer.warmup=0"]
    for name, (x, y), steps in (
        ("diabetes", datasets.load_diabetes(return_X_y=True), 150),
        ("california-like", california_like(), 700),
    ):
        np.save("x.npy", x)
        np.save("y.npy", y)
        ours, theirs = [], []
        for seed in range(3):
            every = [*flat, "device.kind=cpu", f"run.seed={seed}", f"run.steps={steps}"]
            job = run_ranks(1, curve, configured(*every), steps)[0]
            ours.append(job[1][0])
            count = int(np.ceil(0.2 * len(x)))
            order = np.random.default_rng(0).permutation(len(x))
            train, test = order[count:], order[:count]
            (mean, deviation), (low, size) = ((a[train].mean(0), a[train].std(0)) for a in (x, y))
            model = MLPRegressor(
                hidden_layer_sizes=(32,),
                batch_size=32,
                max_iter=max(1, round(steps * 32 / len(train))),
                random_state=seed,
                learning_rate_init=0.003,
            )
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                model.fit((x[train] - mean) / deviation, (y[train] - low) / size)
            found = model.predict((x[test] - mean) / deviation) * size + low
            theirs.append(np.mean((found - y[test]) ** 2))
        medians = np.median(ours), np.median(theirs)
        print(f"{name}: median MSE {medians[0]:.4g}, that of MLPRegressor {medians[1]:.4g}")
        assert medians[0] <= 1.05 * medians[1]
