-- issued -> ready. ARGV: id, the group's bytes, facts about it (JSON, see store.py).
-- Returns 'ready', 'duplicate' (it came before) or 'void' (its ticket had expired).
local id, facts = ARGV[1], cjson.decode(ARGV[3])
if state_of(id) ~= 'issued' then return too_late(id) end
land(id)
local order = facts.order
if facts.raced then order = order + tonumber(redis.call('HGET', key('meta'), 'race') or 0) end
redis.call('SET', key('group:' .. id), ARGV[2])
redis.call('HSET', key('about:' .. id), 'oldest', facts.oldest, 'weight', string.format('%.17g', facts.weight),
  'order', string.format('%.17g', order), 'raced', facts.raced and 1 or 0, 'lengths', cjson.encode(facts.kept))
enter(id, 'ready', string.format('%.17g', order), 'oldest version ' .. facts.oldest)
limiter(1, 0)
account(facts)
return 'ready'
