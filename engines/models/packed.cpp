// Products of rows with weights [outputs, inputs] that are packed as they are read. Every output is summed in float32 over its inputs
// from first to last, whatever the number of rows, so a row's numbers are those it has alone.
//
// bfloat16: a tile is 16 rows of 16 pairs of numbers; AMX multiplies two and adds what it gets to a third. Tiles are whole. Without
// AMX the sums are made one by one, for tests.
// float32: 64 outputs of up to six rows stay in registers.

#include "../kernels/lanes.hpp"

#ifdef __AMX_BF16__
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

constexpr long SIDE = 16, TILE = 2 * SIDE * SIDE, WIDTH = 2 * SIDE;  // a row of a tile is WIDTH numbers
constexpr long CACHED = 1 << 18, CACHED_SINGLE = 1 << 17;
constexpr long AHEAD = 8;  // steps, of weights that come from memory

#ifdef __AMX_BF16__
void configure() {
    struct alignas(64) {
        uint8_t palette = 1, start = 0, rest[14] = {};
        uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
        uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } const tiles;
    _tile_loadconfig(&tiles);
}

void release() { _tile_release(); }

// [32, WIDTH] of one or two tiles' rows and two tiles' outputs.
void multiply(const BFloat16* x, const BFloat16* weight, long steps, bool is_two, bool is_first, float* to) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (long k = 0; k < steps; k++, x += TILE, weight += 2 * TILE) {
        if (is_first)
            for (long i = 0; i < 2 * TILE; i += 32) __builtin_prefetch(weight + AHEAD * 2 * TILE + i, 0, 2);
        _tile_loadd(4, x, 64);
        _tile_loadd(6, weight, 64);
        _tile_loadd(7, weight + TILE, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if (is_two) {
            _tile_loadd(5, x + steps * TILE, 64);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, to, 4 * WIDTH);
    _tile_stored(1, to + SIDE, 4 * WIDTH);
    if (is_two) {
        _tile_stored(2, to + SIDE * WIDTH, 4 * WIDTH);
        _tile_stored(3, to + SIDE * WIDTH + SIDE, 4 * WIDTH);
    }
}
#else
void configure() {}
void release() {}
void multiply(const BFloat16*, const BFloat16*, long, bool, bool, float*) {}
#endif

// The same sums, one by one.
void multiply_alone(const BFloat16* x, const BFloat16* weight, long steps, long rows, float* to) {
    auto wide = [](BFloat16 of) { return load(&of, 1)[0]; };
    for (long row = 0; row < rows; row++)
        for (long column = 0; column < WIDTH; column++) {
            float& sum = to[row * WIDTH + column] = 0;
            for (long i = 0; i < steps * WIDTH; i++) {
                const long step = i / WIDTH, pair = i % WIDTH / 2;
                sum += wide(x[(row / SIDE * steps + step) * TILE + row % SIDE * WIDTH + i % WIDTH]) *
                       wide(weight[(2 * step + column / SIDE) * TILE + pair * WIDTH + column % SIDE * 2 + i % 2]);
            }
        }
}

// The rows' tiles, those of 16 rows one behind the other; zeros behind the last row and the last input.
const BFloat16* tiled(const BFloat16* x, long rows, long inputs, long stride, long steps) {
    static thread_local std::vector<BFloat16> to;
    const long tiles = (rows + SIDE - 1) / SIDE * steps;
    if ((long)to.size() < tiles * TILE) to.resize(tiles * TILE);
    for (long i = 0; i < tiles; i++)
        for (long r = 0; r < SIDE; r++) {
            const long row = i / steps * SIDE + r, first = i % steps * WIDTH;
            const long n = row < rows ? std::min(inputs - first, WIDTH) : 0;
            BFloat16* at = to.data() + i * TILE + r * WIDTH;
            if (n > 0) std::memcpy(at, x + row * stride + first, n * sizeof *at);
            if (n < WIDTH) std::memset(at + std::max(n, 0L), 0, (WIDTH - std::max(n, 0L)) * sizeof *at);
        }
    return to.data();
}

constexpr long PANEL = 64, PART = 4 * LANES, SEVERAL_ROWS = 6;
constexpr long PANELS_AHEAD = 24;  // inputs, of weights that come from memory

// R rows and up to n outputs, V vectors of a part of a panel [inputs, PANEL].
template <int R, int V>
void multiply_panel(const float* x, long stride, const float* weight, long inputs, bool is_first, const float* bias, float* out,
                    long outputs, long n) {
    Floats sums[R][V] = {};
    for (long k = 0; k < inputs; k++, weight += PANEL) {
        if (is_first)
            for (int v = 0; v < V; v++) __builtin_prefetch(weight + PANELS_AHEAD * PANEL + v * LANES, 0, 2);
        Floats part[V];
        for (int v = 0; v < V; v++) part[v] = load(weight + v * LANES);
        for (int r = 0; r < R; r++)
            for (int v = 0; v < V; v++) sums[r][v] = fused(all(x[r * stride + k]), part[v], sums[r][v]);
    }
    for (int r = 0; r < R; r++)
        for (int v = 0; v < V; v++) {
            const long left = n - v * LANES;
            save(out + r * outputs + v * LANES, bias ? sums[r][v] + load(bias + v * LANES, left) : sums[r][v], left);
        }
}

template <int V>
constexpr decltype(&multiply_panel<1, 1>) OF_ROWS[] = {multiply_panel<1, V>, multiply_panel<2, V>, multiply_panel<3, V>,
                                                       multiply_panel<4, V>, multiply_panel<5, V>, multiply_panel<6, V>};

}  // namespace

extern "C" bool has_lanes() {
#ifdef __AVX512F__
    return true;
#else
    return false;
#endif
}

extern "C" void multiply_float32(const float* x, const float* weight, const float* bias, float* out, long rows, long inputs,
                                 long outputs, long stride, long threads) {
    // As many as the second cache holds beside weights.
    const long most = std::max(CACHED_SINGLE / std::max(inputs, 1L) / SEVERAL_ROWS, 1L) * SEVERAL_ROWS;
    for (long begin = 0; begin < rows; begin += most) {
        const long end = std::min(begin + most, rows);
        each((outputs + PANEL - 1) / PANEL, (end - begin) * inputs * outputs / 16, threads, [=](long panel) {
            const long behind = std::min((panel + 1) * PANEL, outputs);
            for (long first = panel * PANEL; first < behind; first += PART) {
                const long n = outputs - first;
                const float* own = weight + panel * PANEL * inputs + first % PANEL;
                const auto* of_rows = n <= LANES ? OF_ROWS<1> : n <= 2 * LANES ? OF_ROWS<2> : n <= 3 * LANES ? OF_ROWS<3> : OF_ROWS<4>;
                for (long row = begin; row < end; row += SEVERAL_ROWS)
                    of_rows[std::min(end - row, SEVERAL_ROWS) - 1](x + row * stride, stride, own, inputs, row == begin,
                                                                   bias ? bias + first : bias, out + row * outputs + first, outputs, n);
            }
        });
    }
}

extern "C" bool has_tiles() {
#ifdef __AMX_BF16__
    static const bool found = syscall(SYS_arch_prctl, 0x1023, 18) == 0;  // asks the system for the tiles' memory
    return found;
#else
    return false;
#endif
}

extern "C" void multiply_bfloat16(const BFloat16* x, const BFloat16* weight, const BFloat16* bias, BFloat16* out, long rows,
                                  long inputs, long outputs, long stride, long threads) {
    const long steps = (inputs + WIDTH - 1) / WIDTH, columns = (outputs + WIDTH - 1) / WIDTH;
    const bool in_tiles = has_tiles();
    // As many as the second cache holds beside weights.
    const long most = std::max(CACHED / (steps * WIDTH) / (2 * SIDE), 1L) * 2 * SIDE;
    if (rows > most) multiply_bfloat16(x + most * stride, weight, bias, out + most * outputs, rows - most, inputs, outputs, stride, threads);
    rows = std::min(rows, most);
    const BFloat16* tiles = tiled(x, rows, inputs, stride, steps);
    each(columns, rows * inputs * outputs / 64, threads, [=](long column) {
        const BFloat16* own = weight + column * steps * 2 * TILE;
        const long first = column * WIDTH, n = outputs - first;
        Floats added[WIDTH / LANES] = {};
        for (long v = 0; bias && v < WIDTH; v += LANES) added[v / LANES] = load(bias + first + v, n - v);
        alignas(64) float sums[2 * SIDE * WIDTH];
        if (in_tiles) configure();
        for (long row = 0; row < rows; row += 2 * SIDE) {
            const long some = std::min(rows - row, 2 * SIDE);
            const BFloat16* from = tiles + row / SIDE * steps * TILE;
            if (in_tiles)
                multiply(from, own, steps, some > SIDE, row == 0, sums);
            else
                multiply_alone(from, own, steps, some, sums);
            for (long i = 0; i < some; i++) {
                BFloat16* to = out + (row + i) * outputs + first;
                for (long v = 0; v < WIDTH; v += LANES) save(to + v, load(sums + i * WIDTH + v) + added[v / LANES], n - v);
            }
        }
        if (in_tiles) release();
    });
}
