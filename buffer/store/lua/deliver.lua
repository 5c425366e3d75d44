-- issued -> ready, for each of several groups, whose bytes have arrived before (ledger.py). args: groups (facts of each).
-- Returns for each 'ready', 'duplicate' (it came before), 'void' (its ticket had expired), 'finished' (the run is over), or
-- 'again' (Redis has lost its bytes since).
local arrived, seen, landing = {}, {}, {}
local race

local function deliver(id, facts)
  if seen[id] then return 'duplicate' end
  local known = redis.call('HMGET', key('about:' .. id), 'state', 'server')
  if known[1] ~= 'issued' then
    redis.call('DEL', key('arriving:' .. id))
    return too_late(id)
  end
  if redis.call('EXISTS', key('arriving:' .. id)) == 0 then return 'again' end
  redis.call('RENAME', key('arriving:' .. id), key('group:' .. id))
  local order = facts.order
  if facts.raced then
    race = race or tonumber(redis.call('HGET', key('meta'), 'race') or 0)
    order = order + race
  end
  order = string.format('%.17g', order)
  seen[id] = true
  local landed = landing[known[2]] or {}
  landing[known[2]] = landed
  landed[#landed + 1] = id
  arrived[#arrived + 1] = {
    id = id, before = 'issued', score = order, detail = 'oldest version ' .. facts.oldest, oldest = facts.oldest,
    facts = {'oldest', facts.oldest, 'weight', string.format('%.17g', facts.weight), 'order', order,
      'raced', facts.raced and 1 or 0, 'lengths', cjson.encode(facts.kept)},
  }
  limiter(1, 0)
  add('meta', 'arrived', 1)
  account(facts)
  return 'ready'
end

local outcomes = {}
for i, facts in ipairs(args.groups) do outcomes[i] = deliver(facts.id, facts) end
for server, ids in pairs(landing) do call_with('SREM', key('tickets_of:' .. server), ids) end
enter_all('ready', arrived)
return outcomes
