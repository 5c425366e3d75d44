-- issued -> ready, for each of several groups whose bytes were stored under `arriving:` before (ledger.py).
-- args: groups (the facts of each), published (a version that is known to be published; Redis may have lost it).
-- Returns for each 'ready', 'duplicate' (delivered before), 'void' (its ticket expired), 'finished' (the run is over),
-- 'again' (Redis has lost its bytes since) or 'future' (a version that was never published; the group stays issued).
local arrived, seen, by_server = {}, {}, {}
local published = math.max(args.published, tonumber(redis.call('HGET', key('meta'), 'version') or 0))
local race

local function deliver(id, facts)
  if seen[id] then return settle_late('duplicate', id, facts.origin) end
  local known = redis.call('HMGET', key('about:' .. id), 'state', 'server')
  if known[1] ~= 'issued' then
    redis.call('DEL', key('arriving:' .. id))
    return settle_late(late_outcome(id), id, facts.origin)
  end
  if facts.newest > published then
    redis.call('DEL', key('arriving:' .. id))
    return 'future'
  end
  if redis.call('EXISTS', key('arriving:' .. id)) == 0 then return 'again' end
  redis.call('RENAME', key('arriving:' .. id), key('group:' .. id))
  redis.call('DEL', key('events:' .. id))
  local order = facts.order
  if facts.raced then
    race = race or tonumber(redis.call('HGET', key('meta'), 'race') or 0)
    order = order + race
  end
  order = string.format('%.17g', order)
  seen[id] = true
  local row = settle(id, facts.origin, facts.lost, facts.kept_tokens)
  local ids = by_server[known[2]] or {}
  by_server[known[2]] = ids
  ids[#ids + 1] = id
  arrived[#arrived + 1] = {
    id = id, before = 'issued', score = order, detail = 'oldest version ' .. facts.oldest,
    depth = group_depth(facts.oldest, facts.newest),
    facts = {'oldest', facts.oldest, 'newest', facts.newest, 'weight', string.format('%.17g', facts.weight), 'order', order,
      'raced', facts.raced and 1 or 0, 'lengths', cjson.encode(facts.kept),
      'row', row, 'tokens', facts.kept_tokens},
  }
  count_rate(1, 0)
  add('meta', 'arrived', 1)
  record_facts(facts)
  return 'ready'
end

local outcomes = {}
for i, facts in ipairs(args.groups) do outcomes[i] = deliver(facts.id, facts) end
for server, ids in pairs(by_server) do call_with('SREM', key('tickets_of:' .. server), ids) end
enter_state_all('ready', arrived)
return outcomes
