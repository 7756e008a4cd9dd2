// Runs all layers of a step in which each sequence decodes one token. Python makes one call, instead of ten a layer.
// The kernels and their order are the same, so the numbers are, too.

#include "../models/packed.cpp"
#include "host.cpp"

namespace {

template <typename T, typename W>
struct Weights {
    const W* packed;
    Ending<T> end;
};

// The norms of heads, q_norm and k_norm, may be null.
template <typename T, typename W>
struct Layer {
    const T* norm;
    Weights<T, W> qkv;
    const T *q_norm, *k_norm;
    Weights<T, W> out;
    const T* mlp_norm;
    Weights<T, W> gate_up, down;
    T *pool_k, *pool_v;
};

template <typename T>
T* room(std::vector<T>& of, long size) {
    if ((long)of.size() < size) of.resize(size);
    return of.data();
}

}  // namespace

// On return x [rows, dim] is the residual stream, and delta [rows, dim] is still to be added to it.
#define LAYERS(T, NAME, W, FULL_NAME)                                                                                             \
    extern "C" void decode_layers_##FULL_NAME(const Layer<T, W>* layers, T* x, T* delta, const T* cos, const T* sin,           \
                                         const int64_t* places, const int64_t* slots, const int64_t* lengths,          \
                                         const int32_t* table, long num_layers, long rows, long sequences,             \
                                         long table_width, long block_size, long heads, long kv_heads, long width,     \
                                         long dim, long hidden, float eps, long threads) {                             \
        static thread_local std::vector<T> normed, products, mixed, gated;                                             \
        const long queries = heads * width, outputs = queries + 2 * kv_heads * width;                                  \
        T *h = room(normed, rows * dim), *qkv = room(products, rows * std::max(outputs, 2 * hidden)),                  \
          *attended = room(mixed, rows * queries), *active = room(gated, rows * hidden);                               \
        for (long i = 0; i < num_layers; i++) {                                                                        \
            const Layer<T, W>& at = layers[i];                                                                            \
            rms_norm_##NAME(x, i ? delta : nullptr, at.norm, h, rows, dim, eps, threads);                              \
            multiply_any(h, at.qkv.packed, at.qkv.end, qkv, rows, dim, outputs, dim, threads);                            \
            for (long row = 0; at.q_norm && row < rows; row++)                                                         \
                for (long head = 0; head < heads + kv_heads; head++) {                                                 \
                    T *own = qkv + row * outputs + head * width, *none = nullptr;                                      \
                    rms_norm_row(own, none, head < heads ? at.q_norm : at.k_norm, own, width, eps);                    \
                }                                                                                                      \
            std::memset(attended + sequences * queries, 0, (rows - sequences) * queries * sizeof *attended);           \
            attend_##NAME(qkv, cos, sin, at.pool_k, at.pool_v, places, attended, slots, lengths, table, rows, sequences, \
                          table_width, block_size, heads, kv_heads, width, threads);                                   \
            multiply_any(attended, at.out.packed, at.out.end, delta, rows, queries, dim, queries, threads);               \
            rms_norm_##NAME(x, delta, at.mlp_norm, h, rows, dim, eps, threads);                                        \
            multiply_any(h, at.gate_up.packed, at.gate_up.end, qkv, rows, dim, 2 * hidden, dim, threads);                 \
            swiglu_##NAME(qkv, qkv + hidden, active, rows, hidden, 2 * hidden, 2 * hidden, threads);                   \
            multiply_any(active, at.down.packed, at.down.end, delta, rows, hidden, dim, hidden, threads);                 \
        }                                                                                                              \
    }

LAYERS(float, float32, float, float32)
LAYERS(float, float32, int8_t, float32_int8)
LAYERS(BFloat16, bfloat16, BFloat16, bfloat16)
LAYERS(BFloat16, bfloat16, int8_t, bfloat16_int8)
