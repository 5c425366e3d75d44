-- issued -> ready, for each of several groups. ARGV: facts about them (a JSON list, see store.py), then each one's bytes.
-- Returns for each 'ready', 'duplicate' (it came before) or 'void' (its ticket had expired).
local function deliver(id, bytes, facts)
  if state_of(id) ~= 'issued' then return too_late(id) end
  land(id)
  local order = facts.order
  if facts.raced then order = order + tonumber(redis.call('HGET', key('meta'), 'race') or 0) end
  redis.call('SET', key('group:' .. id), bytes)
  redis.call('HSET', key('about:' .. id), 'oldest', facts.oldest, 'weight', string.format('%.17g', facts.weight),
    'order', string.format('%.17g', order), 'raced', facts.raced and 1 or 0, 'lengths', cjson.encode(facts.kept))
  enter(id, 'ready', string.format('%.17g', order), 'oldest version ' .. facts.oldest)
  limiter(1, 0)
  account(facts)
  return 'ready'
end

local outcomes = {}
for i, facts in ipairs(cjson.decode(ARGV[1])) do outcomes[i] = deliver(facts.id, ARGV[i + 1], facts) end
return outcomes
