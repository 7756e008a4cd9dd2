-- The operations on the state that state.lua describes. store.py puts state.lua in front of this file: both are one script.

local ops = {}

function ops.create(window_s)
  call('HSETNX', key('run'), 'window_s', window_s)
  return 'ok'
end

function ops.register(worker, incarnation, role, degree, address, capacity, lease_s)
  local w = key('worker', worker)
  if get(w, 'incarnation') == incarnation then return 'ok' end
  lose(worker)
  forget_work(worker)
  call('HSET', w, 'incarnation', incarnation, 'role', role, 'degree', degree, 'address', address,
       'kv_capacity', capacity, 'kv_tokens', 0, 'queued_s', '0', 'queued_tokens', 0, 'batch', 0, 'token_s', '0',
       'ttft_total', '0', 'ttft_count', 0, 'itl_total', '0', 'itl_count', 0, 'suspended', '0', 'request', '',
       'version', number(w, 'version') + 1)
  call('ZADD', key('alive'), exact(now + tonumber(lease_s)), worker)
  return 'ok'
end

function ops.beat(worker, incarnation, lease_s)
  if not is_current(worker, incarnation) then return 'lost' end
  call('ZADD', key('alive'), exact(now + tonumber(lease_s)), worker)
  return 'ok'
end

-- Returns the state of each live worker, as a flat list of names and values.
function ops.snapshot()
  local found = {}
  for _, worker in ipairs(call('ZRANGE', key('alive'), 0, -1)) do
    local w = key('worker', worker)
    local running, age, wait = 0, 0, 0
    if get(w, 'running_task') ~= '' then
      running = math.max(0, number(w, 'running_from') + number(w, 'running_s') - now)
    end
    if number(w, 'batch') > 0 then age = now - number(w, 'token_s') end
    local oldest = call('ZRANGE', key('ready', worker), 0, 0, 'WITHSCORES')
    if oldest[2] then wait = now - tonumber(oldest[2]) end
    found[#found + 1] = {
      'worker_id', worker, 'role', get(w, 'role'), 'degree', get(w, 'degree'), 'incarnation', get(w, 'incarnation'),
      'suspended', get(w, 'suspended'), 'backlog_s', exact(number(w, 'queued_s') + number(w, 'staged_s')),
      'backlog_tokens', tostring(number(w, 'queued_tokens') + number(w, 'staged_tokens') + number(w, 'running_tokens')),
      'running_s', exact(running), 'wait_s', exact(wait), 'ttft_s', exact(mean(worker, 'ttft')),
      'itl_s', exact(mean(worker, 'itl')), 'age_s', exact(age), 'kv_tokens', get(w, 'kv_tokens'),
      'kv_capacity', get(w, 'kv_capacity'), 'num_sessions', tostring(call('SCARD', key('bound', worker))),
    }
  end
  return found
end

-- Returns what waits for the coordinator: the ids of homeless sessions, and the fields of each unrouted task.
function ops.waiting()
  local tasks = {}
  for _, task in ipairs(call('LRANGE', key('unrouted'), 0, -1)) do
    tasks[#tasks + 1] = call('HGETALL', key('task', task))
  end
  return {call('LRANGE', key('homeless'), 0, -1), tasks}
end

function ops.open(session)
  local s = key('session', session)
  if call('EXISTS', s) == 0 or get(s, 'state') == 'left' then
    call('HSET', s, 'session_id', session, 'order', call('HINCRBY', key('run'), 'next_order', 1) - 1, 'home', '',
         'epoch', number(s, 'epoch'), 'round', -1, 'left', 0, 'state', 'waiting', 'task', '', 'last', '0', 'arrived_s', exact(now))
    call('RPUSH', key('homeless'), session)
  end
  return get(s, 'order')
end

function ops.bind(session, worker, incarnation, line)
  local s = key('session', session)
  if get(s, 'home') ~= '' or get(s, 'state') == 'left' then return 'done' end
  local fits = is_current(worker, incarnation) and get(key('worker', worker), 'role') == 'decode'
  call('RPUSH', key('log'), (fits and '+' or '-') .. line)
  if not fits then return 'gone' end
  call('LREM', key('homeless'), 1, session)
  call('HSET', s, 'home', worker)
  call('SADD', key('bound', worker), session)
  return 'ok'
end

function ops.begin(session, round, ids, decode_tokens, is_last, ready_s)
  local s = key('session', session)
  if number(s, 'round') >= tonumber(round) then return get(s, 'task') end
  if get(s, 'state') ~= 'waiting' then return 'busy' end
  local history = length(session)
  call('APPEND', key('ids', session), ids)
  call('HSET', s, 'round', round, 'left', decode_tokens, 'last', is_last)
  local kind = 'incremental'
  if round == '0' then kind = 'initial' end
  local task = make_task(session, kind, history, #ids / 4, ready_s)
  return tostring(task)
end

function ops.assign(task, worker, incarnation, is_local, reason, estimate_s, line)
  local t = key('task', task)
  if get(t, 'state') ~= 'unrouted' then return 'done' end
  local home = get(key('session', get(t, 'session_id')), 'home')
  local fits = home ~= '' and is_current(worker, incarnation) and (is_local == '1') == (home == worker)
  call('RPUSH', key('log'), (fits and '+' or '-') .. line)
  if not fits then return 'gone' end
  local w = key('worker', worker)
  call('LREM', key('unrouted'), 1, task)
  call('HSET', t, 'state', 'queued', 'worker', worker, 'is_local', is_local, 'reason', reason,
       'estimate_s', estimate_s, 'enqueued_s', exact(now))
  call('RPUSH', key('queue', worker), task)
  call('ZADD', key('ready', worker), get(t, 'ready_s'), task)
  call('HSET', w, 'queued_s', exact(number(w, 'queued_s') + tonumber(estimate_s)))
  call('HINCRBY', w, 'queued_tokens', number(t, 'tokens'))
  call('HINCRBY', w, 'version', 1)
  wake(worker, 'task')
  return 'ok'
end

-- Returns a worker's queue, for its policy to choose from: {version, when the running task should end, fields of each task, era}.
function ops.queue(worker, incarnation)
  if not is_current(worker, incarnation) then return 'lost' end
  local w, tasks = key('worker', worker), {}
  for _, task in ipairs(call('LRANGE', key('queue', worker), 0, -1)) do
    tasks[#tasks + 1] = call('HGETALL', key('task', task))
  end
  local until_s = now
  if get(w, 'running_task') ~= '' then until_s = number(w, 'running_from') + number(w, 'running_s') end
  return {get(w, 'version'), exact(until_s), tasks, get(key('run'), 'era')}
end

-- Takes `task` from the queue and leases it. The arguments after `line` are the rest of the queue in its new order, as pairs of id and
-- `postponed`. `version` is that of the queue which the policy saw; `is_staged` says whether another task still runs.
function ops.claim(worker, incarnation, request, version, task, postponed, lease_s, is_staged, line, ...)
  if not is_current(worker, incarnation) then return 'lost' end
  local w, t = key('worker', worker), key('task', task)
  if get(w, 'request') ~= request then
    if get(w, 'version') ~= version then return 'changed' end
    local rest = {...}
    call('RPUSH', key('log'), '+' .. line)
    call('DEL', key('queue', worker))
    for place = 1, #rest, 2 do
      call('RPUSH', key('queue', worker), rest[place])
      call('HSET', key('task', rest[place]), 'postponed', rest[place + 1])
    end
    dequeued(worker, task)
    call('HSET', t, 'state', 'leased', 'postponed', postponed, 'claimed_s', exact(now))
    call('HINCRBY', t, 'fence', 1)
    call('ZADD', key('leases'), exact(now + tonumber(lease_s)), task)
    call('HSET', w, 'request', request, 'suspended', '0')
    if is_staged == '1' then
      call('HSET', w, 'staged_task', task, 'staged_s', get(t, 'estimate_s'), 'staged_tokens', get(t, 'tokens'))
    end
  end
  local s = key('session', get(t, 'session_id'))
  return {call('HGETALL', t), call('HGETALL', s), get(key('worker', get(s, 'home')), 'address'),
          call('GETRANGE', key('ids', get(t, 'session_id')), 0, 4 * (number(t, 'history') + number(t, 'tokens')) - 1)}
end

function ops.start(worker, incarnation, task, fence)
  local w, t = key('worker', worker), key('task', task)
  if not is_current(worker, incarnation) then return 'lost' end
  if get(w, 'staged_task') == task then
    call('HSET', w, 'staged_task', '', 'staged_s', '0', 'staged_tokens', 0)
  end
  if get(t, 'fence') ~= fence then return 'stale' end
  if get(t, 'started_s') == '' or get(t, 'started_fence') ~= fence then
    call('HSET', t, 'started_s', exact(now), 'started_fence', fence)
    call('HSET', w, 'running_task', task, 'running_from', exact(now), 'running_s', get(t, 'estimate_s'),
         'running_tokens', get(t, 'tokens'))
  end
  return 'ok'
end

-- The worker has computed the task's last token. If the task is remote, its K/V is on its way to the session's home.
function ops.computed(worker, incarnation, task, fence, tokens)
  local w, t = key('worker', worker), key('task', task)
  if not is_current(worker, incarnation) then return 'lost' end
  if get(w, 'running_task') == task then
    call('HSET', w, 'running_task', '', 'running_tokens', 0, 'suspended', '0')
  end
  if get(t, 'fence') ~= fence then return 'stale' end
  call('HSET', t, 'computed_tokens', tokens, 'finished_s', exact(now))
  return 'ok'
end

-- The session's home has the K/V, and the first token is out. Only this operation sets a task's state to "done".
function ops.land(worker, incarnation, session, epoch, task, fence, token, time, kv_tokens)
  local s, t = key('session', session), key('task', task)
  if not is_current(worker, incarnation) then return {'lost'} end
  if get(s, 'home') ~= worker or get(s, 'epoch') ~= epoch or get(t, 'fence') ~= fence then return {'stale'} end
  if get(t, 'state') == 'done' then return {'again', get(s, 'state'), get(s, 'left')} end
  if get(t, 'state') ~= 'leased' then return {'stale'} end
  call('HSET', t, 'state', 'done', 'landed_s', exact(now))
  call('ZREM', key('leases'), task)
  call('HSET', key('worker', worker), 'kv_tokens', kv_tokens)
  if get(t, 'worker') ~= worker and get(t, 'kind') ~= 'recompute' then
    observe(get(t, 'worker'), 'ttft', now - number(t, 'ready_s'), 1)
  end
  local left, state = generated(session, token, time), 'decoding'
  call('HSET', s, 'state', state)
  if left == 0 then state = end_round(session) end
  return {'ok', state, tostring(left)}
end

-- A decode step: {session, epoch, position, token} for each sequence, their number `batch`, and the sum `gap_s` of their gaps. Returns the
-- sessions whose home is no longer this worker, those whose round ended, those that ended, and how many local prefills wait.
function ops.tokens(worker, incarnation, request, time, kv_tokens, batch, gap_s, ...)
  if not is_current(worker, incarnation) then return 'lost' end
  local w, items = key('worker', worker), {...}
  local is_first = get(w, 'step') ~= request
  local lost, rounds, ends, count = {}, {}, {}, 0
  for place = 1, #items, 4 do
    local session, s = items[place], key('session', items[place])
    local position = tonumber(items[place + 2])
    if get(s, 'home') ~= worker or get(s, 'epoch') ~= items[place + 1] then
      lost[#lost + 1] = session
    else
      if length(session) == position and get(s, 'state') == 'decoding' then
        count = count + 1
        if generated(session, items[place + 3], time) == 0 then end_round(session) end
      end
      local state = get(s, 'state')
      if state == 'done' then
        ends[#ends + 1] = session
      elseif state ~= 'decoding' or length(session) ~= position + 1 then
        rounds[#rounds + 1] = session  -- ended now, or when this was sent before: the next round may have begun
      end
    end
  end
  if is_first then
    call('HSET', w, 'step', request)
    if count > 0 then observe(worker, 'itl', tonumber(gap_s), count) end
  end
  call('HSET', w, 'kv_tokens', kv_tokens, 'batch', batch, 'token_s', exact(now))
  return {lost, rounds, ends, call('LLEN', key('queue', worker))}
end

-- The worker dropped a decoding session's K/V to free memory. A new task prefills all of the session's tokens again.
function ops.preempt(worker, incarnation, session, epoch)
  local s = key('session', session)
  if not is_current(worker, incarnation) then return 'lost' end
  if get(s, 'home') ~= worker or get(s, 'epoch') ~= epoch or get(s, 'state') ~= 'decoding' then return 'stale' end
  call('HINCRBY', key('worker', worker), 'preemptions', 1)
  make_task(session, 'recompute', 0, length(session), exact(now))
  return 'ok'
end

-- The session's client has left in the middle of a round. We forget the session; its workers find out by its new epoch, or its task's
-- new fence. If it is opened again, it begins anew. `order` is what `open` returned.
function ops.leave(session, order)
  local s = key('session', session)
  local state, home, task = get(s, 'state'), get(s, 'home'), get(s, 'task')
  if get(s, 'order') ~= order or (state ~= 'prefill' and state ~= 'decoding') then return 'over' end
  if state == 'prefill' then
    if not withdraw(task) then call('LREM', key('unrouted'), 1, task) end
    call('HSET', key('task', task), 'state', 'left')
  end
  call('LREM', key('homeless'), 1, session)
  if home ~= '' then
    call('SREM', key('bound', home), session)
    wake(home, 'left')
  end
  call('DEL', key('ids', session), key('times', session))
  call('HSET', s, 'state', 'left', 'home', '', 'task', '')
  call('HINCRBY', s, 'epoch', 1)
  return 'ok'
end

-- Given {session, epoch} for each session whose K/V a worker holds, returns the sessions whose home is no longer this worker.
function ops.strangers(worker, incarnation, kv_tokens, ...)
  if not is_current(worker, incarnation) then return 'lost' end
  local held, found = {...}, {}
  for place = 1, #held, 2 do
    local s = key('session', held[place])
    if get(s, 'home') ~= worker or get(s, 'epoch') ~= held[place + 1] then found[#found + 1] = held[place] end
  end
  call('HSET', key('worker', worker), 'kv_tokens', kv_tokens)
  return found
end

-- Takes the work of workers without a heartbeat or with an expired lease, and counts both. Returns how much waits for the coordinator.
function ops.reap()
  for _, worker in ipairs(call('ZRANGEBYSCORE', key('alive'), '-inf', exact(now))) do lose(worker) end
  for _, task in ipairs(call('ZRANGEBYSCORE', key('leases'), '-inf', exact(now))) do
    local worker = get(key('task', task), 'worker')
    if worker ~= '' then  -- else taken back with another of the same worker
      call('HINCRBY', key('run'), 'taken_back', 1)
      -- Until it finishes or claims something: without new measurements it would look fast.
      call('HSET', key('worker', worker), 'suspended', '1')
      release_leases(worker)
    end
  end
  return call('LLEN', key('homeless')) + call('LLEN', key('unrouted'))
end

-- Called after an outage, in which no heartbeat or lease could be renewed. Each is valid for at least `lease_s` more seconds.
function ops.extend(lease_s)
  local until_s = exact(now + tonumber(lease_s))
  for _, name in ipairs({'alive', 'leases'}) do
    for _, member in ipairs(call('ZRANGEBYSCORE', key(name), '-inf', '(' .. until_s)) do
      call('ZADD', key(name), until_s, member)
    end
  end
  return 'ok'
end

-- Empties the windows, and raises the era so that queues drop their state too: past load says nothing about the load to come.
function ops.forget()
  call('HINCRBY', key('run'), 'era', 1)
  for _, worker in ipairs(call('ZRANGE', key('alive'), 0, -1)) do
    call('DEL', key('window', 'ttft', worker), key('window', 'itl', worker))
    call('HSET', key('worker', worker), 'ttft_total', '0', 'ttft_count', 0, 'itl_total', '0', 'itl_count', 0)
  end
  return 'ok'
end

if ARGV[1] ~= 'create' and call('EXISTS', key('run')) == 0 then return redis.error_reply('NORUN') end
local rest = {}
for place = 3, #ARGV do rest[place - 2] = ARGV[place] end
return ops[ARGV[1]](unpack(rest))
