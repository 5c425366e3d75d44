-- The run is over: nothing more is issued, leased -> ready, issued -> expired. Returns how many expired.
redis.call('HSET', key('meta'), 'finished', 1)
for _, id in ipairs(redis.call('ZRANGE', key('leased'), 0, -1)) do back_to_ready(id, 'the run finished') end
for _, step in ipairs(redis.call('ZRANGE', key('leases'), 0, -1)) do
  redis.call('DEL', key('lease:' .. step))
end
redis.call('DEL', key('leases'))
local ids = redis.call('ZRANGE', key('issued'), 0, -1)
for _, id in ipairs(ids) do
  land(id)
  drop(id, 'expired', 'run_finished')
end
return #ids
