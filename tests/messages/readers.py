"""The sentences that tests expect of `mpitrain/readers`."""

SAFETENSORS_TENSOR_BF_MPITRAIN = "a\\.safetensors has a tensor of BF16, and mpitrain reads F64, F32"
