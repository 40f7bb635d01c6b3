"""The sentences that tests expect of `mpitrain/machine`."""

COMPILES_KERNELS_LATER_THERE = (
    "compiles kernels with g++ 11 or later on x86-64, but there is no g++ here."
)
DEVICE_KIND_CUDA_NEEDS = "ConfigError: device.kind cuda needs CuPy, but it cannot be imported: "
KEEPS_RESIDUALS_HOST_MEMORY = "keeps its residuals in host memory, but device\\.kind is cuda"
LOOK_CUDA_VISIBLE_DEVICES = "Look at CUDA_VISIBLE_DEVICES, or use --device cpu."
MACHINE_AARCH = "but this machine is aarch64."
NAME_ONE_CPU_CUDA = "Name one of cpu, cuda, cuda-sim."
NEEDS_GPU_DRIVER_CUPY = "needs a GPU and its driver, but CuPy fake says"
NEEDS_GPU_DRIVER_CUPY_FAKE = (
    "needs a GPU and its driver, but CuPy fake says cudaErrorInsufficientDriver"
)
NO_DEVICE_KIND_COMPUTE = "no device of kind '{}' to compute on.\\n +Name one of cpu, cuda, cuda-sim"
ONLY_SIMULATOR_CAN_CHECK = "Only the simulator can check kernels, but --device is cpu"
PARAMETERS_GRADIENTS_FREE = "parameters with gradients .* are free"
PARAMETERS_RANK_NEED_GB = "{:,} parameters .* of {} rank\\(s\\) need .* GB on this host"
PIP_INSTALL_MPITRAIN_CUDA = "pip install 'mpitrain[cuda13]', or [cuda12]; or use --device cpu."
SELF_TEST_FAILED_DEVICE = "but a self-test failed: device.kind cuda needs"
WARNING_THEY_TAKE_TURNS = "warning: {}: they take turns, and each needs its own memory.\n"
