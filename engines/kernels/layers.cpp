// All layers of a step in which every sequence decodes one token, in bfloat16: one call where Python makes ten a layer. The same
// kernels in the same order give the same numbers.

#include "../models/tiles.cpp"
#include "host.cpp"

namespace {

// A bias, and the norms of heads, may be null.
struct Layer {
    const BFloat16 *norm, *qkv, *qkv_bias, *q_norm, *k_norm, *out, *out_bias, *mlp_norm, *gate_up, *gate_up_bias, *down, *down_bias;
    BFloat16 *pool_k, *pool_v;
};

BFloat16* room(std::vector<BFloat16>& of, long size) {
    if ((long)of.size() < size) of.resize(size);
    return of.data();
}

}  // namespace

// x [rows, dim] becomes the residual stream, delta [rows, dim] what is to be added to it.
extern "C" void decode_layers(const Layer* layers, BFloat16* x, BFloat16* delta, const BFloat16* cos, const BFloat16* sin,
                              const int64_t* places, const int64_t* slots, const int64_t* lengths, const int32_t* table,
                              long num_layers, long rows, long sequences, long table_width, long block_size, long heads,
                              long kv_heads, long width, long dim, long hidden, float eps, long threads) {
    static thread_local std::vector<BFloat16> normed, products, mixed, gated;
    const long queries = heads * width, outputs = queries + 2 * kv_heads * width;
    BFloat16 *h = room(normed, rows * dim), *qkv = room(products, rows * std::max(outputs, 2 * hidden)),
             *attended = room(mixed, rows * queries), *active = room(gated, rows * hidden);
    for (long i = 0; i < num_layers; i++) {
        const Layer& at = layers[i];
        rms_norm_bfloat16(x, i ? delta : nullptr, at.norm, h, rows, dim, eps, threads);
        multiply_bfloat16(h, at.qkv, at.qkv_bias, qkv, rows, dim, outputs, dim, threads);
        for (long row = 0; at.q_norm && row < rows; row++)
            for (long head = 0; head < heads + kv_heads; head++) {
                BFloat16* own = qkv + row * outputs + head * width;
                rms_norm_row<BFloat16>(own, nullptr, head < heads ? at.q_norm : at.k_norm, own, width, eps);
            }
        std::memset(attended + sequences * queries, 0, (rows - sequences) * queries * sizeof *attended);
        attend_bfloat16(qkv, cos, sin, at.pool_k, at.pool_v, places, attended, slots, lengths, table, rows, sequences, table_width,
                        block_size, heads, kv_heads, width, threads);
        multiply_bfloat16(attended, at.out, at.out_bias, delta, rows, queries, dim, queries, threads);
        rms_norm_bfloat16(x, delta, at.mlp_norm, h, rows, dim, eps, threads);
        multiply_bfloat16(h, at.gate_up, at.gate_up_bias, qkv, rows, dim, 2 * hidden, dim, threads);
        swiglu_bfloat16(qkv, qkv + hidden, active, rows, hidden, 2 * hidden, 2 * hidden, threads);
        multiply_bfloat16(active, at.down, at.down_bias, delta, rows, hidden, dim, hidden, threads);
    }
}
