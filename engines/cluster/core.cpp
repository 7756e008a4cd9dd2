// Simulates workers that prefill and decode, like engines.cluster.simulation: the same events in the same order, and the same arithmetic.
// So both give the same numbers to the last bit. Runs with a user's own policies stay in Python.
//
// The Python modules use the same names, and say what each does and why.

#include <deque>
#include <initializer_list>
#include <list>
#include <numeric>
#include <queue>
#include <set>
#include <string>
#include <unordered_map>

#include "core.hpp"

namespace {

enum Batching : Int { ONE_BY_ONE, PREFILL_FIRST, CHUNKED };
enum Binding : Int { ROUND_ROBIN, LEAST_KV, FEWEST_SESSIONS, LEAST_COST };
enum Routing : Int { LOCAL, REMOTE, CONDITIONAL, ADAPTIVE, KV_AWARE };
enum Choice : Int { SHORTEST, IN_TURN, RANDOM, SHARED };
enum Signal : Int { DONE, AGE, BACKLOG };
enum Reason : Int { COLOCATED, ALWAYS_REMOTE, NOT_BYPASSED, SHORT, PREFILL_BUSY, TTFT_SLACK, ITL_SLACK, COST, BY_KV };
enum Content : Int { HISTORY, INCREMENT };

struct Line {
    double base, slope, floor;
};

// WorkerCost with a Composed price. For any other cost we ask Python for the time of each step.
struct Cost : Prices {
    bool is_composed;
    double share, least_s, sequence_s, fixed_s, row_s, prefill_s;
    std::vector<Line> lines, attention;

    Cost(Ask ask, Int id, const double* terms)
        : Prices{ask, id},
          is_composed(terms[0]),
          share(terms[1]),
          least_s(terms[2]),
          sequence_s(terms[3]),
          fixed_s(terms[4]),
          row_s(terms[5]),
          prefill_s(terms[6]) {}

    // The time of n decoding sequences, a line over their context: of a whole step (`sign` 1) or of attention alone (`sign` -1).
    const Line& line(std::vector<Line>& known, Int n, Int sign) {
        if (n >= Int(known.size())) known.resize(std::max<Int>(n + 1, 2 * Int(known.size())), Line{NOT_YET, 0, 0});
        if (std::isnan(known[n].base)) {
            numbers(LINE, sign * n);
            known[n] = Line{answer[0], answer[1], answer[2]};
        }
        return known[n];
    }

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
    Int lent = 0;
    double token_s = 0;
    Int joined_step = -1, finish_step = -1, stay_start = -1;
    double first_gap_s = 0;
};

struct Task {
    Int id, order, history, tokens;
    bool is_recompute, is_initial;
    double ready_s;
    Int computed = 0, postponed = 0;
    double estimate_s = 0;
    Int left() const { return tokens - computed; }
};

struct Share {
    Int task, tokens;
};

struct Plan {
    std::vector<Share> shares;
    bool decodes = false;
};

// PrefillQueue; ReorderingQueue if `lookahead` is above 1; InFlightFirst or OnTimeQueue if the flag of that name is set.
struct Queue {
    std::deque<Task>& tasks;
    Int lookahead;
    double ttft_s;
    bool is_in_flight_first, is_on_time;
    double share, patience;
    std::deque<Int> waiting;
    Int num_in_flight = 0;
    double backlog_s = 0;
    Int backlog_tokens = 0;
    // The window that we searched last, and its best ordering.
    double searched_s = NOT_YET;
    std::vector<Int> window, best;

    void push(Int id) {
        const Task& task = tasks[id];
        if (is_in_flight_first && !task.is_initial) waiting.insert(waiting.begin() + num_in_flight++, id);
        else if (task.is_recompute && !is_on_time) waiting.push_front(id);
        else waiting.push_back(id);
        backlog_s += tasks[id].estimate_s;
        backlog_tokens += tasks[id].tokens;
        if (is_on_time) first_come_s[id] = backlog_s, chosen_s = NOT_YET;
    }

    Int peek(double now) {
        if (is_on_time) return chosen(now);
        if (lookahead <= 1 || waiting.size() <= 1) return waiting.front();
        search(now);
        return window[best[0]];
    }

    // For OnTimeQueue: each task's wait first come, first served; work owed now and once `choice` is taken; when we chose it.
    std::unordered_map<Int, double> first_come_s;
    double owed_s = 0, owed_then_s = 0, chosen_s = NOT_YET;
    Int choice = -1;

    Int chosen(double now) {
        if (chosen_s == now) return choice;
        chosen_s = now;
        std::vector<Int> ids(waiting.begin(), waiting.end());
        std::sort(ids.begin(), ids.end(), [&](Int one, Int other) {
            const double a = tasks[one].ready_s, b = tasks[other].ready_s;
            return a != b ? a < b : one < other;
        });
        std::vector<double> works_s(ids.size()), limits_s(ids.size());
        const auto split = [&](double rate) {
            for (std::size_t place = 0; place < ids.size(); ++place) {
                works_s[place] = tasks[ids[place]].estimate_s;
                limits_s[place] = rate * (tasks[ids[place]].ready_s + ttft_s - now);
            }
            return kept(works_s, limits_s);
        };
        std::vector<bool> keeps = split(1.0);
        bool owes = false;
        for (std::size_t place = 0; share > 0 && place < ids.size(); ++place) {
            const double waited_s = now - tasks[ids[place]].ready_s;
            owes = owes || (!keeps[place] && waited_s >= patience * std::max(ttft_s, first_come_s[ids[place]]));
        }
        if (owes && share < 1) keeps = split(1 - share);
        owed_then_s = owed_s;
        if (owes && owed_s >= 0) {
            owed_then_s = owed_s - (1 - share) * tasks[ids[0]].estimate_s;
            return choice = ids[0];
        }
        const std::size_t place = std::find(keeps.begin(), keeps.end(), true) - keeps.begin();
        if (place == ids.size()) return choice = ids[0];
        owed_then_s = owed_s + share * tasks[ids[place]].estimate_s;
        if (!owes) owed_then_s = std::min(owed_then_s, 0.0);
        return choice = ids[place];
    }

    Int take(double now) {
        if (is_on_time) {
            const auto place = std::find(waiting.begin(), waiting.end(), chosen(now));
            for (auto before = waiting.begin(); before != place; ++before) ++tasks[*before].postponed;
            waiting.erase(place);
            waiting.push_front(choice);
            first_come_s.erase(choice);
            owed_s = owed_then_s, chosen_s = NOT_YET;
        }
        if (lookahead > 1 && waiting.size() > 1) {
            search(now);
            for (Int place = 0; place < Int(best.size()); ++place) {
                if (place > best[place]) ++tasks[window[best[place]]].postponed;
                waiting[place] = window[best[place]];
            }
            searched_s = NOT_YET;
        }
        num_in_flight = std::max<Int>(0, num_in_flight - 1);
        const Int id = waiting.front();
        waiting.pop_front();
        backlog_tokens -= tasks[id].tokens;
        backlog_s = waiting.empty() ? 0.0 : backlog_s - tasks[id].estimate_s;
        return id;
    }

    Int satisfied(const std::vector<Int>& ordering, double now) const {
        double completion_s = 0.0;
        Int count = 0;
        for (const Int position : ordering) {
            const Task& task = tasks[window[position]];
            completion_s += task.estimate_s;
            count += (now - task.ready_s) + completion_s <= ttft_s;
        }
        return count;
    }

    void search(double now) {
        const Int num = std::min(lookahead, Int(waiting.size()));
        if (searched_s == now && num == Int(window.size()) && std::equal(window.begin(), window.end(), waiting.begin())) return;
        searched_s = now;
        window.assign(waiting.begin(), waiting.begin() + num);
        best.resize(num);
        std::iota(best.begin(), best.end(), 0);
        Int most = satisfied(best, now);
        if (most == num) return;
        std::vector<Int> ordering = best;
        while (std::next_permutation(ordering.begin(), ordering.end())) {
            bool may = true;
            for (Int place = 0; place < num; ++place)
                may = may && !(place > ordering[place] && tasks[window[ordering[place]]].postponed >= lookahead);
            const Int count = may ? satisfied(ordering, now) : 0;
            if (count > most) best = ordering, most = count;
        }
    }
};

// Window: the mean of the TTFTs of the last `length_s` seconds.
struct Window {
    double length_s = 0, total = 0;
    std::deque<std::pair<double, double>> entries;

    void add(double now, double value) {
        entries.push_back({now, value});
        total += value;
    }

    double mean(double now) {
        const double oldest = now - length_s;
        while (!entries.empty() && entries.front().first <= oldest) {
            total -= entries.front().second;
            entries.pop_front();
        }
        if (entries.empty()) total = 0.0;
        return entries.empty() ? 0.0 : total / double(entries.size());
    }
};

struct TokenRun {
    double start_s, period_s;
    Int steps, tokens;
    double gap_s;

    Int tokens_after(double oldest) const {
        if (start_s >= oldest) return steps * tokens;
        return std::max<Int>(0, steps - Int(std::floor((oldest - start_s) / period_s))) * tokens;
    }
};

struct TokenWindow {
    double length_s = 0, total = 0;
    Int count = 0;
    std::deque<TokenRun> runs;
    std::vector<TokenRun> fresh;

    double mean(double now, const std::vector<TokenRun>& current) {
        for (const TokenRun& run : fresh) {
            total += double(run.steps * run.tokens) * run.gap_s;
            count += run.steps * run.tokens;
        }
        runs.insert(runs.end(), fresh.begin(), fresh.end());
        fresh.clear();
        const double oldest = now - length_s;
        while (!runs.empty() && runs.front().start_s + double(runs.front().steps) * runs.front().period_s <= oldest) {
            const TokenRun& run = runs.front();
            total -= double(run.steps * run.tokens) * run.gap_s;
            count -= run.steps * run.tokens;
            runs.pop_front();
        }
        if (runs.empty()) total = 0.0;
        double sum = total;
        Int num = count;
        if (!runs.empty()) {
            const Int outside = runs.front().steps * runs.front().tokens - runs.front().tokens_after(oldest);
            sum -= double(outside) * runs.front().gap_s;
            num -= outside;
        }
        for (const TokenRun& run : current) {
            const Int inside = run.tokens_after(oldest);
            sum += double(inside) * run.gap_s;
            num += inside;
        }
        return num ? sum / double(num) : 0.0;
    }
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

    Int cached(Int order) const {
        const auto found = place.find(order);
        return found != place.end() ? found->second->tokens : 0;
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
    bool is_home = true;
    Int degree = 1, server = 0;
    Cost* cost = nullptr;
    WorkerKv kv;
    Queue* queue = nullptr;
    std::vector<Int> begun, unseen;
    // `shares`: of the last step with prefills. `coming`: the step about to run. `next`: a prefill worker's step after that, if chosen.
    std::vector<Share> shares;
    Plan coming, next;
    double start_s = 0, end_s = 0, ready_s = 0;
    Int step_tokens = 0, coming_tokens = 0, expected_tokens = 0;
    Window ttft;
    // Prefills that a decode worker got from prefill workers and that wait to join its batch: (order of the session, tokens).
    std::vector<std::pair<Int, Int>> landed;
    TokenWindow itl;
    bool is_busy = false, waits = false, runs = false, decodes_along = false;
    Run run, ran;
    Int version = 0, num_sessions = 0, num_prefills = 0, prefilled_tokens = 0, num_preemptions = 0;
    double busy_s = 0, step_s = 0, busy_decode_s = 0;
    // The decode batch.
    Int size = 0, steps = 0, context = 0;
    double token_s = 0;
    std::set<Int> members;
    std::set<std::pair<Int, Int>> finish;
    std::vector<Int> joined;
    // The log of its tokens: gaps, and how many steps each stands for.
    std::vector<double> gaps;
    std::vector<Int> counts;
};

enum Kind : Int { DUE, READY, ROUTE, BEGIN, FINISH, LAND, END_RUN, END };

struct Event {
    double time_s;
    Int number;
    Kind kind;
    Int subject, detail;
    bool operator>(const Event& other) const {
        return time_s != other.time_s ? time_s > other.time_s : number > other.number;
    }
};

}  // namespace

extern "C" {

struct Setup {
    Int num_sessions, num_workers, num_homes, num_costs;
    const Int* session_id;
    const double* arrival_s;
    const Int* first_round;  // index of each session's first round, then the number of rounds
    const Int *prefill, *decode;
    const double* delay_s;
    const Int *worker_cost, *worker_capacity, *worker_degree, *worker_server;  // decode workers first
    const double* cost_terms;  // seven per cost: whether it is composed, then its constants
    const Int* batching;       // kind, most tokens and most sequences of a step: for decode workers, then for prefill workers
    const double* queues;      // likewise: lookahead, TTFT objective, order (1 in-flight first, 2 on-time), On-time's share and patience
    const double* limits;      // the router's: see each router
    Int binding, keeps, schedules_ahead, max_run_steps, max_live;
    Int routing, choice, signal, has_estimator, shares_queue, overlaps, kv_bytes;
    double bind_weight, keep_s, request_s, response_s, until_s, window_s, latency_s, intra_bytes_s, inter_bytes_s;
    Ask ask;
};
}

namespace {

struct Simulation {
    const Setup setup;
    std::vector<Cost> costs;
    std::deque<Task> tasks;
    std::deque<Queue> queues;
    std::vector<Worker> workers;
    std::vector<Live> lives;
    std::priority_queue<Event, std::vector<Event>, std::greater<Event>> events;
    double now = 0;
    Int num_scheduled = 0, num_due = 0, num_live = 0, session_turn = 0, task_turn = 0;
    bool is_stopped = false, has_too_many = false;

    // The recorded tables, one vector for each column. engines.cluster.record has the same names.
    std::vector<Int> session_session_id, session_num_rounds, session_prefill_tokens, session_decode_tokens, session_worker_id,
        session_status;
    std::vector<Int> round_session_id, round_round, round_history, round_prefill_tokens, round_decode_tokens, round_is_local;
    std::vector<Int> task_task_id, task_session_id, task_round, task_kind, task_worker_id, task_is_local, task_reason,
        task_history, task_tokens, task_computed_tokens, task_postponed;
    std::vector<Int> transfer_task_id, transfer_content, transfer_source, transfer_target, transfer_link, transfer_tokens,
        transfer_bytes;
    std::vector<Int> worker_worker_id, worker_role, worker_degree, worker_server, worker_num_prefills,
        worker_prefilled_tokens, worker_kv_capacity, worker_kv_peak, worker_kv_evicted, worker_num_preemptions;
    std::vector<Int> stay_worker, stay_row, stay_start, stay_end;
    std::vector<Int> log_tokens;
    std::vector<double> session_arrival_s, session_finished_s;
    std::vector<double> round_ready_s, round_first_token_s, round_finished_s;
    std::vector<double> task_estimate_s, task_ready_s, task_started_s, task_finished_s, task_landed_s;
    std::vector<double> transfer_start_s, transfer_end_s;
    std::vector<double> worker_busy_prefill_s, worker_busy_decode_s;
    std::vector<double> stay_first_gap_s;
    std::vector<double> log_gap_s;
    std::vector<Chunk> chunks;

#define COLUMN(name) {#name, &name}
    std::vector<std::pair<std::string, std::vector<Int>*>> ints() {
        return {COLUMN(session_session_id), COLUMN(session_num_rounds), COLUMN(session_prefill_tokens),
                COLUMN(session_decode_tokens), COLUMN(session_worker_id), COLUMN(session_status),
                COLUMN(round_session_id), COLUMN(round_round), COLUMN(round_history), COLUMN(round_prefill_tokens),
                COLUMN(round_decode_tokens), COLUMN(round_is_local), COLUMN(task_task_id), COLUMN(task_session_id),
                COLUMN(task_round), COLUMN(task_kind), COLUMN(task_worker_id), COLUMN(task_is_local), COLUMN(task_reason),
                COLUMN(task_history), COLUMN(task_tokens), COLUMN(task_computed_tokens), COLUMN(task_postponed),
                COLUMN(transfer_task_id), COLUMN(transfer_content), COLUMN(transfer_source), COLUMN(transfer_target),
                COLUMN(transfer_link), COLUMN(transfer_tokens), COLUMN(transfer_bytes), COLUMN(worker_worker_id),
                COLUMN(worker_role), COLUMN(worker_degree), COLUMN(worker_server), COLUMN(worker_num_prefills),
                COLUMN(worker_prefilled_tokens), COLUMN(worker_kv_capacity), COLUMN(worker_kv_peak),
                COLUMN(worker_kv_evicted), COLUMN(worker_num_preemptions), COLUMN(stay_worker), COLUMN(stay_row),
                COLUMN(stay_start), COLUMN(stay_end), COLUMN(log_tokens)};
    }
    std::vector<std::pair<std::string, std::vector<double>*>> seconds() {
        return {COLUMN(session_arrival_s), COLUMN(session_finished_s), COLUMN(round_ready_s), COLUMN(round_first_token_s),
                COLUMN(round_finished_s), COLUMN(task_estimate_s), COLUMN(task_ready_s), COLUMN(task_started_s),
                COLUMN(task_finished_s), COLUMN(task_landed_s), COLUMN(transfer_start_s), COLUMN(transfer_end_s),
                COLUMN(worker_busy_prefill_s), COLUMN(worker_busy_decode_s), COLUMN(stay_first_gap_s), COLUMN(log_gap_s)};
    }
#undef COLUMN

    explicit Simulation(const Setup& given) : setup(given) {
        for (Int i = 0; i < given.num_costs; ++i) costs.emplace_back(given.ask, i, given.cost_terms + 7 * i);
        const Int num_rounds = given.first_round[given.num_sessions];
        lives.reserve(given.num_sessions);
        for (const auto& [name, column] : ints())
            if (name.compare(0, 5, "round") == 0 || name.compare(0, 4, "task") == 0) column->reserve(num_rounds);
        for (const auto& [name, column] : seconds())
            if (name.compare(0, 5, "round") == 0 || name.compare(0, 4, "task") == 0) column->reserve(num_rounds);
        workers.resize(given.num_workers);
        for (Int i = 0; i < given.num_workers; ++i) {
            Worker& worker = workers[i];
            worker.is_home = i < given.num_homes;
            worker.degree = given.worker_degree[i], worker.server = given.worker_server[i];
            worker.cost = &costs[given.worker_cost[i]];
            worker.kv.capacity = given.worker_capacity[i];
            worker.ttft.length_s = worker.itl.length_s = given.window_s;
            const double* queue = given.queues + (worker.is_home ? 0 : 5);
            if (i <= given.num_homes || !given.shares_queue)
                queues.push_back(Queue{tasks, Int(queue[0]), queue[1], queue[2] == 1, queue[2] == 2, queue[3], queue[4]});
            worker.queue = &queues.back();
        }
        due(-1);
    }

    void at(double time_s, Kind kind, Int subject, Int detail = 0) {
        events.push(Event{time_s, ++num_scheduled, kind, subject, detail});
    }

    Int num_arrived() const { return Int(session_worker_id.size()); }

    // Runs `num` events. Returns whether more are left.
    bool go_on(Int num) {
        while (!events.empty() && !is_stopped) {
            const Event event = events.top();
            if (event.time_s > setup.until_s) {
                now = setup.until_s;
                return false;
            }
            if (--num < 0) return true;
            events.pop();
            now = event.time_s;
            switch (event.kind) {
                case DUE: due(event.subject); break;
                case READY: ready(event.subject); break;
                case ROUTE: received(event.subject, event.detail); break;
                case BEGIN: begin_step(event.subject); break;
                case FINISH: finish(event.subject); break;
                case LAND: land(event.subject, event.detail); break;
                case END_RUN: end_run(event.subject, event.detail); break;
                case END: end(event.subject); break;
            }
        }
        return false;
    }

    // Fills the workers table, and joins the workers' logs into one.
    void end_all() {
        std::vector<Int> offsets;
        for (Worker& worker : workers) {
            worker_worker_id.push_back(Int(worker_worker_id.size()));
            worker_role.push_back(!worker.is_home);
            worker_degree.push_back(worker.degree);
            worker_server.push_back(worker.server);
            worker_kv_capacity.push_back(worker.is_home ? worker.kv.capacity : -1);
            worker_busy_prefill_s.push_back(worker.busy_s + worker.step_s);
            worker_busy_decode_s.push_back(worker.busy_decode_s);
            worker_num_prefills.push_back(worker.num_prefills);
            worker_prefilled_tokens.push_back(worker.prefilled_tokens);
            worker_kv_peak.push_back(worker.is_home ? worker.kv.peak : -1);
            worker_kv_evicted.push_back(worker.is_home ? worker.kv.evicted : -1);
            worker_num_preemptions.push_back(worker.num_preemptions);
            offsets.push_back(Int(log_gap_s.size()));
            log_gap_s.insert(log_gap_s.end(), worker.gaps.begin(), worker.gaps.end());
            log_tokens.insert(log_tokens.end(), worker.counts.begin(), worker.counts.end());
            worker.gaps = {};
            worker.counts = {};
        }
        for (std::size_t i = 0; i < stay_worker.size(); ++i) {
            stay_start[i] += offsets[stay_worker[i]];
            stay_end[i] += offsets[stay_worker[i]];
        }
        lives = {};
        tasks.clear();
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

    Int kv_in_use(const Worker& worker) const {
        const Int ahead = worker.runs ? worker.run.steps - worker.run.steps_by(now) : 0;
        return worker.kv.held - ahead * worker.size;
    }

    Int kv_tokens(const Worker& worker) const { return kv_in_use(worker) + worker.kv.idle; }

    Int bound(Int order, Int tokens) {
        if (setup.binding == LEAST_COST) return least_cost(order, tokens, setup.bind_weight, 0, setup.num_homes);
        if (setup.binding == ROUND_ROBIN) return session_turn++ % setup.num_homes;
        Int best = 0;
        std::pair<Int, Int> least{0, 0};
        for (Int i = 0; i < setup.num_homes; ++i) {
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
        live.worker = bound(order, setup.prefill[round_of(live)]);
        ++workers[live.worker].num_sessions;
        lives.push_back(live);
        const Int first = setup.first_round[session], end = setup.first_round[session + 1];
        session_session_id.push_back(setup.session_id[session]);
        session_arrival_s.push_back(now);
        session_num_rounds.push_back(end - first);
        session_prefill_tokens.push_back(std::accumulate(setup.prefill + first, setup.prefill + end, Int(0)));
        session_decode_tokens.push_back(std::accumulate(setup.decode + first, setup.decode + end, Int(0)));
        session_worker_id.push_back(live.worker);
        session_finished_s.push_back(NOT_YET);
        session_status.push_back(1);
        ready(order);
    }

    Int round_of(const Live& live) const { return setup.first_round[live.session] + live.round_index; }

    void ready(Int order) {
        Live& live = lives[order];
        const Int round = round_of(live);
        live.row = Int(round_round.size());
        live.left = setup.decode[round];
        round_session_id.push_back(setup.session_id[live.session]);
        round_round.push_back(live.round_index);
        round_prefill_tokens.push_back(setup.prefill[round]);
        round_decode_tokens.push_back(setup.decode[round]);
        round_ready_s.push_back(now);
        round_history.push_back(live.context);
        round_is_local.push_back(false);
        round_first_token_s.push_back(NOT_YET);
        round_finished_s.push_back(NOT_YET);
        if (setup.request_s == 0) return route(order, false);
        Worker& home = workers[live.worker];
        const Int expected = live.context + setup.prefill[round] - home.kv.cached(order);
        home.expected_tokens += expected;
        at(now + setup.request_s, ROUTE, order, expected);
    }

    void received(Int order, Int expected) {
        workers[lives[order].worker].expected_tokens -= expected;
        route(order, false);
    }

    void route(Int order, bool is_recompute) {
        const Live& live = lives[order];
        const Int history = is_recompute ? 0 : live.context;
        const Int tokens = is_recompute ? live.context : setup.prefill[round_of(live)];
        const Int id = Int(tasks.size());
        tasks.push_back(Task{id, order, history, tokens, is_recompute, !is_recompute && !live.round_index, now});
        Task& task = tasks.back();
        const Decision decision = routed(task, live.worker);
        const bool is_local = decision.worker == live.worker;
        Worker& worker = workers[decision.worker];
        if (!is_local) workers[live.worker].coming_tokens += history + tokens;
        if (setup.has_estimator) task.estimate_s = asked(ESTIMATE, worker.degree, {history, tokens});
        task_task_id.push_back(id);
        task_session_id.push_back(setup.session_id[live.session]);
        task_round.push_back(live.round_index);
        task_kind.push_back(is_recompute ? 2 : std::min<Int>(live.round_index, 1));
        task_worker_id.push_back(decision.worker);
        task_is_local.push_back(is_local);
        task_reason.push_back(decision.reason);
        task_history.push_back(history);
        task_tokens.push_back(tokens);
        task_computed_tokens.push_back(-1);
        task_postponed.push_back(0);
        task_estimate_s.push_back(task.estimate_s);
        task_ready_s.push_back(now);
        task_started_s.push_back(NOT_YET);
        task_finished_s.push_back(NOT_YET);
        task_landed_s.push_back(NOT_YET);
        if (!is_recompute) round_is_local[live.row] = is_local;
        if (worker.is_home && setup.schedules_ahead && (worker.is_busy || worker.runs)) {
            worker.unseen.push_back(id);
            worker.expected_tokens += tokens;
        } else {
            worker.queue->push(id);
        }
        poke(decision.worker);
    }

    void see(Worker& worker) {
        for (const Int id : worker.unseen) {
            worker.expected_tokens -= tasks[id].tokens;
            worker.queue->push(id);
        }
        worker.unseen.clear();
    }

    void end(Int order) {
        session_finished_s[order] = now;
        session_status[order] = 0;
        --workers[lives[order].worker].num_sessions;
        --num_live;
        if (!num_live && all_arrived()) is_stopped = true;
    }

    // ---- where a prefill runs

    struct Decision {
        Int worker;
        Reason reason;
    };

    Decision routed(const Task& task, Int home) {
        switch (setup.routing) {
            case REMOTE: return {picked(), ALWAYS_REMOTE};
            case CONDITIONAL: return conditional(task, home);
            case ADAPTIVE: return adaptive(task, home);
            case KV_AWARE: {
                const Int tokens = task.history + task.tokens;
                return {least_cost(task.order, tokens, setup.limits[0], setup.num_homes, setup.num_workers), BY_KV};
            }
            default: return {home, COLOCATED};
        }
    }

    // RemoteOnly: returns a prefill worker.
    Int picked() {
        const Int num = setup.num_workers - setup.num_homes;
        if (setup.choice == RANDOM) return setup.num_homes + Int(drawn() * double(num));
        if (setup.choice == IN_TURN) return setup.num_homes + task_turn++ % num;
        Int best = setup.num_homes;
        for (Int i = best + 1; i < setup.num_workers; ++i) {
            const bool is_less = setup.choice == SHARED ? backlog_tokens(workers[i]) < backlog_tokens(workers[best])
                                                        : ahead_s(workers[i]) < ahead_s(workers[best]);
            if (is_less) best = i;
        }
        return best;
    }

    // KvCost among workers `first` to before `end`. K/V in use counts for decode workers, but not for prefill workers.
    Int least_cost(Int order, Int tokens, double weight, Int first, Int end) const {
        Int best = first;
        std::pair<double, Int> least{0, 0};
        for (Int i = first; i < end; ++i) {
            const Worker& worker = workers[i];
            const Int backlog = backlog_tokens(worker);
            Int to_prefill = backlog + worker.expected_tokens + tokens - worker.kv.cached(order);
            for (const Int id : worker.begun) to_prefill += tasks[id].left();
            const Int awaited = worker.queue->backlog_tokens + worker.coming_tokens + worker.expected_tokens;
            const Int in_use = kv_in_use(worker) + awaited + tokens - worker.kv.kept(order, now);
            const auto found = std::make_pair(weight * double(to_prefill) + double(worker.is_home ? in_use : 0), backlog);
            if (i == first || found < least) best = i, least = found;
        }
        return best;
    }

    // ConditionalRouter. Limits: a short prefill's tokens and share of its prompt, a busy worker's backlog tokens, a full home's K/V share.
    Decision conditional(const Task& task, Int home) {
        const Int worker = picked();
        const double tokens = double(task.tokens);
        const bool is_short = tokens < setup.limits[0] && tokens < setup.limits[1] * double(task.history + task.tokens);
        const bool stays = is_short || double(backlog_tokens(workers[worker])) > setup.limits[2];
        const double in_use = double(kv_tokens(workers[home]) + task.tokens);
        if (stays && !(in_use > setup.limits[3] * double(workers[home].kv.capacity)))
            return {home, is_short ? SHORT : PREFILL_BUSY};
        return {worker, NOT_BYPASSED};
    }

    // AdaptiveRouter. Limits, in seconds: the highest mean TTFT of a prefill worker, and the highest mean ITL of the home.
    Decision adaptive(const Task& task, Int home) {
        std::vector<Int> left;
        for (Int i = setup.num_homes; i < setup.num_workers; ++i) left.push_back(i);
        if (setup.choice != RANDOM)
            std::stable_sort(left.rbegin(), left.rend(), [&](Int one, Int other) {
                return std::make_pair(ahead_s(workers[one]), one) < std::make_pair(ahead_s(workers[other]), other);
            });
        while (!left.empty()) {
            if (setup.choice == RANDOM) std::swap(left[Int(drawn() * double(left.size()))], left.back());
            if (ttft_s(workers[left.back()]) <= setup.limits[0]) return {left.back(), TTFT_SLACK};
            left.pop_back();
        }
        if (itl_s(workers[home]) <= setup.limits[1]) return {home, ITL_SLACK};
        const Int degree = workers[home].degree;
        Decision best{home, COST};
        double best_s = asked(HERE, degree, {task.history, task.tokens}) + backlog_s(workers[home]);
        for (Int i = setup.num_homes; i < setup.num_workers; ++i) {
            const double cost_s = asked(AWAY, workers[i].degree, {task.history, task.tokens, degree}) + backlog_s(workers[i]);
            if (cost_s < best_s) best_s = cost_s, best.worker = i;
        }
        return best;
    }

    double ttft_s(Worker& worker) {
        const double windowed = worker.ttft.mean(now);
        if (setup.signal == DONE) return windowed;
        double other = ahead_s(worker);
        if (setup.signal == AGE) {
            double oldest = worker.queue->waiting.empty() ? now : INFINITE;
            for (const Int id : worker.queue->waiting) oldest = std::min(oldest, tasks[id].ready_s);
            other = now - oldest;
        }
        return std::max(windowed, other);
    }

    double itl_s(Worker& home) {
        const Int done = home.runs ? home.run.steps_by(now) : 0;
        const double windowed = home.itl.mean(now, done ? token_runs(home, home.run, done) : std::vector<TokenRun>());
        if (setup.signal == DONE) return windowed;
        const double token_s = done ? home.run.start_s + home.run.after_s(done) : home.token_s;
        return std::max(windowed, home.size ? now - token_s : 0.0);
    }

    double estimated_s(const std::vector<Share>& shares) const {
        if (shares.size() == 1) return tasks[shares[0].task].estimate_s;
        std::vector<double> each;
        for (const Share& share : shares) each.push_back(tasks[share.task].estimate_s);
        return exact_sum(each);
    }

    double backlog_s(const Worker& worker) const { return worker.queue->backlog_s + estimated_s(worker.next.shares); }

    double ahead_s(const Worker& worker) const {
        const double busy_s = worker.is_busy ? std::max(0.0, worker.start_s + estimated_s(worker.shares) - now) : 0.0;
        return busy_s + backlog_s(worker);
    }

    Int backlog_tokens(const Worker& worker) const {
        Int found = worker.queue->backlog_tokens + (worker.is_busy ? worker.step_tokens : 0);
        for (const Share& share : worker.next.shares) found += share.tokens;
        return found;
    }

    double asked(Question question, Int degree, std::initializer_list<Int> in) const {
        double answer;
        if (setup.ask(question, degree, Int(in.size()), in.begin(), &answer) <= 0) throw Stopped{};
        return answer;
    }

    double drawn() {
        if (draws.empty()) {
            draws.resize(256);
            if (setup.ask(DRAW, 0, Int(draws.size()), nullptr, draws.data()) <= 0) throw Stopped{};
            std::reverse(draws.begin(), draws.end());
        }
        const double found = draws.back();
        draws.pop_back();
        return found;
    }
    std::vector<double> draws;

    // ---- between steps

    void poke(Int w) {
        Worker& worker = workers[w];
        const bool may_choose = setup.overlaps && worker.next.shares.empty() && !(worker.waits && !worker.begun.empty());
        if (!worker.is_home && worker.is_busy && may_choose) choose(w, std::max(worker.end_s, now));
        if (!worker.runs) {
            if (!worker.is_busy) boundary(w);
            return;
        }
        const Run cut = worker.run.cut_at(now);
        if (cut.steps < worker.run.steps) schedule_run(w, cut, worker.run.steps);
    }

    void boundary(Int w) {
        Worker& worker = workers[w];
        if (!worker.is_home) {
            if (worker.next.shares.empty()) choose(w, now);
            if (worker.next.shares.empty()) return;
            std::swap(worker.coming, worker.next);
            worker.next.shares.clear();
            worker.is_busy = true;
            worker.waits = worker.ready_s > now;
            if (worker.waits) {
                worker.end_s = worker.ready_s;
                at(worker.ready_s, BEGIN, w);
            } else {
                begin_step(w);
            }
            return;
        }
        worker.is_busy = true;
        worker.step_tokens = 0;
        ++worker.version;
        for (;;) {
            for (std::size_t i = 0; i < worker.landed.size(); ++i) join_landed(w, worker.landed[i].first, worker.landed[i].second);
            worker.landed.clear();
            if (!worker.queue->waiting.empty() || !worker.begun.empty()) {
                plan(worker, now, worker.coming);
                if (!worker.coming.shares.empty()) {
                    start(w);
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

    // Chooses a prefill worker's next step, which can begin at `start_s`, and sends it the histories. They have arrived at `ready_s`.
    void choose(Int w, double start_s) {
        Worker& worker = workers[w];
        if (worker.queue->waiting.empty() && worker.begun.empty()) return;
        plan(worker, start_s, worker.next);
        worker.ready_s = now;
        for (Share& share : worker.next.shares) {
            Task& task = tasks[share.task];
            if (task.computed || task.history <= 0) continue;
            const bool is_whole = share.tokens == task.tokens;
            Live& live = lives[task.order];
            live.lent = workers[live.worker].kv.resume(task.order);
            task.tokens += task.history - live.lent;
            task.history = live.lent;
            worker.ready_s = sent(HISTORY, task.id, live.worker, w, live.lent, worker.ready_s);
            if (is_whole) share.tokens = task.tokens;
        }
    }

    // Records a transfer of the K/V of `tokens` tokens, and returns when it ends.
    double sent(Content content, Int task, Int source, Int target, Int tokens, double start_s) {
        if (!tokens) return start_s;
        const Worker &from = workers[source], &to = workers[target];
        const bool crosses = from.server != to.server;
        const double bytes_s = (crosses ? setup.inter_bytes_s : setup.intra_bytes_s) * double(std::min(from.degree, to.degree));
        const double end_s = start_s + (setup.latency_s + double(tokens * setup.kv_bytes) / bytes_s);
        transfer_task_id.push_back(task);
        transfer_content.push_back(content);
        transfer_source.push_back(source);
        transfer_target.push_back(target);
        transfer_link.push_back(crosses);
        transfer_tokens.push_back(tokens);
        transfer_bytes.push_back(tokens * setup.kv_bytes);
        transfer_start_s.push_back(start_s);
        transfer_end_s.push_back(end_s);
        return end_s;
    }

    void begin_step(Int w) {
        workers[w].waits = false;
        start(w);
        poke(w);
    }

    // Plans the shares of the next step by the batching policy, and takes their tasks from the queue.
    void plan(Worker& worker, double start_s, Plan& made) {
        std::vector<Share>& shares = made.shares;
        Queue& queue = *worker.queue;
        shares.clear();
        const Int* batching = setup.batching + (worker.is_home ? 0 : 3);
        made.decodes = batching[0] == CHUNKED;
        const bool is_empty = !worker.size && worker.begun.empty();
        Int room = is_empty ? worker.kv.capacity - worker.kv.held : worker.kv.free() + worker.kv.evictable(start_s);
        const auto need_of = [&](const Task& task) {
            if (!worker.is_home) return Int(0);
            return task.history + task.tokens + 1 - (is_empty ? 0 : worker.kv.kept(task.order, now));
        };
        if (batching[0] == ONE_BY_ONE) {
            if (!worker.begun.empty()) {
                shares.push_back(Share{worker.begun[0], tasks[worker.begun[0]].left()});
            } else if (!queue.waiting.empty() && need_of(tasks[queue.peek(start_s)]) <= room) {
                const Int id = queue.take(start_s);
                shares.push_back(Share{id, tasks[id].tokens});
            }
            return;
        }
        const bool is_chunked = made.decodes;
        Int budget = is_chunked ? std::max<Int>(batching[1] - worker.size, 1) : batching[1];
        for (const Int id : worker.begun) {
            const Int tokens = is_chunked ? std::min(tasks[id].left(), budget) : tasks[id].left();
            if (!tokens) break;
            shares.push_back(Share{id, tokens});
            budget -= tokens;
        }
        Int places = batching[2] - worker.size - Int(worker.begun.size());
        while (!queue.waiting.empty() && places > 0 && (!is_chunked || budget > 0)) {
            const Task& task = tasks[queue.peek(start_s)];
            const Int need = need_of(task);
            if (need > room || (!is_chunked && !shares.empty() && task.tokens > budget)) break;
            const Int tokens = is_chunked ? std::min(task.tokens, budget) : task.tokens;
            shares.push_back(Share{queue.take(start_s), tokens});
            budget -= tokens;
            room -= need;
            --places;
        }
    }

    // ---- steps with prefills

    void start(Int w) {
        Worker& worker = workers[w];
        std::vector<Share>& shares = worker.coming.shares;
        if (worker.is_home)
            for (Share& share : shares) admit(worker, share);
        const Int decoding = worker.coming.decodes && reserve(w, 1) ? worker.size : 0;
        const Int context = decoding ? worker.context : 0;
        chunks.clear();
        worker.step_tokens = 0;
        const bool had_begun = !worker.begun.empty();
        for (const Share& share : shares) {
            Task& task = tasks[share.task];
            chunks.push_back(Chunk{task.history + task.computed, share.tokens});
            if (!task.computed) {
                task_started_s[task.id] = now;
                task_postponed[task.id] = task.postponed;
                if (share.tokens < task.tokens) worker.begun.push_back(task.id);
            }
            task.computed += share.tokens;
            worker.step_tokens += share.tokens;
        }
        if (had_begun) {
            auto& begun = worker.begun;
            begun.erase(std::remove_if(begun.begin(), begun.end(), [&](Int id) { return !tasks[id].left(); }), begun.end());
        }
        worker.prefilled_tokens += worker.step_tokens;
        worker.busy_s += worker.step_s;
        worker.step_s = worker.cost->step_s(chunks, decoding, context);
        worker.start_s = now, worker.end_s = now + worker.step_s;
        worker.shares.swap(shares);
        worker.decodes_along = decoding > 0;
        worker.ran = Run{now, worker.step_s, 0.0, 1};
        at(worker.end_s, FINISH, w);
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
            task_computed_tokens[task.id] = task.tokens;
            task_finished_s[task.id] = now;
            const double end_s = worker.is_home ? now : sent(INCREMENT, task.id, w, lives[task.order].worker, task.tokens, now);
            if (end_s > now) at(end_s, LAND, task.id, w);
            else land(task.id, w);
        }
        worker.is_busy = false;
        boundary(w);
    }

    // The prefill's K/V has reached the session's home, and its token is out.
    void land(Int id, Int w) {
        const Task& task = tasks[id];
        Live& live = lives[task.order];
        Worker& home = workers[live.worker];
        task_landed_s[id] = now;
        live.context = task.history + task.tokens + 1;
        --live.left;
        if (task.is_recompute) log_stay(live, now - live.token_s, 0, 0);
        else round_first_token_s[live.row] = now + setup.response_s;
        live.token_s = now;
        if (w == live.worker) {
            if (live.left) join(home, task.order);
            else round_done(home, task.order);
            return;
        }
        home.coming_tokens -= task.history + task.tokens;
        if (setup.routing == ADAPTIVE && !task.is_recompute) workers[w].ttft.add(now, now - task.ready_s);
        if (live.left) {
            home.landed.push_back({task.order, task.tokens});
            poke(live.worker);
            return;
        }
        // A round of one token never joins the batch: its K/V is cached if there is room.
        if (home.kv.make_room(task.tokens + 1, now, true)) {
            home.kv.hold(task.tokens + 1);
            round_done(home, task.order);
        } else {
            home.kv.held -= live.lent;
            goes_on(task.order);
        }
        live.lent = 0;
    }

    void join_landed(Int w, Int order, Int tokens) {
        Worker& worker = workers[w];
        Live& live = lives[order];
        while (!worker.kv.make_room(tokens + 1, now, true)) {
            if (worker.size && *worker.members.rbegin() > order) {
                preempt(worker, *worker.members.rbegin());
                continue;
            }
            worker.kv.held -= live.lent;
            live.lent = 0;
            ++worker.num_preemptions;
            route(order, true);
            return;
        }
        worker.kv.hold(tokens + 1);
        live.lent = 0;
        join(worker, order);
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

    // The tokens of a run's first `steps`, for the windowed ITL of AdaptiveRouter.
    std::vector<TokenRun> token_runs(const Worker& worker, const Run& run, Int steps) const {
        const double first_end = run.start_s + run.first_s;
        if (worker.joined.empty() && run.start_s == worker.token_s) {
            const double gap = run.after_s(steps) / double(steps);
            return {TokenRun{run.start_s, gap, steps, worker.size, gap}};
        }
        std::vector<double> waits;
        for (const Int order : worker.joined) waits.push_back(first_end - lives[order].token_s);
        const double waited = double(worker.size - Int(waits.size())) * (first_end - worker.token_s) + exact_sum(waits);
        const TokenRun first{run.start_s, run.first_s, 1, worker.size, waited / double(worker.size)};
        if (steps == 1) return {first};
        const double gap = (run.after_s(steps) - run.first_s) / double(steps - 1);
        return {first, TokenRun{first_end, gap, steps - 1, worker.size, gap}};
    }

    void advance(Worker& worker, const Run& run) {
        if (setup.routing == ADAPTIVE)
            for (const TokenRun& each : token_runs(worker, run, run.steps)) worker.itl.fresh.push_back(each);
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

    // Ends a round, whose tokens are all out. Returns whether the session has more rounds.
    bool goes_on(Int order) {
        Live& live = lives[order];
        const double end_s = now + setup.response_s;
        round_finished_s[live.row] = end_s;
        const double delay_s = setup.delay_s[round_of(live)];
        ++live.round_index;
        const bool has_more = round_of(live) < setup.first_round[live.session + 1];
        if (has_more) at(end_s + delay_s, READY, order);
        else at(end_s, END, order);
        return has_more;
    }

    void round_done(Worker& worker, Int order) {
        const bool keeps = goes_on(order) && setup.keeps;
        if (keeps) worker.kv.park(order, lives[order].context, now + setup.keep_s);
        else worker.kv.held -= lives[order].context;
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

#include "exports.hpp"
