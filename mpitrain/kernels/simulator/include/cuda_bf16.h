// Everything in cuda_bf16.h that kernels use is in language.h.
