-- Shared by all transitions. KEYS[1] is the prefix of the run's keys. `args` has the named arguments of the script; a
-- script's head says which. Further ARGV are bytes that JSON can't hold.
local args = cjson.decode(ARGV[1])

local function key(name) return KEYS[1] .. ':' .. name end

-- One clock: deadlines are judged by Redis's time, hosts' clocks may differ. A transition happens at one time.
local clock
local function now()
  if not clock then
    local time = redis.call('TIME')
    clock = tonumber(time[1]) + tonumber(time[2]) / 1e6
  end
  return clock
end

-- The same as text, for what is remembered.
local clock_text
local function stamp()
  clock_text = clock_text or string.format('%.6f', now())
  return clock_text
end

-- A command with any number of arguments, in portions (of an even number, for pairs): a Lua call takes 8000 at most.
local function call_with(command, name, arguments)
  for first = 1, #arguments, 1000 do
    redis.call(command, name, unpack(arguments, first, math.min(first + 999, #arguments)))
  end
end

-- Counters are written once for each script, by `write_counts`, and not at each of its groups.
local counted = {}
local function add(hash, name, by)
  local fields = counted[hash] or {}
  counted[hash] = fields
  fields[name] = (fields[name] or 0) + by
end

-- Runs by itself after each script (scripts.py); who reads a counter that it has changed calls it before.
local function write_counts()
  for hash, fields in pairs(counted) do
    for name, by in pairs(fields) do
      if by ~= 0 then redis.call('HINCRBY', key(hash), name, by) end
    end
  end
  counted = {}
end

local function count(name, by) add('counters', name, by) end

-- Why a learner may not do what only the run's present one may (scripts.py): nil if it is the present one, or has no name.
-- Another one has said hello since, or Redis has lost its hello.
local function check_learner(learner)
  if learner == '' or redis.call('HGET', key('meta'), 'learner') == learner then return nil end
  return redis.call('SISMEMBER', key('learners'), learner) == 1 and 'superseded' or 'unknown'
end

-- What the ledger knows of a group, besides its bytes and its history.
local function about(id, field) return redis.call('HGET', key('about:' .. id), field) end

local function state_of(id) return about(id, 'state') end

local function note(id, event)
  redis.call('RPUSH', key('history:' .. id), stamp() .. ' ' .. event)
end

-- The only way into a state, for several groups at once; each a table of
--   id, before (the state that it leaves; nil: it is new), detail (of the history; nil: none),
--   score: orders the groups in the state: issued and leased by deadline, ready by the sampler's key, trained and durable
--     by the last step that used them, the others by time,
--   oldest (into ready only): its oldest version, facts (or nil): further {field, value, ...} of what is known of it.
local function enter_all(state, groups)
  local left, entering, by_version = {}, {}, {}
  for i, group in ipairs(groups) do
    local id, before = group.id, group.before
    if before then
      local leaving = left[before] or {}
      left[before] = leaving
      leaving[#leaving + 1] = id
    end
    entering[2 * i - 1], entering[2 * i] = group.score, id
    if state == 'ready' then by_version[2 * i - 1], by_version[2 * i] = group.oldest, id end
    redis.call('HSET', key('about:' .. id), 'state', state, unpack(group.facts or {}))
    note(id, group.detail and (state .. ' ' .. group.detail) or state)
  end
  for before, ids in pairs(left) do call_with('ZREM', key(before), ids) end
  if left.ready then call_with('ZREM', key('by_version'), left.ready) end
  call_with('ZADD', key(state), entering)
  call_with('ZADD', key('by_version'), by_version)
end

local function enter(id, state, score, detail)
  local oldest = state == 'ready' and about(id, 'oldest') or nil
  enter_all(state, {{id = id, before = state_of(id) or nil, score = score, detail = detail, oldest = oldest}})
end

-- Lengths of answers, as {bucket = answers}; `sign` -1 takes them back.
local function add_lengths(class, lengths, sign)
  for bucket, answers in pairs(lengths) do add('lengths:' .. class, bucket, sign * answers) end
end

local function drop_answers(reason, lengths)
  add_lengths(reason, lengths, 1)
  for _, answers in pairs(lengths) do count('answers_dropped:' .. reason, answers) end
end

-- What a group brought, whether it is used or not (facts: see ledger.py).
local function account(facts)
  count('tokens', facts.tokens)
  add_lengths('delivered', facts.delivered, 1)
  for reason, lengths in pairs(facts.dropped) do drop_answers(reason, lengths) end
  count('answers_dropped:unfinished', facts.missing)
  if facts.outcome then
    local before = redis.call('HGET', key('outcomes'), facts.task)
    if before then count('tasks:' .. before, -1) end
    count('tasks:' .. facts.outcome, 1)
    redis.call('HSET', key('outcomes'), facts.task, facts.outcome)
  end
end

-- issued -> anything: the ticket is no longer in flight, its server has a credit again.
local function land(id) redis.call('SREM', key('tickets_of:' .. about(id, 'server')), id) end

-- What the rate limit compares: groups that were inserted and are still there, and how often these were sampled.
local function limiter(inserts, samples)
  add('meta', 'inserts', inserts)
  add('meta', 'samples', samples)
end

-- Inserts and samples, with what is in flight counted as inserted and what is leased as sampled.
local function rate()
  write_counts()
  local done = redis.call('HMGET', key('meta'), 'inserts', 'samples')
  return tonumber(done[1] or 0) + redis.call('ZCARD', key('issued')),
    tonumber(done[2] or 0) + redis.call('ZCARD', key('leased'))
end

-- Uses by which a bound may be passed, because 3 * 0.1 > 0.3: otherwise a lease that is due would never come.
local ROUNDING = 1e-6

-- Groups that admission (issue.lua) still allows to a server of this policy version (nil: the latest one); negative: too
-- many are under way. The second value is that version: one that nobody published must not widen the capacity.
local function room(max_staleness, per_version, server_version)
  local meta = redis.call('HMGET', key('meta'), 'version', 'consumed', 'throttle')
  local version, consumed = tonumber(meta[1] or 0), tonumber(meta[2] or 0)
  max_staleness = math.min(max_staleness, tonumber(meta[3] or max_staleness))
  server_version = math.min(server_version or version, version)
  local pipeline = redis.call('ZCARD', key('issued')) + redis.call('ZCARD', key('ready')) + redis.call('ZCARD', key('leased'))
  return (max_staleness + 1 + server_version - version) * per_version - consumed - pipeline, server_version
end

-- What to say of something that arrives for a group which is not in flight.
local function too_late(id)
  if state_of(id) == 'filtered' or about(id, 'oldest') then return 'duplicate' end
  return redis.call('HEXISTS', key('meta'), 'finished') == 1 and 'finished' or 'void'
end

-- -> filtered(reason) or expired(reason)
local function drop(id, state, reason)
  enter(id, state, now(), reason)
  count(state, 1)
  count(state .. ':' .. reason, 1)
  redis.call('DEL', key('group:' .. id), key('arriving:' .. id))
end

-- Groups of one state that are over are remembered no longer. `last`: of durable ones the last step that used one of them;
-- it stays known that this step can't be undone any more.
local function forget(state, ids, last)
  if #ids == 0 then return end
  if last then
    local before = tonumber(redis.call('HGET', key('meta'), 'forgotten_step') or -1)
    redis.call('HSET', key('meta'), 'forgotten_step', math.max(before, last))
  end
  call_with('ZREM', key(state), ids)
  for _, id in ipairs(ids) do
    redis.call('DEL', key('group:' .. id), key('arriving:' .. id), key('about:' .. id), key('history:' .. id),
      key('steps:' .. id))
  end
end

-- issued -> reissued: the same task will be issued again, under a new ticket. Whoever has the old one is charged for it until
-- it says that it holds it no more (heartbeat.lua): it may still be busy with it.
local function reissue(id, why)
  enter(id, 'reissued', now(), why)
  count('reissued', 1)
  redis.call('DEL', key('arriving:' .. id))
  redis.call('RPUSH', key('reissue'), about(id, 'epoch') .. ':' .. about(id, 'position'))
end

-- leased -> ready, trained -> ready: at its old place in the sampler's order.
local function back_to_ready(id, why) enter(id, 'ready', about(id, 'order'), why) end

-- leased -> ready, for all: no step is owed groups any more. Returns how many.
local function end_leases(why)
  for _, step in ipairs(redis.call('ZRANGE', key('leases'), 0, -1)) do redis.call('DEL', key('lease:' .. step)) end
  redis.call('DEL', key('leases'))
  local ids = redis.call('ZRANGE', key('leased'), 0, -1)
  for _, id in ipairs(ids) do back_to_ready(id, why) end
  return #ids
end

-- leased -> trained, for the groups of all steps up to this one; with uses left: -> ready. `seed`: of the race that these
-- enter anew. Returns how many groups.
local function settle(last_step, max_uses, seed)
  math.randomseed(tonumber(seed))
  local race
  local over, again, used, used_again = {}, {}, {}, {}

  local function use(id, step)
    local known = redis.call('HMGET', key('about:' .. id), 'state', 'lengths', 'uses', 'raced', 'weight', 'order', 'oldest')
    local uses, order = tonumber(known[3] or 0) + 1, known[6]
    redis.call('RPUSH', key('steps:' .. id), step)
    add_lengths('trained', cjson.decode(known[2]), 1)
    limiter(0, 1)
    if uses < tonumber(max_uses) then
      if known[4] == '1' then
        -- It enters the race anew, as an arrival does (sampling.py).
        race = race or tonumber(redis.call('HGET', key('meta'), 'race') or 0)
        order = string.format('%.17g', race - math.log(1 - math.random()) / tonumber(known[5]))
      end
      used_again[#used_again + 1] = step
      used_again[#used_again + 1] = id
      again[#again + 1] = {
        id = id, before = known[1], score = order, detail = 'trained at step ' .. step .. ', to be used again',
        oldest = known[7], facts = {'uses', uses, 'order', order},
      }
    else
      limiter(-1, -uses)
      used[#used + 1] = id
      over[#over + 1] = {id = id, before = known[1], score = step, detail = 'at step ' .. step, facts = {'uses', uses}}
    end
  end

  local steps, groups = redis.call('ZRANGEBYSCORE', key('leases'), '-inf', last_step), 0
  for _, step in ipairs(steps) do
    local ids = redis.call('ZRANGE', key('lease:' .. step), 0, -1)
    for _, id in ipairs(ids) do use(id, step) end
    groups = groups + #ids
    redis.call('DEL', key('lease:' .. step))
  end
  call_with('ZREM', key('leases'), steps)
  call_with('ZADD', key('used'), used_again)
  call_with('ZREM', key('used'), used)
  enter_all('ready', again)
  enter_all('trained', over)
  count('uses', groups)
  add('meta', 'consumed', groups)
  return groups
end

-- The id under which a slice of an evaluation was last handed out: another one each time, because servers ignore a ticket
-- that they have had.
local function slice_ticket(version, slice)
  local times = tonumber(redis.call('HGET', key('eval_handed:' .. version), slice))
  local id = 'e' .. version .. '-' .. slice:match('%d+')
  return times > 1 and (id .. '-' .. times) or id
end

-- A slice of an evaluation is not under way any more.
local function end_slice(version, slice)
  redis.call('ZREM', key('eval_issued:' .. version), slice)
  redis.call('HDEL', key('eval_holder:' .. version), slice)
end

-- It goes back to those that are to be handed out.
local function return_slice(version, slice)
  end_slice(version, slice)
  redis.call('RPUSH', key('eval_todo:' .. version), slice)
end

-- Held-out tasks that were answered, or that nobody can answer. With the last of them the evaluation is over.
local function settle_tasks(version, answered, failed)
  local eval = key('eval:' .. version)
  local done = redis.call('HINCRBY', eval, 'done', answered) + redis.call('HINCRBY', eval, 'failed', failed)
  if done >= tonumber(redis.call('HGET', eval, 'tasks')) then
    redis.call('HSET', eval, 'finished', now())
    redis.call('RPUSH', key('eval_reports'), version)
  end
end

-- Slices of the evaluation under way whose holder is `server`.
local function slices_of(server)
  local version, mine = redis.call('HGET', key('meta'), 'evaluated'), {}
  if not version then return version, mine end
  local holders = redis.call('HGETALL', key('eval_holder:' .. version))
  for i = 1, #holders, 2 do
    if holders[i + 1] == server then mine[#mine + 1] = holders[i] end
  end
  return version, mine
end

-- All that a server was given comes back. Returns how many tickets and how many slices of an evaluation.
local function take_back(server, why)
  local tickets = 0
  for _, id in ipairs(redis.call('SMEMBERS', key('tickets_of:' .. server))) do
    if state_of(id) == 'issued' then
      reissue(id, why)
      tickets = tickets + 1
    end
  end
  redis.call('DEL', key('tickets_of:' .. server))
  local version, slices = slices_of(server)
  for _, slice in ipairs(slices) do return_slice(version, slice) end
  return tickets, #slices
end

-- A server is gone: the same, and it is known no more.
local function dismiss(server, why)
  redis.call('ZREM', key('heard'), server)
  redis.call('HDEL', key('incarnations'), server)
  return take_back(server, why)
end
