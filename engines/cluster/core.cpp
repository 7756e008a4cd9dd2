// Runs of co-located workers, as engines.cluster.simulation makes them of Python objects: the same events in the same order, and the
// same arithmetic, so that both leave the same numbers to the last bit. What a policy of a user's own decides stays in Python.
//
// Names are those of the Python modules, which say what each does and why.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <deque>
#include <limits>
#include <list>
#include <queue>
#include <set>
#include <unordered_map>
#include <utility>
#include <vector>

namespace {

using Int = std::int64_t;
const double NOT_YET = std::numeric_limits<double>::quiet_NaN();
const double INFINITE = std::numeric_limits<double>::infinity();

enum Question : Int { LAYERS, HEAD, LINE, LAW, STEP };

// Asks Python: of worker `cost` the numbers of `question`, into `out`. Returns how many there are, or -1 to stop the run.
using Ask = Int (*)(Int question, Int cost, Int n, const Int* in, double* out);

enum Batching : Int { ONE_BY_ONE, PREFILL_FIRST, CHUNKED };
enum Binding : Int { ROUND_ROBIN, LEAST_KV, FEWEST_SESSIONS };

struct Stopped {};

struct Line {
    double base, slope, floor;
};

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

// WorkerCost, or any other by asking for each step.
struct Cost {
    Ask ask;
    Int id;
    bool is_composed;
    double share, least_s, sequence_s, fixed_s, row_s, prefill_s;
    std::vector<double> layers, heads;
    std::vector<Line> lines;
    std::vector<Law> laws;
    std::vector<double> answer = std::vector<double>(4096);

    Int numbers(Question question, Int n, const Int* in = nullptr) {
        const Int num = ask(question, id, n, in, answer.data());
        if (num < 0) throw Stopped{};
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

    // A whole step's of n sequences, and that of their attention alone by the sign.
    const Line& line(std::vector<Line>& known, Int n, Int sign) {
        if (n >= Int(known.size())) known.resize(std::max<Int>(n + 1, 2 * Int(known.size())), Line{NOT_YET, 0, 0});
        if (std::isnan(known[n].base)) {
            numbers(LINE, sign * n);
            known[n] = Line{answer[0], answer[1], answer[2]};
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

    std::vector<Line> attention;

    double step_s(const std::vector<Chunk>& chunks, Int decoding, Int context) {
        const Int num = Int(chunks.size());
        if (!is_composed) {
            std::vector<Int> in{decoding, context};
            for (const Chunk& each : chunks) {
                in.push_back(each.history);
                in.push_back(each.tokens);
            }
            numbers(STEP, num, in.data());
            return answer[0];
        }
        Int rows = decoding;
        double attention_s = 0.0;
        if (num) {
            const Law& prompt = law(num);
            for (const Chunk& each : chunks) {
                rows += each.tokens;
                attention_s += prompt.at(double(each.tokens) * (double(each.history) + 0.5 * double(each.tokens + 1)));
            }
        }
        if (decoding) {
            const Line& found = line(attention, decoding, -1);
            attention_s += std::max(found.base + found.slope * double(context), found.floor);
        }
        const double linear_s = number(layers, LAYERS, rows), logits_s = number(heads, HEAD, num + decoding);
        const double device_s = share * linear_s + attention_s + logits_s;
        const double busy_s = std::max(device_s, least_s) + double(decoding + num) * sequence_s;
        return busy_s + fixed_s + (row_s != 0 ? double(rows) : 0.0) * row_s + double(num) * prefill_s;
    }

    const Line& decode_line(Int decoding) { return line(lines, decoding, 1); }
};

struct Live {
    Int session = 0;
    Int worker = 0;
    Int round_index = 0;
    Int row = -1;
    Int context = 0;
    Int left = 0;
    double token_s = 0;
    Int joined_step = -1, finish_step = -1, stay_start = -1;
    double first_gap_s = 0;
};

struct Task {
    Int id, order, history, tokens, computed;
    bool is_recompute;
    Int left() const { return tokens - computed; }
};

struct Share {
    Int task, tokens;
};

struct Run {
    double start_s = 0, first_s = 0, growth_s = 0;
    Int steps = 0;

    double after_s(Int num) const { return double(num) * first_s + growth_s * double(num * (num - 1) / 2); }

    Int steps_by(double now) const {
        const double elapsed = now - start_s;
        Int guess;
        if (growth_s != 0) {
            const double linear = first_s / growth_s - 0.5;
            guess = Int(std::floor(std::sqrt(linear * linear + 2 * elapsed / growth_s) - linear));
        } else {
            guess = Int(std::floor(elapsed / first_s));
        }
        while (guess < steps && after_s(guess + 1) <= elapsed) ++guess;
        while (guess > 0 && after_s(guess) > elapsed) --guess;
        return std::min(guess, steps);
    }

    Run cut_at(double now) const {
        Int done = steps_by(now);
        if (done == 0 || start_s + after_s(done) < now) ++done;
        return Run{start_s, first_s, growth_s, std::min(done, steps)};
    }
};

struct Idle {
    Int order, tokens;
    double keep_until_s;
};

struct WorkerKv {
    Int capacity = 0, held = 0, idle = 0, peak = 0, evicted = 0;
    std::list<Idle> entries;
    std::unordered_map<Int, std::list<Idle>::iterator> place;
    double last_keep_s = 0;

    Int free() const { return capacity - held - idle; }

    Int evictable(double now) const {
        Int found = idle;
        if (now < last_keep_s) {
            for (const Idle& each : entries) found -= each.keep_until_s > now ? each.tokens : 0;
        }
        return found;
    }

    Int kept(Int order, double now) const {
        const auto found = place.find(order);
        return found != place.end() && found->second->keep_until_s > now ? found->second->tokens : 0;
    }

    void hold(Int tokens) {
        held += tokens;
        peak = std::max(peak, held + idle);
    }

    void park(Int order, Int tokens, double keep_until_s) {
        held -= tokens;
        idle += tokens;
        place[order] = entries.insert(entries.end(), Idle{order, tokens, keep_until_s});
        last_keep_s = std::max(last_keep_s, keep_until_s);
    }

    Int resume(Int order) {
        const auto found = place.find(order);
        if (found == place.end()) return 0;
        const Int tokens = found->second->tokens;
        entries.erase(found->second);
        place.erase(found);
        idle -= tokens;
        held += tokens;
        return tokens;
    }

    bool make_room(Int tokens, double now, bool force) {
        Int missing = tokens - free();
        if (missing > 0) missing = evict(missing, now);
        if (missing > 0 && force) missing = evict(missing, INFINITE);
        return missing <= 0;
    }

    Int evict(Int tokens, double until_s) {
        for (auto entry = entries.begin(); entry != entries.end() && tokens > 0;) {
            const auto next = std::next(entry);
            if (entry->keep_until_s <= until_s) {
                const Int taken = std::min(tokens, entry->tokens);
                entry->tokens -= taken;
                idle -= taken;
                evicted += taken;
                tokens -= taken;
                if (!entry->tokens) {
                    place.erase(entry->order);
                    entries.erase(entry);
                }
            }
            entry = next;
        }
        return tokens;
    }
};

struct Worker {
    Cost* cost = nullptr;
    WorkerKv kv;
    std::deque<Int> queue;
    std::vector<Int> begun, unseen;
    std::vector<Share> shares;
    bool is_busy = false, runs = false, decodes_along = false;
    Run run, ran;
    Int version = 0, num_sessions = 0, num_prefills = 0, prefilled_tokens = 0, num_preemptions = 0;
    double busy_s = 0, step_s = 0, busy_decode_s = 0;
    // The decode batch.
    Int size = 0, steps = 0, context = 0;
    double token_s = 0;
    std::set<Int> members;
    std::set<std::pair<Int, Int>> finish;
    std::vector<Int> joined;
    // Its log.
    std::vector<double> gaps;
    std::vector<Int> counts;
};

enum Kind : Int { DUE, READY, ROUTE, FINISH, END_RUN, END };

struct Event {
    double time_s;
    Int number;
    Kind kind;
    Int subject, version;
    bool operator>(const Event& other) const {
        return time_s != other.time_s ? time_s > other.time_s : number > other.number;
    }
};

}  // namespace

extern "C" {

struct Setup {
    Int num_sessions, num_workers, num_costs;
    const double* arrival_s;
    const Int* first_round;  // of each session, and behind the last
    const Int *prefill, *decode;
    const double* delay_s;
    const Int *worker_cost, *worker_capacity;
    const double* cost_terms;  // seven of each cost: whether it is composed, then its constants
    Int batching, max_tokens, max_seqs, binding, keeps, schedules_ahead, max_run_steps, max_live;
    double keep_s, request_s, response_s, until_s;
    Ask ask;
};

struct Columns {
    const void *session_worker, *session_finished_s;
    Int num_rounds;
    const void *round_session, *round_index, *round_ready_s, *round_history, *round_first_token_s, *round_finished_s;
    Int num_tasks;
    const void *task_row, *task_recomputes, *task_worker, *task_history, *task_tokens, *task_computed, *task_ready_s,
        *task_started_s, *task_finished_s;
    Int num_stays;
    const void *stay_row, *stay_first_gap_s, *stay_start, *stay_end, *stay_worker;
};

struct Totals {
    Int num_arrived, num_live, num_events, has_too_many;
    double now;
};
}

namespace {

struct Simulation {
    const Setup& setup;
    std::vector<Cost> costs;
    std::vector<Worker> workers;
    std::vector<Live> lives;
    std::vector<Task> tasks;
    std::priority_queue<Event, std::vector<Event>, std::greater<Event>> events;
    double now = 0;
    Int num_scheduled = 0, num_due = 0, num_live = 0, turn = 0;
    bool is_stopped = false, has_too_many = false;

    std::vector<Int> session_worker;
    std::vector<double> session_finished_s;
    std::vector<Int> round_session, round_index, round_history;
    std::vector<double> round_ready_s, round_first_token_s, round_finished_s;
    std::vector<Int> task_row, task_recomputes, task_worker, task_history, task_tokens, task_computed;
    std::vector<double> task_ready_s, task_started_s, task_finished_s;
    std::vector<Int> stay_row, stay_start, stay_end, stay_worker;
    std::vector<double> stay_first_gap_s;
    std::vector<Chunk> chunks;

    explicit Simulation(const Setup& given) : setup(given) {
        for (Int i = 0; i < given.num_costs; ++i) {
            const double* t = given.cost_terms + 7 * i;
            Cost cost;
            cost.ask = given.ask;
            cost.id = i;
            cost.is_composed = t[0] != 0;
            cost.share = t[1], cost.least_s = t[2], cost.sequence_s = t[3];
            cost.fixed_s = t[4], cost.row_s = t[5], cost.prefill_s = t[6];
            costs.push_back(std::move(cost));
        }
        const Int num_rounds = given.first_round[given.num_sessions];
        lives.reserve(given.num_sessions);
        for (auto* each : {&session_worker, &round_session, &round_index, &round_history, &task_row, &task_recomputes, &task_worker,
                           &task_history, &task_tokens, &task_computed, &stay_row, &stay_start, &stay_end, &stay_worker})
            each->reserve(num_rounds);
        for (auto* each : {&session_finished_s, &round_ready_s, &round_first_token_s, &round_finished_s, &task_ready_s,
                           &task_started_s, &task_finished_s, &stay_first_gap_s})
            each->reserve(num_rounds);
        workers.resize(given.num_workers);
        for (Int i = 0; i < given.num_workers; ++i) {
            workers[i].cost = &costs[given.worker_cost[i]];
            workers[i].kv.capacity = given.worker_capacity[i];
        }
    }

    void at(double time_s, Kind kind, Int subject, Int version = 0) {
        events.push(Event{time_s, ++num_scheduled, kind, subject, version});
    }

    void run() {
        due(-1);
        while (!events.empty() && !is_stopped) {
            const Event event = events.top();
            if (event.time_s > setup.until_s) {
                now = setup.until_s;
                return;
            }
            events.pop();
            now = event.time_s;
            switch (event.kind) {
                case DUE: due(event.subject); break;
                case READY: ready(event.subject); break;
                case ROUTE: route(event.subject, false); break;
                case FINISH: finish(event.subject); break;
                case END_RUN: end_run(event.subject, event.version); break;
                case END: end(event.subject); break;
            }
        }
    }

    // ---- sessions

    void due(Int session) {
        if (num_due < setup.num_sessions) {
            at(setup.arrival_s[num_due], DUE, num_due);
            ++num_due;
        } else {
            num_due = setup.num_sessions + 1;
        }
        if (session >= 0) begin(session);
    }

    bool all_arrived() const { return num_due > setup.num_sessions; }

    Int kv_tokens(const Worker& worker) const {
        const Int ahead = worker.runs ? worker.run.steps - worker.run.steps_by(now) : 0;
        return worker.kv.held - ahead * worker.size + worker.kv.idle;
    }

    Int bound() {
        if (setup.binding == ROUND_ROBIN) return turn++ % Int(workers.size());
        Int best = 0;
        std::pair<Int, Int> least{0, 0};
        for (Int i = 0; i < Int(workers.size()); ++i) {
            const Int kv = kv_tokens(workers[i]), num = workers[i].num_sessions;
            const auto found = setup.binding == LEAST_KV ? std::make_pair(kv, num) : std::make_pair(num, kv);
            if (i == 0 || found < least) best = i, least = found;
        }
        return best;
    }

    void begin(Int session) {
        const Int order = Int(lives.size());
        Live live;
        live.session = session;
        ++num_live;
        if (setup.max_live >= 0 && num_live > setup.max_live) {
            has_too_many = true;
            is_stopped = true;
        }
        live.worker = bound();
        ++workers[live.worker].num_sessions;
        lives.push_back(live);
        session_worker.push_back(live.worker);
        session_finished_s.push_back(NOT_YET);
        ready(order);
    }

    Int round_of(const Live& live) const { return setup.first_round[live.session] + live.round_index; }

    void ready(Int order) {
        Live& live = lives[order];
        const Int round = round_of(live);
        live.row = Int(round_session.size());
        live.left = setup.decode[round];
        round_session.push_back(live.session);
        round_index.push_back(live.round_index);
        round_ready_s.push_back(now);
        round_history.push_back(live.context);
        round_first_token_s.push_back(NOT_YET);
        round_finished_s.push_back(NOT_YET);
        if (setup.request_s != 0) at(now + setup.request_s, ROUTE, order);
        else route(order, false);
    }

    void route(Int order, bool is_recompute) {
        const Live& live = lives[order];
        const Int history = is_recompute ? 0 : live.context;
        const Int tokens = is_recompute ? live.context : setup.prefill[round_of(live)];
        const Int id = Int(tasks.size());
        tasks.push_back(Task{id, order, history, tokens, 0, is_recompute});
        task_row.push_back(live.row);
        task_recomputes.push_back(is_recompute);
        task_worker.push_back(live.worker);
        task_history.push_back(history);
        task_tokens.push_back(tokens);
        task_computed.push_back(-1);
        task_ready_s.push_back(now);
        task_started_s.push_back(NOT_YET);
        task_finished_s.push_back(NOT_YET);
        Worker& worker = workers[live.worker];
        worker.unseen.push_back(id);
        if (!setup.schedules_ahead || (!worker.is_busy && !worker.runs)) see(worker);
        poke(live.worker);
    }

    void see(Worker& worker) {
        for (const Int id : worker.unseen) {
            if (tasks[id].is_recompute) worker.queue.push_front(id);
            else worker.queue.push_back(id);
        }
        worker.unseen.clear();
    }

    void end(Int order) {
        session_finished_s[order] = now;
        --workers[lives[order].worker].num_sessions;
        --num_live;
        if (!num_live && all_arrived()) is_stopped = true;
    }

    // ---- between steps

    void poke(Int w) {
        Worker& worker = workers[w];
        if (!worker.runs) {
            if (!worker.is_busy) boundary(w);
            return;
        }
        const Run cut = worker.run.cut_at(now);
        if (cut.steps < worker.run.steps) schedule_run(w, cut, worker.run.steps);
    }

    void boundary(Int w) {
        Worker& worker = workers[w];
        worker.is_busy = true;
        ++worker.version;
        for (;;) {
            if (!worker.queue.empty() || !worker.begun.empty()) {
                bool decodes = false;
                plan(worker, decodes);
                if (!worker.shares.empty()) {
                    start(w, decodes);
                    see(worker);
                    return;
                }
            }
            if (!worker.size && worker.unseen.empty()) break;
            if (!worker.size) {
                see(worker);
                continue;
            }
            const Int most = worker.unseen.empty() ? setup.max_run_steps : 1;
            const Int steps = reserve(w, std::min(worker.finish.begin()->first - worker.steps, most));
            if (steps) {
                schedule_run(w, decode_run(worker, steps), steps);
                break;
            }
        }
        see(worker);
        worker.is_busy = false;
    }

    // What the batching policy says: shares of the next step, taken from the queue.
    void plan(Worker& worker, bool& decodes) {
        worker.shares.clear();
        const bool is_empty = !worker.size && worker.begun.empty();
        Int room = is_empty ? worker.kv.capacity - worker.kv.held : worker.kv.free() + worker.kv.evictable(now);
        const auto need_of = [&](const Task& task) {
            return task.history + task.tokens + 1 - (is_empty ? 0 : worker.kv.kept(task.order, now));
        };
        if (setup.batching == ONE_BY_ONE) {
            if (!worker.begun.empty()) {
                worker.shares.push_back(Share{worker.begun[0], tasks[worker.begun[0]].left()});
            } else if (!worker.queue.empty() && need_of(tasks[worker.queue.front()]) <= room) {
                worker.shares.push_back(Share{worker.queue.front(), tasks[worker.queue.front()].tokens});
                worker.queue.pop_front();
            }
            return;
        }
        const bool is_chunked = setup.batching == CHUNKED;
        Int budget = is_chunked ? std::max<Int>(setup.max_tokens - worker.size, 1) : setup.max_tokens;
        for (const Int id : worker.begun) {
            const Int tokens = is_chunked ? std::min(tasks[id].left(), budget) : tasks[id].left();
            if (!tokens) break;
            worker.shares.push_back(Share{id, tokens});
            budget -= tokens;
        }
        Int places = setup.max_seqs - worker.size - Int(worker.begun.size());
        while (!worker.queue.empty() && places > 0 && (!is_chunked || budget > 0)) {
            const Task& task = tasks[worker.queue.front()];
            const Int need = need_of(task);
            if (need > room || (!is_chunked && !worker.shares.empty() && task.tokens > budget)) break;
            const Int tokens = is_chunked ? std::min(task.tokens, budget) : task.tokens;
            worker.shares.push_back(Share{task.id, tokens});
            worker.queue.pop_front();
            budget -= tokens;
            room -= need;
            --places;
        }
        decodes = is_chunked;
    }

    // ---- steps with prefills

    void start(Int w, bool decodes) {
        Worker& worker = workers[w];
        for (Share& share : worker.shares) admit(worker, share);
        const Int decoding = decodes && reserve(w, 1) ? worker.size : 0;
        const Int context = decoding ? worker.context : 0;
        chunks.clear();
        const bool had_begun = !worker.begun.empty();
        for (const Share& share : worker.shares) {
            Task& task = tasks[share.task];
            chunks.push_back(Chunk{task.history + task.computed, share.tokens});
            if (!task.computed) {
                task_started_s[task.id] = now;
                if (share.tokens < task.tokens) worker.begun.push_back(task.id);
            }
            task.computed += share.tokens;
            worker.prefilled_tokens += share.tokens;
        }
        if (had_begun) {
            auto& begun = worker.begun;
            begun.erase(std::remove_if(begun.begin(), begun.end(), [&](Int id) { return !tasks[id].left(); }), begun.end());
        }
        worker.busy_s += worker.step_s;
        worker.step_s = worker.cost->step_s(chunks, decoding, context);
        worker.decodes_along = decoding > 0;
        worker.ran = Run{now, worker.step_s, 0.0, 1};
        at(now + worker.step_s, FINISH, w);
    }

    void admit(Worker& worker, Share& share) {
        Task& task = tasks[share.task];
        if (task.computed) return;
        const bool is_whole = share.tokens == task.tokens;
        const Int missing = task.history - worker.kv.resume(task.order);
        task.history -= missing;
        task.tokens += missing;
        worker.kv.make_room(task.tokens + 1, now, true);
        worker.kv.hold(task.tokens + 1);
        share.tokens = is_whole ? task.tokens : std::min(share.tokens, task.tokens);
    }

    void finish(Int w) {
        Worker& worker = workers[w];
        if (worker.decodes_along) decoded(worker, worker.ran);
        for (const Share& share : worker.shares) {
            const Task& task = tasks[share.task];
            if (task.left()) continue;
            ++worker.num_prefills;
            task_computed[task.id] = task.tokens;
            task_finished_s[task.id] = now;
            land(worker, task);
        }
        worker.is_busy = false;
        boundary(w);
    }

    void land(Worker& worker, const Task& task) {
        Live& live = lives[task.order];
        live.context = task.history + task.tokens + 1;
        --live.left;
        if (task.is_recompute) log_stay(live, now - live.token_s, 0, 0);
        else round_first_token_s[live.row] = now + setup.response_s;
        live.token_s = now;
        if (live.left) join(worker, task.order);
        else round_done(worker, task.order);
    }

    void log_stay(const Live& live, double first_gap_s, Int from, Int to) {
        stay_row.push_back(live.row);
        stay_first_gap_s.push_back(first_gap_s);
        stay_start.push_back(from);
        stay_end.push_back(to);
        stay_worker.push_back(live.worker);
    }

    // ---- decoding

    void join(Worker& worker, Int order) {
        Live& live = lives[order];
        live.joined_step = worker.steps;
        live.finish_step = worker.steps + live.left;
        live.stay_start = -1;
        worker.members.insert(order);
        worker.finish.insert({live.finish_step, order});
        worker.joined.push_back(order);
        worker.context += live.context;
        ++worker.size;
    }

    void leave(Worker& worker, Int order) {
        Live& live = lives[order];
        worker.members.erase(order);
        worker.finish.erase({live.finish_step, order});
        const Int steps = worker.steps - live.joined_step;
        live.context += steps;
        live.left -= steps;
        worker.context -= live.context;
        --worker.size;
        if (live.stay_start < 0) {
            worker.joined.erase(std::find(worker.joined.begin(), worker.joined.end(), order));
        } else {
            live.token_s = worker.token_s;
            log_stay(live, live.first_gap_s, live.stay_start, Int(worker.gaps.size()));
        }
    }

    Run decode_run(const Worker& worker, Int steps) {
        const Line& line = worker.cost->decode_line(worker.size);
        const double first = line.base + line.slope * double(worker.context), growth = line.slope * double(worker.size);
        if (first >= line.floor || growth == 0)
            return Run{now, std::max(first, line.floor), first >= line.floor ? growth : 0.0, steps};
        return Run{now, line.floor, 0.0, std::min(steps, Int(std::ceil((line.floor - first) / growth)))};
    }

    void advance(Worker& worker, const Run& run) {
        if (worker.joined.empty() && run.start_s == worker.token_s) {
            worker.gaps.push_back(run.after_s(run.steps) / double(run.steps));
            worker.counts.push_back(run.steps);
        } else {
            const double first_end = run.start_s + run.first_s;
            worker.gaps.push_back(first_end - worker.token_s);
            worker.counts.push_back(1);
            for (const Int order : worker.joined) {
                lives[order].first_gap_s = first_end - lives[order].token_s;
                lives[order].stay_start = Int(worker.gaps.size());
            }
            worker.joined.clear();
            if (run.steps > 1) {
                worker.gaps.push_back((run.after_s(run.steps) - run.first_s) / double(run.steps - 1));
                worker.counts.push_back(run.steps - 1);
            }
        }
        worker.steps += run.steps;
        worker.context += run.steps * worker.size;
        worker.token_s = now;
    }

    void decoded(Worker& worker, const Run run) {
        advance(worker, run);
        while (!worker.finish.empty() && worker.finish.begin()->first <= worker.steps) {
            finished.push_back(worker.finish.begin()->second);
            leave(worker, finished.back());
        }
        for (const Int order : finished) round_done(worker, order);
        finished.clear();
    }
    std::vector<Int> finished;

    void round_done(Worker& worker, Int order) {
        Live& live = lives[order];
        const double end_s = now + setup.response_s;
        round_finished_s[live.row] = end_s;
        const double delay_s = setup.delay_s[round_of(live)];
        ++live.round_index;
        const bool goes_on = round_of(live) < setup.first_round[live.session + 1];
        if (goes_on) at(end_s + delay_s, READY, order);
        else at(end_s, END, order);
        if (goes_on && setup.keeps) worker.kv.park(order, live.context, now + setup.keep_s);
        else worker.kv.held -= live.context;
    }

    Int reserve(Int w, Int steps) {
        Worker& worker = workers[w];
        WorkerKv& kv = worker.kv;
        while (worker.size) {
            const Int size = worker.size;
            if (kv.make_room(steps * size, now, false)) {
                kv.hold(steps * size);
                return steps;
            }
            if (kv.make_room(size, now, true)) {
                steps = std::min(steps, kv.free() / size);
                kv.hold(steps * size);
                return steps;
            }
            preempt(worker, *worker.members.rbegin());
        }
        return 0;
    }

    void preempt(Worker& worker, Int order) {
        ++worker.num_preemptions;
        leave(worker, order);
        worker.kv.held -= lives[order].context;
        route(order, true);
    }

    void schedule_run(Int w, const Run& run, Int reserved) {
        Worker& worker = workers[w];
        if (run.steps < reserved) worker.kv.held -= (reserved - run.steps) * worker.size;
        worker.run = run;
        worker.runs = true;
        ++worker.version;
        at(run.start_s + run.after_s(run.steps), END_RUN, w, worker.version);
    }

    void end_run(Int w, Int version) {
        Worker& worker = workers[w];
        if (version != worker.version || !worker.runs) return;
        worker.runs = false;
        worker.busy_decode_s += now - worker.run.start_s;
        decoded(worker, worker.run);
        boundary(w);
    }
};

}  // namespace

extern "C" {

Simulation* simulate(const Setup* setup, Totals* totals) {
    auto* made = new Simulation(*setup);
    try {
        made->run();
    } catch (const Stopped&) {
        // Python has the reason.
    }
    made->lives = {};
    made->tasks = {};
    *totals = Totals{Int(made->session_worker.size()), made->num_live,   made->num_scheduled - Int(made->events.size()),
                     made->has_too_many,      made->now};
    return made;
}

void columns_of(const Simulation* made, Columns* out) {
    const Simulation& s = *made;
    *out = Columns{s.session_worker.data(),      s.session_finished_s.data(),
                   Int(s.round_session.size()),  s.round_session.data(),
                   s.round_index.data(),         s.round_ready_s.data(),
                   s.round_history.data(),       s.round_first_token_s.data(),
                   s.round_finished_s.data(),    Int(s.task_row.size()),
                   s.task_row.data(),            s.task_recomputes.data(),
                   s.task_worker.data(),         s.task_history.data(),
                   s.task_tokens.data(),         s.task_computed.data(),
                   s.task_ready_s.data(),        s.task_started_s.data(),
                   s.task_finished_s.data(),
                   Int(s.stay_row.size()),       s.stay_row.data(),
                   s.stay_first_gap_s.data(),    s.stay_start.data(),
                   s.stay_end.data(),            s.stay_worker.data()};
}

// Of one worker: sizes and counts, seconds of prefill steps and of decode runs, and the gaps of its log.
Int worker_of(const Simulation* made, Int w, Int* counts, double* seconds, const double** gaps, const Int** lengths) {
    const Worker& worker = made->workers[w];
    counts[0] = worker.num_prefills, counts[1] = worker.prefilled_tokens, counts[2] = worker.kv.peak;
    counts[3] = worker.kv.evicted, counts[4] = worker.num_preemptions;
    seconds[0] = worker.busy_s + worker.step_s, seconds[1] = worker.busy_decode_s;
    *gaps = worker.gaps.data(), *lengths = worker.counts.data();
    return Int(worker.gaps.size());
}

void let_go(Simulation* made) { delete made; }
}
