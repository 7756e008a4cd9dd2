// Simulates instances that only prefill, like engines.laps.cluster: the same events in the same order, and the same arithmetic. So both
// give the same numbers to the last bit. Runs with a user's own policies stay in Python.
//
// The Python modules use the same names, and say what each does and why.

#include <deque>
#include <queue>
#include <string>
#include <unordered_map>

#include "../cluster/core.hpp"

namespace {

enum Kind : Int { COME, CLIENT, READY, FINISH, WAKE, CONTROL, NOTHING };
enum Stream : Int { TURNS, OPEN, CLOSED };
enum Batching : Int { CHUNKED, TEMPORAL, RESERVE, MOORE_HODGSON, ON_TIME };
enum Choice : Int { NO_GRAPHS, NEAREST, LADDER };
enum Router : Int { IN_TURN, LEAST_REQUESTS, LEAST_TOKENS, LEAST_IN_POOL, CACHE_AWARE };
enum Wait : Int { OFF, PRINTED, GUARDED, REPAIRED };
enum Joins : Int { ALL, SHORTER, SAME };
const Int EAGER = -2, FALLBACK = -1;  // modes; any other mode is the index of a shape
const Int MOST_WAKES = 10000;
const Int BUCKETS = 7;

struct Model {
    double base_s, request_s, floor_s, token_s, alpha, history_s, fallback_s;

    double work_s(Int history, Int tokens) const {
        return request_s + token_s * double(tokens) + alpha * double(tokens) * double(tokens + 2 * history) +
               history_s * double(history);
    }
};

struct Shape {
    Int length, batch;  // a rung has batch 0, and its tokens are `length`
    double seconds;
    Int tokens() const { return batch ? length * batch : length; }
};

struct Task {
    Int id, session, live, turn, history, tokens;
    double ready_s, estimate_s = 0, started_s = NOT_YET, landed_s = NOT_YET;
    Int computed = 0, worker = -1, before = -1, after = -1, place = -1;
    Int left() const { return tokens - computed; }
};

struct Share {
    Int task, tokens;
};

// Groups of tasks, each in order of arrival. An OpenQueue uses only the first. A ClassQueue has long tasks there, and short ones by bucket.
struct Queue {
    std::deque<Task>& tasks;
    Int boundary;
    struct Group {
        Int first = -1, last = -1;
    } groups[1 + BUCKETS];
    Int size = 0, num_short = 0, short_tokens = 0, backlog_tokens = 0;
    double backlog_s = 0, short_rate = 0, last_short_s = NOT_YET, gap_s = NOT_YET;

    Queue(std::deque<Task>& all, Int boundary) : tasks(all), boundary(boundary) {}

    static Int bucket(Int tokens) {
        Int place = 0;
        for (Int length = 8; place < BUCKETS - 1 && length < tokens; length *= 2) ++place;
        return place;
    }

    bool is_short(const Task& task) const { return task.tokens < boundary; }
    Group& group_of(const Task& task) { return groups[is_short(task) ? 1 + bucket(task.tokens) : 0]; }

    void push(Int id) {
        Task& task = tasks[id];
        Group& group = group_of(task);
        task.before = group.last, task.after = -1;
        (group.last < 0 ? group.first : tasks[group.last].after) = id;
        group.last = id;
        if (is_short(task)) {
            ++num_short;
            short_tokens += task.tokens;
            if (!std::isnan(last_short_s)) {
                const double gap = std::max(0.0, task.ready_s - last_short_s), old = std::isnan(gap_s) ? gap : gap_s;
                gap_s = old + 0.1 * (gap - old);
                short_rate = 1 / std::max(gap_s, 1e-9);
            }
            last_short_s = task.ready_s;
        }
        ++size;
        backlog_s += task.estimate_s;
        backlog_tokens += task.tokens;
    }

    void pull(Int id) {
        Task& task = tasks[id];
        Group& group = group_of(task);
        (task.before < 0 ? group.first : tasks[task.before].after) = task.after;
        (task.after < 0 ? group.last : tasks[task.after].before) = task.before;
        if (is_short(task)) --num_short, short_tokens -= task.tokens;
        --size;
        backlog_tokens -= task.tokens;
        backlog_s = size ? backlog_s - task.estimate_s : 0.0;
    }

    Int oldest_short() const {
        Int oldest = -1;
        for (Int place = 1; place <= BUCKETS; ++place) {
            const Int id = groups[place].first;
            if (id >= 0 && (oldest < 0 || is_before(id, oldest))) oldest = id;
        }
        return oldest;
    }

    bool is_before(Int one, Int other) const {
        const double a = tasks[one].ready_s, b = tasks[other].ready_s;
        return a != b ? a < b : one < other;
    }

    std::vector<Int> waiting() const {
        std::vector<Int> found;
        for (const Group& group : groups)
            for (Int id = group.first; id >= 0; id = tasks[id].after) found.push_back(id);
        return found;
    }

    void by_arrival(std::vector<Int>& ids) const {
        std::sort(ids.begin(), ids.end(), [&](Int one, Int other) { return is_before(one, other); });
    }
};

struct Instance {
    Queue* queue;
    Int id, pool;  // pool 0 is short, 1 long
    std::vector<Int> begun;
    std::vector<Share> shares;
    Int mode = EAGER;
    bool is_busy = false;
    Int version = 0, num_prefills = 0, num_requests = 0, backlog_tokens = 0, step_tokens = 0, num_late = 0, num_ended = 0;
    double start_s = 0, end_s = 0, step_s = 0, busy_s = 0, signals_s = 0, busy_before_s = 0;
    std::unordered_map<Int, Int> cached;
    Int num_steps = 0, tokens = 0, padded_tokens = 0;
    // State of TemporalDisaggregation and AdaptiveWait.
    bool was_long = false;
    Int target = 0, full_rounds = 0, collected = 0;
    double window_s = 0, round_s = NOT_YET;
    // State of OnTime.
    double pace = 1, last_start_s = NOT_YET, last_step_s = 0;
    Int num_measured = 0;
    std::unordered_map<Int, double> first_come_s;
};

struct Live {
    Int session, stream, round, context;
};

struct Event {
    double time_s;
    Int number, kind, subject, detail;
    bool operator>(const Event& other) const {
        return time_s != other.time_s ? time_s > other.time_s : number > other.number;
    }
};

// Python's sum() of floats. From Python 3.12 on it `compensates`: it adds what rounding lost (Neumaier 1974).
double summed(const std::vector<double>& values, bool compensates) {
    double sum = 0, lost = 0;
    for (const double x : values) {
        const double next = sum + x;
        lost += std::fabs(sum) >= std::fabs(x) ? (sum - next) + x : (x - next) + sum;
        sum = next;
    }
    return compensates && lost != 0 && std::isfinite(lost) ? sum + lost : sum;
}

double whole_steps_s(double work_s, double budget_s, double overhead_s) {
    return work_s + std::ceil(work_s / budget_s - 1e-9) * overhead_s;
}

std::vector<double> work_by(const std::vector<double>& slacks_s, double budget_s, double overhead_s, double rate, double all_s) {
    const double whole_s = rate == 1 ? whole_steps_s(all_s, budget_s, overhead_s) : INFINITE;
    const double paid_s = rate * budget_s, step_s = budget_s + overhead_s;
    std::vector<double> found;
    for (const double slack_s : slacks_s)
        found.push_back(whole_s <= slack_s ? INFINITE : paid_s * std::floor(slack_s / step_s + 1e-9));
    return found;
}

std::vector<Int> shorter_first(const std::vector<double>& works_s, const std::vector<double>& limits_s, double done_s) {
    Int latest = Int(works_s.size()) - 1;
    Longest longest;
    std::vector<Int> order;
    while (order.size() < works_s.size()) {
        while (latest >= 0 && (limits_s[latest] >= done_s || longest.empty())) {
            longest.push({-works_s[latest], -latest});
            --latest;
            if (limits_s[latest + 1] < done_s) break;
        }
        order.push_back(-longest.top().second);
        done_s += longest.top().first;
        longest.pop();
    }
    std::reverse(order.begin(), order.end());
    return order;
}

}  // namespace

extern "C" {

struct Setup {
    Int num_streams, num_instances, num_shapes;
    const Int* streams;  // four per stream: kind, first and end index of its turns or sessions, clients
    const double* think_s;
    const Int* session_id;
    const double* arrival_s;
    const Int *first_round, *prefill, *decode;  // first_round as in cluster/core.cpp; tokens of each round
    const double* delay_s;
    const Int* turns;  // five per turn: session, turn, history, tokens, answered tokens
    const double* turn_s;
    const double *factors, *batching, *wait, *own_model, *graph_model, *work_model, *router, *constants;
    const Int *depths, *shapes;
    const double* shape_s;
    const Int *lengths, *batches, *cover;
    Int num_depths, num_lengths, num_batches;
    Int batching_kind, choice, router_kind, compares, boundary, class_boundary, num_short;
    Int reprefills, is_shared, is_global, has_works, compensates;
    double most_padding, slo_s, period_s, until_s;
    void* prices;
    Ask ask;
};
}

namespace {

struct Simulation {
    const Setup setup;
    Prices& prices;
    const Model own, graph, work;
    std::deque<Task> tasks;
    std::deque<Queue> queues;
    std::vector<Instance> instances;
    std::vector<Live> lives;
    std::vector<Int> next;  // the next session of each stream
    std::vector<Shape> shapes;
    std::priority_queue<Event, std::vector<Event>, std::greater<Event>> events;
    double now = 0;
    Int num_scheduled = 0, num_live = 0, turn = 0, num_wakes = 0;
    bool has_too_many = false;

    std::vector<Int> request_session_id, request_turn, request_history, request_tokens, request_worker;
    std::vector<double> request_ready_s, request_started_s, request_landed_s;
    std::vector<Int> step_instance, step_tokens, step_padded_tokens, step_num_short, step_num_long, step_num_finished, step_mode;
    std::vector<double> step_start_s, step_duration_s;
    std::vector<Int> move_instance, move_num_short;
    std::vector<double> move_time_s;
    std::vector<Int> instance_pool, instance_num_steps, instance_num_finished, instance_tokens, instance_padded_tokens;
    std::vector<double> instance_busy_s;

#define COLUMN(name) {#name, &name}
    std::vector<std::pair<std::string, std::vector<Int>*>> ints() {
        return {COLUMN(request_session_id), COLUMN(request_turn), COLUMN(request_history), COLUMN(request_tokens),
                COLUMN(request_worker), COLUMN(step_instance), COLUMN(step_tokens), COLUMN(step_padded_tokens),
                COLUMN(step_num_short), COLUMN(step_num_long), COLUMN(step_num_finished), COLUMN(step_mode),
                COLUMN(move_instance), COLUMN(move_num_short), COLUMN(instance_pool), COLUMN(instance_num_steps),
                COLUMN(instance_num_finished), COLUMN(instance_tokens), COLUMN(instance_padded_tokens)};
    }

    std::vector<std::pair<std::string, std::vector<double>*>> seconds() {
        return {COLUMN(request_ready_s), COLUMN(request_started_s), COLUMN(request_landed_s), COLUMN(step_start_s),
                COLUMN(step_duration_s), COLUMN(move_time_s), COLUMN(instance_busy_s)};
    }
#undef COLUMN

    static Model model_of(const double* t) { return Model{t[0], t[1], t[2], t[3], t[4], t[5], t[6]}; }

    explicit Simulation(const Setup& given)
        : setup(given),
          prices(*static_cast<Prices*>(given.prices)),
          own(model_of(given.own_model)),
          graph(model_of(given.graph_model)),
          work(model_of(given.work_model)) {
        for (Int i = 0; i < given.num_shapes; ++i)
            shapes.push_back(Shape{given.shapes[2 * i], given.shapes[2 * i + 1], given.shape_s[i]});
        for (Int i = 0; i < (given.is_global ? 2 : given.num_instances); ++i) queues.emplace_back(tasks, given.class_boundary);
        instances.resize(given.num_instances);
        for (Int i = 0; i < given.num_instances; ++i) {
            Instance& each = instances[i];
            each.id = i;
            each.pool = i >= given.num_short;
            each.queue = &queues[given.is_global ? each.pool : i];
            each.target = given.num_depths ? given.depths[given.num_depths - 1] : 0;
            each.window_s = given.wait[2];
        }
        for (Int i = 0; i < given.num_streams; ++i) {
            const Int* stream = given.streams + 4 * i;
            next.push_back(stream[1]);
            if (stream[0] != CLOSED) {
                if (stream[1] < stream[2]) at(arrival_of(i, stream[1]), COME, i, stream[1]);
                continue;
            }
            for (Int client = 0; client < std::min(stream[3], stream[2] - stream[1]); ++client) at(0.0, CLIENT, i, next[i]++);
        }
        if (given.period_s > 0) at(given.period_s, CONTROL, 0);
    }

    double arrival_of(Int stream, Int item) const {
        return setup.streams[4 * stream] == TURNS ? setup.turn_s[item] : setup.arrival_s[item];
    }

    void at(double time_s, Kind kind, Int subject, Int detail = 0) { events.push({time_s, ++num_scheduled, kind, subject, detail}); }

    Int num_arrived() const { return Int(tasks.size()); }

    bool go_on(Int num) {
        while (!events.empty()) {
            const Event event = events.top();
            if (event.time_s > setup.until_s) {
                now = setup.until_s;
                return false;
            }
            if (--num < 0) return true;
            events.pop();
            now = event.time_s;
            Instance* instance = event.kind == FINISH || event.kind == WAKE ? &instances[event.subject] : nullptr;
            switch (event.kind) {
                case COME: come(event.subject, event.detail); break;
                case CLIENT: begin(event.subject, event.detail); break;
                case READY: ready(event.subject); break;
                case FINISH: finish(*instance); break;
                case CONTROL: control(); break;
                case WAKE:
                    if (event.detail != instance->version) break;
                    if (++num_wakes > MOST_WAKES) throw Stopped{};
                    poke(*instance);
            }
        }
        return false;
    }

    // ---- turns

    void come(Int stream, Int item) {
        if (item + 1 < setup.streams[4 * stream + 2]) at(arrival_of(stream, item + 1), COME, stream, item + 1);
        if (setup.streams[4 * stream] != TURNS) return begin(stream, item);
        const Int* turn = setup.turns + 5 * item;
        ask(turn[0], -1, turn[1], turn[2], turn[3], turn[4]);
    }

    void begin(Int stream, Int session) {
        lives.push_back(Live{session, stream, 0, 0});
        ready(Int(lives.size()) - 1);
    }

    void ready(Int which) {
        const Live& live = lives[which];
        const Int round = setup.first_round[live.session] + live.round;
        ask(setup.session_id[live.session], which, live.round, live.context, setup.prefill[round],
            live.round ? setup.decode[round - 1] : 0);
    }

    void ask(Int session, Int live, Int turn, Int history, Int tokens, Int answered) {
        if (setup.reprefills) history -= answered, tokens += answered;
        const Int id = Int(tasks.size());
        tasks.push_back(Task{id, session, live, turn, history, tokens, now});
        if (!setup.is_global) return send(id);
        if (setup.has_works) tasks[id].estimate_s = work.work_s(history, tokens);
        const Int pool = tokens >= setup.boundary;
        queues[pool].push(id);
        for (Instance& each : instances) {
            if (each.pool != pool || each.is_busy) continue;
            poke(each);
            if (each.is_busy) break;
        }
    }

    Int cached_tokens(const Instance& instance, const Task& task) const {
        if (setup.is_shared) return task.history;
        const auto found = instance.cached.find(task.session);
        return found == instance.cached.end() ? 0 : std::min(task.history, found->second);
    }

    // Returns the instance with the least `number` of those that `may` be taken, the lowest id if several have it; -1 if there is none.
    template <typename Number, typename May>
    Int least(Number number, May may) const {
        Int found = -1;
        for (const Instance& each : instances)
            if (may(each) && (found < 0 || number(each) < number(instances[found]))) found = each.id;
        return found;
    }

    Int picked(const Task& task) {
        const auto any = [](const Instance&) { return true; };
        const auto requests = [](const Instance& each) { return each.num_requests; };
        const auto tokens = [&](const Instance& each) { return each.backlog_tokens - cached_tokens(each, task); };
        const Int prompt = task.history + task.tokens;
        switch (setup.router_kind) {
            case IN_TURN: return turn++ % setup.num_instances;
            case LEAST_REQUESTS: return least(requests, any);
            case LEAST_IN_POOL: {
                const Int found = least(tokens, [&](const Instance& each) {
                    return !each.pool && double(prompt - cached_tokens(each, task)) < setup.router[0];
                });
                return found >= 0 ? found : least(tokens, [](const Instance& each) { return each.pool == 1; });
            }
            case CACHE_AWARE: {
                const Int fewest = least(requests, any), most = least([](const Instance& each) { return -each.num_requests; }, any);
                const Int low = instances[fewest].num_requests, high = instances[most].num_requests;
                if (double(high - low) > setup.router[1] && double(high) > setup.router[2] * double(low)) return fewest;
                const Int best = least(
                    [&](const Instance& each) { return std::make_pair(-cached_tokens(each, task), each.num_requests); }, any);
                if (double(cached_tokens(instances[best], task)) > setup.router[0] * double(prompt)) return best;
            }
        }
        return least(tokens, any);
    }

    void send(Int id) {
        Task& task = tasks[id];
        Instance& instance = instances[picked(task)];
        if (!setup.is_shared) {
            const Int missing = task.history - cached_tokens(instance, task);
            task.history -= missing, task.tokens += missing;
        }
        if (setup.has_works) task.estimate_s = work.work_s(task.history, task.tokens);
        own_now(instance, task);
        instance.queue->push(id);
        poke(instance);
    }

    void own_now(Instance& instance, const Task& task) {
        ++instance.num_requests;
        instance.backlog_tokens += task.tokens;
    }

    // ---- steps

    void poke(Instance& instance) {
        if (!instance.is_busy) boundary(instance);
    }

    void boundary(Instance& instance) {
        ++instance.version;
        shares.clear();
        double wake_s = NOT_YET;
        plan(instance, wake_s);
        if (shares.empty()) {
            if (!std::isnan(wake_s)) at(std::max(wake_s, now), WAKE, instance.id, instance.version);
            return;
        }
        instance.mode = mode_of();
        start(instance);
    }
    std::vector<Share> shares;
    std::vector<Chunk> chunks;

    Int mode_of() {
        chunks.clear();
        Int rows = 0, longest = 0;
        for (const Share& share : shares) {
            chunks.push_back(Chunk{tasks[share.task].history + tasks[share.task].computed, share.tokens});
            rows += share.tokens;
            longest = std::max(longest, share.tokens);
        }
        if (setup.choice == NO_GRAPHS) return EAGER;
        Int shape = FALLBACK;
        if (setup.choice == LADDER) {  // its shapes are in rising order
            for (shape = 0; shape < setup.num_shapes && shapes[shape].length < rows; ++shape) {}
            if (shape == setup.num_shapes || double(shapes[shape].length) > setup.most_padding * double(rows)) return FALLBACK;
        } else {
            const Int row = std::lower_bound(setup.lengths, setup.lengths + setup.num_lengths, longest) - setup.lengths;
            const Int column = std::lower_bound(setup.batches, setup.batches + setup.num_batches, Int(chunks.size())) - setup.batches;
            if (row == setup.num_lengths || column == setup.num_batches) return FALLBACK;
            shape = setup.cover[row * setup.num_batches + column];
        }
        if (shape == FALLBACK || !setup.compares) return shape;
        return predicted_s(graph, shape) < predicted_s(graph, FALLBACK) ? shape : FALLBACK;
    }

    double predicted_s(const Model& model, Int mode) const {
        Int tokens = 0, histories = 0;
        double pairs = 0, crossed = 0;
        for (const Chunk& each : chunks) {
            tokens += each.tokens;
            histories += each.history;
            pairs += double(each.tokens * each.tokens);
            crossed += double(each.tokens * each.history);
        }
        const double requests_s = model.request_s * double(chunks.size());
        if (mode >= 0) {
            double over_s = 2 * model.alpha * crossed + model.history_s * double(histories);
            if (!shapes[mode].batch) over_s += model.alpha * pairs;
            return shapes[mode].seconds + requests_s + over_s;
        }
        const double work_s = model.token_s * double(tokens) + model.alpha * (pairs + 2 * crossed) + model.history_s * double(histories);
        return model.base_s + requests_s + std::max(model.floor_s, work_s) + model.fallback_s;
    }

    void start(Instance& instance) {
        num_wakes = 0;
        instance.step_tokens = 0;
        const bool had_begun = !instance.begun.empty();
        for (const Share& share : shares) {
            Task& task = tasks[share.task];
            if (!task.computed) {
                task.started_s = now, task.worker = instance.id;
                if (setup.is_global) own_now(instance, task);
                if (share.tokens < task.tokens) instance.begun.push_back(task.id);
            }
            task.computed += share.tokens;
            instance.step_tokens += share.tokens;
        }
        if (had_begun) {
            auto& begun = instance.begun;
            begun.erase(std::remove_if(begun.begin(), begun.end(), [&](Int id) { return !tasks[id].left(); }), begun.end());
        }
        instance.busy_s += instance.step_s;
        instance.step_s = charged_s(instance.mode);
        instance.start_s = now, instance.end_s = now + instance.step_s;
        instance.shares = shares;
        instance.is_busy = true;
        at(instance.end_s, FINISH, instance.id);
    }

    // PrefillCost: seconds of a step of the current `chunks`.
    double charged_s(Int mode) {
        const double *c = setup.constants, num = double(chunks.size());
        double fixed_s = c[0] + c[1] * num;
        if (mode >= 0) return fixed_s + c[2] + c[3] + gpu_s(mode);
        const double gpu = gpu_s(mode);
        if (mode == FALLBACK) fixed_s += c[2];
        return fixed_s + (c[7] != 0 ? gpu + c[4] : std::max(gpu, c[4]));
    }

    double gpu_s(Int mode) {
        Int num = Int(chunks.size()), rows = 0, padding = 0, length = 0, num_short = 0;
        for (const Chunk& each : chunks) rows += each.tokens, num_short += double(each.tokens) < setup.constants[6];
        if (mode >= 0 && shapes[mode].batch) {
            padding = shapes[mode].batch - num, length = shapes[mode].length;
            num += padding;
            rows = num * length;
        } else if (mode >= 0) {
            rows = shapes[mode].length;
        }
        const Law& prompt = prices.law(num);
        double attention_s = 0;
        if (padding) attention_s = double(padding) * prompt.at(0.5 * double(length) * double(length + 1));
        for (const Chunk& each : chunks) {
            const Int tokens = length ? length : each.tokens;
            attention_s += prompt.at(double(tokens) * (double(each.history) + 0.5 * double(tokens + 1)));
        }
        const double linear_s = prices.number(prices.layers, LAYERS, rows), logits_s = prices.number(prices.heads, HEAD, num);
        const double found_s = linear_s + attention_s + logits_s, kappa = setup.constants[5];
        const bool is_mixed = kappa != 0 && num_short && num_short < Int(chunks.size());
        return is_mixed ? found_s * (1 + kappa) : found_s;
    }

    void finish(Instance& instance) {
        Int num_short = 0, num_finished = 0;
        for (const Share& share : instance.shares) {
            num_short += tasks[share.task].tokens < setup.boundary;
            num_finished += !tasks[share.task].left();
        }
        const Int padded = instance.mode >= 0 ? shapes[instance.mode].tokens() : instance.step_tokens;
        step_instance.push_back(instance.id);
        step_start_s.push_back(instance.start_s);
        step_duration_s.push_back(instance.step_s);
        step_tokens.push_back(instance.step_tokens);
        step_padded_tokens.push_back(padded);
        step_num_short.push_back(num_short);
        step_num_long.push_back(Int(instance.shares.size()) - num_short);
        step_num_finished.push_back(num_finished);
        step_mode.push_back(instance.mode - EAGER);
        ++instance.num_steps;
        instance.tokens += instance.step_tokens;
        instance.padded_tokens += padded;
        instance.num_requests -= num_finished;
        instance.backlog_tokens -= instance.step_tokens;
        instance.num_prefills += num_finished;
        for (const Share& share : instance.shares)
            if (!tasks[share.task].left()) prefilled(instance, tasks[share.task]);
        instance.is_busy = false;
        boundary(instance);
    }

    void prefilled(Instance& instance, Task& task) {
        task.landed_s = now;
        ++instance.num_ended;
        instance.num_late += now > task.ready_s + setup.slo_s;
        if (!setup.is_shared) instance.cached[task.session] = task.history + task.tokens;
        if (task.live < 0) return;
        Live& live = lives[task.live];
        const Int round = setup.first_round[live.session] + live.round, answer = setup.decode[round];
        live.context = task.history + task.tokens + answer;
        if (!setup.is_shared && !setup.reprefills) instance.cached[task.session] += answer;
        ++live.round;
        if (round + 1 < setup.first_round[live.session + 1]) return at(now + setup.delay_s[round], READY, task.live);
        if (!setup.is_shared)
            for (Instance& each : instances) each.cached.erase(task.session);
        const Int* stream = setup.streams + 4 * live.stream;
        if (stream[0] != CLOSED) return;
        const bool has_more = next[live.stream] < stream[2];
        at(now + setup.think_s[live.stream], has_more ? CLIENT : NOTHING, live.stream, has_more ? next[live.stream]++ : 0);
    }

    // ---- spatial disaggregation

    double busy_until(const Instance& each) const {
        return each.busy_s + (each.is_busy ? std::min(now, each.end_s) - each.start_s : each.step_s);
    }

    void control() {
        // We tell the controller the time, then each instance's pool and its three signals.
        std::vector<double> told{now};
        Int num_short = 0;
        for (const Instance& each : instances) num_short += !each.pool;
        for (Instance& each : instances) {
            const double busy_s = busy_until(each), passed_s = now - each.signals_s;
            const double utilisation = passed_s > 0 ? (busy_s - each.busy_before_s) / passed_s : 0.0;
            const Int sharing = setup.is_global ? (each.pool ? setup.num_instances - num_short : num_short) : 1;
            std::vector<double> begun;
            for (const Int id : each.begun)
                begun.push_back(tasks[id].estimate_s * double(tasks[id].left()) / double(tasks[id].tokens));
            const double backlog_s = each.queue->backlog_s / double(sharing) + exact_sum(begun);
            const double late = each.num_ended ? double(each.num_late) / double(each.num_ended) : 0.0;
            for (const double value : {double(each.pool), backlog_s, late, utilisation}) told.push_back(value);
            each.num_late = each.num_ended = 0, each.signals_s = now, each.busy_before_s = busy_s;
        }
        if (setup.ask(DECIDE, 0, setup.num_instances, nullptr, told.data()) <= 0) throw Stopped{};
        if (told[0] > 0) {
            const Int grows = told[0] - 1;  // the pool that gets one more instance
            Int mover = -1, least_left = 0;
            for (const Instance& each : instances) {
                if (each.pool == grows) continue;
                Int left = 0;
                for (const Int id : each.begun) left += tasks[id].left();
                if (mover < 0 || left < least_left || (left == least_left && each.is_busy < instances[mover].is_busy))
                    mover = each.id, least_left = left;
            }
            move_time_s.push_back(now);
            move_instance.push_back(mover);
            move_num_short.push_back(num_short + (grows ? -1 : 1));
            migrate(instances[mover], grows);
        }
        at(now + setup.period_s, CONTROL, 0);
    }

    void migrate(Instance& mover, Int to) {
        mover.pool = to;
        if (setup.is_global) {
            mover.queue = &queues[to];
            return poke(mover);
        }
        std::vector<Int> waiting = mover.queue->waiting();
        if (setup.class_boundary) mover.queue->by_arrival(waiting);
        for (const Int id : waiting) {
            mover.queue->pull(id);
            --mover.num_requests;
            mover.backlog_tokens -= tasks[id].tokens;
        }
        for (const Int id : waiting) send(id);
    }

    // ---- batching policies: each leaves its plan in ``shares``

    void plan(Instance& instance, double& wake_s) {
        switch (setup.batching_kind) {
            case CHUNKED: return chunked(instance);
            case TEMPORAL: return temporal(instance, wake_s);
            case ON_TIME: return on_time(instance);
            default: return reserve(instance);
        }
    }

    void chunked(Instance& instance) {
        Int budget = std::max<Int>(Int(setup.batching[0]), 1);
        for (const Int id : instance.begun) {
            const Int tokens = std::min(tasks[id].left(), budget);
            if (!tokens) break;
            shares.push_back(Share{id, tokens});
            budget -= tokens;
        }
        Queue& queue = *instance.queue;
        for (Int places = Int(setup.batching[1]) - Int(instance.begun.size()); queue.size && budget > 0 && places > 0; --places) {
            const Int id = queue.groups[0].first, tokens = std::min(tasks[id].tokens, budget);
            queue.pull(id);
            shares.push_back(Share{id, tokens});
            budget -= tokens;
        }
    }

    // AdaptiveWait. `wait` holds: variant, W_min, W_max, sigma, delta, T_max, the objective, M_s, whether there is an objective.
    struct Waiting {
        Int depth;
        double wake_s = NOT_YET;
    };

    double latest_start_s(const Queue& queue, Int depth) const {
        const double tokens = double(queue.short_tokens), pairs = double(queue.short_tokens * queue.short_tokens);
        const double work_s = own.token_s * tokens + own.alpha * (pairs + 2 * 0.0) + own.history_s * 0.0;
        const double step_s = own.base_s + own.request_s * 1.0 + std::max(own.floor_s, work_s);
        return tasks[queue.oldest_short()].ready_s + setup.wait[6] - (step_s + own.request_s * double(depth - 1));
    }

    Waiting next_batch(Instance& instance) {
        const double* wait = setup.wait;
        const Queue& queue = *instance.queue;
        const Int variant = Int(wait[0]);
        if (variant == OFF) return {std::min(queue.num_short, setup.depths[setup.num_depths - 1])};
        if (variant == PRINTED) return printed(instance);
        if (!queue.num_short) {
            instance.round_s = NOT_YET;
            return {0};
        }
        if (std::isnan(instance.round_s)) instance.round_s = now;
        const Int depth = std::min(queue.num_short, instance.target);
        const double latest_s = latest_start_s(queue, depth), ready_s = tasks[queue.oldest_short()].ready_s;
        if (variant == REPAIRED) {
            const double sla_s = latest_s - now - wait[4];
            const double graph_s = double(instance.target - depth) / std::max(queue.short_rate, 1e-9);
            instance.window_s = wait[8] == 0 ? wait[2] : std::min(std::max(std::min(sla_s, graph_s), wait[1]), wait[2]);
        }
        const double wake_s = std::min(std::min(instance.round_s + instance.window_s, latest_s - wait[3]), ready_s + wait[5]);
        const bool is_full = wait[8] == 0 && double(queue.short_tokens) >= wait[7];
        if (now < wake_s && depth < instance.target && !is_full) return {0, wake_s};
        close(instance, depth, now - instance.round_s);
        return {depth};
    }

    void close(Instance& instance, Int depth, double took_s) {
        instance.round_s = NOT_YET;
        if (depth < instance.target) {
            instance.full_rounds = 0;
            instance.target = setup.wait[0] == PRINTED ? depth : std::max<Int>(1, depth);
            return;
        }
        if (setup.wait[0] != REPAIRED) {
            instance.window_s = std::min(std::max(took_s, setup.wait[1]), setup.wait[2]);
            return;
        }
        if (++instance.full_rounds < 2) return;
        instance.full_rounds = 0;
        const Int above = std::upper_bound(setup.depths, setup.depths + setup.num_depths, instance.target) - setup.depths;
        instance.target = setup.depths[std::min(above, setup.num_depths - 1)];
    }

    Waiting printed(Instance& instance) {
        const Queue& queue = *instance.queue;
        if (!instance.target) return {0};
        if (std::isnan(instance.round_s)) instance.round_s = now, instance.collected = 0;
        const Int depth = std::min(queue.num_short, instance.target);
        double wake_s = instance.round_s + instance.window_s;
        if (queue.num_short) {
            const double urgent_s = latest_start_s(queue, depth) - setup.wait[3];
            if (now >= urgent_s) return dispatch(instance, instance.collected);
            wake_s = std::min(wake_s, urgent_s);
        }
        instance.collected = depth;
        if (now < wake_s && depth < instance.target) return {0, wake_s};
        return dispatch(instance, depth);
    }

    Waiting dispatch(Instance& instance, Int depth) {
        close(instance, depth, now - instance.round_s);
        return depth ? Waiting{depth} : Waiting{0, now};
    }

    // TemporalDisaggregation. `batching` holds: C_l, whether long ones pack, by urgency, max_long_wait_s, M, joins, idle while waiting.
    void temporal(Instance& instance, double& wake_s) {
        const Queue& queue = *instance.queue;
        Waiting found{-1};
        if (queue.num_short) {
            if (!long_is_due(instance)) found = next_batch(instance);
        } else if (setup.wait[0] == PRINTED) {
            found = next_batch(instance);
        }
        if (found.depth > 0) take_short(instance, found.depth);
        if (!shares.empty()) {
            instance.was_long = false;
            return;
        }
        const bool waits = !std::isnan(found.wake_s);
        if (!(waits && setup.batching[6] != 0)) take_long(instance);
        if (!shares.empty()) instance.was_long = true;
        else wake_s = found.wake_s;
    }

    bool long_is_due(const Instance& instance) const {
        const Queue& queue = *instance.queue;
        Int oldest = queue.groups[0].first;
        if (!instance.begun.empty()) {
            oldest = instance.begun[0];
            for (const Int id : instance.begun)
                if (tasks[id].ready_s < tasks[oldest].ready_s) oldest = id;
        }
        if (oldest < 0) return false;
        const double ready_s = tasks[oldest].ready_s, slo_s = setup.wait[6];
        if (now - ready_s >= setup.batching[3]) return !instance.was_long;
        if (setup.batching[2] == 0) return false;
        const double short_s = tasks[queue.oldest_short()].ready_s;
        if (std::min(ready_s, short_s) + slo_s - now <= setup.wait[3] && slo_s < INFINITE) return ready_s < short_s;
        Int long_tokens = queue.backlog_tokens - queue.short_tokens;
        for (const Int id : instance.begun) long_tokens += tasks[id].left();
        return double(long_tokens) / setup.batching[0] > double(queue.short_tokens) / setup.batching[4];
    }

    void take_short(Instance& instance, Int depth) {
        Queue& queue = *instance.queue;
        const Int home = Queue::bucket(tasks[queue.oldest_short()].tokens), joins = Int(setup.batching[5]);
        std::vector<Int> order;
        for (Int each = home; each >= (joins == SAME ? home : 0); --each) order.push_back(each);
        for (Int each = home + 1; joins == ALL && each < BUCKETS; ++each) order.push_back(each);
        double budget = setup.batching[4];
        for (const Int bucket : order) {
            for (Int id = queue.groups[1 + bucket].first; id >= 0; id = tasks[id].after) {
                const Int tokens = tasks[id].tokens;
                if (Int(shares.size()) == depth || (!shares.empty() && double(tokens) > budget)) goto full;
                shares.push_back(Share{id, tokens});
                budget -= double(tokens);
            }
        }
    full:
        for (const Share& share : shares) queue.pull(share.task);
    }

    void take_long(Instance& instance) {
        Int budget = Int(setup.batching[0]);
        const auto add = [&](Int id) {
            const Int tokens = std::min(tasks[id].left(), budget);
            shares.push_back(Share{id, tokens});
            budget -= tokens;
            return budget && setup.batching[1] != 0;
        };
        for (const Int id : instance.begun)
            if (!add(id)) return;
        Queue& queue = *instance.queue;
        for (Int id = queue.groups[0].first, after; id >= 0; id = after) {
            after = tasks[id].after;
            queue.pull(id);
            if (!add(id)) return;
        }
    }

    // Filling: the step in the making is ``shares``. `admitted` tasks are still in the queue.
    struct Filling {
        Int places;
        bool goes_past;
        std::vector<Int> admitted;
    };

    double fill(Filling& step, const std::vector<Int>& ids, double budget_s, bool rounds_up = false) {
        const double token_s = own.token_s, alpha = own.alpha;
        double spent_s = 0;
        for (const Int id : ids) {
            Task& task = tasks[id];
            const Int given = task.place < 0 ? 0 : shares[task.place].tokens, before = task.computed + given;
            Int left = task.tokens - before;
            if (!left) continue;
            const double slope_s = token_s + 2 * alpha * double(task.history + before);
            double work_s = double(left) * (slope_s + alpha * double(left));
            if (spent_s + work_s > budget_s) {
                const double over_s = budget_s - spent_s;
                const Int fitting =
                    over_s <= 0 ? 0 : Int(2 * over_s / (slope_s + std::sqrt(slope_s * slope_s + 4 * alpha * over_s)));
                left = rounds_up ? std::min(fitting + 1, left) : fitting;
                if (!left && shares.empty()) left = 1;
                if (!left) break;
                work_s = double(left) * (slope_s + alpha * double(left));
            }
            if (task.place < 0) {
                if (!step.places) {
                    if (step.goes_past) continue;
                    break;
                }
                if (!task.computed) step.admitted.push_back(id);
                --step.places;
                task.place = Int(shares.size());
                shares.push_back(Share{id, 0});
            }
            shares[task.place].tokens += left;
            spent_s += work_s;
            if (spent_s >= budget_s) break;
        }
        return spent_s;
    }

    void end_filling(Instance& instance, const Filling& step) {
        for (const Int id : step.admitted) instance.queue->pull(id);
        for (const Share& share : shares) tasks[share.task].place = -1;
    }

    std::vector<Int> all_of(const Instance& instance) const {
        std::vector<Int> found = instance.begun, waiting = instance.queue->waiting();
        found.insert(found.end(), waiting.begin(), waiting.end());
        return found;
    }

    double factor(Int id) const { return setup.factors ? setup.factors[id] : 1.0; }

    double left_s(const Task& task) const {
        const Int left = task.left();
        return double(left) * (own.token_s + own.alpha * double(left + 2 * (task.history + task.computed))) * factor(task.id);
    }

    using Ranked = std::vector<std::pair<double, Int>>;

    static std::vector<Int> ranked(Ranked& keys) {
        std::sort(keys.begin(), keys.end());
        std::vector<Int> found;
        for (const auto& [key, id] : keys) found.push_back(id);
        return found;
    }

    // Reserve and MooreHodgson. `batching` holds: share, objective, share of backlog, least and most seconds of a step, sequences, aging.
    void reserve(Instance& instance) {
        std::vector<Int> ids = all_of(instance), first, late;
        if (ids.empty()) return;
        const double *config = setup.batching, latest_s = config[1] - own.base_s - now;
        double backlog_s = 0;
        if (setup.batching_kind == RESERVE) {
            Ranked on_time_keys, late_keys;
            for (const Int id : ids) {
                const double work_s = left_s(tasks[id]), ready_s = tasks[id].ready_s;
                backlog_s += work_s;
                if (work_s <= ready_s + latest_s) on_time_keys.push_back({work_s + config[6] * ready_s, id});
                else late_keys.push_back({ready_s, id});
            }
            first = ranked(on_time_keys), late = ranked(late_keys);
        } else {
            instance.queue->by_arrival(ids);
            std::vector<double> works_s, limits_s;
            for (const Int id : ids) {
                works_s.push_back(left_s(tasks[id]));
                limits_s.push_back(tasks[id].ready_s + latest_s);
            }
            split(ids, works_s, limits_s, first, late);
            backlog_s = summed(works_s, setup.compensates);
        }
        const double budget_s = std::min(std::max(config[2] * backlog_s, config[3]), config[4]);
        Filling step{Int(config[5]), false};
        double spent_s = fill(step, late, config[0] * budget_s);
        spent_s += fill(step, first, budget_s - spent_s);
        fill(step, late, budget_s - spent_s);
        end_filling(instance, step);
    }

    static void split(const std::vector<Int>& ids, const std::vector<double>& works_s, const std::vector<double>& limits_s,
                      std::vector<Int>& keeps, std::vector<Int>& gives_up) {
        const std::vector<bool> flags = kept(works_s, limits_s);
        keeps.clear(), gives_up.clear();
        for (std::size_t index = 0; index < ids.size(); ++index) (flags[index] ? keeps : gives_up).push_back(ids[index]);
    }

    // OnTime. `batching` holds: share, objective, patience, haste, aging, least and most step in units, share of backlog, sequences, unit.
    void on_time(Instance& instance) {
        const double* config = setup.batching;
        std::vector<Int> ids = all_of(instance), keeps, gives_up, others, other_up;
        instance.queue->by_arrival(ids);
        measure(instance, ids);
        if (ids.empty()) return instance.first_come_s.clear();
        std::vector<double> works_s, slacks_s;
        const double pace = instance.pace, slo_s = config[1];
        for (const Int id : ids) {
            works_s.push_back(own.request_s + left_s(tasks[id]));
            slacks_s.push_back((tasks[id].ready_s + slo_s - now) / pace);
        }
        const double all_s = summed(works_s, setup.compensates), unit_s = config[9] / pace;
        double budget_s = std::min(std::max(config[7] * all_s, config[5] * unit_s), config[6] * unit_s);
        budget_s = std::max(budget_s, own.floor_s);
        const auto by = [&](double budget_s, double rate, std::vector<Int>& keeps, std::vector<Int>& gives_up) {
            split(ids, works_s, work_by(slacks_s, budget_s, own.base_s, rate, all_s), keeps, gives_up);
        };
        by(budget_s, 1.0, keeps, gives_up);
        double share = 0;
        waits(instance, ids, works_s, budget_s);
        bool owes = false;
        for (const Int id : gives_up)
            owes = owes || now - tasks[id].ready_s >= config[2] * std::max(slo_s, instance.first_come_s[id]);
        if (config[0] > 0 && owes) {
            share = config[0];
            if (share < 1) by(budget_s, 1 - share, keeps, gives_up);
        }
        double shorter_s = budget_s;
        const double least_s = std::max(config[5] * unit_s / 8, own.floor_s), rate = 1 - share;
        while (share < 1 && !gives_up.empty() && shorter_s > least_s) {
            shorter_s = std::max(shorter_s / 2, least_s);
            by(shorter_s, rate, others, other_up);
            if (other_up.size() < gives_up.size()) keeps.swap(others), gives_up.swap(other_up), budget_s = shorter_s;
        }
        Filling step{Int(config[8]), true};
        double spent_s = share != 0 ? fill(step, ids, share * budget_s, true) : 0.0;
        spent_s += fill(step, hastened(instance, keeps, budget_s, rate), budget_s - spent_s);
        Ranked aged;
        for (const Int id : gives_up) aged.push_back({own.request_s + left_s(tasks[id]) + config[4] * tasks[id].ready_s, id});
        fill(step, ranked(aged), budget_s - spent_s);
        end_filling(instance, step);
        if (shares.empty()) return;
        std::vector<double> taken_s;
        for (const Share& share : shares) {
            const Task& task = tasks[share.task];
            const Int over = share.tokens + 2 * (task.history + task.computed);
            taken_s.push_back(double(share.tokens) * (own.token_s + own.alpha * double(over)));
        }
        instance.last_start_s = now;
        instance.last_step_s =
            own.base_s + own.request_s * double(shares.size()) + std::max(own.floor_s, summed(taken_s, setup.compensates));
    }

    void measure(Instance& instance, const std::vector<Int>& ids) {
        bool goes_on = false;
        for (const Int id : ids) goes_on = goes_on || instance.first_come_s.count(id);
        if (goes_on && now > instance.last_start_s) {
            const double pace = std::min(std::max((now - instance.last_start_s) / instance.last_step_s, 1 / 4.0), 4.0);
            ++instance.num_measured;
            instance.pace += std::max(0.1, 1 / double(instance.num_measured)) * (pace - instance.pace);
        }
        instance.last_start_s = NOT_YET;
    }

    void waits(Instance& instance, const std::vector<Int>& ids, const std::vector<double>& works_s, double budget_s) {
        std::unordered_map<Int, double> found;
        double done_s = 0;
        for (std::size_t index = 0; index < ids.size(); ++index) {
            done_s += works_s[index];
            const auto known = instance.first_come_s.find(ids[index]);
            const bool is_known = known != instance.first_come_s.end();
            found[ids[index]] = is_known ? known->second : instance.pace * whole_steps_s(done_s, budget_s, own.base_s);
        }
        instance.first_come_s.swap(found);
    }

    std::vector<Int> hastened(const Instance& instance, const std::vector<Int>& keeps, double budget_s, double rate) const {
        const double slo_s = setup.batching[1];
        if (keeps.size() < 2 || slo_s == INFINITE) return keeps;
        std::vector<double> works_s, slacks_s;
        for (const Int id : keeps) {
            works_s.push_back(own.request_s + left_s(tasks[id]));
            slacks_s.push_back(setup.batching[3] / instance.pace * (tasks[id].ready_s + slo_s - now));
        }
        const double all_s = summed(works_s, setup.compensates);
        std::vector<Int> order = shorter_first(works_s, work_by(slacks_s, budget_s, own.base_s, rate, all_s), all_s);
        for (Int& place : order) place = keeps[place];
        return order;
    }

    void end_all() {
        for (const Task& task : tasks) {
            request_session_id.push_back(task.session);
            request_turn.push_back(task.turn);
            request_history.push_back(task.history);
            request_tokens.push_back(task.tokens);
            request_worker.push_back(task.worker);
            request_ready_s.push_back(task.ready_s);
            request_started_s.push_back(task.started_s);
            request_landed_s.push_back(task.landed_s);
        }
        for (const Instance& each : instances) {
            instance_pool.push_back(each.pool);
            instance_busy_s.push_back(busy_until(each));
            instance_num_steps.push_back(each.num_steps);
            instance_num_finished.push_back(each.num_prefills);
            instance_tokens.push_back(each.tokens);
            instance_padded_tokens.push_back(each.padded_tokens);
        }
    }
};

}  // namespace

#include "../cluster/exports.hpp"

extern "C" {

void* prices_of(Ask ask) { return new Prices{ask, 0}; }
}
