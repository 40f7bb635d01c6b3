"""The processor of this host, as Linux describes it."""

import platform
from typing import NamedTuple


class Processor(NamedTuple):
    """A processor.

    vendor    such as GenuineIntel or AuthenticAMD; empty if unknown
    features  instruction sets, as the kernel names them
    family    the vendor's number of the architecture; 0 if unknown
    """

    name: str
    vendor: str
    features: frozenset[str]
    family: int = 0

    @property
    def gains_from_mkl(self) -> bool:
        """Whether MKL multiplies faster than OpenBLAS: on Intel processors with AVX-512."""
        return self.vendor == "GenuineIntel" and "avx512f" in self.features

    @property
    def gains_from_avx2(self) -> bool:
        """Whether OpenBLAS multiplies faster with its AVX2 kernels: on AMD's Zen 4.

        Zen 4 divides a 512-bit instruction into two of 256 bits.
        """
        return (self.vendor, self.family) == ("AuthenticAMD", 25) and "avx512f" in self.features


def processor(path: str = "/proc/cpuinfo") -> Processor:
    """Return the first processor that the kernel lists."""
    facts: dict[str, str] = {}
    with open(path, encoding="utf-8") as lines:
        for line in lines:
            key, _, value = line.partition(":")
            facts.setdefault(key.strip(), value.strip())
    return Processor(
        facts.get("model name", platform.machine()),
        facts.get("vendor_id", ""),
        frozenset(facts.get("flags", "").split()),
        int(facts.get("cpu family", "0")),
    )
