-- The state of a live AMPD cluster (AMPD §3, §6). Each change is one call of an operation in operations.lua, and therefore atomic.
--
-- KEYS[1] the run's prefix; ARGV[1] the operation, ARGV[2] the time in seconds, then the operation's arguments.
--
--   run                       hash    window_s, next_task, next_order, taken_back, era
--   worker:W                  hash    role, degree, address, incarnation, sums over its queue, the running task, K/V, sums over its windows
--   queue:W, ready:W          list and sorted set of the tasks queued at W, in queue order and by the time when they became ready
--   window:ttft:W, window:itl:W  list of "time total count", for the last window_s seconds
--   bound:W                   set of the sessions W is home to
--   alive                     sorted set: worker -> when its heartbeat is overdue
--   leases                    sorted set: task -> when its worker must have finished it
--   task:T, session:S         hashes
--   ids:S, times:S            strings: token ids (int32), and when each generated one came (float64)
--   unrouted, homeless        lists of tasks and sessions that wait for the coordinator
--   log                       list of decisions
--   events, wake:W, news      streams: rounds that ended, words that wake a worker, sessions that got a token
--   names, num_names          hash: a session's name -> its number; count of the names
--   lost                      list of workers, each as often as it was lost; run's taken_back counts leases that expired at live workers
--
-- A worker's calls name its incarnation, and the fence of a task that they change. Outdated ones get "lost" or "stale" and change no task.
-- Every operation may be sent twice: a client that gets no answer sends it again.

local prefix, now = KEYS[1], tonumber(ARGV[2])
local call = redis.call

local function key(...) return prefix .. ':' .. table.concat({...}, ':') end
local function exact(x) return string.format('%.17g', x) end
local function get(k, name) return call('HGET', k, name) or '' end
local function number(k, name) return tonumber(call('HGET', k, name) or '0') or 0 end
local function length(session) return call('STRLEN', key('ids', session)) / 4 end

local function is_current(worker, incarnation)
  return get(key('worker', worker), 'incarnation') == incarnation and call('ZSCORE', key('alive'), worker) ~= false
end

-- A stream keeps its last entries, about `most`, for readers that could not listen. Older ones have been read.
local function tell(stream, most, ...) call('XADD', stream, 'MAXLEN', '~', most, '*', ...) end
local function wake(worker, word) tell(key('wake', worker), 64, 'word', word) end

-- Windows: we add new entries to their sums and subtract those older than window_s, like `Window` of engines.cluster.worker.

local function observe(worker, name, total, count)
  local w = key('worker', worker)
  call('RPUSH', key('window', name, worker), exact(now) .. ' ' .. exact(total) .. ' ' .. count)
  call('HSET', w, name .. '_total', exact(number(w, name .. '_total') + total),
       name .. '_count', number(w, name .. '_count') + count)
end

local function mean(worker, name)
  local w, entries = key('worker', worker), key('window', name, worker)
  local oldest = now - number(key('run'), 'window_s')
  local total, count, expired = number(w, name .. '_total'), number(w, name .. '_count'), false
  local head = call('LINDEX', entries, 0)
  while head do
    local time, sum, tokens = string.match(head, '^(%S+) (%S+) (%S+)$')
    if tonumber(time) > oldest then break end
    total, count, expired = total - tonumber(sum), count - tonumber(tokens), true
    call('LPOP', entries)
    head = call('LINDEX', entries, 0)
  end
  if not head then total, count = 0, 0 end  -- sheds the rounding of the sums before
  if expired then call('HSET', w, name .. '_total', exact(total), name .. '_count', count) end
  if count > 0 then return total / count end
  return 0
end

-- Queues

local function dequeued(worker, task)
  local w, t = key('worker', worker), key('task', task)
  call('ZREM', key('ready', worker), task)
  call('HINCRBY', w, 'version', 1)
  call('HINCRBY', w, 'queued_tokens', -number(t, 'tokens'))
  local left = 0
  if call('LLEN', key('queue', worker)) > 0 then left = number(w, 'queued_s') - number(t, 'estimate_s') end
  call('HSET', w, 'queued_s', exact(left))
end

local function forget_work(worker)
  call('HSET', key('worker', worker), 'staged_task', '', 'staged_s', '0', 'staged_tokens', 0,
       'running_task', '', 'running_from', '0', 'running_s', '0', 'running_tokens', 0)
end

-- Takes a task from the worker that has it, and raises its fence, so that worker can no longer change it. Returns whether one had it.
local function withdraw(task)
  local t = key('task', task)
  local state, worker = get(t, 'state'), get(t, 'worker')
  if state == 'queued' then
    call('LREM', key('queue', worker), 1, task)
    dequeued(worker, task)
  elseif state ~= 'leased' then
    return false
  end
  call('ZREM', key('leases'), task)
  call('HINCRBY', t, 'fence', 1)
  call('HSET', t, 'worker', '')
  return true
end

-- Gives a task back to the coordinator, if a worker has it.
local function unroute(task)
  if not withdraw(task) then return end
  local t = key('task', task)
  call('HINCRBY', t, 'requeued', 1)
  call('HSET', t, 'state', 'unrouted')
  call('RPUSH', key('unrouted'), task)
end

local function make_task(session, kind, history, tokens, ready)
  local s = key('session', session)
  local task = call('HINCRBY', key('run'), 'next_task', 1) - 1
  call('HSET', key('task', task), 'task_id', task, 'session_id', session, 'order', get(s, 'order'),
       'round_index', get(s, 'round'), 'kind', kind, 'history', history, 'tokens', tokens, 'ready_s', ready,
       'enqueued_s', ready, 'estimate_s', '0', 'is_local', '0', 'reason', '', 'postponed', 0, 'fence', 0, 'requeued', 0, 'state', 'unrouted', 'worker', '')
  call('HSET', s, 'state', 'prefill', 'task', task)
  call('RPUSH', key('unrouted'), task)
  return task
end

local function release_leases(worker)
  for _, task in ipairs(call('ZRANGE', key('leases'), 0, -1)) do
    if get(key('task', task), 'worker') == worker then unroute(task) end
  end
  for _, task in ipairs(call('LRANGE', key('queue', worker), 0, -1)) do unroute(task) end
end

local function lose(worker)
  local w = key('worker', worker)
  if get(w, 'incarnation') ~= '' then call('RPUSH', key('lost'), worker) end
  call('ZREM', key('alive'), worker)
  call('HSET', w, 'incarnation', '')
  release_leases(worker)
  call('DEL', key('window', 'ttft', worker), key('window', 'itl', worker))
  for _, session in ipairs(call('SMEMBERS', key('bound', worker))) do
    local s = key('session', session)
    local state = get(s, 'state')
    if state == 'decoding' then
      make_task(session, 'recompute', 0, length(session), exact(now))
    elseif state == 'prefill' then
      unroute(get(s, 'task'))
    end
    call('HSET', s, 'home', '')
    call('HINCRBY', s, 'epoch', 1)
    call('RPUSH', key('homeless'), session)
  end
  call('DEL', key('bound', worker))
end

local function end_round(session)
  local s = key('session', session)
  local word = 'round'
  if get(s, 'last') == '1' then
    word = 'end'
    call('HSET', s, 'state', 'done')
    call('SREM', key('bound', get(s, 'home')), session)
  else
    call('HSET', s, 'state', 'waiting')
  end
  call('XADD', key('events'), '*', 'what', word, 'session', session, 'round', get(s, 'round'), 'at', exact(now))
  return word
end

local function generated(session, token, time)
  call('APPEND', key('ids', session), token)
  call('APPEND', key('times', session), time)
  tell(key('news'), 1024, 'session', session)
  return call('HINCRBY', key('session', session), 'left', -1)
end
