// Products of rows with weights [outputs, inputs], which are packed in the order in which we read them. Each output is one float32 sum
// over its inputs from first to last, for any number of rows. So a row gets the same numbers alone and in a batch.
//
// Tiles, for AMX: a tile is 16 rows of 16 pairs of bfloat16, padded with zeros. AMX multiplies two and adds the result to a third.
// Without AMX we compute the same sums one by one, for tests.
// Panels, for float32, and for bfloat16 if neither AMX nor oneDNN multiplies it: a panel's sums of up to six rows stay in registers.
// Weights may be int8, with rows of either dtype: we multiply a sum by its output's scale before we add the bias.

#include <array>

#include "../kernels/lanes.hpp"

#ifdef __AMX_BF16__
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

constexpr long SIDE = 16, TILE = 2 * SIDE * SIDE, WIDTH = 2 * SIDE;  // a row of a tile is WIDTH numbers
constexpr long CACHED = 1 << 18, CACHED_SINGLE = 1 << 17;
constexpr long AHEAD = 8;  // how many steps ahead we prefetch weights from memory

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

// Multiplies one or two tiles of rows by two tiles of outputs, to [32, WIDTH]. If `is_first`, the weights come from memory.
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

// The same sums without AMX, one by one.
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

// Copies rows to tiles: all tiles of the first 16 rows, then those of the next. After the last row and the last input come zeros.
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

const BFloat16* widened(const BFloat16* weight, long) { return weight; }

// bfloat16 represents every int8 exactly.
const BFloat16* widened(const int8_t* weight, long size) {
    static thread_local std::vector<BFloat16> to;
    if ((long)to.size() < size) to.resize(size);
    for (long i = 0; i < size; i += LANES) save(to.data() + i, load(weight + i));
    return to.data();
}

// A panel has VECTORS vectors, so that the sums of SEVERAL_ROWS rows stay in registers. A lone row gets UNIT outputs at once.
constexpr int VECTORS = LANES == 16 ? 4 : 2, SEVERAL_ROWS = 6;
constexpr long PANEL = VECTORS * LANES, UNIT = 64;
constexpr long BYTES_AHEAD = 6144;           // how far ahead we prefetch weights from memory
constexpr long MOST_INPUTS = 1024;           // with more than FEW_ROWS rows, all add up this many inputs before the next ones
constexpr long FEW_ROWS = 3 * SEVERAL_ROWS;  // with up to so many rows, we widen weights while reading, not beforehand

// A product's sizes, and the part that we compute now: inputs `from` to `to`, from panels of `height` inputs.
struct Part {
    long stride, from, to, height, inputs, outputs;
};

// The scales that multiply the outputs, and the bias that we then add. Each may be null.
template <typename T>
struct Ending {
    const float* scale;
    const T* bias;

    Ending from(long output) const { return {scale ? scale + output : scale, bias ? bias + output : bias}; }

    Floats of(Floats sums, long first, long n) const {
        const Floats added = bias ? load(bias + first, n) : Floats{};
        if (scale) return fused(sums, load(scale + first, n), added);
        return bias ? sums + added : sums;
    }
};

// Multiplies R rows by up to n outputs: V vectors of each of P adjacent panels [height, PANEL]. Unfinished sums wait in `partial`.
template <typename T, typename W, int R, int P, int V>
void multiply_panels(const Part& of, const float* x, const W* weight, bool is_first, float* partial, Ending<T> end, T* out, long n) {
    constexpr long AHEAD = BYTES_AHEAD / P / (long)sizeof(W), LINE = std::max(64 / (PANEL * (long)sizeof(W)), 1L);
    const long stride = of.stride, height = of.height;
    Floats sums[R][P * V] = {};
    for (int r = 0; r < R && of.from > 0; r++)
        for (int i = 0; i < P * V; i++) sums[r][i] = load(partial + r * UNIT + i * LANES);
    for (long k = of.from; k < of.to; k++, weight += PANEL) {
        Floats part[P * V];
        for (int i = 0; i < P * V; i++) {
            const W* at = weight + i / V * PANEL * height + i % V * LANES;
            if (is_first && k % LINE == 0 && (LINE == 1 || i % V == 0)) __builtin_prefetch(at + AHEAD, 0, 2);
            part[i] = load(at);
        }
        for (int r = 0; r < R; r++)
            for (int i = 0; i < P * V; i++) sums[r][i] = fused(all(x[r * stride + k]), part[i], sums[r][i]);
    }
    for (int r = 0; r < R; r++)
        for (int i = 0; i < P * V; i++) {
            const long first = i * LANES, left = n - first;
            if (of.to < of.inputs)
                save(partial + r * UNIT + first, sums[r][i]);
            else
                save(out + r * of.outputs + first, end.of(sums[r][i], first, left), left);
        }
}

template <typename T, typename W>
using Multiply = decltype(&multiply_panels<T, W, 1, 1, 1>);

template <typename T, typename W, int V, int... R>
constexpr std::array<Multiply<T, W>, sizeof...(R)> of_rows(std::integer_sequence<int, R...>) {
    return {multiply_panels<T, W, R + 1, 1, V>...};
}

template <typename T, typename W, int... V>
constexpr auto of_vectors(std::integer_sequence<int, V...>) {
    return std::array{of_rows<T, W, V + 1>(std::make_integer_sequence<int, SEVERAL_ROWS>())...};
}

template <typename T, typename W>
constexpr auto OF_VECTORS = of_vectors<T, W>(std::make_integer_sequence<int, VECTORS>());

// Up to n outputs of all rows, in groups of about equal numbers of rows. A lone row gets all panels of a unit at once.
template <typename T, typename W>
void multiply_rows(const Part& of, const float* x, const W* weight, long rows, float* partial, Ending<T> end, T* out, long n) {
    for (long groups = (rows + SEVERAL_ROWS - 1) / SEVERAL_ROWS, row = 0; groups > 0; groups--) {
        const long some = (rows - row) / groups;
        auto multiply = OF_VECTORS<T, W>[std::min((n + LANES - 1) / LANES, (long)VECTORS) - 1][some - 1];
        if (n > PANEL) multiply = multiply_panels<T, W, 1, UNIT / PANEL, VECTORS>;
        multiply(of, x + row * of.stride, weight, row == 0, partial + row * UNIT, end, out + row * of.outputs, n);
        row += some;
    }
}

const float* single(const float* x, long, long, long&, std::vector<float>&) { return x; }

template <typename W>
const float* single(const W* x, long rows, long width, long& stride, std::vector<float>& to) {
    if ((long)to.size() < rows * width) to.resize(rows * width);
    for (long row = 0; row < rows; row++)
        for (long i = 0; i < width; i += LANES) save(to.data() + row * width + i, load(x + row * stride + i, width - i), width - i);
    stride = width;
    return to.data();
}

template <typename T, typename W>
void multiply_in_panels(const T* given, const W* weight, Ending<T> end_of, T* out, long rows, long inputs, long outputs, long stride,
                        long threads) {
    static thread_local std::vector<float> widened;
    const float* x = single(given, rows, inputs, stride, widened);
    // As many rows as the L2 cache holds beside weights.
    const long most = std::max(CACHED_SINGLE / std::clamp(inputs, 1L, MOST_INPUTS) / SEVERAL_ROWS, 1L) * SEVERAL_ROWS;
    for (long begin = 0; begin < rows; begin += most) {
        const long some = std::min(rows - begin, most);
        each((outputs + UNIT - 1) / UNIT, some * inputs * outputs / 16, threads, [=](long unit) {
            static thread_local std::vector<float> wide, sums;
            if ((long)sums.size() < some * UNIT) sums.resize(some * UNIT);
            const long end = std::min((unit + 1) * UNIT, outputs), at_once = some == 1 && end % UNIT == 0 ? UNIT : PANEL;
            for (long first = unit * UNIT; first < end; first += at_once) {
                const W* own = weight + first * inputs;
                const long n = std::min(end - first, at_once);
                auto multiply = [&](const Part& part, const auto* weight) {
                    multiply_rows(part, x + begin * stride, weight, some, sums.data(), end_of.from(first), out + begin * outputs + first, n);
                };
                if (some <= FEW_ROWS || inputs == 0) {
                    multiply({stride, 0, inputs, inputs, inputs, outputs}, own);
                } else {
                    for (long from = 0, height, apart; from < inputs; from += height) {
                        height = std::min(inputs - from, MOST_INPUTS);
                        multiply({stride, from, from + height, height, inputs, outputs}, single(own + from * PANEL, 1, height * PANEL, apart, wide));
                    }
                }
            }
        });
    }
}

}  // namespace

// Returns the outputs of a panel; 0 without fused multiply-adds, because sums would be rounded twice per input.
extern "C" long panel() {
#if defined(__AVX512F__) || defined(__AVX2__) && defined(__FMA__)
    return PANEL;
#else
    return 0;
#endif
}

extern "C" bool has_tiles() {
#ifdef __AMX_BF16__
    static const bool found = syscall(SYS_arch_prctl, 0x1023, 18) == 0;  // asks the system for the tiles' memory
    return found;
#else
    return false;
#endif
}

namespace {

template <typename W>
void multiply_in_tiles(const BFloat16* x, const W* weight, Ending<BFloat16> end, BFloat16* out, long rows, long inputs, long outputs,
                       long stride, long threads) {
    const long steps = (inputs + WIDTH - 1) / WIDTH, columns = (outputs + WIDTH - 1) / WIDTH, size = steps * 2 * TILE;
    const bool in_tiles = has_tiles();
    // As many rows as the L2 cache holds beside weights.
    const long most = std::max(CACHED / (steps * WIDTH) / (2 * SIDE), 1L) * 2 * SIDE;
    if (rows > most) multiply_in_tiles(x + most * stride, weight, end, out + most * outputs, rows - most, inputs, outputs, stride, threads);
    rows = std::min(rows, most);
    const BFloat16* tiles = tiled(x, rows, inputs, stride, steps);
    each(columns, rows * inputs * outputs / 64, threads, [=](long column) {
        const BFloat16* own = widened(weight + column * size, size);
        const long first = column * WIDTH;
        alignas(64) float sums[2 * SIDE * WIDTH];
        if (in_tiles) configure();
        for (long row = 0; row < rows; row += 2 * SIDE) {
            const long some = std::min(rows - row, 2 * SIDE);
            const BFloat16* from = tiles + row / SIDE * steps * TILE;
            if (in_tiles)
                multiply(from, own, steps, some > SIDE, row == 0, sums);
            else
                multiply_alone(from, own, steps, some, sums);
            for (long i = 0; i < some; i++)
                for (long v = 0; v < WIDTH; v += LANES) {
                    const long at = first + v, n = outputs - at;
                    if (n > 0) save(out + (row + i) * outputs + at, end.of(load(sums + i * WIDTH + v), at, n), n);
                }
        }
        if (in_tiles) release();
    });
}

template <typename W>
void multiply_any(const float* x, const W* weight, Ending<float> end, float* out, long rows, long inputs, long outputs, long stride,
                  long threads) {
    multiply_in_panels(x, weight, end, out, rows, inputs, outputs, stride, threads);
}

template <typename W>
void multiply_any(const BFloat16* x, const W* weight, Ending<BFloat16> end, BFloat16* out, long rows, long inputs, long outputs,
                  long stride, long threads) {
    auto* multiply = has_tiles() ? multiply_in_tiles<W> : multiply_in_panels<BFloat16, W>;
    multiply(x, weight, end, out, rows, inputs, outputs, stride, threads);
}

}  // namespace

#define MULTIPLY(NAME, BY, T, W)                                                                                                    \
    extern "C" void NAME(const T* x, const W* weight, const float* scale, const T* bias, T* out, long rows, long inputs, long outputs, \
                         long stride, long threads) {                                                                               \
        BY(x, weight, Ending<T>{scale, bias}, out, rows, inputs, outputs, stride, threads);                                         \
    }

MULTIPLY(multiply_float32, multiply_any, float, float)
MULTIPLY(multiply_float32_int8, multiply_any, float, int8_t)
MULTIPLY(multiply_bfloat16, multiply_any, BFloat16, BFloat16)
MULTIPLY(multiply_bfloat16_int8, multiply_any, BFloat16, int8_t)
// Each way to pack weights by itself, for tests.
MULTIPLY(multiply_panels_bfloat16, multiply_in_panels, BFloat16, BFloat16)
MULTIPLY(multiply_panels_bfloat16_int8, multiply_in_panels, BFloat16, int8_t)
MULTIPLY(multiply_tiles_bfloat16, multiply_in_tiles, BFloat16, BFloat16)
MULTIPLY(multiply_tiles_bfloat16_int8, multiply_in_tiles, BFloat16, int8_t)
