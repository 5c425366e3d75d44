-- The run is over: nothing more is issued, leased -> ready, issued -> expired. Returns how many expired.
redis.call('HSET', key('meta'), 'finished', 1)
for _, id in ipairs(redis.call('ZRANGE', key('leased'), 0, -1)) do
  redis.call('ZREM', key('leased'), id)
  redis.call('ZADD', key('ready'), id, id)
end
local ids = redis.call('ZRANGE', key('issued'), 0, -1)
for _, id in ipairs(ids) do land(id) end
count('expired', #ids)
count('expired:run_finished', #ids)
return #ids
