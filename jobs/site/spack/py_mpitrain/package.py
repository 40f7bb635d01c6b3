# Spack recipe of mpitrain. Not run on a real Spack: parsed and compiled by tests alone.
#
#   spack repo create site && cp -r py_mpitrain site/packages/
#   spack repo add site && spack install py-mpitrain ^openmpi
#
# Replace the path of `git` by your clone or mirror. mpi4py is built with the MPI that Spack chooses.

from spack.package import PythonPackage, depends_on, license, variant, version


class PyMpitrain(PythonPackage):
    """Distributed training of neural networks with nothing but message passing."""

    git = "file:///path/to/mpitrain"

    license("MIT")

    version("main", branch="main")

    variant("plots", default=False, description="Pictures of runs and benchmarks")
    variant("cuda", default=False, description="Train on NVIDIA GPUs with CuPy")

    depends_on("python@3.11:", type=("build", "run"))
    depends_on("py-setuptools@70:", type="build")
    depends_on("mpi")
    depends_on("py-numpy@2.1.2:", type=("build", "run"))
    depends_on("py-mpi4py@4.0:", type=("build", "run"))
    depends_on("py-click@8.2:", type=("build", "run"))
    depends_on("py-pydantic@2.7:", type=("build", "run"))
    depends_on("py-tomli-w@1.0:", type=("build", "run"))
    depends_on("py-tqdm@4.66:", type=("build", "run"))
    depends_on("py-threadpoolctl@3.5:", type=("build", "run"))
    depends_on("py-safetensors@0.5:", type=("build", "run"))
    depends_on("py-ml-dtypes@0.4:", type=("build", "run"))
    depends_on("py-matplotlib@3.8:", type="run", when="+plots")
    depends_on("py-cupy@14:", type="run", when="+cuda")
