"""The files for sites: each can be parsed, names every dependency, and says that it was not run on a real one."""

import re
from configparser import ConfigParser
from pathlib import Path

import pytest
from click.testing import CliRunner

from mpitrain import __version__
from mpitrain.cli import commands
from tests.processes import run

ROOT = Path(__file__).parents[3]
SITE = ROOT / "jobs" / "site"
FILES = sorted(path for path in SITE.rglob("*") if path.is_file() and path.suffix != ".png")
SPACK = SITE / "spack/py_mpitrain/package.py"
EASYBUILD = SITE / f"mpitrain-{__version__}-foss-2024a.eb"


def needed():
    """The dependencies of the package: name and least version."""
    setup = ConfigParser()
    setup.read(ROOT / "setup.cfg")
    lines = setup["options"]["install_requires"].splitlines()
    return dict(line.split(" >= ") for line in lines if line and not line.startswith("#"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_site_file_claims_nothing_that_was_not_tried(path):
    head = [line for line in path.read_text().splitlines() if line.startswith("#")][:3]
    assert "Not run on a" in " ".join(head)


@pytest.mark.parametrize("system", ("pbs", "lsf"))
def test_the_scripts_for_pbs_and_lsf_are_output_of_mpitrain_slurm(system):
    words = f"slurm --{system} --nodes 2 --ranks-per-node 2 --cores-per-rank 32 -- train"
    done = CliRunner().invoke(commands, words.split())
    assert done.exit_code == 0
    path = SITE / f"train.{system}.sh"
    assert path.read_text() == done.output
    assert run(["bash", "-n", path]).returncode == 0


def test_srun_starts_the_image_by_the_pmi_that_its_mpi_takes():
    mpi = re.search(r"mpitrain\[(\w+)\]", (SITE / "mpitrain.def").read_text())[1]
    words = "slurm --env apptainer:mpitrain.sif -- train"
    text = CliRunner().invoke(commands, words.split()).output
    assert f"srun --mpi={ {'mpich': 'pmi2', 'openmpi': 'pmix'}[mpi] } " in text


@pytest.mark.parametrize("launcher", ("pals", "flux"))
def test_scripts_are_parsed_and_use_options_that_exist(launcher):
    path = SITE / f"train.{launcher}.sh"
    assert run(["bash", "-n", path]).returncode == 0
    line = re.search(r"mpitrain train (.*)", path.read_text().replace("\\\n", " "))[1]
    train = commands.get_command(None, "train")
    options = {name for option in train.params for name in option.opts}
    assert {word.partition("=")[0] for word in re.findall(r"--[\w=]+", line)} <= options


@pytest.mark.parametrize("path", [SPACK, EASYBUILD], ids=("spack", "easybuild"))
def test_recipes_compile_and_name_every_dependency(path):
    text = path.read_text()
    compile(text, str(path), "exec")
    plain = text.lower().replace("_", "-")
    missing = [name for name in needed() if name not in plain]
    if path == EASYBUILD:  # They come with these modules.
        assert "Python-bundle-PyPI" in text
        missing = [name for name in missing if name not in ("click", "tqdm", "threadpoolctl")]
    assert not missing


def test_the_spack_recipe_has_the_least_versions():
    found = dict(re.findall(r'depends_on\("py-([\w-]+)@([\d.]+):"', SPACK.read_text()))
    assert {name: found.get(name) for name in needed()} == needed()


def test_the_easybuild_file_has_this_version_and_versions_that_suffice():
    values = {}
    exec(compile(EASYBUILD.read_text(), "eb", "exec"), values)
    assert values["version"] == __version__
    listed = [*values["dependencies"], *values["exts_list"]]
    found = {entry[0].lower().replace("_", "-"): entry[1] for entry in listed}
    for name, least in needed().items():
        if name in found:
            assert [*map(int, found[name].split("."))] >= [*map(int, least.split("."))], name


def test_the_image_has_the_sections_of_apptainer():
    text = (SITE / "mpitrain.def").read_text()
    sections = ["files", "post", "environment", "runscript", "test"]
    assert re.findall(r"^%(\w+)$", text, re.M) == sections
    for body in re.findall(r"^%(?:post|runscript|test)\n((?: .*\n)+)", text, re.M):
        assert run(["bash", "-n", "-c", body]).returncode == 0
