// Everything in cuda_fp16.h that kernels use is in language.h.
