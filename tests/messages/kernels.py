"""The sentences that tests expect of `mpitrain/kernels`."""

COMPILING_KERNELS_CUDA_SIM = "Compiling kernels for cuda-sim with "
DEVICE_KIND_CUDA_SIM = (
    "ConfigError: device.kind cuda-sim compiles kernels with g++ 11 or later on x86-64, "
    "but there is no g++ here.\n             Install g++ on an x86-64 machine (apt install "
    "g++, or pip install ziglang), or use --device cpu."
)
DOES_FIT_INTO = "does not fit into"
KERNELERROR_INDICES_BITS_REACH = (
    "KernelError: Indices of 32 bits reach 2147483647 elements, but there are 2147483648 "
    "to choose from.\n             Choose from parts of the array."
)
MAKES_ONE_PRODUCT_TIME = "makes one product at a time, not 2"
NEED_CUBLAS_FAILURE_NO = "need cuBLAS, but .* it: Failure .* No such file\\n +Install it: .*cuda13"
NVRTC_CANNOT_COMPILE_GEMM = "NVRTC cannot compile gemm\\.cu for sm_90a:\\n.*gemm\\.cu\\(7\\): error"
ONLY_OPERAND_STORED_TRANSPOSED = "Only of an operand stored transposed can the rows be summed"
PAST_END_NO_ARRAY = "past_the_end has no array `z`\\.\\n +Its arrays: x, y"
RACE_NO_BARRIER_BEFORE = (
    "race in no_barrier_before_reuse, planted.cu:21: thread 32 of block 0 reads shared "
    "`tile` + 124 bytes, which thread 31 of block 0 wrote with no barrier between; block "
    "(0, 0, 0), thread (32, 0, 0)."
)
THERE_NO_KERNEL_GEM = "There is no kernel `gem`\\.\\n +There are: .*bounded"
