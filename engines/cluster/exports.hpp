// The functions by which Python runs a core's Simulation. Each core includes this file at its end.

extern "C" {

Simulation* begin(const Setup* setup) { return new Simulation(*setup); }

// Runs `num` events. Returns whether more are left, or -1 if Python or the core has given the run up.
Int go_on(Simulation* made, Int num, Totals* totals) {
    Int has_more = -1;
    try {
        has_more = made->go_on(num);
    } catch (const Stopped&) {
    }
    if (!has_more) made->end_all();
    const Int num_events = made->num_scheduled - Int(made->events.size());
    *totals = Totals{made->num_arrived(), made->num_live, num_events, made->has_too_many, made->now};
    return has_more;
}

// Points `at` to the column `name`, of ints or of seconds. Returns its length, or -1 if there is none of that name.
Int column_of(Simulation* made, const char* name, const void** at) {
    for (const auto& [own, column] : made->ints())
        if (own == name) return *at = column->data(), Int(column->size());
    for (const auto& [own, column] : made->seconds())
        if (own == name) return *at = column->data(), Int(column->size());
    return -1;
}

void let_go(Simulation* made) { delete made; }
}
