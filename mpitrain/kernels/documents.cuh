// Documents in the rows of attention: no query sees a key of an earlier document. See `starts` of attention in ops/reference.
// The macro DOCUMENTS is 1 where a launch has them, else `starts` is not read.
#pragma once

#ifndef DOCUMENTS
#define DOCUMENTS 0
#endif

// The documents of one sequence. starts: (T,), ascending; of each token, the first token of its document.
struct Documents {
    const int* starts;
    int T;

    __device__ __forceinline__ Documents(const int* every, int T)
        : starts(every + (DOCUMENTS ? (long long)blockIdx.z * T : 0)), T(T) {}

    // The first key that query t sees. A query from T on sees all keys.
    __device__ __forceinline__ int first_key(int t) const { return DOCUMENTS && t < T ? starts[t] : 0; }

    // The first query from t0 on that sees no key before `key`, by bisection; T if there is none.
    __device__ __forceinline__ int first_query(int t0, int key) const {
        if (!DOCUMENTS) return T;
        int before = t0, end = T;
        while (before < end) {
            const int middle = (before + end) / 2;
            if (starts[middle] < key) before = middle + 1;
            else end = middle;
        }
        return end;
    }
};
