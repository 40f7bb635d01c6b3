// Which keys a query sees, and where rows lie: Seen in ops/reference/attention.py. Macros, so that a launch without these things pays for none:
// DOCUMENTS is not 0 where rows have several documents, else `starts` is not read. 1: no query sees a key of an earlier document;
// with GENERAL too, a query may see no key: its y is 0 and its log sum -infinity. 2: nor of a later one, and queries and keys are
// of the same tokens; a causal mask hides these keys without it.
// WINDOW is 1 where a query sees only the last `window` keys up to its last, else `window` is not read. Not with DOCUMENTS 2.
// GENERAL is 0 for causal attention of sequences with themselves, whose q and kv lie side by side in rows of H + 2 G heads.
// GROUP is the number of query heads that share a head of keys and values.
#pragma once

#ifndef DOCUMENTS
#define DOCUMENTS 0
#endif
#ifndef WINDOW
#define WINDOW 0
#endif
#ifndef GENERAL
#define GENERAL 0
#endif
#ifndef GROUP
#define GROUP 1
#endif

constexpr bool BOUNDED = DOCUMENTS || WINDOW;    // a query does not see all keys before it

// The sizes of a launch. A query sees the keys up to last_key.
struct Sizes {
    int Q, T, offset, window, H, q_pitch, kv_pitch, q_rows, kv_rows;

    __device__ __forceinline__ Sizes(int Q, int T, int offset, int window, int H, int q_pitch, int kv_pitch, int q_rows,
                                     int kv_rows)
        : Q(GENERAL ? Q : T), T(T), offset(GENERAL ? offset : 0), window(window), H(H),
          q_pitch(GENERAL ? q_pitch : side_by_side(H)), kv_pitch(GENERAL ? kv_pitch : side_by_side(H)), q_rows(GENERAL ? q_rows : T), kv_rows(GENERAL ? kv_rows : T) {}

    static __device__ __forceinline__ int side_by_side(int H) { return (H + 2 * (H / GROUP)) * HEAD; }

    __device__ __forceinline__ int last_key(int t) const { return GENERAL ? min(t + offset, T - 1) : t; }

    // Where rows of head h of sequence b begin: of q; of the keys (of the values G heads later); of y, dy; of log_sums.
    __device__ __forceinline__ long long q(int b, int h) const { return (long long)b * q_rows * q_pitch + h * HEAD; }
    __device__ __forceinline__ long long k(int b, int h) const { return (long long)b * kv_rows * kv_pitch + h / GROUP * HEAD; }
    __device__ __forceinline__ long long v(int b, int h) const { return k(b, h) + H / GROUP * HEAD; }
    __device__ __forceinline__ long long y(int b, int h) const { return (long long)b * Q * (H * HEAD) + h * HEAD; }
    __device__ __forceinline__ long long row(int b, int h) const { return ((long long)b * H + h) * Q; }
};

// The first keys that the queries of one sequence see. starts: (Q,), ascending; of each query, the first key of its document.
// First keys ascend. So every block of queries sees the keys of a run, and so do, with DOCUMENTS 2, queries of a block of keys.
struct Bounds {
    const int* starts;
    int Q, reach;    // query t sees no key before t + reach

    __device__ __forceinline__ Bounds(const int* every, const Sizes& sizes) : Bounds(every, sizes, blockIdx.z) {}
    // Those of sequence b.
    __device__ __forceinline__ Bounds(const int* every, const Sizes& sizes, int b)
        : starts(every + (DOCUMENTS ? (long long)b * sizes.Q : 0)), Q(sizes.Q), reach(sizes.offset + 1 - sizes.window) {}

    // The first key that query t sees. A query from Q on sees all keys.
    __device__ __forceinline__ int first_key(int t) const {
        const int first = DOCUMENTS && t < Q ? starts[t] : 0;
        return WINDOW && t < Q ? max(first, t + reach) : first;
    }

    // The first query from t0 on that sees no key before `key`, by bisection; Q if there is none.
    __device__ __forceinline__ int first_query(int t0, int key) const {
        if (!BOUNDED) return Q;
        int before = t0, end = Q;
        while (before < end) {
            const int middle = (before + end) / 2;
            if (first_key(middle) < key) before = middle + 1;
            else end = middle;
        }
        return end;
    }

    // The end of the keys of query t's document, where it bounds what the query sees.
    __device__ __forceinline__ int end_key(int t) const {
        return DOCUMENTS == 2 ? first_query(t, first_key(t) + 1) : 0x7fffffff;
    }

    // Whether a query whose first key is `first` does not see a key, although that is not after its last.
    __device__ __forceinline__ bool hides(int first, int key) const {
        return DOCUMENTS == 2 ? first_key(key) != first : key < first;
    }
};
