// Shared by compiled runs: questions to Python, and sums and prices that equal Python's to the last bit.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <queue>
#include <utility>
#include <vector>

namespace {

using Int = std::int64_t;
const double NOT_YET = std::numeric_limits<double>::quiet_NaN();
const double INFINITE = std::numeric_limits<double>::infinity();

enum Question : Int { LAYERS, HEAD, LINE, LAW, STEP, ESTIMATE, HERE, AWAY, DRAW, DECIDE };

// Asks Python a `question` about a cost, or about workers of a degree. Python writes numbers to `out` and returns how many, or -1 to stop.
using Ask = Int (*)(Int question, Int cost, Int n, const Int* in, double* out);

struct Stopped {};

// math.fsum: the exact sum, rounded once (Shewchuk 1997).
double exact_sum(const std::vector<double>& values) {
    std::vector<double> parts;
    for (double x : values) {
        std::size_t kept = 0;
        for (double y : parts) {
            if (std::fabs(x) < std::fabs(y)) std::swap(x, y);
            const double high = x + y, low = y - (high - x);
            if (low != 0) parts[kept++] = low;
            x = high;
        }
        parts.resize(kept);
        parts.push_back(x);
    }
    if (parts.empty()) return 0.0;
    std::size_t n = parts.size() - 1;
    double high = parts[n], low = 0;
    while (n > 0 && low == 0) {
        const double x = high, y = parts[--n];
        high = x + y;
        low = y - (high - x);
    }
    if (n > 0 && ((low < 0 && parts[n - 1] < 0) || (low > 0 && parts[n - 1] > 0))) {
        const double twice = low * 2, x = high + twice;
        if (twice == x - high) high = x;
    }
    return high;
}

using Longest = std::priority_queue<std::pair<double, Int>, std::vector<std::pair<double, Int>>, std::greater<>>;

std::vector<bool> kept(const std::vector<double>& works_s, const std::vector<double>& limits_s) {
    std::vector<bool> found(works_s.size(), true);
    double done_s = 0;
    Longest longest;
    for (std::size_t index = 0; index < works_s.size(); ++index) {
        const double latest_s = limits_s[index] + 1e-9;
        if (works_s[index] > latest_s && longest.empty()) {
            found[index] = false;
            continue;
        }
        done_s += works_s[index];
        longest.push({-works_s[index], -Int(index)});
        if (done_s > latest_s) {
            done_s += longest.top().first;
            found[-longest.top().second] = false;
            longest.pop();
        }
    }
    return found;
}

struct Law {
    std::vector<double> sizes, times, powers;

    double at(double size) const {
        const std::size_t place = std::lower_bound(sizes.begin(), sizes.end(), size) - sizes.begin();
        if (place == sizes.size()) return times.back() * size / sizes.back();
        if (place == 0) return times.front();
        return times[place - 1] * std::pow(size / sizes[place - 1], powers[place]);
    }
};

struct Chunk {
    Int history, tokens;
};

// Times of a framework's kernels. We ask Python for each once, and keep it.
struct Prices {
    Ask ask;
    Int id;
    std::vector<double> layers, heads;
    std::vector<Law> laws;
    std::vector<double> answer = std::vector<double>(4096);

    Int numbers(Question question, Int n, const Int* in = nullptr) {
        const Int num = ask(question, id, n, in, answer.data());
        if (num <= 0) throw Stopped{};
        return num;
    }

    double number(std::vector<double>& known, Question question, Int n) {
        if (n >= Int(known.size())) known.resize(std::max<Int>(n + 1, 2 * Int(known.size())), NOT_YET);
        if (std::isnan(known[n])) {
            numbers(question, n);
            known[n] = answer[0];
        }
        return known[n];
    }

    const Law& law(Int n) {
        if (n >= Int(laws.size())) laws.resize(n + 1);
        if (laws[n].sizes.empty()) {
            const Int num = numbers(LAW, n) / 3;
            const double* at = answer.data();
            laws[n] = Law{{at, at + num}, {at + num, at + 2 * num}, {at + 2 * num, at + 3 * num}};
        }
        return laws[n];
    }
};

}  // namespace

extern "C" {

struct Totals {
    Int num_arrived, num_live, num_events, has_too_many;
    double now;
};
}
