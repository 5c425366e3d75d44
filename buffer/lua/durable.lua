-- trained -> durable: a checkpoint on disk contains these groups' steps. ARGV: steps done, so those below. Returns how many.
local ids = redis.call('ZRANGEBYSCORE', key('trained'), '-inf', '(' .. ARGV[1])
local highest = tonumber(redis.call('HGET', key('meta'), 'durable_id') or 0)
for _, id in ipairs(ids) do
  redis.call('ZREM', key('trained'), id)
  forget(id)
  highest = math.max(highest, tonumber(id))
end
redis.call('HSET', key('meta'), 'durable_id', highest)
count('durable', #ids)
return #ids
