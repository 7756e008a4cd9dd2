// Vectors of as many numbers as a register holds: float32 in registers, and float32, bfloat16 or int8 in memory. Also loops on threads.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <thread>
#include <utility>
#include <vector>

#ifdef __AVX2__
#include <immintrin.h>
#endif

namespace {

#ifdef __AVX512F__
constexpr int LANES = 16;
#else
constexpr int LANES = 8;
#endif
constexpr auto EACH_LANE = std::make_integer_sequence<int, LANES>();
typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));
typedef uint32_t Words __attribute__((vector_size(4 * LANES)));
typedef uint16_t Halves __attribute__((vector_size(2 * LANES)));

struct BFloat16 {
    uint16_t bits;
};

Floats all(float value) { return value - Floats{}; }

template <int... I>
Ints lane_numbers(std::integer_sequence<int, I...>) {
    return Ints{I...};
}

Ints lane_numbers() { return lane_numbers(EACH_LANE); }

// a * b + c, rounded once. Without intrinsics, the loop around it would decide whether the compiler rounds twice.
inline Floats fused(Floats a, Floats b, Floats c) {
#ifdef __AVX512F__
    return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__) && defined(__FMA__)
    return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;
#endif
}

Floats widen(Halves bits) { return (Floats)(__builtin_convertvector(bits, Words) << 16); }

// Rounds to the nearest bfloat16, ties to even; a NaN stays a NaN. The processor's own instruction turns values below 1e-38 into zeros.
#ifdef __AVX512BF16__
Halves narrow(Floats x) { return (Halves)_mm512_cvtneps_pbh((__m512)x); }
#else
Halves narrow(Floats x) {
    const Words bits = (Words)x;
    const Words nearest = x == x ? bits + 0x7fff + ((bits >> 16) & 1) : Words{} + 0x7fc00000;
    return __builtin_convertvector(nearest >> 16, Halves);
}
#endif

Floats load(const float* from) {
    Floats x;
    std::memcpy(&x, from, sizeof x);
    return x;
}

Floats load(const BFloat16* from) {
    Halves bits;
    std::memcpy(&bits, from, sizeof bits);
    return widen(bits);
}

// Without intrinsics, the compiler would widen bytes one by one.
Floats load(const int8_t* from) {
#ifdef __AVX512F__
    return (Floats)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)from)));
#elif defined(__AVX2__)
    return (Floats)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)from)));
#else
    Floats x;
    for (int i = 0; i < LANES; i++) x[i] = from[i];
    return x;
#endif
}

void save(float* to, Floats x) { std::memcpy(to, &x, sizeof x); }

void save(BFloat16* to, Floats x) {
    Halves bits = narrow(x);
    std::memcpy(to, &bits, sizeof bits);
}

// Loads the first n numbers, at most LANES; the lanes after them are zeros.
template <typename T>
Floats load(const T* from, long n) {
    if (n >= LANES) return load(from);
    if (n <= 0) return Floats{};
    T some[LANES] = {};
    std::memcpy(some, from, n * sizeof(T));
    return load(some);
}

template <typename T>
void save(T* to, Floats x, long n) {
    if (n >= LANES) return save(to, x);
    if (n <= 0) return;
    T some[LANES];
    save(some, x);
    std::memcpy(to, some, n * sizeof(T));
}

#ifdef __AVX512F__
inline __mmask16 first(long n) { return n >= LANES ? 0xffff : n <= 0 ? 0 : (1 << n) - 1; }

inline Floats load(const float* from, long n) { return (Floats)_mm512_maskz_loadu_ps(first(n), from); }

inline void save(float* to, Floats x, long n) { _mm512_mask_storeu_ps(to, first(n), (__m512)x); }
#elif defined(__AVX2__)
inline Floats load(const float* from, long n) {
    return n >= LANES ? load(from) : (Floats)_mm256_maskload_ps(from, (__m256i)(lane_numbers() < (int32_t)n));
}

// Uses a mask only if it needs one: AMD's processors take a dozen cycles for a masked store.
inline void save(float* to, Floats x, long n) {
    if (n >= LANES) return save(to, x);
    _mm256_maskstore_ps(to, (__m256i)(lane_numbers() < (int32_t)n), (__m256)x);
}
#endif

// Rounds x to T's precision.
template <typename T>
Floats rounded(Floats x);
template <>
Floats rounded<float>(Floats x) {
    return x;
}
template <>
Floats rounded<BFloat16>(Floats x) {
    return widen(narrow(x));
}

template <int S, int... I>
float sum(Floats x, std::integer_sequence<int, I...> lanes) {
    x += __builtin_shufflevector(x, x, (I ^ S)...);
    if constexpr (S > 1) return sum<S / 2>(x, lanes);
    return x[0];
}

float sum(Floats x) { return sum<LANES / 2>(x, EACH_LANE); }

// Exchanges lane i of b with lane i + S of a, for each i in which bit S is 0.
template <int S, int... I>
void exchange(Floats& a, Floats& b, std::integer_sequence<int, I...>) {
    const Floats x = a, y = b;
    a = __builtin_shufflevector(x, y, (I & S ? LANES + I - S : I)...);
    b = __builtin_shufflevector(x, y, (I & S ? LANES + I : I + S)...);
}

Floats larger(Floats a, Floats b) { return a > b ? a : b; }

// exp within two units in the last place; 0 if the result is below the smallest normal number.
Floats exponential(Floats x) {
    Ints is_zero = x < all(-87.33f);
    x = larger(x, all(-87.33f));
    x = x < all(88.7f) ? x : all(88.7f);
    Floats shifted = x * 1.44269504f + 12582912.0f;
    Floats n = shifted - 12582912.0f;
    Floats r = x - n * 0.693359375f;
    r = r + n * 2.12194440e-4f;
    Floats p = all(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    Ints power = (__builtin_convertvector(n, Ints) + 127) << 23;
    Floats found = p * (Floats)power;
    return is_zero ? Floats{} : found;
}

constexpr long WORTH_A_THREAD = 1 << 19;

// Calls f(first, last) for parts of the range 0 to n, on up to `threads` threads, if each has enough of the `work`.
template <typename F>
void each_share(long n, long work, long threads, F f) {
    threads = std::min({threads, n, work / WORTH_A_THREAD});
    if (threads <= 1) return f(0, n);
    std::vector<std::thread> others;
    for (long t = 1; t < threads; t++) others.emplace_back([=] { f(n * t / threads, n * (t + 1) / threads); });
    f(0, n / threads);
    for (auto& other : others) other.join();
}

// Calls f(i) for each i < n, likewise. Compiled once: if inlined in two places, a sum could be rounded in two ways.
template <typename F>
void each(long n, long work, long threads, F f) {
    each_share(n, work, threads, [=](long first, long last) __attribute__((noinline)) {
        for (long i = first; i < last; i++) f(i);
    });
}

}  // namespace
