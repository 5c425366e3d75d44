-- Shared by all transitions. KEYS[1] is a shard's hash-tagged prefix, so that all its keys live in one slot.
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

local function count(name, by) redis.call('HINCRBY', key('counters'), name, by) end

-- What the ledger knows of a group, besides its bytes and its history.
local function about(id, field) return redis.call('HGET', key('about:' .. id), field) end

local function state_of(id) return about(id, 'state') end

local function note(id, event)
  redis.call('RPUSH', key('history:' .. id), string.format('%.6f %s', now(), event))
end

-- The only way into a state. `score` orders the groups in it: issued and leased by deadline, ready by the sampler's key,
-- trained and durable by the last step that used them, the others by time.
local function enter(id, state, score, detail)
  local before = state_of(id)
  if before then redis.call('ZREM', key(before), id) end
  if before == 'ready' then redis.call('ZREM', key('by_version'), id) end
  if state == 'ready' then redis.call('ZADD', key('by_version'), about(id, 'oldest'), id) end
  redis.call('ZADD', key(state), score, id)
  redis.call('HSET', key('about:' .. id), 'state', state)
  note(id, detail and (state .. ' ' .. detail) or state)
end

-- Lengths of answers, as {bucket = answers}; `sign` -1 takes them back.
local function add_lengths(class, lengths, sign)
  for bucket, answers in pairs(lengths) do
    redis.call('HINCRBY', key('lengths:' .. class), bucket, sign * answers)
  end
end

local function drop_answers(reason, lengths)
  add_lengths(reason, lengths, 1)
  for _, answers in pairs(lengths) do count('answers_dropped:' .. reason, answers) end
end

-- What a group brought, whether it is used or not (facts: see store.py).
local function account(facts)
  count('tokens', facts.tokens)
  add_lengths('delivered', facts.delivered, 1)
  for reason, lengths in pairs(facts.dropped) do drop_answers(reason, lengths) end
  if facts.missing > 0 then count('answers_dropped:unfinished', facts.missing) end
  if facts.outcome then redis.call('HSET', key('outcomes'), facts.task, facts.outcome) end
end

-- issued -> anything: the ticket is no longer in flight, its server has a credit again.
local function land(id) redis.call('SREM', key('tickets_of:' .. about(id, 'server')), id) end

-- What the rate limit compares: groups that were inserted, and how often these were sampled.
local function limiter(inserts, samples)
  redis.call('HINCRBY', key('meta'), 'inserts', inserts)
  redis.call('HINCRBY', key('meta'), 'samples', samples)
end

-- Inserts and samples, with what is in flight counted as inserted and what is leased as sampled.
local function rate()
  local done = redis.call('HMGET', key('meta'), 'inserts', 'samples')
  return tonumber(done[1] or 0) + redis.call('ZCARD', key('issued')),
    tonumber(done[2] or 0) + redis.call('ZCARD', key('leased'))
end

local ROUNDING = 1e-6  -- as in limiter.py

-- What to say of something that arrives for a group which is not in flight.
local function too_late(id)
  if state_of(id) == 'filtered' or about(id, 'oldest') then return 'duplicate' end
  return 'void'
end

-- -> filtered(reason) or expired(reason)
local function drop(id, state, reason)
  enter(id, state, now(), reason)
  count(state, 1)
  count(state .. ':' .. reason, 1)
  redis.call('DEL', key('group:' .. id))
end

-- A group that is over is remembered no longer. Of a durable one it stays known that its step can't be undone any more.
local function forget(id, state)
  if state == 'durable' then
    local last = tonumber(redis.call('HGET', key('meta'), 'forgotten_step') or -1)
    redis.call('HSET', key('meta'), 'forgotten_step', math.max(last, tonumber(redis.call('ZSCORE', key('durable'), id))))
  end
  redis.call('ZREM', key(state), id)
  redis.call('DEL', key('group:' .. id), key('about:' .. id), key('history:' .. id), key('steps:' .. id))
end

-- issued -> reissued: the same task will be issued again, under a new ticket.
local function reissue(id, why)
  land(id)
  enter(id, 'reissued', now(), why)
  count('reissued', 1)
  redis.call('RPUSH', key('reissue'), about(id, 'epoch') .. ':' .. about(id, 'position'))
end

-- leased -> ready, trained -> ready: at its old place in the sampler's order.
local function back_to_ready(id, why) enter(id, 'ready', about(id, 'order'), why) end

-- The id under which a slice of an evaluation was last handed out: another one each time, because servers ignore a ticket
-- that they have had.
local function slice_ticket(version, slice)
  local times = tonumber(redis.call('HGET', key('eval_handed:' .. version), slice))
  local id = 'e' .. version .. '-' .. slice:match('%d+')
  return times > 1 and (id .. '-' .. times) or id
end

-- A slice of an evaluation goes back to those that are to be handed out.
local function return_slice(version, slice)
  redis.call('ZREM', key('eval_issued:' .. version), slice)
  redis.call('HDEL', key('eval_holder:' .. version), slice)
  redis.call('RPUSH', key('eval_todo:' .. version), slice)
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
  local tickets = redis.call('SMEMBERS', key('tickets_of:' .. server))
  for _, id in ipairs(tickets) do reissue(id, why) end
  local version, slices = slices_of(server)
  for _, slice in ipairs(slices) do return_slice(version, slice) end
  return #tickets, #slices
end
