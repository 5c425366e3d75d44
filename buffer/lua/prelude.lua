-- Shared by all transitions. KEYS[1] is the run's hash-tagged prefix, so that all its keys live in one slot.
local function key(name) return KEYS[1] .. ':' .. name end

-- One clock: deadlines are judged by Redis's time, hosts' clocks may differ.
local function now()
  local time = redis.call('TIME')
  return tonumber(time[1]) + tonumber(time[2]) / 1e6
end

local function count(name, by) redis.call('HINCRBY', key('counters'), name, by) end

-- A group leaves the ledger's live part for good; only its counters stay.
local function forget(id)
  redis.call('DEL', key('group:' .. id))
  redis.call('HDEL', key('oldest'), id)
  redis.call('HDEL', key('holder'), id)
end

-- Whether the group is leased for this step: its lease may have run out and another step may hold it now.
local function is_held(id, step)
  return redis.call('ZSCORE', key('leased'), id) and redis.call('HGET', key('holder'), id) == step
end

-- The ticket is no longer in flight: its server has a credit again. Returns false if it was not in flight.
local function land(id)
  if redis.call('ZREM', key('issued'), id) == 0 then return false end
  local server = redis.call('HGET', key('ticket:' .. id), 'server')
  redis.call('DEL', key('ticket:' .. id))
  if redis.call('HINCRBY', key('in_flight'), server, -1) <= 0 then redis.call('HDEL', key('in_flight'), server) end
  return true
end
