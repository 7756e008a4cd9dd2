// Attention of whole sequences on a CPU: each query of a sequence sees all of its keys.
//
// Each lane has one query of a K/V head. So we read K and V in place, one number at a time, and a head of any width fills the
// lanes. A lane finds its query's highest score and sums alone, over the keys from first to last. So a query's numbers depend
// neither on its lane nor on the other queries.

#include "lanes.hpp"

namespace {

struct alignas(sizeof(Floats)) Lane {
    Floats x;
};

constexpr int KEYS = 8;  // whose scores we compute at a time
constexpr long MOST_COPIED = 1 << 21;  // most numbers of K or V to copy at a time, unless a single head has more
constexpr long MOST_IN_PLACE = LANES;  // most rows per head for which we read float32 in place

// 2^x for x <= 0, within two units in the last place, and never below the smallest normal number.
Floats power_of_two(Floats x) {
    x = larger(x, all(-126.0f));
    const Floats shifted = x + 12582912.0f;
    const Floats r = x - (shifted - 12582912.0f);
    Floats p = all(1.535336188e-4f);
    p = p * r + 1.339887440e-3f;
    p = p * r + 9.618437357e-3f;
    p = p * r + 5.550332471e-2f;
    p = p * r + 2.402264791e-1f;
    p = p * r + 6.931472028e-1f;
    p = p * r + 1.0f;
    return (Floats)((Words)p + ((Words)shifted << 23));
}

template <int S = LANES / 2>
void transpose(Floats* x) {
    for (int i = 0; i < LANES; i++)
        if (!(i & S)) exchange<S>(x[i], x[i + S], EACH_LANE);
    if constexpr (S > 1) transpose<S / 2>(x);
}

// Computes the scores [length] of LANES queries [width], and returns each lane's highest.
Floats score(const Lane* query, const float* keys, long stride, long length, long width, Lane* scores) {
    Floats highest = all(-INFINITY);
    for (long p = 0; p < length; p += KEYS) {
        const float* key[KEYS];  // after the last key, that key again
        for (int i = 0; i < KEYS; i++) key[i] = keys + std::min(p + i, length - 1) * stride;
        Floats dots[KEYS] = {};
        for (long d = 0; d < width; d++) {
            const Floats part = query[d].x;
            for (int i = 0; i < KEYS; i++) dots[i] = fused(part, all(key[i][d]), dots[i]);
        }
        for (int i = 0; i < KEYS; i++) {
            scores[p + i].x = dots[i];
            highest = larger(highest, dots[i]);
        }
    }
    return highest;
}

// Sums C columns of the values [length], weighted by the shares [length], and multiplies the sums by `over`.
template <int C>
void mix(const Lane* shares, const float* values, long stride, long length, Floats over, Lane* mixed) {
    Floats sum[C] = {};
    for (long p = 0; p < length; p++) {
        const Floats share = shares[p].x;
#pragma GCC unroll 32
        for (int c = 0; c < C; c++) sum[c] = fused(share, all(values[p * stride + c]), sum[c]);
    }
    for (int c = 0; c < C; c++) mixed[c].x = sum[c] * over;
}

struct Scratch {
    std::vector<Lane> query, mixed, scores;
    std::vector<float> keys, values;
};

// Calls f(first, n) for parts that cover the width. Each has LANES numbers, and the last may overlap the one before; a narrow head is one.
template <typename F>
void each_part(long width, F f) {
    for (long d = 0; d < width; d += LANES) f(std::max(std::min(d, width - LANES), 0L), std::min(width, (long)LANES));
}

// Copies K or V [length, heads * width] of some heads as float32, head by head. We read whole rows: a fetch for one head brings
// part of the next one too, and the processor prefetches memory that is read in order.
template <typename T>
void widen_heads(const T* from, long stride, long length, long heads, long width, std::vector<float>& to) {
    to.resize(length * heads * width + LANES);
    for (long p = 0; p < length; p++)
        for (long h = 0; h < heads; h++)
            each_part(width, [&](long d, long n) {
                save(&to[(h * length + p) * width + d], load(from + p * stride + h * width + d, n), n);
            });
}

// Attends at most LANES rows q to the first `seen` of `length` keys. The values of unseen keys are multiplied, too, with zero.
template <typename T>
void attend_rows(const T* const* q, T* const* out, int rows, const float* keys, const float* values, long k_stride,
                 long v_stride, long length, long seen, long width, Scratch& scratch) {
    Lane *query = scratch.query.data(), *mixed = scratch.mixed.data(), *scores = scratch.scores.data();
    const float scale = 1.44269504f / std::sqrt((float)width);
    each_part(width, [&](long d, long n) {
        Floats x[LANES];
        for (int i = 0; i < LANES; i++) x[i] = load(q[std::min(i, rows - 1)] + d, n) * scale;
        transpose(x);
        for (int i = 0; i < LANES; i++) query[d + i].x = x[i];
    });
    const Floats highest = score(query, keys, k_stride, seen, width, scores);
    if (seen < length) score(query, keys + seen * k_stride, k_stride, length - seen, width, scores + seen);
    Floats total = {};
    for (long p = 0; p < seen; p++) {
        const Floats share = power_of_two(scores[p].x - highest);
        scores[p].x = share;
        total += share;
    }
    for (long p = seen; p < length; p++) scores[p].x = Floats{};
    const Floats over = 1.0f / total;
    long d = 0;
    auto some = [&](auto mix, int n) {
        for (; d + n <= width; d += n) mix(scores, values + d, v_stride, length, over, mixed + d);
    };
    constexpr int MOST = LANES + LANES / 4;  // most columns whose sums fit the registers
    if (width % LANES) some(mix<MOST>, MOST);
    some(mix<LANES>, LANES), some(mix<8>, 8), some(mix<4>, 4), some(mix<1>, 1);
    each_part(width, [&](long d, long n) {
        Floats x[LANES];
        for (int i = 0; i < LANES; i++) x[i] = mixed[d + i].x;
        transpose(x);
        for (int i = 0; i < rows; i++) save(out[i] + d, x[i], n);
    });
}

// n sequences: i has rows q_start[i] to q_end[i] of q, and k_len[i] keys from row k_start[i] on. It sees the first seen[i] of
// them, or all if `seen` is null.
struct Sequences {
    const int32_t *q_start, *q_end, *k_start, *k_len, *seen;
    long n, heads, kv_heads, width, q_stride, k_stride, v_stride, out_stride;
};

// Attends K/V heads `head` to before `last` of a sequence.
template <typename T>
void attend_heads(const Sequences& in, const T* q, const T* k, const T* v, T* out, long sequence, long head, long last) {
    static thread_local Scratch scratch;
    const long length = in.k_len[sequence], seen = in.seen ? in.seen[sequence] : length, start = in.k_start[sequence];
    const long first = in.q_start[sequence], group = in.heads / in.kv_heads, width = in.width;
    const long rows = (in.q_end[sequence] - first) * group;
    if (rows <= 0 || seen <= 0) return;
    scratch.query.resize(width + LANES);
    scratch.mixed.resize(width + LANES);
    scratch.scores.resize(length + 2 * KEYS);
    const T *own_k = k + start * in.k_stride + head * width, *own_v = v + start * in.v_stride + head * width;
    const bool copies = !std::is_same_v<T, float> || rows > MOST_IN_PLACE;
    if (copies) {
        widen_heads(own_k, in.k_stride, length, last - head, width, scratch.keys);
        widen_heads(own_v, in.v_stride, length, last - head, width, scratch.values);
    }
    for (long h = head; h < last; h++) {
        const float *keys, *values;
        if (copies) {
            keys = &scratch.keys[(h - head) * length * width], values = &scratch.values[(h - head) * length * width];
        } else {
            keys = (const float*)own_k + (h - head) * width, values = (const float*)own_v + (h - head) * width;
            for (long p = 0; p < length; p++)
                for (long d = width; d < 2 * width; d += 64 / (long)sizeof(float)) {  // the next head's columns
                    __builtin_prefetch(keys + p * in.k_stride + d, 0, 2);
                    __builtin_prefetch(values + p * in.v_stride + d, 0, 2);
                }
        }
        for (long row = 0; row < rows; row += LANES) {
            const int n = std::min(rows - row, (long)LANES);
            const T* from[LANES];
            T* to[LANES];
            for (int i = 0; i < n; i++) {
                const long at = first + (row + i) / group, column = (h * group + (row + i) % group) * width;
                from[i] = q + at * in.q_stride + column;
                to[i] = out + at * in.out_stride + column;
            }
            attend_rows(from, to, n, keys, values, copies ? width : in.k_stride, copies ? width : in.v_stride, length, seen,
                        width, scratch);
        }
    }
}

template <typename T>
void attend_spans(const Sequences& in, const T* q, const T* k, const T* v, T* out, long threads) {
    long work = 0;
    for (long i = 0; i < in.n; i++) work += (long)(in.q_end[i] - in.q_start[i]) * in.k_len[i] * in.heads * in.width / 4;
    each_share(in.n * in.kv_heads, work, threads, [=, &in](long first, long last) __attribute__((noinline)) {
        for (long i = first; i < last;) {
            const long sequence = i / in.kv_heads, head = i % in.kv_heads;
            const long most = std::max(1L, MOST_COPIED / std::max(1L, in.k_len[sequence] * in.width));
            const long heads = std::min({in.kv_heads - head, last - i, most});
            attend_heads(in, q, k, v, out, sequence, head, head + heads);
            i += heads;
        }
    });
}

}  // namespace

#define KERNELS(T, NAME)                                                                                               \
    extern "C" void spans_##NAME(const T* q, const T* k, const T* v, T* out, const int32_t* q_start,                   \
                                 const int32_t* q_end, const int32_t* k_start, const int32_t* k_len,                   \
                                 const int32_t* seen, long n, long heads, long kv_heads, long width, long q_stride,    \
                                 long k_stride, long v_stride, long out_stride, long threads) {                        \
        attend_spans<T>({q_start, q_end, k_start, k_len, seen, n, heads, kv_heads, width, q_stride, k_stride, v_stride, \
                         out_stride},                                                                                  \
                        q, k, v, out, threads);                                                                        \
    }

KERNELS(float, float32)
KERNELS(BFloat16, bfloat16)
