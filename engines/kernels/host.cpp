// Kernels for a step's few rows on a CPU. Each does in one pass over the rows what takes torch several operators.
//
// A row gets the same numbers alone and in a batch: no sum spans rows, and only a sum's length decides how lanes share it.

#include "lanes.hpp"

namespace {

template <typename T>
void rms_norm_row(T* x, const T* delta, const T* weight, T* y, long width, float eps) {
    Floats squares = {};
    for (long i = 0; i < width; i += LANES) {
        Floats value = load(x + i, width - i);
        if (delta) {
            value = rounded<T>(value + load(delta + i, width - i));
            save(x + i, value, width - i);
        }
        squares += value * value;
    }
    float scale = 1.0f / std::sqrt(sum(squares) / width + eps);
    for (long i = 0; i < width; i += LANES) {
        Floats value = rounded<T>(load(x + i, width - i) * scale);
        save(y + i, value * load(weight + i, width - i), width - i);
    }
}

template <typename T>
void turn(Floats& a, Floats& b, Floats c, Floats s, bool rounds) {
    const Floats x = a, y = b;
    a = rounds ? rounded<T>(x * c) - rounded<T>(y * s) : x * c - y * s;
    b = rounds ? rounded<T>(y * c) + rounded<T>(x * s) : y * c + x * s;
}

template <typename T, typename Table>
void rotate_head(T* x, const Table* cos, const Table* sin, long half, bool rounds) {
    for (long i = 0; i < half; i += LANES) {
        long n = half - i;
        Floats a = load(x + i, n), b = load(x + half + i, n), c = load(cos + i, n), s = load(sin + half + i, n);
        if (rounds) c = rounded<T>(c), s = rounded<T>(s);
        turn<T>(a, b, c, s, rounds);
        save(x + i, a, n);
        save(x + half + i, b, n);
    }
}

// Loads several narrow heads before it saves them: a load right next to a recent store would wait for that store.
template <typename T, typename Table>
void rotate_heads(T* x, long heads, const Table* cos, const Table* sin, long half, bool rounds) {
    constexpr int SEVERAL = 8;
    long h = 0;
    if (half < LANES) {
        Floats c = load(cos, half), s = load(sin + half, half), a[SEVERAL], b[SEVERAL];
        if (rounds) c = rounded<T>(c), s = rounded<T>(s);
        for (; h + SEVERAL <= heads; h += SEVERAL) {
            T* from = x + 2 * h * half;
            for (int i = 0; i < SEVERAL; i++) a[i] = load(from + 2 * i * half, half), b[i] = load(from + (2 * i + 1) * half, half);
            for (int i = 0; i < SEVERAL; i++) turn<T>(a[i], b[i], c, s, rounds);
            for (int i = 0; i < SEVERAL; i++) save(from + 2 * i * half, a[i], half), save(from + (2 * i + 1) * half, b[i], half);
        }
    }
    for (; h < heads; h++) rotate_head(x + 2 * h * half, cos, sin, half, rounds);
}

template <typename T>
void swiglu_row(const T* gate, const T* up, T* out, long width) {
    for (long i = 0; i < width; i += LANES) {
        Floats g = load(gate + i, width - i);
        Floats silu = rounded<T>(g / (exponential(-g) + 1.0f));
        save(out + i, silu * load(up + i, width - i), width - i);
    }
}

// Lane i of the result is the sum of x[i]'s lanes.
template <int S = LANES / 2>
Floats sums(Floats* x) {
    for (int i = 0; i < S; i++) {
        exchange<S>(x[i], x[i + S], EACH_LANE);
        x[i] += x[i + S];
    }
    if constexpr (S > 1) return sums<S / 2>(x);
    return x[0];
}

struct Paged {
    const int32_t* table;
    long table_width, block_size, heads, kv_heads, width;

    // Calls f(p, place in K and V) for each token p of a sequence. Inlined, as the compiler would drop a call that only prefetches.
    template <typename F>
    __attribute__((always_inline)) void each_token(long slot, long length, long head, F f) const {
        const int32_t* block = table + slot * table_width;
        for (long p = 0; p < length; block++) {
            long row = *block * block_size;
            for (long end = std::min(p + block_size, length); p < end; p++) f(p, (row++ * kv_heads + head) * width);
        }
    }
};

// Attends G queries of one K/V head to the first `length` tokens of a sequence, whose places in K and V are `at`.
template <typename T, int G, int CHUNKS, bool IS_WHOLE>
void attend(const T* q, const T* k, const T* v, T* out, const long* at, long length, long width, float* scores) {
    const long padded = (length + LANES - 1) / LANES * LANES;
    const float scale = 1.0f / std::sqrt((float)width);
    auto chunk = [=](const T* from, int c) {
        return IS_WHOLE ? load(from + c * LANES) : load(from + c * LANES, width - c * LANES);
    };
    Floats query[G][CHUNKS], highest[G];
    for (int g = 0; g < G; g++) {
        highest[g] = all(-INFINITY);
        for (int c = 0; c < CHUNKS; c++)
            query[g][c] = chunk(q + g * width, c) * scale;
    }
    for (long p = 0; p < padded; p += LANES) {
        Floats dots[G][LANES];
        for (int i = 0; i < LANES; i++) {
            const T* key = k + at[p + i];
            for (int g = 0; g < G; g++) dots[g][i] = Floats{};
            for (int c = 0; c < CHUNKS; c++) {
                const Floats part = chunk(key, c);
                for (int g = 0; g < G; g++) dots[g][i] = fused(query[g][c], part, dots[g][i]);
            }
        }
        for (int g = 0; g < G; g++) {
            Floats score = lane_numbers() < (int32_t)std::min(length - p, (long)LANES) ? sums(dots[g]) : all(-INFINITY);
            save(scores + g * padded + p, score);
            highest[g] = larger(highest[g], score);
        }
    }
    Floats mixed[G][CHUNKS] = {};
    float over[G];
    for (int g = 0; g < G; g++) {
        float most = highest[g][0];
        for (int i = 1; i < LANES; i++) most = std::max(most, highest[g][i]);
        Floats total = {};
        for (long p = 0; p < padded; p += LANES) {
            const Floats share = exponential(load(scores + g * padded + p) - most);
            save(scores + g * padded + p, share);
            total += share;
        }
        over[g] = 1.0f / sum(total);
    }
    for (long p = 0; p < length; p++) {
        const T* value = v + at[p];
        for (int c = 0; c < CHUNKS; c++) {
            const Floats part = chunk(value, c);
            for (int g = 0; g < G; g++) mixed[g][c] = fused(all(scores[g * padded + p]), part, mixed[g][c]);
        }
    }
    for (int g = 0; g < G; g++)
        for (int c = 0; c < CHUNKS && c * LANES < width; c++)
            save(out + g * width + c * LANES, mixed[g][c] * over[g], width - c * LANES);
}

// Attends all queries of one K/V head. Its width is CHUNKS * LANES, or less unless IS_WHOLE.
template <typename T, int CHUNKS, bool IS_WHOLE>
void attend_heads(const Paged& in, const T* q, const T* k, const T* v, T* out, long slot, long length, long head) {
    static thread_local std::vector<float> scores;
    static thread_local std::vector<long> at;
    constexpr int MOST = !IS_WHOLE ? 1 : CHUNKS <= LANES / 4 ? 4 : 2;  // most queries whose sums fit the registers
    const long padded = (length + LANES - 1) / LANES * LANES, group = in.heads / in.kv_heads;
    scores.resize(MOST * padded);
    at.resize(padded);
    in.each_token(slot, length, head, [&](long p, long place) { at[p] = place; });
    std::fill(at.begin() + length, at.end(), at[length - 1]);
    long g = 0;
    auto some = [&](auto attend, int n) {
        for (; g + n <= group; g += n) {
            const long first = (head * group + g) * in.width;
            attend(q + first, k, v, out + first, at.data(), length, in.width, scores.data());
        }
    };
    if constexpr (MOST >= 4) some(attend<T, 4, CHUNKS, IS_WHOLE>, 4), some(attend<T, 3, CHUNKS, IS_WHOLE>, 3);
    if constexpr (MOST >= 2) some(attend<T, 2, CHUNKS, IS_WHOLE>, 2);
    some(attend<T, 1, CHUNKS, IS_WHOLE>, 1);
}

// Row i of q is the query of sequence i's newest token.
template <typename T>
void decode(const Paged& in, const T* q, const T* k, const T* v, T* out, const int64_t* slots, const int64_t* lengths,
            long sequences, long q_stride, long threads) {
    long work = 0;
    for (long i = 0; i < sequences; i++) work += lengths[i] * in.heads * in.width;
    auto one = in.width == 64    ? attend_heads<T, 64 / LANES, true>
               : in.width == 128 ? attend_heads<T, 128 / LANES, true>
               : in.width < 32   ? attend_heads<T, 32 / LANES, false>
               : in.width < 64   ? attend_heads<T, 64 / LANES, false>
                                 : attend_heads<T, 256 / LANES, false>;
    const long units = sequences * in.kv_heads;
    each(units, work, threads, [=, &in](long i) {
        const long s = i / in.kv_heads, next = std::min(i + 1, units - 1);
        // Prefetch the next unit's K and V to the L2 cache: since the layer before, weights have displaced them.
        in.each_token(slots[next / in.kv_heads], lengths[next / in.kv_heads], next % in.kv_heads, [&](long, long place) {
            for (long byte = 0; byte < in.width * (long)sizeof(T); byte += 64) {
                __builtin_prefetch((const char*)(k + place) + byte, 0, 2);
                __builtin_prefetch((const char*)(v + place) + byte, 0, 2);
            }
        });
        one(in, q + s * q_stride, k, v, out + s * in.heads * in.width, slots[s], lengths[s], i % in.kv_heads);
    });
}

}  // namespace

// Strides are in elements; rows of q, k, v, gate and up may lie apart.
#define KERNELS(T, NAME)                                                                                               \
    extern "C" void rms_norm_##NAME(T* x, const T* delta, const T* weight, T* y, long rows, long width, float eps,     \
                                    long threads) {                                                                    \
        each(rows, rows * width, threads, [=](long i) {                                                                \
            rms_norm_row(x + i * width, delta ? delta + i * width : delta, weight, y + i * width, width, eps);         \
        });                                                                                                            \
    }                                                                                                                  \
    extern "C" void rotate_##NAME(T* q, T* k, const float* cos, const float* sin, long rows, long heads,               \
                                  long kv_heads, long width, long q_stride, long k_stride, bool rounds,                \
                                  long threads) {                                                                      \
        each(rows, rows * (heads + kv_heads) * width, threads, [=](long i) {                                           \
            const float *c = cos + i * width, *s = sin + i * width;                                                    \
            rotate_heads(q + i * q_stride, heads, c, s, width / 2, rounds);                                            \
            rotate_heads(k + i * k_stride, kv_heads, c, s, width / 2, rounds);                                         \
        });                                                                                                            \
    }                                                                                                                  \
    extern "C" void swiglu_##NAME(const T* gate, const T* up, T* out, long rows, long width, long gate_stride,         \
                                  long up_stride, long threads) {                                                      \
        each(rows, 4 * rows * width, threads, [=](long i) {                                                            \
            swiglu_row(gate + i * gate_stride, up + i * up_stride, out + i * width, width);                            \
        });                                                                                                            \
    }                                                                                                                  \
    extern "C" void store_##NAME(T* pool_k, T* pool_v, const int64_t* places, const T* k, const T* v, long rows,       \
                                 long width, long k_stride, long v_stride) {                                           \
        for (long i = 0; i < rows; i++) {                                                                              \
            std::memcpy(pool_k + places[i] * width, k + i * k_stride, width * sizeof(T));                              \
            std::memcpy(pool_v + places[i] * width, v + i * v_stride, width * sizeof(T));                              \
        }                                                                                                              \
    }                                                                                                                  \
    extern "C" void decode_##NAME(const T* q, const T* k, const T* v, T* out, const int64_t* slots,                    \
                                  const int64_t* lengths, const int32_t* table, long sequences, long table_width,      \
                                  long block_size, long heads, long kv_heads, long width, long q_stride, long threads) { \
        decode<T>({table, table_width, block_size, heads, kv_heads, width}, q, k, v, out, slots, lengths, sequences,   \
                  q_stride, threads);                                                                                  \
    }                                                                                                                  \
    extern "C" void attend_##NAME(T* qkv, const T* cos, const T* sin, T* pool_k, T* pool_v, const int64_t* places, T* out, \
                                  const int64_t* slots, const int64_t* lengths, const int32_t* table, long rows,       \
                                  long sequences, long table_width, long block_size, long heads, long kv_heads,        \
                                  long width, long threads) {                                                          \
        const long stride = (heads + 2 * kv_heads) * width, size = kv_heads * width;                                   \
        for (long i = 0; i < rows; i++) {                                                                              \
            T *q = qkv + i * stride, *k = q + heads * width;                                                           \
            for (long h = 0; h < heads + kv_heads; h++)                                                                \
                rotate_head(q + h * width, cos + i * width, sin + i * width, width / 2, true);                         \
            std::memcpy(pool_k + places[i] * size, k, size * sizeof(T));                                               \
            std::memcpy(pool_v + places[i] * size, k + size, size * sizeof(T));                                        \
        }                                                                                                              \
        decode<T>({table, table_width, block_size, heads, kv_heads, width}, qkv, pool_k, pool_v, out, slots, lengths,  \
                  sequences, stride, threads);                                                                         \
    }

KERNELS(float, float32)
KERNELS(BFloat16, bfloat16)
