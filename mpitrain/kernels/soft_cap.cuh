// A soft-cap of scores of attention: a score s becomes CAP tanh(s / CAP) before it is masked (Gemma 2, 2024). CAP is a macro of the
// launch, a number above 0; without it scores stay, and nothing of this costs an instruction.
#pragma once
#include "element.cuh"

#ifndef CAP
#define CAP 0
#endif

__device__ __forceinline__ Sum capped(Sum score) { return CAP == 0 ? score : Sum(CAP) * tanh(score / Sum(CAP)); }

// The slope of a capped score, which is at most CAP.
__device__ __forceinline__ Sum cap_slope(Sum capped) {
    const Sum ratio = CAP == 0 ? Sum(0) : capped * (Sum(1) / Sum(CAP));    // not a division for each score
    return Sum(1) - ratio * ratio;
}
